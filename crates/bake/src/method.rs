//! How scales and integers are chosen: the methods, and what they have in common.
//!
//! A method makes a [`Quantiser`] for one matrix: a function from a row of weights to fields and scales. Rows are independent
//! of each other, so that they can be made in any order, tile by tile. `rtn` and `mse` look at nothing but the row; a method
//! that needs more (activations) brings its own `Quantiser`.

use half::bf16;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::precision::Choice;
use crate::quant::{self, Arithmetic, Bits};

/// How scales and integers are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Round to nearest; the largest magnitude of a group sets its scale (min-max). What the field's tools do.
    #[default]
    Rtn,
    /// Round to nearest; of a grid of scales, each group takes the one with the least squared error.
    Mse,
    /// Errors are made up for by later weights, as calibration text allows: [`crate::gptq`]. Row by row, without any text, it is
    /// `mse`.
    Gptq,
}

impl Method {
    /// Name in plans, on the command line and in the lineage.
    pub fn name(self) -> &'static str {
        match self {
            Method::Rtn => "rtn",
            Method::Mse => "mse",
            Method::Gptq => "gptq",
        }
    }
}

/// Quantises the rows of one matrix.
pub trait Quantiser: Send + Sync {
    /// Row `row`: fields (`q + 2^(b-1)`), as many as weights, and one scale a group. The weights are finite.
    ///
    /// # Errors
    /// Slices whose lengths do not fit together.
    fn quantise(&self, row: usize, weights: &[f32], fields: &mut [u8], scales: &mut [bf16]) -> Result<()>;
}

/// A [`Method`] for matrices of one width and group size.
#[derive(Debug, Clone, Copy)]
pub struct ByRow {
    /// Method.
    pub method: Method,
    /// Width.
    pub bits: Bits,
    /// Inputs that share a scale, a divisor of the row's length.
    pub group: usize,
    /// Type of the weights.
    pub arithmetic: Arithmetic,
}

impl ByRow {
    /// For rows of `inputs`.
    pub fn new(choice: Choice, inputs: usize, arithmetic: Arithmetic) -> ByRow {
        let Choice { scheme, method } = choice;
        ByRow { method, bits: scheme.bits, group: scheme.group(inputs), arithmetic }
    }
}

impl Quantiser for ByRow {
    fn quantise(&self, _: usize, weights: &[f32], fields: &mut [u8], scales: &mut [bf16]) -> Result<()> {
        let ByRow { method, bits, group, arithmetic } = *self;
        match method {
            Method::Rtn => quant::quantise_row(weights, group, bits, arithmetic, fields, scales),
            Method::Mse | Method::Gptq => {
                quant::check_lengths(weights, group, fields, scales)?;
                let groups = weights.chunks_exact(group).zip(fields.chunks_exact_mut(group));
                for ((w, f), s) in groups.zip(scales) {
                    *s = least_squares_scale(w, bits, arithmetic);
                    quant::quantise_group(w, *s, bits, arithmetic, f);
                }
                Ok(())
            }
        }
    }
}

/// Steps of the grid between zero and the scale that clips nothing.
const GRID: usize = 80;
/// The grid ends at this share of it: the best scale of two-bit weights in a long row is about a third.
const GRID_END: usize = 16;

/// The scale of a group with the least sum of squared errors.
///
/// Candidates are the min-max scale and, from the one that clips nothing (absmax over the largest integer) down to a fifth of
/// it, `GRID` steps of even width; each is rounded to bf16 before it is tried. Of equals the largest wins.
pub fn least_squares_scale(weights: &[f32], bits: Bits, arithmetic: Arithmetic) -> bf16 {
    let absmax = quant::absmax(weights);
    let min_max = quant::scale(absmax, bits, arithmetic);
    let mut best = (min_max, squared_error(weights, min_max, absmax, bits, arithmetic));
    for scale in grid(absmax, bits) {
        let error = squared_error(weights, scale, absmax, bits, arithmetic);
        if error < best.1 || (error == best.1 && scale > best.0) {
            best = (scale, error);
        }
    }
    best.0
}

/// The steps of the search, usable ones, largest first, for a group of largest magnitude `absmax`.
pub(crate) fn grid(absmax: f32, bits: Bits) -> impl Iterator<Item = bf16> {
    let widest = absmax / bits.q_max() as f32;
    let steps = (GRID_END..=GRID).rev().map(move |i| bf16::from_f32(widest * (i as f32 / GRID as f32)));
    steps.filter(|s| *s > bf16::ZERO && s.is_finite())
}

/// Sums run side by side, in a fixed order.
const LANES: usize = 8;

/// Sum of the squared errors of weights that share `scale`, in units in which `absmax` is about 1: squares of tiny weights
/// would vanish.
fn squared_error(weights: &[f32], scale: bf16, absmax: f32, bits: Bits, arithmetic: Arithmetic) -> f32 {
    let unit = power_of_two_near_reciprocal(absmax);
    let scale = scale.to_f32();
    let (low, high) = (bits.q_min() as f32, bits.q_max() as f32);
    let error = |w: f32| {
        let q = quant::nearest(w / scale, low, high, arithmetic);
        let e = (q * scale - w) * unit;
        e * e
    };
    let (vectors, rest) = weights.as_chunks::<LANES>();
    let mut sums = [0f32; LANES];
    for w in vectors {
        for (sum, &w) in sums.iter_mut().zip(w) {
            *sum += error(w);
        }
    }
    rest.iter().zip(&mut sums).for_each(|(&w, sum)| *sum += error(w));
    sums.iter().sum()
}

/// A power of two, so that multiplying by it rounds nothing, whose product with `x` is between 1 and 2 where that is a normal
/// number.
fn power_of_two_near_reciprocal(x: f32) -> f32 {
    let exponent = (x.to_bits() >> 23 & 0xff).clamp(1, 253);
    f32::from_bits((254 - exponent) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by_row(method: Method, bits: Bits, group: usize) -> ByRow {
        ByRow { method, bits, group, arithmetic: Arithmetic::Bf16 }
    }

    fn quantised(q: &ByRow, weights: &[f32]) -> (Vec<u8>, Vec<bf16>, f64) {
        let mut fields = vec![0; weights.len()];
        let mut scales = vec![bf16::ZERO; weights.len() / q.group];
        q.quantise(0, weights, &mut fields, &mut scales).unwrap();
        let mut back = vec![0.0; weights.len()];
        quant::dequantise_row(&fields, &scales, q.group, q.bits, &mut back);
        let error = back.iter().zip(weights).map(|(b, w)| (f64::from(*b) - f64::from(*w)).powi(2)).sum();
        (fields, scales, error)
    }

    /// Sums of four uniform values, roughly normal, and now and then an outlier; bf16 values.
    fn weights() -> impl Strategy<Value = Vec<f32>> {
        let one = (prop::collection::vec(-1.0f32..1.0, 4), 0u32..20).prop_map(|(v, outlier)| {
            let sum: f32 = v.iter().sum();
            bf16::from_f32(if outlier == 0 { sum * 4.0 } else { sum }).to_f32()
        });
        (prop::collection::vec(one, 64), -100i32..100).prop_map(|(v, exponent)| {
            let unit = 2f32.powi(exponent);
            v.into_iter().map(|w| w * unit).collect()
        })
    }

    proptest! {
        #[test]
        fn the_search_is_never_worse_than_min_max(w in weights(), bits in prop::sample::select(&Bits::ALL[..])) {
            for group in [32, 64] {
                let (_, _, rtn) = quantised(&by_row(Method::Rtn, bits, group), &w);
                let (_, _, mse) = quantised(&by_row(Method::Mse, bits, group), &w);
                // The search sums in f32.
                prop_assert!(mse <= rtn * (1.0 + 1e-5), "{bits} group {group}: mse {mse:e}, rtn {rtn:e}");
            }
        }
    }

    #[test]
    fn an_outlier_is_clipped_where_that_pays() {
        // 31 weights at the levels of a scale of 1, and one far outside.
        let mut w: Vec<f32> = (0..32).map(|i| [-2.0, -1.0, 0.0, 1.0][i % 4]).collect();
        w[31] = 2.5;
        let (fields, scales, _) = quantised(&by_row(Method::Mse, Bits::Two, 32), &w);
        assert!((1.0..1.1).contains(&scales[0].to_f32()), "{scales:?}");
        assert_eq!((fields[0], fields[31]), (0, 3));
        let (_, scales, _) = quantised(&by_row(Method::Rtn, Bits::Two, 32), &w);
        assert_eq!(scales, [bf16::from_f32(2.5 / 1.5)]);
    }

    #[test]
    fn of_equal_scales_the_largest_wins() {
        // All zero: every scale is exact, and the one of a zero group stands.
        let (_, scales, _) = quantised(&by_row(Method::Mse, Bits::Three, 32), &[0.0; 32]);
        assert_eq!(scales, [bf16::EPSILON]);
        // One magnitude: w = -4 s and w = -2 s are both exact for int3 among the candidates; min-max is not.
        let w = [-1.0; 32];
        let (_, scales, error) = quantised(&by_row(Method::Mse, Bits::Three, 32), &w);
        assert_eq!(error, 0.0);
        assert!(scales[0] >= bf16::from_f32(0.25), "{scales:?}");
    }

    #[test]
    fn tiny_and_huge_weights_are_searched_too() {
        for unit in [1e-37f32, 1e-20, 1e20, 1e37] {
            let w: Vec<f32> = (0..32).map(|i| bf16::from_f32([-2.0, -1.0, 0.0, 1.2][i % 4] * unit).to_f32()).collect();
            let (_, _, rtn) = quantised(&by_row(Method::Rtn, Bits::Two, 32), &w);
            let (_, _, mse) = quantised(&by_row(Method::Mse, Bits::Two, 32), &w);
            assert!(mse < rtn / 2.0, "{unit:e}: mse {mse:e}, rtn {rtn:e}");
        }
    }
}
