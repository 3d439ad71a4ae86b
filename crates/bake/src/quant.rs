//! Quantiser arithmetic: pure functions on rows, without files or threads.
//!
//! The format is symmetric int4 of `compressed-tensors`, `pack-quantized`: a weight is `q * scale` with q in -8..=7, stored as
//! the nibble `q + 8`, eight nibbles a 32-bit word, lowest first. The arithmetic is the library's (0.20.1, observer
//! `memoryless_minmax`), bit for bit, which `tests/interop` holds to: the scale is absmax / 7.5 (half of the range -8..7) in
//! the weights' own type, a zero scale becomes that type's machine epsilon, and the quotient w / scale of bf16 weights is
//! rounded to bf16 *before* it is rounded to an integer. That double rounding moves about one quotient in a hundred across a
//! tie; it is kept, because "the same bytes as everybody's tools" is worth more than that.

use half::bf16;

use crate::error::{Error, Result};

/// Weights in a 32-bit word.
pub const PER_WORD: usize = 8;
/// Smallest and largest integer.
pub const Q_MIN: i32 = -8;
/// Largest integer.
pub const Q_MAX: i32 = 7;
/// Half of the width of the integer range: absmax maps to it.
const HALF_RANGE: f32 = 7.5;
/// Adding and subtracting 1.5 * 2^23 rounds an f32 of small magnitude to the nearest integer, ties to even; the integer
/// stands in the low bits. Unlike `round_ties_even` it needs no SSE4.1, so the loop vectorises on every x86-64.
const ROUND: f32 = 12_582_912.0;

/// Element type that the weights are stored in, which is also the type of the library's intermediate results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// bf16 weights: scale and quotient are bf16 values.
    Bf16,
    /// f32 weights: scale and quotient are f32, the scale is rounded to bf16 before it is used.
    F32,
}

impl Arithmetic {
    /// What replaces a scale of zero: the machine epsilon.
    fn epsilon(self) -> bf16 {
        match self {
            Arithmetic::Bf16 => bf16::EPSILON,
            Arithmetic::F32 => bf16::from_f32_const(f32::EPSILON),
        }
    }
}

/// Words of a packed row of `inputs` weights.
pub const fn words(inputs: usize) -> usize {
    inputs.div_ceil(PER_WORD)
}

/// Scale of a group whose largest magnitude is `absmax` (finite).
pub fn scale(absmax: f32, arithmetic: Arithmetic) -> bf16 {
    let scale = bf16::from_f32(absmax / HALF_RANGE);
    // The f32 epsilon also replaces f32 scales that only vanish in bf16: dividing by them would make infinities.
    if scale == bf16::ZERO { arithmetic.epsilon() } else { scale }
}

/// Quantises one row to nibbles (`q + 8`, 0..=15) and one bf16 scale a group.
///
/// `weights` and `nibbles` have the same length, a multiple of `group`; `scales` has `weights.len() / group` entries. A
/// channel is one group of the whole row. All weights are finite (see [`find_non_finite`]).
pub fn quantise_row(
    weights: &[f32],
    group: usize,
    arithmetic: Arithmetic,
    nibbles: &mut [u8],
    scales: &mut [bf16],
) -> Result<()> {
    if group == 0 || weights.len() != group * scales.len() || nibbles.len() != weights.len() {
        return Err(Error::Option {
            option: "group",
            expected: format!("a divisor of the row's length, with {} scales and nibbles to match", scales.len()),
            found: format!("{group} for {} weights and {} nibbles", weights.len(), nibbles.len()),
        });
    }
    for ((w, n), s) in weights.chunks_exact(group).zip(nibbles.chunks_exact_mut(group)).zip(scales) {
        *s = scale(absmax(w), arithmetic);
        let divisor = s.to_f32();
        match arithmetic {
            Arithmetic::Bf16 => {
                for (n, &w) in n.iter_mut().zip(w) {
                    *n = nibble(round_to_bf16(w / divisor));
                }
            }
            Arithmetic::F32 => {
                for (n, &w) in n.iter_mut().zip(w) {
                    *n = nibble(w / divisor);
                }
            }
        }
    }
    Ok(())
}

/// Largest magnitude.
fn absmax(weights: &[f32]) -> f32 {
    // Magnitudes of finite floats order like their bits; integer max vectorises, f32::max does not for its NaN rule.
    f32::from_bits(weights.iter().fold(0, |m, w| m.max(w.to_bits() & 0x7fff_ffff)))
}

/// Nearest bf16 value of a finite f32, ties to even.
fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) & 0xffff_0000)
}

/// Clamps, rounds half to even, offsets.
fn nibble(quotient: f32) -> u8 {
    let clamped = quotient.clamp(Q_MIN as f32, Q_MAX as f32);
    let q = (clamped + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    (q - Q_MIN) as u8
}

/// Packs nibbles (0..=15) eight a word, lowest first. The unused high nibbles of the last word are zero.
///
/// `out` has [`words`]`(nibbles.len())` entries.
pub fn pack_row(nibbles: &[u8], out: &mut [u32]) {
    for (word, n) in out.iter_mut().zip(nibbles.chunks(PER_WORD)) {
        *word = n.iter().enumerate().fold(0, |w, (i, &n)| w | u32::from(n & 15) << (4 * i));
    }
}

/// The inverse of [`pack_row`]; `out.len()` is the number of weights.
pub fn unpack_row(words: &[u32], out: &mut [u8]) {
    for (n, &word) in out.chunks_mut(PER_WORD).zip(words) {
        for (i, n) in n.iter_mut().enumerate() {
            *n = (word >> (4 * i)) as u8 & 15;
        }
    }
}

/// The weights that a packed row stands for: `(nibble - 8) * scale`, exact in f32.
///
/// `scales` has one entry a group of `group` weights.
pub fn dequantise_row(nibbles: &[u8], scales: &[bf16], group: usize, out: &mut [f32]) {
    let groups = nibbles.chunks(group.max(1)).zip(out.chunks_mut(group.max(1)));
    for ((n, o), s) in groups.zip(scales) {
        let s = s.to_f32();
        for (o, &n) in o.iter_mut().zip(n) {
            *o = (i32::from(n) + Q_MIN) as f32 * s;
        }
    }
}

/// Index and value of the first NaN or infinity.
pub fn find_non_finite(weights: &[f32]) -> Option<(usize, f32)> {
    // One branch a row in the good case: exponent bits all set means not finite.
    let bad = weights.iter().fold(false, |bad, w| bad | (w.to_bits() & 0x7f80_0000 == 0x7f80_0000));
    if !bad {
        return None;
    }
    weights.iter().position(|w| !w.is_finite()).map(|i| (i, weights[i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same arithmetic said plainly.
    fn naive(w: f32, s: bf16, arithmetic: Arithmetic) -> u8 {
        let quotient = match arithmetic {
            Arithmetic::Bf16 => bf16::from_f32(w / s.to_f32()).to_f32(),
            Arithmetic::F32 => w / s.to_f32(),
        };
        (quotient.clamp(-8.0, 7.0).round_ties_even() + 8.0) as u8
    }

    fn row(arithmetic: Arithmetic) -> impl Strategy<Value = (usize, Vec<f32>)> {
        let weight = prop_oneof![
            8 => -4.0f32..4.0,
            1 => Just(0.0f32),
            1 => prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL | prop::num::f32::ZERO,
        ];
        (1usize..40, 1usize..5).prop_flat_map(move |(group, groups)| {
            let rounded = prop::collection::vec(weight.clone(), group * groups).prop_map(move |v| {
                let round = |w: f32| if bf16::from_f32(w).is_finite() { bf16::from_f32(w).to_f32() } else { 1.0 };
                if arithmetic == Arithmetic::Bf16 { v.into_iter().map(round).collect() } else { v }
            });
            (Just(group), rounded)
        })
    }

    fn check(group: usize, weights: &[f32], arithmetic: Arithmetic) -> std::result::Result<(), TestCaseError> {
        let mut nibbles = vec![0; weights.len()];
        let mut scales = vec![bf16::ZERO; weights.len() / group];
        quantise_row(weights, group, arithmetic, &mut nibbles, &mut scales).unwrap();
        let mut back = vec![0.0; weights.len()];
        dequantise_row(&nibbles, &scales, group, &mut back);
        for (i, (&w, &n)) in weights.iter().zip(&nibbles).enumerate() {
            let s = scales[i / group];
            prop_assert_eq!(n, naive(w, s, arithmetic), "weight {} scale {}", w, s);
            if s.to_f32() < 1e-36 {
                continue; // too few bits in the scale for a bound
            }
            // Half a step, plus the step lost at +7.5 -> 7 and the rounding of scale and quotient (2^-8 relative each).
            let s = s.to_f32();
            let limit = if w > 6.5 * s { 1.0 } else { 0.5 };
            prop_assert!((back[i] - w).abs() <= (limit + 0.07) * s, "{} became {}, scale {}", w, back[i], s);
        }
        let mut packed = vec![0; words(weights.len())];
        pack_row(&nibbles, &mut packed);
        let mut unpacked = vec![0xff; weights.len()];
        unpack_row(&packed, &mut unpacked);
        prop_assert_eq!(unpacked, nibbles);
        Ok(())
    }

    proptest! {
        #[test]
        fn bf16_rows_round_trip((group, weights) in row(Arithmetic::Bf16)) {
            check(group, &weights, Arithmetic::Bf16)?;
        }

        #[test]
        fn f32_rows_round_trip((group, weights) in row(Arithmetic::F32)) {
            check(group, &weights, Arithmetic::F32)?;
        }

        #[test]
        fn packing_follows_the_formula_of_the_format(nibbles in prop::collection::vec(0u8..16, 0..70)) {
            let mut packed = vec![u32::MAX; words(nibbles.len())];
            pack_row(&nibbles, &mut packed);
            for i in 0..packed.len() * PER_WORD {
                let n = (packed[i / 8] >> (4 * (i % 8))) & 15;
                prop_assert_eq!(n, nibbles.get(i).copied().map_or(0, u32::from), "index {}", i);
            }
        }
    }

    #[test]
    fn known_values() {
        let weights = [7.5, 6.5, 5.5, 0.5, -0.5, -1.5, -7.5, 7.0];
        let (mut n, mut s) = ([0; 8], [bf16::ZERO; 1]);
        quantise_row(&weights, 8, Arithmetic::Bf16, &mut n, &mut s).unwrap();
        assert_eq!(s[0], bf16::ONE);
        // Ties go to even, +8 is clamped to 7.
        assert_eq!(n, [15, 14, 14, 8, 8, 6, 0, 15]);
        let mut word = [0];
        pack_row(&n, &mut word);
        assert_eq!(word, [0xf068_8eef]);
    }

    #[test]
    fn a_zero_group_gets_the_epsilon_of_the_weights_type() {
        let (mut n, mut s) = ([1; 4], [bf16::ZERO; 2]);
        for (arithmetic, eps) in [(Arithmetic::Bf16, 0.007_812_5), (Arithmetic::F32, f32::EPSILON)] {
            quantise_row(&[0.0, -0.0, 1e-41, -1e-41], 2, arithmetic, &mut n, &mut s).unwrap();
            assert_eq!(s.map(bf16::to_f32), [eps; 2], "{arithmetic:?}");
            assert_eq!(n, [8; 4]);
        }
    }

    #[test]
    fn the_quotient_is_rounded_to_bf16_first() {
        // Between 4 and 8 bf16 has steps of 2^-5.
        let absmax = 7.5;
        let w = 5.492;
        let (mut n, mut s) = ([0; 2], [bf16::ZERO; 1]);
        quantise_row(&[absmax, w], 2, Arithmetic::Bf16, &mut n, &mut s).unwrap();
        assert_eq!(n[1], 14, "5.492 becomes 5.5, whose even neighbour is 6");
        quantise_row(&[absmax, w], 2, Arithmetic::F32, &mut n, &mut s).unwrap();
        assert_eq!(n[1], 13);
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let (mut n, mut s) = ([0; 4], [bf16::ZERO; 1]);
        assert!(quantise_row(&[0.0; 4], 3, Arithmetic::F32, &mut n, &mut s).is_err());
        assert!(quantise_row(&[0.0; 4], 0, Arithmetic::F32, &mut n, &mut s).is_err());
        assert!(quantise_row(&[0.0; 3], 3, Arithmetic::F32, &mut n, &mut s).is_err());
    }

    #[test]
    fn the_first_non_finite_weight_is_found() {
        assert_eq!(find_non_finite(&[0.0, f32::MAX, f32::MIN_POSITIVE]), None);
        assert_eq!(find_non_finite(&[0.0, f32::INFINITY, f32::NAN]), Some((1, f32::INFINITY)));
        assert!(find_non_finite(&[f32::NAN]).unwrap().1.is_nan());
    }
}
