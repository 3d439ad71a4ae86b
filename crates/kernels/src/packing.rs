//! Packed integer weights: the widths, and where a field stands in its word.
//!
//! This is `pack-quantized` of compressed-tensors, which checkpoints use and the CPU reads as it is: symmetric integers of b
//! bits stored in offset binary (`q + 2^(b-1)`), floor(32 / b) of them in a 32-bit word, lowest bits first, and each row begins
//! a new word. No field crosses a word, so the top two bits of a word of int3 are unused. The library (0.20.1) packs 8, 4 and 2 bits by
//! this formula and int3 densely across words; programs that load checkpoints read 4 and 8 bits only.

use std::fmt;

/// Width of a packed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Bits {
    /// -2 to 1, sixteen a word.
    Two = 2,
    /// -4 to 3, ten a word.
    Three = 3,
    /// -8 to 7, eight a word.
    Four = 4,
    /// -128 to 127, four a word.
    Eight = 8,
}

impl Bits {
    /// All widths, ascending.
    pub const ALL: [Bits; 4] = [Bits::Two, Bits::Three, Bits::Four, Bits::Eight];

    /// The width of that many bits, where there is one.
    pub fn new(bits: usize) -> Option<Bits> {
        Bits::ALL.into_iter().find(|b| b.get() == bits)
    }

    /// Number of bits.
    pub const fn get(self) -> usize {
        self as usize
    }

    /// Weights in a 32-bit word.
    pub const fn per_word(self) -> usize {
        32 / self.get()
    }

    /// Words of a packed row of `inputs` weights.
    pub const fn words(self, inputs: usize) -> usize {
        inputs.div_ceil(self.per_word())
    }

    /// Smallest integer; it is stored as 0.
    pub const fn q_min(self) -> i32 {
        -(1 << (self.get() - 1))
    }

    /// Largest integer.
    pub const fn q_max(self) -> i32 {
        (1 << (self.get() - 1)) - 1
    }

    /// Largest stored field.
    pub const fn field_max(self) -> u32 {
        (1 << self.get()) - 1
    }

    /// Field `index` of a row: the stored integer, without its offset.
    pub fn field(self, words: &[u32], index: usize) -> u32 {
        words[index / self.per_word()] >> (self.get() * (index % self.per_word())) & self.field_max()
    }

    /// Bytes of `[rows, inputs]` weights on a device, scales not counted: without the padding of the file's words, int3 as a
    /// plane of two bits and one of one, so that 32 weights take 12 bytes.
    pub const fn device_bytes(self, rows: usize, inputs: usize) -> usize {
        rows * (inputs * self.get()).div_ceil(8)
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "int{}", self.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_fields_a_word() {
        let facts = Bits::ALL.map(|b| (b.get(), b.per_word(), b.q_min(), b.q_max(), b.words(31)));
        assert_eq!(facts, [(2, 16, -2, 1, 2), (3, 10, -4, 3, 4), (4, 8, -8, 7, 4), (8, 4, -128, 127, 8)]);
        assert_eq!([1, 5, 6, 16].map(Bits::new), [None; 4]);
        assert!(Bits::ALL.iter().all(|&b| Bits::new(b.get()) == Some(b)));
    }

    #[test]
    fn fields_stand_lowest_first_and_never_cross_a_word() {
        assert_eq!(Bits::Four.field(&[0xFEDC_BA98], 7), 15);
        assert_eq!(Bits::Eight.field(&[0x0302_0100, 0x07], 4), 7);
        // Field 9 ends at bit 29; field 10 begins the next word.
        assert_eq!(Bits::Three.field(&[5 << 27 | 3 << 30, 6], 9), 5);
        assert_eq!(Bits::Three.field(&[5 << 27 | 3 << 30, 6], 10), 6);
    }

    #[test]
    fn int3_takes_three_bits_on_a_device() {
        assert_eq!(Bits::Three.device_bytes(4, 2560), 4 * 960);
        assert_eq!(Bits::Three.words(2560) * 4, 1024);
    }
}
