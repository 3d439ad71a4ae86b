//! The kernels in plain Rust: the reference that the others are tested against, and the code for processors without AVX2.
//!
//! Where the processor has AVX2, the same code runs in a second compilation for its wider registers. Rust fuses no multiplication with
//! an addition, so that the bits are the same.

use std::ops::Range;

use super::attention::{KvView, Ops, attend_with};
use super::{LANES, MatrixView, fold_lanes};

/// `out[(n - begin) * M + m] = sum over k of w[n, k] * x[m, k]` for the weight rows n of `begin ..`; as many as fit `out`.
///
/// `SEGMENT` is [`crate::SEGMENT`], except for the planted defect.
///
/// Per output: each segment of k is summed in [`LANES`] interleaved lanes, the lanes of the segment are added to those of the
/// total, and the total's lanes are folded once at the end. None of it knows M.
pub(super) fn weight_rows<const SEGMENT: usize>(
    w: &MatrixView,
    begin: usize,
    x: &[f32],
    m_rows: usize,
    out: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has just said so.
        return unsafe { wider::weight_rows::<SEGMENT>(w, begin, x, m_rows, out) };
    }
    weight_rows_plain::<SEGMENT>(w, begin, x, m_rows, out)
}

/// The code above, compiled for AVX2 without fused multiply-adds.
#[cfg(target_arch = "x86_64")]
mod wider {
    use super::*;

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn weight_rows<const SEGMENT: usize>(
        w: &MatrixView,
        begin: usize,
        x: &[f32],
        m_rows: usize,
        out: &mut [f32],
    ) {
        weight_rows_plain::<SEGMENT>(w, begin, x, m_rows, out)
    }

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn attend(
        query: &[f32],
        kv: KvView,
        head: usize,
        visible: Range<usize>,
        own: Option<(&[f32], &[f32])>,
        out: &mut [f32],
    ) {
        // SAFETY: plain arithmetic needs no feature.
        unsafe { attend_with::<Plain>(query, kv, head, visible, own, out) }
    }
}

#[inline(always)]
fn weight_rows_plain<const SEGMENT: usize>(w: &MatrixView, begin: usize, x: &[f32], m_rows: usize, out: &mut [f32]) {
    let cols = w.cols();
    let mut totals = vec![[0.0f32; LANES]; m_rows];
    for (i, out) in out.chunks_exact_mut(m_rows).enumerate() {
        totals.fill([0.0; LANES]);
        for k in (0..cols).step_by(SEGMENT) {
            let len = SEGMENT.min(cols - k);
            let mut weights = [0.0f32; SEGMENT];
            w.expand(begin + i, k, &mut weights[..len]);
            let row = |m: usize| &x[m * cols + k..][..len];
            // Several rows at a time, only so that the processor has independent sums to work on.
            let (blocks, rest) = totals.as_chunks_mut::<BLOCK>();
            for (b, block) in blocks.iter_mut().enumerate() {
                add_segment(block, &weights[..len], std::array::from_fn(|i| row(b * BLOCK + i)));
            }
            for (i, total) in rest.iter_mut().enumerate() {
                add_segment(std::array::from_mut(total), &weights[..len], [row(m_rows - m_rows % BLOCK + i)]);
            }
        }
        for (o, total) in out.iter_mut().zip(&totals) {
            *o = fold_lanes(*total);
        }
    }
}

/// Activation rows whose sums run side by side.
const BLOCK: usize = 4;

/// Adds the sums of one segment to the totals of `M` rows.
#[inline(always)]
fn add_segment<const M: usize>(totals: &mut [[f32; LANES]; M], weights: &[f32], rows: [&[f32]; M]) {
    for (total, sums) in totals.iter_mut().zip(lane_sums(weights, rows)) {
        for (t, s) in total.iter_mut().zip(sums) {
            *t += s;
        }
    }
}

/// For each row of `b`: lane i holds the sum over k = i, i + 8, i + 16, ... of `a[k] * b[k]`, in that order.
#[inline(always)]
fn lane_sums<const M: usize>(a: &[f32], b: [&[f32]; M]) -> [[f32; LANES]; M] {
    let mut sums = [[0.0f32; LANES]; M];
    let (a8, a_rest) = a.as_chunks::<LANES>();
    let b8 = b.map(|row| row.as_chunks::<LANES>().0);
    for (k, a) in a8.iter().enumerate() {
        for m in 0..M {
            for i in 0..LANES {
                sums[m][i] += a[i] * b8[m][k][i];
            }
        }
    }
    for (i, a) in a_rest.iter().enumerate() {
        for m in 0..M {
            sums[m][i] += a * b[m][a8.len() * LANES + i];
        }
    }
    sums
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let [sums] = lane_sums(a, [b]);
    fold_lanes(sums)
}

/// Plain arithmetic.
struct Plain;

impl Ops for Plain {
    #[inline(always)]
    unsafe fn dots<const M: usize>(a: &[f32], b: [&[f32]; M]) -> [f32; M] {
        lane_sums(a, b).map(fold_lanes)
    }

    #[inline(always)]
    unsafe fn scaled_adds<const M: usize>(y: &mut [f32], a: [f32; M], x: [&[f32]; M]) {
        let x = x.map(|x| &x[..y.len()]);
        for (i, y) in y.iter_mut().enumerate() {
            for m in 0..M {
                *y += a[m] * x[m][i];
            }
        }
    }
}

/// See [`super::attend`].
pub(super) fn attend(
    query: &[f32],
    kv: KvView,
    head: usize,
    visible: Range<usize>,
    own: Option<(&[f32], &[f32])>,
    out: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has just said so.
        return unsafe { wider::attend(query, kv, head, visible, own, out) };
    }
    // SAFETY: plain arithmetic needs no feature.
    unsafe { attend_with::<Plain>(query, kv, head, visible, own, out) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Data, Matrix};

    /// Values with many significant bits, so that a fused or reordered sum would show.
    fn values(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32).map(|i| ((i + seed).wrapping_mul(2_654_435_761) >> 8) as f32 / 9_999_991.0 - 0.8).collect()
    }

    #[test]
    fn both_compilations_give_the_same_bits() {
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for (rows, cols, m) in [(5, 300, 1), (3, 129, 7), (4, 64, 16)] {
            let weights: Vec<u8> = values(rows * cols, 1).iter().flat_map(|v| v.to_le_bytes()).collect();
            let matrix = Matrix::new(rows, cols, Data::F32(&weights[..])).unwrap();
            let x = values(m * cols, 7);
            let (mut plain, mut chosen) = (vec![0.0; rows * m], vec![1.0; rows * m]);
            weight_rows_plain::<{ crate::SEGMENT }>(&matrix, 0, &x, m, &mut plain);
            weight_rows::<{ crate::SEGMENT }>(&matrix, 0, &x, m, &mut chosen);
            assert_eq!(bits(&plain), bits(&chosen));
        }
        let (keys, cached, dim) = (values(200 * 48, 3), values(200 * 48, 5), 48);
        let kv = KvView { keys: &keys, values: &cached, kv_heads: 1, head_dim: dim };
        let query = values(dim, 11);
        let (mut plain, mut chosen) = (vec![0.0; dim], vec![1.0; dim]);
        let own = Some((&query[..], &query[..]));
        // SAFETY: plain arithmetic needs no feature.
        unsafe { attend_with::<Plain>(&query, kv, 0, 3..190, own, &mut plain) };
        attend(&query, kv, 0, 3..190, own, &mut chosen);
        assert_eq!(bits(&plain), bits(&chosen));
    }
}
