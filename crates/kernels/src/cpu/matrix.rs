//! A weight matrix as the checkpoint stores it.

use std::ops::Deref;

use crate::cpu::LANES;
use crate::packing::Bits;

/// Weights `[rows, cols]` of a linear, row-major: row n holds the inputs of output n. `B` is whatever holds the bytes: a
/// piece of a memory map in a model, a slice ([`MatrixView`]) in a kernel.
#[derive(Clone, Copy)]
pub struct Matrix<B> {
    rows: usize,
    cols: usize,
    data: Data<B>,
}

/// A borrowed [`Matrix`].
pub type MatrixView<'a> = Matrix<&'a [u8]>;

/// Little-endian contents of a [`Matrix`]. Bytes, since a memory-mapped tensor need not be aligned.
#[derive(Clone, Copy)]
pub enum Data<B> {
    /// `rows * cols` f32.
    F32(B),
    /// `rows * cols` bf16.
    Bf16(B),
    /// Symmetric integers as [`crate::packing`] describes them.
    Packed {
        /// Width of a weight.
        bits: Bits,
        /// `[rows, bits.words(cols)]` 32-bit words.
        packed: B,
        /// bf16 `[rows, ceil(cols / group)]`.
        scales: B,
        /// Inputs that share a scale: a multiple of 8, or at least `cols` (one scale a row).
        group: usize,
    },
}

/// A matrix whose parts do not fit together.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum MatrixError {
    /// A slice has another length than the shape implies.
    #[error("{part}: {found} bytes, but a [{rows}, {cols}] matrix needs {expected}")]
    Length {
        /// Which slice.
        part: &'static str,
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
        /// Bytes needed.
        expected: usize,
        /// Bytes there.
        found: usize,
    },
    /// A group size that the kernels do not take.
    #[error("group size {group} is neither a multiple of {LANES} nor a whole row of {cols}")]
    Group {
        /// Inputs that share a scale.
        group: usize,
        /// Inputs of a row.
        cols: usize,
    },
}

impl<B: Deref<Target = [u8]>> Matrix<B> {
    /// Checks that the slices have the lengths that the shape implies.
    pub fn new(rows: usize, cols: usize, data: Data<B>) -> Result<Matrix<B>, MatrixError> {
        let check = |part, bytes: &[u8], expected| match bytes.len() == expected {
            true => Ok(()),
            false => Err(MatrixError::Length { part, rows, cols, expected, found: bytes.len() }),
        };
        match &data {
            Data::F32(bytes) => check("f32 weights", bytes, rows * cols * 4)?,
            Data::Bf16(bytes) => check("bf16 weights", bytes, rows * cols * 2)?,
            &Data::Packed { bits, ref packed, ref scales, group } => {
                if group == 0 || (!group.is_multiple_of(LANES) && group < cols) {
                    return Err(MatrixError::Group { group, cols });
                }
                check("packed weights", packed, rows * bits.words(cols) * 4)?;
                check("scales", scales, rows * cols.div_ceil(group) * 2)?;
            }
        }
        Ok(Matrix { rows, cols, data })
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The same matrix, borrowed.
    pub fn view(&self) -> MatrixView<'_> {
        let data = match &self.data {
            Data::F32(b) => Data::F32(&**b),
            Data::Bf16(b) => Data::Bf16(&**b),
            Data::Packed { bits, packed, scales, group } => {
                Data::Packed { bits: *bits, packed: &**packed, scales: &**scales, group: *group }
            }
        };
        Matrix { rows: self.rows, cols: self.cols, data }
    }

    /// Bytes of weights and scales as stored: what one pass on the CPU reads.
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(b) | Data::Bf16(b) => b.len(),
            Data::Packed { packed, scales, .. } => packed.len() + scales.len(),
        }
    }

    /// The same on a device, where int3 is stored without the unused bits of the file's words.
    pub fn device_bytes(&self) -> usize {
        match &self.data {
            Data::F32(b) | Data::Bf16(b) => b.len(),
            Data::Packed { bits, scales, .. } => bits.device_bytes(self.rows, self.cols) + scales.len(),
        }
    }

    /// A matrix of some of the rows, copied, in the given order. A row is a run of bytes in every format.
    ///
    /// # Panics
    /// If a row does not exist: a defect of the caller, not of its input.
    pub fn select_rows<C: From<Vec<u8>>>(&self, rows: &[usize]) -> Matrix<C> {
        let pick = |part: &B| -> C {
            let width = part.len() / self.rows.max(1);
            let mut out = Vec::with_capacity(rows.len() * width);
            rows.iter().for_each(|r| out.extend_from_slice(&part[r * width..(r + 1) * width]));
            out.into()
        };
        let data = match &self.data {
            Data::F32(b) => Data::F32(pick(b)),
            Data::Bf16(b) => Data::Bf16(pick(b)),
            Data::Packed { bits, packed, scales, group } => {
                Data::Packed { bits: *bits, packed: pick(packed), scales: pick(scales), group: *group }
            }
        };
        Matrix { rows: rows.len(), cols: self.cols, data }
    }

    /// One whole row as f32, for look-ups in embedding tables. A row has the same values however it is read.
    pub fn row(&self, row: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.cols];
        self.view().expand(row, 0, &mut out);
        out
    }
}

impl<'a> MatrixView<'a> {
    /// Contents.
    pub fn data(&self) -> Data<&'a [u8]> {
        self.data
    }

    /// Expands the inputs `begin .. begin + out.len()` of row `row`. The product of an integer of at most 8 bits and a bf16
    /// scale has at most 16 significant bits, so it is exact in f32.
    pub fn expand(&self, row: usize, begin: usize, out: &mut [f32]) {
        let at = row * self.cols + begin;
        match self.data {
            Data::F32(bytes) => {
                let words = bytes[at * 4..(at + out.len()) * 4].as_chunks::<4>().0;
                out.iter_mut().zip(words).for_each(|(o, w)| *o = f32::from_le_bytes(*w));
            }
            Data::Bf16(bytes) => {
                let halves = bytes[at * 2..(at + out.len()) * 2].as_chunks::<2>().0;
                out.iter_mut().zip(halves).for_each(|(o, w)| *o = bf16(*w));
            }
            Data::Packed { bits, packed, scales, group } => {
                let words = &packed[row * bits.words(self.cols) * 4..];
                let scales = &scales[row * self.cols.div_ceil(group) * 2..];
                match bits {
                    Bits::Two => expand_packed::<2>(words, scales, group, begin, out),
                    Bits::Three => expand_packed::<3>(words, scales, group, begin, out),
                    Bits::Four => expand_packed::<4>(words, scales, group, begin, out),
                    Bits::Eight => expand_packed::<8>(words, scales, group, begin, out),
                }
            }
        }
    }
}

/// The inputs `begin .. begin + out.len()` of a row with these words and scales.
fn expand_packed<const BITS: usize>(words: &[u8], scales: &[u8], group: usize, begin: usize, out: &mut [f32]) {
    let (mask, offset) = ((1u32 << BITS) - 1, 1i32 << (BITS - 1));
    let end_of_all = begin + out.len();
    // Runs of one scale: at most to the end of its group.
    let mut k = begin;
    while k < end_of_all {
        let end = end_of_all.min((k / group + 1).saturating_mul(group));
        let s = k / group * 2;
        let scale = bf16([scales[s], scales[s + 1]]);
        for (k, o) in (k..end).zip(&mut out[k - begin..end - begin]) {
            let field = if 8 % BITS == 0 {
                // Words are little-endian, so fields that fill bytes can be read from them.
                u32::from(words[k * BITS / 8] >> (k * BITS % 8)) & mask
            } else {
                let at = k / (32 / BITS) * 4;
                let word = u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]);
                word >> (k % (32 / BITS) * BITS) & mask
            };
            *o = (field as i32 - offset) as f32 * scale;
        }
        k = end;
    }
}

/// A bf16 is the upper half of an f32.
#[inline(always)]
pub(super) fn bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_lengths_are_refused() {
        assert!(Matrix::new(2, 3, Data::F32(&[0u8; 24][..])).is_ok());
        assert!(matches!(Matrix::new(2, 3, Data::F32(&[0u8; 23][..])), Err(MatrixError::Length { expected: 24, .. })));
        assert!(Matrix::new(2, 3, Data::Bf16(&[0u8; 12][..])).is_ok());
        assert!(Matrix::new(2, 3, Data::Bf16(&[0u8; 24][..])).is_err());
        fn int4<'a>(packed: &'a [u8], scales: &'a [u8], group: usize) -> Data<&'a [u8]> {
            Data::Packed { bits: Bits::Four, packed, scales, group }
        }
        assert!(Matrix::new(2, 12, int4(&[0; 16], &[0; 8], 8)).is_ok());
        assert!(Matrix::new(2, 12, int4(&[0; 16], &[0; 4], 12)).is_ok());
        assert!(matches!(Matrix::new(2, 12, int4(&[0; 16], &[0; 4], 6)), Err(MatrixError::Group { .. })));
        assert!(Matrix::new(2, 12, int4(&[0; 12], &[0; 8], 8)).is_err());
        assert!(Matrix::new(2, 12, int4(&[0; 16], &[0; 6], 8)).is_err());
    }

    #[test]
    fn fields_are_offset_binary_lowest_first_and_never_cross_a_word() {
        let two = half::bf16::from_f32(2.0).to_le_bytes();
        let row = |bits, words: &[u32], cols| {
            let packed: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            Matrix::new(1, cols, Data::Packed { bits, packed: &packed[..], scales: &two[..], group: cols })
                .unwrap()
                .row(0)
        };
        assert_eq!(row(Bits::Four, &[0xFEDC_BA98], 8), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]);
        assert_eq!(row(Bits::Eight, &[0x8180_FF00, 0x82], 5), [-256.0, 254.0, 0.0, 2.0, 4.0]);
        assert_eq!(row(Bits::Two, &[0b11_10_01_00], 5), [-4.0, -2.0, 0.0, 2.0, -4.0]);
        let ten = row(Bits::Three, &[0o7_6543_2101 << 3, 0o5], 11);
        assert_eq!(ten, [-8.0, -6.0, -8.0, -6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 2.0]);
    }

    #[test]
    fn a_device_stores_int3_without_the_unused_bits() {
        let (packed, scales) = ([0; 2 * 16], [0; 2 * 2]);
        let m =
            Matrix::new(2, 40, Data::Packed { bits: Bits::Three, packed: &packed[..], scales: &scales[..], group: 40 });
        let m = m.unwrap();
        assert_eq!((m.bytes(), m.device_bytes()), (32 + 4, 30 + 4));
    }
}
