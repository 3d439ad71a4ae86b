//! The kernels in plain Rust: the reference that the others are tested against, and the code for processors without AVX2.

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
    let cols = w.cols();
    let mut totals = vec![[0.0f32; LANES]; m_rows];
    for (i, out) in out.chunks_exact_mut(m_rows).enumerate() {
        totals.fill([0.0; LANES]);
        for k in (0..cols).step_by(SEGMENT) {
            let len = SEGMENT.min(cols - k);
            let mut weights = [0.0f32; SEGMENT];
            w.expand(begin + i, k, &mut weights[..len]);
            for (m, total) in totals.iter_mut().enumerate() {
                let sums = lane_sums(&weights[..len], &x[m * cols + k..][..len]);
                for (t, s) in total.iter_mut().zip(sums) {
                    *t += s;
                }
            }
        }
        for (o, total) in out.iter_mut().zip(&totals) {
            *o = fold_lanes(*total);
        }
    }
}

/// Lane i holds the sum over k = i, i + 8, i + 16, ... in that order.
#[inline(always)]
fn lane_sums(a: &[f32], b: &[f32]) -> [f32; LANES] {
    let mut sums = [0.0f32; LANES];
    let ((a8, a_rest), (b8, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a8.iter().zip(b8) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    for (i, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[i] += a * b;
    }
    sums
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    fold_lanes(lane_sums(a, b))
}

pub(super) fn scaled_add(y: &mut [f32], a: f32, x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
}
