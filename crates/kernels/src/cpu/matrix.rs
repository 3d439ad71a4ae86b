//! A weight matrix as the checkpoint stores it.

use std::ops::Deref;

use crate::cpu::LANES;

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
    /// Symmetric int4 in `compressed-tensors` order: eight weights an i32 word, low nibble first, offset binary
    /// (`nibble - 8`); each row begins a new word.
    Int4 {
        /// `[rows, ceil(cols / 8)]` words.
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
            &Data::Int4 { ref packed, ref scales, group } => {
                if group == 0 || (!group.is_multiple_of(LANES) && group < cols) {
                    return Err(MatrixError::Group { group, cols });
                }
                check("packed int4 weights", packed, rows * cols.div_ceil(8) * 4)?;
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
            Data::Int4 { packed, scales, group } => Data::Int4 { packed: &**packed, scales: &**scales, group: *group },
        };
        Matrix { rows: self.rows, cols: self.cols, data }
    }

    /// Bytes of weights and scales: what one pass reads.
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(b) | Data::Bf16(b) => b.len(),
            Data::Int4 { packed, scales, .. } => packed.len() + scales.len(),
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
            Data::Int4 { packed, scales, group } => {
                Data::Int4 { packed: pick(packed), scales: pick(scales), group: *group }
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

    /// Expands the inputs `begin .. begin + out.len()` of row `row`. The product of a nibble and a bf16 scale has at most 12
    /// significant bits, so it is exact in f32.
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
            Data::Int4 { packed, scales, group } => {
                let words = &packed[row * self.cols.div_ceil(8) * 4..];
                let scales = &scales[row * self.cols.div_ceil(group) * 2..];
                // Runs of one scale: at most to the end of its group.
                let mut k = begin;
                while k < begin + out.len() {
                    let end = (begin + out.len()).min((k / group + 1).saturating_mul(group));
                    let s = k / group * 2;
                    let scale = bf16([scales[s], scales[s + 1]]);
                    for (k, o) in (k..end).zip(&mut out[k - begin..end - begin]) {
                        let nibble = words[k / 2] >> (4 * (k % 2)) & 15;
                        *o = (i32::from(nibble) - 8) as f32 * scale;
                    }
                    k = end;
                }
            }
        }
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
            Data::Int4 { packed, scales, group }
        }
        assert!(Matrix::new(2, 12, int4(&[0; 16], &[0; 8], 8)).is_ok());
        assert!(Matrix::new(2, 12, int4(&[0; 16], &[0; 4], 12)).is_ok());
        assert!(matches!(Matrix::new(2, 12, int4(&[0; 16], &[0; 4], 6)), Err(MatrixError::Group { .. })));
        assert!(Matrix::new(2, 12, int4(&[0; 12], &[0; 8], 8)).is_err());
        assert!(Matrix::new(2, 12, int4(&[0; 16], &[0; 6], 8)).is_err());
    }

    #[test]
    fn int4_is_offset_binary_low_nibble_first() {
        let packed = 0xFEDC_BA98_u32.to_le_bytes();
        let two = half::bf16::from_f32(2.0).to_le_bytes();
        let m = Matrix::new(1, 8, Data::Int4 { packed: &packed[..], scales: &two[..], group: 8 }).unwrap();
        assert_eq!(m.row(0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]);
    }
}
