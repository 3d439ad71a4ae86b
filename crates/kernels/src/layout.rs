//! How weights lie in device memory: tiles in the order in which the kernels read them (`kernels/formats.cuh`).
//!
//! A file in `compressed-tensors` order is repacked once, when it is loaded. The layout has a version, which the kernels' sources name.
//!
//! A tile has 64 channels and [`Format::tile_inputs`] inputs; tiles of a column of channels follow each other. Inside, every lane of a warp
//! finds its part of the operands of `mma` in 16 bytes of its own: `[2 halves of the inputs][4 x 16 channels][chunks][32 lanes]`, and in a
//! lane's words one product of 16 channels and 16 inputs after the other. Lane `4 g + t` has of each product channels `g` and `g + 8` at
//! inputs `2t, 2t + 1, 2t + 8, 2t + 9`, as the registers of `mma.m16n8k16` have them.

use rayon::prelude::*;

use crate::{
    cpu::{Data, MatrixView},
    packing::Bits,
};

/// Output channels of a tile.
pub const TILE_CHANNELS: usize = 64;

/// How the weights of a tile are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// -2 to 1, 16 a word.
    Int2,
    /// -4 to 3: a plane with the lower two bits, laid out as [`Format::Int2`], and behind it one with the third.
    Int3,
    /// -8 to 7, 8 a word.
    Int4,
    /// -128 to 127, 4 a word.
    Int8,
    /// bf16.
    Bf16,
    /// -128 to 127 in two's complement, for inputs of 8 bits: operands of `mma.m16n8k32`.
    Int8Dot,
}

/// A matrix in tiles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tiles {
    /// How weights are stored.
    pub format: Format,
    /// Output channels.
    pub channels: usize,
    /// Inputs.
    pub inputs: usize,
    /// Inputs that share a scale: 32, 64 or 128; `None`: all of a channel.
    pub group: Option<usize>,
    /// `[channels / 64, inputs / tile_inputs]` tiles, both rounded up. Beyond the matrix weights are zero.
    pub weights: Vec<u8>,
    /// bf16. With groups `[tiles, tile_inputs / group, 64]`; without `[channels rounded up to 64]`; of bf16 weights none.
    pub scales: Vec<u8>,
}

/// Matrices that cannot be laid out.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum LayoutError {
    /// A format that has no tiles.
    #[error("a [{channels}, {inputs}] matrix of {found} has no tiles: the kernels take {expected}")]
    Format {
        /// Output channels.
        channels: usize,
        /// Inputs.
        inputs: usize,
        /// What it is.
        found: &'static str,
        /// What would do.
        expected: &'static str,
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
    /// Matrices that do not go into one.
    #[error("matrices [{}, {}] and [{}, {}] do not go into one: {differ} differ", .first.0, .first.1, .second.0, .second.1)]
    Mixed {
        /// Channels and inputs of the first.
        first: (usize, usize),
        /// Of the other.
        second: (usize, usize),
        /// What they do not share.
        differ: &'static str,
    },
    /// Gates and ups that are not pairs of eights.
    #[error("{channels} gates: they are interleaved with their ups by eights")]
    Gates {
        /// Channels of either.
        channels: usize,
    },
}

impl Format {
    /// All of them.
    pub const ALL: [Format; 6] =
        [Format::Int2, Format::Int3, Format::Int4, Format::Int8, Format::Bf16, Format::Int8Dot];

    /// Inputs of a tile.
    pub const fn tile_inputs(self) -> usize {
        if matches!(self, Format::Bf16) { 128 } else { 256 }
    }

    /// Bits of a weight.
    pub const fn bits(self) -> usize {
        match self {
            Format::Int2 => 2,
            Format::Int3 => 3,
            Format::Int4 => 4,
            Format::Int8 | Format::Int8Dot => 8,
            Format::Bf16 => 16,
        }
    }

    /// Bytes of a tile.
    pub const fn tile_bytes(self) -> usize {
        TILE_CHANNELS * self.tile_inputs() * self.bits() / 8
    }

    /// Bytes of one input.
    pub const fn input_bytes(self) -> usize {
        if matches!(self, Format::Int8Dot) { 1 } else { 2 }
    }

    /// What weights beyond the matrix are stored as.
    const fn zero(self) -> u32 {
        match self {
            Format::Int2 => 2,
            Format::Int3 => 4,
            Format::Int4 => 8,
            Format::Int8 => 128,
            Format::Bf16 | Format::Int8Dot => 0,
        }
    }

    /// Where the weight of a tile is: pieces of (its lowest bit, how many, first bit in the tile).
    fn pieces(self, channel: usize, input: usize) -> ([(u32, u32, usize); 2], usize) {
        let half_inputs = self.tile_inputs() / 2;
        let part = input / half_inputs * 4 + channel / 16;
        let product_inputs = if self == Format::Int8Dot { 32 } else { 16 };
        // Registers of a product hold runs of 32 / 16 (or 8) inputs: channel g and the first half of the inputs, g + 8, then the second half.
        let run = product_inputs / 8;
        let (row, product, within) = (channel % 16, input % half_inputs / product_inputs, input % product_inputs);
        let lane = row % 8 * 4 + within / run % 4;
        let register = row / 8 + within / (product_inputs / 2) * 2;
        let place = within % run;
        // First bit of a lane's word where a lane has `chunks` times four of them.
        let word = |chunks: usize, word: usize| ((part * chunks + word / 4) * 32 + lane) * 128 + word % 4 * 32;
        let field = product % 2 * 4 + register;
        let two = word(1, product / 2) + 2 * field + 16 * place;
        match self {
            Format::Int2 => ([(0, 2, two), (0, 0, 0)], 1),
            Format::Int3 => {
                let plane = TILE_CHANNELS * self.tile_inputs() * 2;
                let third =
                    plane + (part * 32 + lane) * 64 + product / 4 * 32 + 2 * field + product / 2 % 2 + 16 * place;
                ([(0, 2, two), (2, 1, third)], 2)
            }
            Format::Int4 => ([(0, 4, word(2, product) + 4 * register + 16 * place), (0, 0, 0)], 1),
            Format::Int8 => {
                let bit = word(4, product * 2 + register / 2) + 8 * (register % 2) + 16 * place;
                ([(0, 8, bit), (0, 0, 0)], 1)
            }
            Format::Bf16 => ([(0, 16, word(4, product * 4 + register) + 16 * place), (0, 0, 0)], 1),
            Format::Int8Dot => ([(0, 8, word(4, product * 4 + register) + 8 * place), (0, 0, 0)], 1),
        }
    }

    fn set(self, tile: &mut [u8], channel: usize, input: usize, value: u32) {
        let (pieces, count) = self.pieces(channel, input);
        for (low, bits, at) in &pieces[..count] {
            let part = value >> low & ((1 << bits) - 1);
            for byte in 0..bits.div_ceil(8) as usize {
                let mask = ((1 << bits.min(&8)) - 1) as u8;
                let shift = at % 8;
                tile[at / 8 + byte] &= !(mask << shift);
                tile[at / 8 + byte] |= ((part >> (8 * byte)) as u8) << shift;
            }
        }
    }

    fn get(self, tile: &[u8], channel: usize, input: usize) -> u32 {
        let (pieces, count) = self.pieces(channel, input);
        let read = |&(low, bits, at): &(u32, u32, usize)| {
            let bytes = (0..bits.div_ceil(8) as usize).map(|byte| u32::from(tile[at / 8 + byte]) << (8 * byte));
            (bytes.sum::<u32>() >> (at % 8) & ((1 << bits) - 1)) << low
        };
        pieces[..count].iter().map(read).sum()
    }
}

impl Tiles {
    /// Version of this layout.
    pub const VERSION: u32 = 1;

    /// Lays out a matrix in the order of its file, for bf16 inputs.
    pub fn pack(matrix: MatrixView<'_>) -> Result<Tiles, LayoutError> {
        Tiles::stack(&[matrix])
    }

    /// Lays out matrices with the same inputs as one: the channels of the first, then those of the next.
    pub fn stack(matrices: &[MatrixView<'_>]) -> Result<Tiles, LayoutError> {
        let rows = matrices.iter().flat_map(|&m| (0..m.rows()).map(move |row| (m, row)));
        Tiles::from_rows(&rows.collect::<Vec<_>>(), false)
    }

    /// Lays out gates and ups so that a block has both of a pair: of every 16 channels, the first 8 are gates and the others their ups.
    pub fn gated(gate: MatrixView<'_>, up: MatrixView<'_>) -> Result<Tiles, LayoutError> {
        let channels = gate.rows();
        if up.rows() != channels {
            let (first, second) = ((channels, gate.cols()), (up.rows(), up.cols()));
            return Err(LayoutError::Mixed { first, second, differ: "channels" });
        }
        if !channels.is_multiple_of(8) {
            return Err(LayoutError::Gates { channels });
        }
        let eights = (0..channels / 8).flat_map(|e| [(gate, e), (up, e)]);
        let rows = eights.flat_map(|(m, e)| (0..8).map(move |i| (m, e * 8 + i)));
        Tiles::from_rows(&rows.collect::<Vec<_>>(), false)
    }

    /// Lays out an int8 matrix with a scale a channel, for int8 inputs.
    pub fn dot(matrix: MatrixView<'_>) -> Result<Tiles, LayoutError> {
        Tiles::from_rows(&(0..matrix.rows()).map(|row| (matrix, row)).collect::<Vec<_>>(), true)
    }

    /// One channel a row, of matrices that share their format.
    fn from_rows(rows: &[(MatrixView<'_>, usize)], dot: bool) -> Result<Tiles, LayoutError> {
        let Some(&(first, _)) = rows.first() else {
            return Err(LayoutError::Shape { channels: 0, inputs: 0, group: 0 });
        };
        let (channels, inputs) = (rows.len(), first.cols());
        let kind = |m: MatrixView<'_>| match m.data() {
            Data::F32(_) => (32, m.cols(), m.cols()),
            Data::Bf16(_) => (16, m.cols(), m.cols()),
            Data::Packed { bits, group, .. } => (bits.get(), group.min(m.cols()), m.cols()),
        };
        let mut seen = first;
        for &(matrix, _) in rows {
            // Rows come in runs of one matrix.
            if std::ptr::eq(start(seen), start(matrix)) {
                continue;
            }
            let (a, b) = (kind(first), kind(matrix));
            if a != b {
                let differ = ["widths", "groups", "inputs"];
                let differ = if a.0 != b.0 { differ[0] } else { differ[if a.2 == b.2 { 1 } else { 2 }] };
                let (first, second) = ((first.rows(), inputs), (matrix.rows(), matrix.cols()));
                return Err(LayoutError::Mixed { first, second, differ });
            }
            seen = matrix;
        }
        let refuse = |found, expected| Err(LayoutError::Format { channels, inputs, found, expected });
        let (format, group) = match first.data() {
            Data::F32(_) => return refuse("f32", "bf16 and packed integers"),
            Data::Packed { bits: Bits::Eight, group, .. } if dot && group >= inputs => (Format::Int8Dot, group),
            _ if dot => return refuse("other weights", "int8 with a scale a channel where inputs are int8"),
            Data::Bf16(_) => (Format::Bf16, inputs),
            Data::Packed { bits, group, .. } => match bits {
                Bits::Two => (Format::Int2, group),
                Bits::Three => (Format::Int3, group),
                Bits::Four => (Format::Int4, group),
                Bits::Eight => (Format::Int8, group),
            },
        };
        let per_channel = group >= inputs;
        let fits = inputs > 0 && inputs.is_multiple_of(16) && (per_channel || [32, 64, 128].contains(&group));
        if !fits {
            return Err(LayoutError::Shape { channels, inputs, group });
        }
        let group = (!per_channel).then_some(group);
        let mut tiles = Tiles { format, channels, inputs, group, weights: Vec::new(), scales: Vec::new() };
        tiles.fill(rows);
        Ok(tiles)
    }

    fn fill(&mut self, rows: &[(MatrixView<'_>, usize)]) {
        let (format, inputs) = (self.format, self.inputs);
        let mut zero = vec![0; format.tile_bytes()];
        for (channel, input) in (0..TILE_CHANNELS).flat_map(|c| (0..format.tile_inputs()).map(move |i| (c, i))) {
            format.set(&mut zero, channel, input, format.zero());
        }
        self.weights = zero.repeat(self.columns() * self.units());
        self.scales = vec![0; self.scale_bytes()];
        let groups = self.groups();
        for (channel, &(matrix, row)) in rows.iter().enumerate() {
            if let Data::Packed { scales, .. } = matrix.data() {
                for index in 0..groups {
                    let (from, to) = ((row * groups + index) * 2, self.scale_at(channel, index));
                    self.scales[to..to + 2].copy_from_slice(&scales[from..from + 2]);
                }
            }
        }
        let column_bytes = self.units() * format.tile_bytes();
        let columns = self.weights.par_chunks_mut(column_bytes).zip(rows.par_chunks(TILE_CHANNELS));
        columns.for_each(|(column, rows)| {
            for (channel, &(matrix, row)) in rows.iter().enumerate() {
                for input in 0..inputs {
                    let value = stored(matrix, row, input) ^ if format == Format::Int8Dot { 0x80 } else { 0 };
                    let tile = &mut column[input / format.tile_inputs() * format.tile_bytes()..][..format.tile_bytes()];
                    format.set(tile, channel, input % format.tile_inputs(), value);
                }
            }
        });
    }

    /// Weights in the order of a file (packed words, or bf16) and scales: the inverse of [`Tiles::pack`].
    pub fn unpack(&self) -> (Vec<u8>, Vec<u8>) {
        let (channels, inputs, format) = (self.channels, self.inputs, self.format);
        let per_word = 32 / format.bits();
        let row_words = inputs.div_ceil(per_word);
        let mut words = vec![0_u32; channels * row_words];
        for channel in 0..channels {
            for input in 0..inputs {
                let at = self.tile_at(channel, input);
                let tile = &self.weights[at..at + format.tile_bytes()];
                let value = format.get(tile, channel % TILE_CHANNELS, input % format.tile_inputs());
                let value = if format == Format::Int8Dot { value ^ 0x80 } else { value };
                words[channel * row_words + input / per_word] |= value << (input % per_word * format.bits());
            }
        }
        let places = (0..channels).flat_map(|c| (0..self.groups()).map(move |i| (c, i)));
        let scales = if format == Format::Bf16 {
            Vec::new()
        } else {
            places.map(|(c, i)| self.scale_at(c, i)).flat_map(|at| [self.scales[at], self.scales[at + 1]]).collect()
        };
        (words.into_iter().flat_map(u32::to_le_bytes).collect(), scales)
    }

    fn columns(&self) -> usize {
        self.channels.div_ceil(TILE_CHANNELS)
    }

    fn units(&self) -> usize {
        self.inputs.div_ceil(self.format.tile_inputs())
    }

    fn groups(&self) -> usize {
        self.group.map_or(1, |g| self.inputs.div_ceil(g))
    }

    /// First byte of the tile that has this weight.
    fn tile_at(&self, channel: usize, input: usize) -> usize {
        let tile = channel / TILE_CHANNELS * self.units() + input / self.format.tile_inputs();
        tile * self.format.tile_bytes()
    }

    fn scale_bytes(&self) -> usize {
        match self.group {
            _ if self.format == Format::Bf16 => 0,
            Some(group) => self.columns() * self.units() * (self.format.tile_inputs() / group) * TILE_CHANNELS * 2,
            None => self.columns() * TILE_CHANNELS * 2,
        }
    }

    fn scale_at(&self, channel: usize, index: usize) -> usize {
        let Some(group) = self.group else { return channel * 2 };
        let in_tile = self.format.tile_inputs() / group;
        let tile = channel / TILE_CHANNELS * self.units() + index / in_tile;
        ((tile * in_tile + index % in_tile) * TILE_CHANNELS + channel % TILE_CHANNELS) * 2
    }
}

/// Where a matrix's weights begin, which tells matrices apart.
fn start(matrix: MatrixView<'_>) -> *const u8 {
    match matrix.data() {
        Data::F32(bytes) | Data::Bf16(bytes) | Data::Packed { packed: bytes, .. } => bytes.as_ptr(),
    }
}

/// A weight as the file stores it: the packed field, or the bits of a bf16.
fn stored(matrix: MatrixView<'_>, row: usize, input: usize) -> u32 {
    match matrix.data() {
        Data::F32(_) => 0,
        Data::Bf16(bytes) => {
            let at = (row * matrix.cols() + input) * 2;
            u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
        }
        Data::Packed { bits, packed, .. } => {
            let at = (row * bits.words(matrix.cols()) + input / bits.per_word()) * 4;
            let word = u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]]);
            bits.field(&[word], input % bits.per_word())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Matrix;
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    fn bytes(seed: u64, n: usize) -> Vec<u8> {
        let mut random = StdRng::seed_from_u64(seed);
        (0..n).map(|_| random.random()).collect()
    }

    /// Random weights in the order of a file; bits that no field has are zero.
    fn weights(format: Format, channels: usize, inputs: usize, seed: u64) -> Vec<u8> {
        let per_word = 32 / format.bits();
        let mut packed = bytes(seed, channels * inputs.div_ceil(per_word) * 4);
        for (i, word) in packed.chunks_exact_mut(4).enumerate() {
            let fields = (inputs - i % inputs.div_ceil(per_word) * per_word).min(per_word);
            let used = u32::MAX >> (32 - fields * format.bits());
            let kept = u32::from_le_bytes([word[0], word[1], word[2], word[3]]) & used;
            word.copy_from_slice(&kept.to_le_bytes());
        }
        packed
    }

    fn data<'a>(format: Format, packed: &'a [u8], scales: &'a [u8], group: usize) -> Data<&'a [u8]> {
        match Bits::new(format.bits()) {
            Some(bits) => Data::Packed { bits, packed, scales, group },
            None => Data::Bf16(packed),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn packing_loses_nothing(
            format in 0..Format::ALL.len(), channels in 1..150_usize, sixteens in 1..40_usize, group in 0..4_usize, seed: u64
        ) {
            let (format, inputs) = (Format::ALL[format], sixteens * 16);
            let whole = matches!(format, Format::Bf16 | Format::Int8Dot);
            let group = if whole { inputs } else { [32, 64, 128, inputs][group] };
            let packed = weights(format, channels, inputs, seed);
            let scale_bytes = if format == Format::Bf16 { 0 } else { channels * inputs.div_ceil(group) * 2 };
            let scales = bytes(seed.wrapping_add(1), scale_bytes);
            let matrix = Matrix::new(channels, inputs, data(format, &packed, &scales, group)).unwrap();
            let tiles = if format == Format::Int8Dot { Tiles::dot(matrix) } else { Tiles::pack(matrix) }.unwrap();
            prop_assert_eq!(tiles.format, format);
            prop_assert_eq!(tiles.unpack(), (packed, scales));
        }
    }

    #[test]
    fn every_bit_of_a_tile_belongs_to_one_weight() {
        for format in Format::ALL {
            let mut seen = vec![false; format.tile_bytes() * 8];
            for (channel, input) in (0..TILE_CHANNELS).flat_map(|c| (0..format.tile_inputs()).map(move |i| (c, i))) {
                let (pieces, count) = format.pieces(channel, input);
                assert_eq!(pieces[..count].iter().map(|p| p.1).sum::<u32>() as usize, format.bits());
                for bit in pieces[..count].iter().flat_map(|p| p.2..p.2 + p.1 as usize) {
                    assert!(!std::mem::replace(&mut seen[bit], true), "{format:?}, bit {bit}");
                }
            }
            assert!(seen.iter().all(|&s| s));
        }
    }

    #[test]
    fn a_word_of_int4_is_one_lanes_part_of_a_product() {
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
        let tiles = Tiles::pack(Matrix::new(channels, inputs, data).unwrap()).unwrap();
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
    fn gates_and_ups_alternate_by_eights() {
        let (gate, up) = (weights(Format::Int2, 24, 32, 1), weights(Format::Int2, 24, 32, 2));
        let scales = bytes(3, 24 * 2);
        let matrix = |packed| Matrix::new(24, 32, data(Format::Int2, packed, &scales, 32)).unwrap();
        let (found, _) = Tiles::gated(matrix(&gate[..]), matrix(&up[..])).unwrap().unpack();
        for (i, row) in found.chunks_exact(8).enumerate() {
            let from = if i / 8 % 2 == 0 { &gate } else { &up };
            assert_eq!(row, &from[(i / 16 * 8 + i % 8) * 8..][..8], "channel {i}");
        }
        let (found, _) = Tiles::stack(&[matrix(&gate[..]), matrix(&up[..])]).unwrap().unpack();
        assert_eq!(found, [gate, up].concat());
    }

    #[test]
    fn matrices_that_no_kernel_takes_are_refused() {
        let of = |n, k, data| Tiles::pack(Matrix::new(n, k, data).unwrap());
        let four = |packed, scales, group| Data::Packed { bits: Bits::Four, packed, scales, group };
        assert!(matches!(of(1, 24, four(&[0; 12][..], &[0; 2][..], 24)), Err(LayoutError::Shape { .. })));
        assert!(matches!(of(1, 32, four(&[0; 16][..], &[0; 4][..], 16)), Err(LayoutError::Shape { group: 16, .. })));
        let plain = of(1, 16, Data::F32(&[0; 64][..]));
        assert!(matches!(plain, Err(LayoutError::Format { found: "f32", .. })));
        let four = Matrix::new(8, 16, four(&[0; 64][..], &[0; 16][..], 16)).unwrap();
        let wide = Matrix::new(8, 32, Data::Bf16(&[0; 512][..])).unwrap();
        assert!(matches!(Tiles::stack(&[four, wide]), Err(LayoutError::Mixed { differ: "widths", .. })));
        assert!(matches!(Tiles::dot(four), Err(LayoutError::Format { .. })));
        assert!(matches!(Tiles::stack(&[]), Err(LayoutError::Shape { .. })));
        let odd = Matrix::new(4, 16, Data::Bf16(&[0; 128][..])).unwrap();
        assert!(matches!(Tiles::gated(odd, odd), Err(LayoutError::Gates { channels: 4 })));
        assert!(matches!(Tiles::gated(odd, wide), Err(LayoutError::Mixed { differ: "channels", .. })));
    }
}
