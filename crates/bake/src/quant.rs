//! Quantiser arithmetic: pure functions on rows, without files or threads.
//!
//! The format is the symmetric one of `compressed-tensors`, `pack-quantized`: a weight is `q * scale` with q of b bits, stored
//! as the field `q + 2^(b-1)`, packed as [`kernels::packing`] says. The arithmetic is the library's (0.20.1, observer
//! `memoryless_minmax`), bit for bit, which `tests/interop` holds to: the scale is absmax over half of the range (7.5 for
//! -8..7) in the weights' own type, a zero scale becomes that type's machine epsilon, and the quotient w / scale of bf16
//! weights is rounded to bf16 *before* it is rounded to an integer. That double rounding moves about one quotient in a hundred
//! across a tie; it is kept, because "the same bytes as everybody's tools" is worth more than that.
//!
//! A method ([`crate::method`]) chooses scales, and may choose fields that are not the nearest; the rest is shared by all.

use half::bf16;
pub use runtime::config::Bits;

use crate::error::{Error, Result};

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

/// Scale of a group whose largest magnitude is `absmax` (finite): half of the width of the integer range stands for it.
pub fn scale(absmax: f32, bits: Bits, arithmetic: Arithmetic) -> bf16 {
    let half_range = bits.field_max() as f32 / 2.0;
    non_zero(bf16::from_f32(absmax / half_range), arithmetic)
}

/// `scale`, or the epsilon that replaces a zero.
pub(crate) fn non_zero(scale: bf16, arithmetic: Arithmetic) -> bf16 {
    // The f32 epsilon also replaces f32 scales that only vanish in bf16: dividing by them would make infinities.
    if scale == bf16::ZERO { arithmetic.epsilon() } else { scale }
}

/// Quantises one row by its largest magnitudes: fields (`q + 2^(b-1)`) and one bf16 scale a group.
///
/// `weights` and `fields` have the same length, a multiple of `group`; `scales` has `weights.len() / group` entries. A
/// channel is one group of the whole row. All weights are finite (see [`find_non_finite`]).
///
/// # Errors
/// [`Error::Option`] where the lengths do not fit together.
pub fn quantise_row(
    weights: &[f32],
    group: usize,
    bits: Bits,
    arithmetic: Arithmetic,
    fields: &mut [u8],
    scales: &mut [bf16],
) -> Result<()> {
    check_lengths(weights, group, fields, scales)?;
    for ((w, f), s) in weights.chunks_exact(group).zip(fields.chunks_exact_mut(group)).zip(scales) {
        *s = scale(absmax(w), bits, arithmetic);
        quantise_group(w, *s, bits, arithmetic, f);
    }
    Ok(())
}

/// Refuses slices of lengths that are not those of a row.
pub(crate) fn check_lengths(weights: &[f32], group: usize, fields: &[u8], scales: &[bf16]) -> Result<()> {
    if group == 0 || weights.len() != group * scales.len() || fields.len() != weights.len() {
        return Err(Error::Option {
            option: "group",
            expected: format!("a divisor of the row's length, with {} scales and fields to match", scales.len()),
            found: format!("{group} for {} weights and {} fields", weights.len(), fields.len()),
        });
    }
    Ok(())
}

/// The nearest fields of weights that share a scale, which is not zero.
#[inline]
pub fn quantise_group(weights: &[f32], scale: bf16, bits: Bits, arithmetic: Arithmetic, fields: &mut [u8]) {
    let divisor = scale.to_f32();
    let (low, high) = (bits.q_min() as f32, bits.q_max() as f32);
    match arithmetic {
        Arithmetic::Bf16 => {
            for (f, &w) in fields.iter_mut().zip(weights) {
                *f = field(round_to_bf16(w / divisor), low, high);
            }
        }
        Arithmetic::F32 => {
            for (f, &w) in fields.iter_mut().zip(weights) {
                *f = field(w / divisor, low, high);
            }
        }
    }
}

/// Largest magnitude.
pub(crate) fn absmax(weights: &[f32]) -> f32 {
    // Magnitudes of finite floats order like their bits; integer max vectorises, f32::max does not for its NaN rule.
    f32::from_bits(weights.iter().fold(0, |m, w| m.max(w.to_bits() & 0x7fff_ffff)))
}

/// Nearest bf16 value of a finite f32, ties to even.
fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) & 0xffff_0000)
}

/// Clamps, rounds half to even, offsets by the smallest integer, `low`.
fn field(quotient: f32, low: f32, high: f32) -> u8 {
    let clamped = quotient.clamp(low, high);
    let q = (clamped + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    (q - low as i32) as u8
}

/// The integer that a quotient becomes, as [`quantise_group`] rounds it.
#[inline(always)]
pub(crate) fn nearest(quotient: f32, low: f32, high: f32, arithmetic: Arithmetic) -> f32 {
    let quotient = if arithmetic == Arithmetic::Bf16 { round_to_bf16(quotient) } else { quotient };
    quotient.clamp(low, high) + ROUND - ROUND
}

/// Packs fields, lowest first. Unused high bits of a word are zero.
///
/// `out` has [`Bits::words`]`(fields.len())` entries.
pub fn pack_row(fields: &[u8], bits: Bits, out: &mut [u32]) {
    match bits {
        Bits::Two => pack::<2>(fields, out),
        Bits::Three => pack::<3>(fields, out),
        Bits::Four => pack::<4>(fields, out),
        Bits::Eight => pack::<8>(fields, out),
    }
}

fn pack<const BITS: usize>(fields: &[u8], out: &mut [u32]) {
    let mask = (1u32 << BITS) - 1;
    for (word, f) in out.iter_mut().zip(fields.chunks(32 / BITS)) {
        *word = f.iter().enumerate().fold(0, |w, (i, &f)| w | (u32::from(f) & mask) << (BITS * i));
    }
}

/// The inverse of [`pack_row`]; `out.len()` is the number of weights.
pub fn unpack_row(words: &[u32], bits: Bits, out: &mut [u8]) {
    let (width, mask) = (bits.get(), bits.field_max());
    for (f, &word) in out.chunks_mut(bits.per_word()).zip(words) {
        for (i, f) in f.iter_mut().enumerate() {
            *f = (word >> (width * i) & mask) as u8;
        }
    }
}

/// The weights that a packed row stands for: `q * scale`, exact in f32.
///
/// `scales` has one entry a group of `group` weights.
pub fn dequantise_row(fields: &[u8], scales: &[bf16], group: usize, bits: Bits, out: &mut [f32]) {
    let groups = fields.chunks(group.max(1)).zip(out.chunks_mut(group.max(1)));
    for ((f, o), s) in groups.zip(scales) {
        let s = s.to_f32();
        for (o, &f) in o.iter_mut().zip(f) {
            *o = (i32::from(f) + bits.q_min()) as f32 * s;
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
    fn naive(w: f32, s: bf16, bits: Bits, arithmetic: Arithmetic) -> u8 {
        let quotient = match arithmetic {
            Arithmetic::Bf16 => bf16::from_f32(w / s.to_f32()).to_f32(),
            Arithmetic::F32 => w / s.to_f32(),
        };
        let half = (1 << (bits.get() - 1)) as f32;
        (quotient.clamp(-half, half - 1.0).round_ties_even() + half) as u8
    }

    fn width() -> impl Strategy<Value = Bits> {
        prop::sample::select(&Bits::ALL[..])
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

    fn check(
        group: usize,
        weights: &[f32],
        bits: Bits,
        arithmetic: Arithmetic,
    ) -> std::result::Result<(), TestCaseError> {
        let mut fields = vec![0; weights.len()];
        let mut scales = vec![bf16::ZERO; weights.len() / group];
        quantise_row(weights, group, bits, arithmetic, &mut fields, &mut scales).unwrap();
        let mut back = vec![0.0; weights.len()];
        dequantise_row(&fields, &scales, group, bits, &mut back);
        for (i, (&w, &n)) in weights.iter().zip(&fields).enumerate() {
            let s = scales[i / group];
            prop_assert_eq!(n, naive(w, s, bits, arithmetic), "weight {} scale {}", w, s);
            if s.to_f32() < 1e-36 {
                continue; // too few bits in the scale for a bound
            }
            // Half a step, plus the half lost where the range's upper half ends below absmax, and the rounding of scale and
            // quotient (2^-8 relative each).
            let s = s.to_f32();
            let top = bits.q_max() as f32;
            let limit = if w > (top - 0.5) * s { 1.0 } else { 0.5 };
            let rounding = (top + 1.0) / 256.0;
            prop_assert!((back[i] - w).abs() <= (limit + rounding) * s, "{} became {}, scale {}", w, back[i], s);
        }
        let mut packed = vec![0; bits.words(weights.len())];
        pack_row(&fields, bits, &mut packed);
        let mut unpacked = vec![0xff; weights.len()];
        unpack_row(&packed, bits, &mut unpacked);
        prop_assert_eq!(unpacked, fields);
        Ok(())
    }

    proptest! {
        #[test]
        fn bf16_rows_round_trip((group, weights) in row(Arithmetic::Bf16), bits in width()) {
            check(group, &weights, bits, Arithmetic::Bf16)?;
        }

        #[test]
        fn f32_rows_round_trip((group, weights) in row(Arithmetic::F32), bits in width()) {
            check(group, &weights, bits, Arithmetic::F32)?;
        }

        #[test]
        fn packing_follows_the_formula_of_the_format(bytes in prop::collection::vec(any::<u8>(), 0..70), bits in width()) {
            let b = bits.get() as u32;
            let fields: Vec<u8> = bytes.iter().map(|v| (u32::from(*v) % (1 << b)) as u8).collect();
            let per_word = (32 / b) as usize;
            let mut packed = vec![u32::MAX; fields.len().div_ceil(per_word)];
            pack_row(&fields, bits, &mut packed);
            for i in 0..packed.len() * per_word {
                let field = (packed[i / per_word] >> (b * (i % per_word) as u32)) & ((1 << b) - 1);
                prop_assert_eq!(field, fields.get(i).copied().map_or(0, u32::from), "index {}", i);
            }
            // Nothing stands above the last field of a word.
            let used = per_word as u32 * b;
            prop_assert!(packed.iter().all(|w| used == 32 || w >> used == 0));
        }
    }

    #[test]
    fn known_values() {
        let weights = [7.5, 6.5, 5.5, 0.5, -0.5, -1.5, -7.5, 7.0];
        let (mut n, mut s) = ([0; 8], [bf16::ZERO; 1]);
        quantise_row(&weights, 8, Bits::Four, Arithmetic::Bf16, &mut n, &mut s).unwrap();
        assert_eq!(s[0], bf16::ONE);
        // Ties go to even, +8 is clamped to 7.
        assert_eq!(n, [15, 14, 14, 8, 8, 6, 0, 15]);
        let mut word = [0];
        pack_row(&n, Bits::Four, &mut word);
        assert_eq!(word, [0xf068_8eef]);
        // The range of two bits, -2..1, has half width 1.5.
        let weights = [3.0, 2.9, 1.1, 0.9, -0.9, -1.1, -3.0, -2.9];
        quantise_row(&weights, 8, Bits::Two, Arithmetic::F32, &mut n, &mut s).unwrap();
        assert_eq!(s[0], bf16::from_f32(2.0));
        assert_eq!(n, [3, 3, 3, 2, 2, 1, 0, 1]);
    }

    #[test]
    fn a_zero_group_gets_the_epsilon_of_the_weights_type() {
        let (mut n, mut s) = ([1; 4], [bf16::ZERO; 2]);
        for (arithmetic, eps) in [(Arithmetic::Bf16, 0.007_812_5), (Arithmetic::F32, f32::EPSILON)] {
            quantise_row(&[0.0, -0.0, 1e-41, -1e-41], 2, Bits::Four, arithmetic, &mut n, &mut s).unwrap();
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
        quantise_row(&[absmax, w], 2, Bits::Four, Arithmetic::Bf16, &mut n, &mut s).unwrap();
        assert_eq!(n[1], 14, "5.492 becomes 5.5, whose even neighbour is 6");
        quantise_row(&[absmax, w], 2, Bits::Four, Arithmetic::F32, &mut n, &mut s).unwrap();
        assert_eq!(n[1], 13);
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let (mut n, mut s) = ([0; 4], [bf16::ZERO; 1]);
        assert!(quantise_row(&[0.0; 4], 3, Bits::Four, Arithmetic::F32, &mut n, &mut s).is_err());
        assert!(quantise_row(&[0.0; 4], 0, Bits::Four, Arithmetic::F32, &mut n, &mut s).is_err());
        assert!(quantise_row(&[0.0; 3], 3, Bits::Four, Arithmetic::F32, &mut n, &mut s).is_err());
    }

    #[test]
    fn the_first_non_finite_weight_is_found() {
        assert_eq!(find_non_finite(&[0.0, f32::MAX, f32::MIN_POSITIVE]), None);
        assert_eq!(find_non_finite(&[0.0, f32::INFINITY, f32::NAN]), Some((1, f32::INFINITY)));
        assert!(find_non_finite(&[f32::NAN]).unwrap().1.is_nan());
    }
}
