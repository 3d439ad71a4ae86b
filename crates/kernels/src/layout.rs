//! How weights lie in device memory: tiles in the order in which the kernels read them.
//!
//! A file in `compressed-tensors` order is repacked once, when it is loaded. The layout has a version, which the kernels' sources name.

use crate::{
    cpu::{Data, MatrixView},
    packing::Bits,
};

/// Output channels of a tile.
pub const TILE_CHANNELS: usize = 64;
/// Inputs of a tile.
pub const TILE_INPUTS: usize = 256;
/// Weights a lane holds as one word: the operand of one matrix product of 16 channels and 16 inputs.
const PRODUCT_INPUTS: usize = 16;

/// Int4 weights for `gemm_int4.cu`: tiles of 64 channels x 256 inputs, channels of a tile first in its column of tiles.
///
/// A tile is `[2 halves of 128 inputs][4 x 16 channels][2 x 4 products][32 lanes][4 products]` words. In the word of a product, lane
/// `4 g + t` holds channels `g` and `g + 8` at inputs `2t, 2t + 1, 2t + 8, 2t + 9`: nibbles i and i + 4 are the pair of register i of
/// `mma.m16n8k16`. Channels and inputs beyond the matrix are zero weights with a zero scale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Int4Tiles {
    /// Output channels.
    pub channels: usize,
    /// Inputs.
    pub inputs: usize,
    /// Inputs that share a scale: 32, 64 or 128; `None`: all of a channel.
    pub group: Option<usize>,
    /// `[channels / 64, inputs / 256]` tiles of 8192 bytes, both rounded up.
    pub weights: Vec<u8>,
    /// bf16. With groups `[tiles, 256 / group, 64]`; without `[channels rounded up to 64]`.
    pub scales: Vec<u8>,
}

/// A matrix that cannot be laid out.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum LayoutError {
    /// Not int4.
    #[error("a [{channels}, {inputs}] matrix that is not int4 has no int4 tiles")]
    Format {
        /// Output channels.
        channels: usize,
        /// Inputs.
        inputs: usize,
    },
    /// A shape or group that the kernels do not take.
    #[error(
        "a [{channels}, {inputs}] matrix in groups of {group}: the kernels take multiples of 16 inputs, and groups of 32, 64, 128 or a whole channel"
    )]
    Shape {
        /// Output channels.
        channels: usize,
        /// Inputs.
        inputs: usize,
        /// Inputs that share a scale.
        group: usize,
    },
}

impl Int4Tiles {
    /// Version of this layout.
    pub const VERSION: u32 = 1;

    /// Lays out an int4 matrix in `compressed-tensors` order.
    pub fn pack(matrix: MatrixView<'_>) -> Result<Int4Tiles, LayoutError> {
        let (channels, inputs) = (matrix.rows(), matrix.cols());
        let Data::Packed { bits: Bits::Four, packed, scales, group } = matrix.data() else {
            return Err(LayoutError::Format { channels, inputs });
        };
        let per_channel = group >= inputs;
        let fits = inputs > 0 && inputs.is_multiple_of(16) && (per_channel || [32, 64, 128].contains(&group));
        if channels == 0 || !fits {
            return Err(LayoutError::Shape { channels, inputs, group });
        }
        let group = (!per_channel).then_some(group);
        let (columns, units) = (channels.div_ceil(TILE_CHANNELS), inputs.div_ceil(TILE_INPUTS));
        let row_bytes = inputs.div_ceil(8) * 4;
        let mut words = vec![0x8888_8888_u32; columns * units * TILE_CHANNELS * TILE_INPUTS / 8];
        for channel in 0..channels {
            for input in 0..inputs {
                let nibble = packed[channel * row_bytes + input / 2] >> (4 * (input % 2)) & 15;
                let (word, shift) = Self::place(units, channel, input);
                words[word] = words[word] & !(15 << shift) | u32::from(nibble) << shift;
            }
        }
        let mut tiled = vec![0; Self::scale_bytes(columns, units, group)];
        let groups = group.map_or(1, |g| inputs.div_ceil(g));
        for channel in 0..channels {
            for index in 0..groups {
                let from = (channel * groups + index) * 2;
                let to = Self::scale_at(units, group, channel, index) * 2;
                tiled[to..to + 2].copy_from_slice(&scales[from..from + 2]);
            }
        }
        let weights = words.into_iter().flat_map(u32::to_le_bytes).collect();
        Ok(Int4Tiles { channels, inputs, group, weights, scales: tiled })
    }

    /// The packed words and the scales in `compressed-tensors` order: the inverse of [`Int4Tiles::pack`].
    pub fn unpack(&self) -> (Vec<u8>, Vec<u8>) {
        let (channels, inputs) = (self.channels, self.inputs);
        let (units, row_bytes) = (inputs.div_ceil(TILE_INPUTS), inputs.div_ceil(8) * 4);
        let mut packed = vec![0; channels * row_bytes];
        for channel in 0..channels {
            for input in 0..inputs {
                let (word, shift) = Self::place(units, channel, input);
                let nibble = self.weights[word * 4 + shift / 8] >> (shift % 8) & 15;
                packed[channel * row_bytes + input / 2] |= nibble << (4 * (input % 2));
            }
        }
        let groups = self.group.map_or(1, |g| inputs.div_ceil(g));
        let places = (0..channels).flat_map(|c| (0..groups).map(move |i| (c, i)));
        let at = places.map(|(channel, index)| Self::scale_at(units, self.group, channel, index) * 2);
        (packed, at.flat_map(|at| [self.scales[at], self.scales[at + 1]]).collect())
    }

    /// Where a weight is: word, and first bit in it.
    fn place(units: usize, channel: usize, input: usize) -> (usize, usize) {
        let tile = channel / TILE_CHANNELS * units + input / TILE_INPUTS;
        let (sixteen, row) = (channel % TILE_CHANNELS / 16, channel % 16);
        let (half, product) = (input % TILE_INPUTS / 128, input % 128 / PRODUCT_INPUTS);
        let (pair, odd) = (input % PRODUCT_INPUTS / 2, input % 2);
        let lane = row % 8 * 4 + pair % 4;
        let register = row / 8 + pair / 4 * 2;
        let word = (((half * 4 + sixteen) * 2 + product / 4) * 32 + lane) * 4 + product % 4;
        (tile * (TILE_CHANNELS * TILE_INPUTS / 8) + word, (register + odd * 4) * 4)
    }

    fn scale_bytes(columns: usize, units: usize, group: Option<usize>) -> usize {
        match group {
            Some(group) => columns * units * (TILE_INPUTS / group) * TILE_CHANNELS * 2,
            None => columns * TILE_CHANNELS * 2,
        }
    }

    fn scale_at(units: usize, group: Option<usize>, channel: usize, index: usize) -> usize {
        let Some(group) = group else { return channel };
        let in_tile = TILE_INPUTS / group;
        let tile = channel / TILE_CHANNELS * units + index / in_tile;
        (tile * in_tile + index % in_tile) * TILE_CHANNELS + channel % TILE_CHANNELS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Matrix;
    use proptest::prelude::*;

    fn bytes(seed: u64, n: usize) -> Vec<u8> {
        use rand::{RngExt, SeedableRng};
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        (0..n).map(|_| random.random()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn packing_loses_nothing(channels in 1..150_usize, sixteens in 1..40_usize, group in 0..4_usize, seed: u64) {
            let inputs = sixteens * 16;
            let group = [32, 64, 128, inputs][group];
            let packed = bytes(seed, channels * inputs / 2);
            let scales = bytes(seed + 1, channels * inputs.div_ceil(group) * 2);
            let data = Data::Packed { bits: Bits::Four, packed: &packed[..], scales: &scales[..], group };
            let tiles = Int4Tiles::pack(Matrix::new(channels, inputs, data).unwrap()).unwrap();
            prop_assert_eq!(tiles.unpack(), (packed, scales));
        }
    }

    #[test]
    fn a_word_is_one_lanes_part_of_a_product() {
        // Weight value = (channel + input) % 16; channel 64 * 1 + 16 * 2 + 5, product 9 (half 1, second of its half).
        let (channels, inputs) = (128, 512);
        let value = |channel: usize, input: usize| ((channel + input) % 16) as u32;
        let packed: Vec<u8> = (0..channels * inputs / 8)
            .flat_map(|w| {
                let (channel, input) = (w * 8 / inputs, w * 8 % inputs);
                (0..8).map(|i| value(channel, input + i) << (4 * i)).sum::<u32>().to_le_bytes()
            })
            .collect();
        let scales = vec![0; channels * 4 * 2];
        let data = Data::Packed { bits: Bits::Four, packed: &packed[..], scales: &scales[..], group: 128 };
        let tiles = Int4Tiles::pack(Matrix::new(channels, inputs, data).unwrap()).unwrap();
        let (column, unit, half, sixteen, product, g, t) = (1, 1, 1, 2, 1, 5, 3);
        let word =
            ((((column * 2 + unit) * 2 + half) * 4 + sixteen) * 2 + product / 4) * 128 + (g * 4 + t) * 4 + product % 4;
        let found = u32::from_le_bytes(tiles.weights[word * 4..][..4].try_into().unwrap());
        let (channel, input) = (column * 64 + sixteen * 16 + g, unit * 256 + half * 128 + product * 16 + 2 * t);
        for register in 0..4 {
            for odd in 0..2 {
                let expected = value(channel + register % 2 * 8, input + register / 2 * 8 + odd);
                assert_eq!(found >> (4 * (register + 4 * odd)) & 15, expected, "register {register}, half {odd}");
            }
        }
    }

    #[test]
    fn shapes_that_no_kernel_takes_are_refused() {
        let data = Data::Packed { bits: Bits::Four, packed: &[0; 12][..], scales: &[0; 2][..], group: 24 };
        assert!(matches!(Int4Tiles::pack(Matrix::new(1, 24, data).unwrap()), Err(LayoutError::Shape { .. })));
        let data = Data::Bf16(&[0; 32][..]);
        assert!(matches!(Int4Tiles::pack(Matrix::new(1, 16, data).unwrap()), Err(LayoutError::Format { .. })));
    }
}
