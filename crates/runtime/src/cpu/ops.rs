//! The small operations on rows of activations. Each works on one row alone, so none can depend on its neighbours.

use kernels::cpu::math::tanh;
use rayon::prelude::*;

/// Multiply-adds, roughly, below which an operation stays on one thread: waking another one costs tens of microseconds.
const PARALLEL_FROM: usize = 1 << 18;

/// Applies `f` to each row (of `width` values) with its index, on several threads where that pays. `cost` is the work of one
/// element in multiply-adds, roughly.
pub(crate) fn each_row(data: &mut [f32], width: usize, cost: usize, f: impl Fn(usize, &mut [f32]) + Sync + Send) {
    if width == 0 {
        return;
    }
    let rows = data.len() / width;
    if rows < 2 || data.len() * cost < PARALLEL_FROM || rayon::current_num_threads() == 1 {
        data.chunks_exact_mut(width).enumerate().for_each(|(i, row)| f(i, row));
    } else {
        data.par_chunks_exact_mut(width).enumerate().for_each(|(i, row)| f(i, row));
    }
}

/// Sum of squares in eight interleaved lanes, folded in one order.
fn sum_of_squares(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<8>();
    let mut lanes = [0.0f32; 8];
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += v * v;
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane += v * v;
    }
    lanes.iter().sum()
}

/// `x <- w * x / sqrt(mean(x^2) + eps)`; without `w` for the weightless form. The weight multiplies directly (not `1 + w`).
pub(crate) fn rms_norm(x: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    let mean = sum_of_squares(x) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    match weight {
        Some(w) => x.iter_mut().zip(w).for_each(|(x, w)| *x = *x * scale * w),
        None => x.iter_mut().for_each(|x| *x *= scale),
    }
}

/// A normed copy of every row of `x`.
pub(crate) fn normed(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = x.to_vec();
    each_row(&mut out, weight.len(), 4, |_, row| rms_norm(row, Some(weight), eps));
    out
}

/// `x <- x + y`.
pub(crate) fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// GELU in its tanh form.
pub(crate) fn gelu(z: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * z * (1.0 + tanh(SQRT_2_OVER_PI * (z + 0.044715 * z * z * z)))
}

/// `gate <- gelu(gate) * other`, element by element.
pub(crate) fn gelu_times(gate: &mut [f32], other: &[f32]) {
    // tanh costs about twenty multiply-adds; pieces of 512 spread even one wide row over threads.
    const PIECE: usize = 512;
    const COST: usize = 20;
    let apply = |(gate, other): (&mut [f32], &[f32])| {
        gate.iter_mut().zip(other).for_each(|(g, o)| *g = gelu(*g) * o);
    };
    if gate.len() * COST < PARALLEL_FROM || rayon::current_num_threads() == 1 {
        apply((gate, other));
    } else {
        gate.par_chunks_mut(PIECE).zip(other.par_chunks(PIECE)).for_each(apply);
    }
}

/// Cosine and sine of every pair's angle at one position.
pub(crate) struct Rotation {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rotation {
    /// Angles `position * inv_freq`, computed in f32 as the reference does.
    pub(crate) fn new(position: usize, inv_freq: &[f32]) -> Rotation {
        let angle = |f: &f32| position as f32 * f;
        Rotation {
            cos: inv_freq.iter().map(|f| angle(f).cos()).collect(),
            sin: inv_freq.iter().map(|f| angle(f).sin()).collect(),
        }
    }

    /// Rotates one head: component m pairs with component m + D/2.
    pub(crate) fn apply(&self, head: &mut [f32]) {
        let (low, high) = head.split_at_mut(self.cos.len());
        for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(self.cos.iter().zip(&self.sin)) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// `c * tanh(z / c)` for every logit. The cap would make a plausible c of an infinity; that stays an error (NaN).
pub(crate) fn softcap(logits: &mut [f32], cap: f32) {
    logits.iter_mut().for_each(|z| *z = if z.is_finite() { cap * tanh(*z / cap) } else { f32::NAN });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gelu_matches_known_values() {
        for (z, want) in [(0.0, 0.0), (1.0, 0.841_192), (-1.0, -0.158_808), (3.0, 2.996_363)] {
            assert!((gelu(z) - want).abs() < 2e-6, "{z}");
        }
    }

    #[test]
    fn norm_has_the_epsilon_inside_the_root() {
        let mut x = [1e-3f32; 4];
        rms_norm(&mut x, None, 1e-6);
        assert!(x.iter().all(|v| (v - 1e-3 / 2e-6f32.sqrt()).abs() < 1e-6));
    }

    #[test]
    fn rotation_pairs_the_halves_and_leaves_zero_frequencies_alone() {
        let mut head = [1.0, 5.0, 2.0, 7.0];
        Rotation::new(1, &[std::f32::consts::FRAC_PI_2, 0.0]).apply(&mut head);
        assert!((head[0] + 2.0).abs() < 1e-6 && (head[2] - 1.0).abs() < 1e-6);
        assert_eq!((head[1], head[3]), (5.0, 7.0));
    }
}
