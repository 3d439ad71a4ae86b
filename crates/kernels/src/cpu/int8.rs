//! Products with activations rounded to int8: the fast path for packed weights on processors whose integer units outrun their
//! floating-point ones.
//!
//! Activations are rounded in blocks of [`BLOCK`] inputs of a row, to 127ths of the block's largest magnitude. Of every block, lane j sums
//! the products of inputs 8j to 8j + 7 in integers, exactly; a group of weights is never shared by a part of a lane, since groups are
//! multiples of eight. Then, for the blocks in ascending order,
//!
//! ```text
//! lane[j] = fma(sum of integers, weight scale * activation scale, lane[j])
//! ```
//!
//! and [`super::fold_lanes`] adds the lanes. Nothing else is rounded and the order is a constant, so every processor and every number of
//! rows gives the same bits. The error of a product is that of the rounding: each activation is off by at most half a step, 0.4 % of the
//! largest in its block (`llama.cpp` multiplies on CPUs this way, in blocks of 32 or 256). Measured on the embedded model at int4 g32:
//! perplexity 33.539 instead of 33.533 (`chiku ppl --precision int8`).

use super::matrix::bf16;
use super::{Data, LANES, MatrixView, fold_lanes};
use crate::packing::Bits;

/// Inputs that share a scale of the activations: what two vectors of 32 bytes hold.
pub(super) const BLOCK: usize = 64;
/// Rows of a panel: what stays in registers beside the weights.
pub(super) const PANEL: usize = 8;
/// Inputs of a lane in a block.
const LANE_INPUTS: usize = BLOCK / LANES;
/// Integers are stored with this added, since the multiplying instruction takes one signed and one unsigned operand.
const OFFSET: i16 = 128;

/// Activation rows, rounded, in panels of [`PANEL`] rows: block by block, within a block row by row.
pub(super) struct Rounded {
    /// [`BLOCK`] bytes a row and block: integers plus 128, those of even inputs first.
    bytes: Vec<Block>,
    /// One a row and block.
    scales: Vec<f32>,
    m_rows: usize,
    /// Blocks of a row; the last one is filled up with zeros.
    blocks: usize,
}

/// The integers of a row and block, in one cache line: a load across two lines costs two.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Block<T = u8>(pub [T; BLOCK]);

/// One panel of [`Rounded`].
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    /// `[blocks, rows, BLOCK]`.
    pub bytes: &'a [Block],
    /// `[blocks, rows]`.
    pub scales: &'a [f32],
    /// At most [`PANEL`].
    pub rows: usize,
}

impl Rounded {
    /// Rounds `x` `[m_rows, cols]`.
    pub(super) fn new(x: &[f32], m_rows: usize, cols: usize) -> Rounded {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has just said so.
            return unsafe { wider(x, m_rows, cols) };
        }
        Rounded::plain(x, m_rows, cols)
    }

    #[inline(always)]
    fn plain(x: &[f32], m_rows: usize, cols: usize) -> Rounded {
        let blocks = cols.div_ceil(BLOCK);
        let mut bytes = Vec::with_capacity(m_rows * blocks);
        let mut scales = Vec::with_capacity(m_rows * blocks);
        for first in (0..m_rows).step_by(PANEL) {
            for block in 0..blocks {
                for m in first..(first + PANEL).min(m_rows) {
                    let inputs = block * BLOCK..cols.min((block + 1) * BLOCK);
                    let mut values = [0.0; BLOCK];
                    values[..inputs.len()].copy_from_slice(&x[m * cols..][inputs]);
                    let (integers, scale) = round(&values);
                    scales.push(scale);
                    bytes.push(Block(std::array::from_fn(|i| integers[i % (BLOCK / 2) * 2 + i / (BLOCK / 2)])));
                }
            }
        }
        Rounded { bytes, scales, m_rows, blocks }
    }

    /// Blocks of a row.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// The panels, and the first row of each.
    pub(super) fn panels(&self) -> impl Iterator<Item = (usize, Panel<'_>)> {
        (0..self.m_rows).step_by(PANEL).map(move |first| {
            let rows = PANEL.min(self.m_rows - first);
            let range = first * self.blocks..(first + rows) * self.blocks;
            (first, Panel { bytes: &self.bytes[range.clone()], scales: &self.scales[range], rows })
        })
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn wider(x: &[f32], m_rows: usize, cols: usize) -> Rounded {
    Rounded::plain(x, m_rows, cols)
}

/// The integers of a block, plus 128, and its scale. A block that holds NaN or an infinity has a scale of NaN, so that it is found in the
/// results.
#[inline(always)]
fn round(values: &[f32; BLOCK]) -> ([u8; BLOCK], f32) {
    /// Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let mut largest = 0u32;
    for v in values {
        // Magnitudes order like their bits, and NaN is above all.
        largest = largest.max(v.to_bits() & 0x7fff_ffff);
    }
    let largest = f32::from_bits(largest);
    let scale = if largest.is_finite() { largest / 127.0 } else { f32::NAN };
    // Below the smallest normal number the quotient would overflow; such a block is zero.
    let steps = if largest >= f32::MIN_POSITIVE * 127.0 { 127.0 / largest } else { 0.0 };
    let mut integers = [0; BLOCK];
    for (integer, v) in integers.iter_mut().zip(values) {
        *integer = ((v * steps + ROUND).to_bits() as i16 + OFFSET) as u8;
    }
    (integers, scale)
}

/// Packed weights, as the kernels read them.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a> {
    pub bits: Bits,
    packed: &'a [u8],
    scales: &'a [u8],
    group: usize,
    cols: usize,
}

impl<'a> Packed<'a> {
    /// The packed weights of a matrix; `None` for another format.
    pub(super) fn of(w: &MatrixView<'a>) -> Option<Packed<'a>> {
        let Data::Packed { bits, packed, scales, group } = w.data() else { return None };
        Some(Packed { bits, packed, scales, group, cols: w.cols() })
    }

    /// Inputs.
    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    /// The packed bytes of row `n`.
    pub(super) fn row(&self, n: usize) -> &'a [u8] {
        let width = self.bits.words(self.cols) * 4;
        &self.packed[n * width..][..width]
    }

    /// Block `block` of row `n` in the order of [`Rounded`], zeros behind the last input.
    #[inline(always)]
    pub(super) fn integers(&self, n: usize, block: usize) -> [i8; BLOCK] {
        let row = self.row(n);
        let (per_word, bits) = (self.bits.per_word(), self.bits.get());
        let first = block * BLOCK;
        let mut out = [0; BLOCK];
        for i in 0..BLOCK.min(self.cols - first) {
            let (k, at) = (first + i, (first + i) / per_word * 4);
            let word = u32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]);
            let field = word >> (k % per_word * bits) & self.bits.field_max();
            out[i / 2 + i % 2 * (BLOCK / 2)] = (field as i32 + self.bits.q_min()) as i8;
        }
        out
    }

    /// bf16 scales of row `n`.
    pub(super) fn row_scales(&self, n: usize) -> &'a [[u8; 2]] {
        let groups = self.cols.div_ceil(self.group);
        &self.scales.as_chunks().0[n * groups..][..groups]
    }

    /// Inputs that share a scale.
    pub(super) fn group(&self) -> usize {
        self.group
    }

    /// The scale of each lane of a block of row `n`. Lanes behind the last input take its scale: their integers are zero.
    #[inline(always)]
    pub(super) fn lane_scales(&self, n: usize, block: usize) -> [f32; LANES] {
        let (row, first) = (self.row_scales(n), block * BLOCK);
        std::array::from_fn(|j| bf16(row[(first + j * LANE_INPUTS).min(self.cols - 1) / self.group]))
    }
}

/// `out[(n - begin) * M + m]`, as [`super::portable::weight_rows`] without the rounding.
pub(super) fn weight_rows(w: Packed, begin: usize, x: &Rounded, out: &mut [f32]) {
    for (i, out) in out.chunks_exact_mut(x.m_rows).enumerate() {
        for (first, panel) in x.panels() {
            let mut lanes = [[0.0f32; LANES]; PANEL];
            for (block, (rows, activation_scales)) in
                panel.bytes.chunks(panel.rows).zip(panel.scales.chunks(panel.rows)).enumerate()
            {
                let (integers, scales) = (w.integers(begin + i, block), w.lane_scales(begin + i, block));
                for ((lanes, row), activation_scale) in lanes.iter_mut().zip(rows).zip(activation_scales) {
                    for j in 0..LANES {
                        let sum = lane_sum(&integers, &row.0, j);
                        lanes[j] = (sum as f32).mul_add(scales[j] * activation_scale, lanes[j]);
                    }
                }
            }
            for (out, lanes) in out[first..].iter_mut().zip(&lanes[..panel.rows]) {
                *out = fold_lanes(*lanes);
            }
        }
    }
}

/// The exact sum of a lane's products. Its even and its odd inputs lie half a block apart.
fn lane_sum(weights: &[i8; BLOCK], activations: &[u8; BLOCK], lane: usize) -> i32 {
    let half = LANE_INPUTS / 2;
    let places = (lane * half..(lane + 1) * half).chain((lane * half..(lane + 1) * half).map(|i| i + BLOCK / 2));
    places.map(|i| i32::from(weights[i]) * (i32::from(activations[i]) - i32::from(OFFSET))).sum()
}
