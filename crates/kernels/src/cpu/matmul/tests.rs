use half::bf16;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::cpu::Data;
use crate::packing::Bits;

/// Owned weights of one format.
struct Weights {
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
    scales: Vec<u8>,
    group: usize,
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Format {
    F32,
    Bf16,
    Packed(Bits),
}

const FORMATS: [Format; 6] = [
    Format::F32,
    Format::Bf16,
    Format::Packed(Bits::Two),
    Format::Packed(Bits::Three),
    Format::Packed(Bits::Four),
    Format::Packed(Bits::Eight),
];

impl Weights {
    fn random(format: Format, rows: usize, cols: usize, group: usize, seed: u64) -> Weights {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut value = || rng.random_range(-1.0f32..1.0);
        let (mut bytes, mut scales) = (Vec::new(), Vec::new());
        match format {
            Format::F32 => (0..rows * cols).for_each(|_| bytes.extend(value().to_le_bytes())),
            Format::Bf16 => (0..rows * cols).for_each(|_| bytes.extend(bf16::from_f32(value()).to_le_bytes())),
            // All bits are random, those of int3 that mean nothing, too.
            Format::Packed(bits) => {
                bytes.resize(rows * bits.words(cols) * 4, 0);
                rng.fill(&mut bytes[..]);
                let mut value = || rng.random_range(-1.0f32..1.0);
                let count = rows * cols.div_ceil(group);
                (0..count).for_each(|_| scales.extend(bf16::from_f32(value().abs() + 0.01).to_le_bytes()));
            }
        }
        Weights { rows, cols, bytes, scales, group, format }
    }

    fn matrix(&self) -> MatrixView<'_> {
        let data = match self.format {
            Format::F32 => Data::F32(&self.bytes[..]),
            Format::Bf16 => Data::Bf16(&self.bytes[..]),
            Format::Packed(bits) => {
                Data::Packed { bits, packed: &self.bytes[..], scales: &self.scales[..], group: self.group }
            }
        };
        MatrixView::new(self.rows, self.cols, data).unwrap()
    }
}

fn activations(m_rows: usize, cols: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..m_rows * cols).map(|_| rng.random_range(-1.0f32..1.0)).collect()
}

fn product(isa: Isa, w: &Weights, x: &[f32]) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len() / w.cols * w.rows];
    matmul(isa, &w.matrix(), x, &mut y);
    y
}

/// The rule for every kernel: error against f64 at most twice that of a naive f32 implementation, plus one rounding.
fn assert_accurate(w: &Weights, x: &[f32], y: &[f32]) {
    let (matrix, m_rows) = (w.matrix(), x.len() / w.cols);
    let (mut naive_error, mut error, mut scale) = (0.0f64, 0.0f64, 0.0f64);
    for n in 0..w.rows {
        let row = matrix.row(n);
        for m in 0..m_rows {
            let x = &x[m * w.cols..][..w.cols];
            let exact: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            let naive: f32 = row.iter().zip(x).fold(0.0, |sum, (w, x)| sum + w * x);
            naive_error = naive_error.max((f64::from(naive) - exact).abs());
            error = error.max((f64::from(y[m * w.rows + n]) - exact).abs());
            scale = scale.max(exact.abs());
        }
    }
    let rounding = scale * f64::from(f32::EPSILON);
    assert!(error <= 2.0 * naive_error + rounding, "error {error:e}, naive {naive_error:e}");
}

#[test]
fn every_format_and_width_is_accurate_on_both_instruction_sets() {
    for isa in [Isa::portable(), Isa::best()] {
        for format in FORMATS {
            for (rows, cols, group) in [(5, 256, 32), (9, 1000, 128), (3, 24, 8), (4, 21, 21), (7, 130, 130), (2, 7, 7)]
            {
                let w = Weights::random(format, rows, cols, group, 7);
                for m_rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 70] {
                    let x = activations(m_rows, cols, 8);
                    assert_accurate(&w, &x, &product(isa, &w, &x));
                }
            }
        }
    }
}

/// Whether some row of `x` has other bits beside its neighbours, or in reversed order, than alone.
fn company_matters(isa: Isa, w: &Weights, x: &[f32]) -> bool {
    let bits = |y: &[f32]| -> Vec<Vec<u32>> {
        y.chunks(w.rows).map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
    };
    let alone: Vec<_> = x.chunks(w.cols).flat_map(|x| bits(&product(isa, w, x))).collect();
    let together = bits(&product(isa, w, x));
    let reversed: Vec<f32> = x.chunks(w.cols).rev().flatten().copied().collect();
    let reversed = bits(&product(isa, w, &reversed));
    together != alone || reversed.iter().rev().ne(alone.iter())
}

/// All there are.
fn isas() -> Vec<Isa> {
    [Isa::portable(), Isa::best()].into_iter().flat_map(|isa| [isa, isa.with_int8_activations()]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Row invariance: a row alone, among others, in any order, on any number of threads.
    #[test]
    fn a_row_has_the_same_bits_in_any_company(
        format in prop::sample::select(&FORMATS[..]), isa in prop::sample::select(isas()), rows in 1usize..40, cols in 1usize..400,
        group in prop::sample::select(vec![8usize, 32, 128, 1 << 20]), m_rows in 1usize..40, threads in 1usize..4, seed: u64,
    ) {
        let w = Weights::random(format, rows, cols, group, seed);
        let x = activations(m_rows, cols, seed ^ 1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        prop_assert!(!pool.install(|| company_matters(isa, &w, &x)));
    }
}

/// The test of the test.
#[test]
fn a_planted_dependence_on_m_is_caught() {
    let w = Weights::random(Format::F32, 16, 512, 512, 5);
    assert!(company_matters(Isa::planted_m_dependence(), &w, &activations(8, 512, 6)));
}

#[test]
fn threads_share_a_large_product_without_changing_a_bit() {
    let w = Weights::random(Format::Packed(Bits::Four), 2000, 512, 128, 3);
    let x = activations(3, 512, 4);
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| product(Isa::best(), &w, &x))
    };
    let one = on(1);
    assert!(w.rows * w.cols * 3 >= PARALLEL_FROM, "the test must reach the parallel path");
    for threads in [2, 3, 8] {
        assert!(on(threads).iter().zip(&one).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn empty_shapes_do_nothing() {
    let w = Weights::random(Format::F32, 4, 8, 8, 1);
    assert!(product(Isa::best(), &w, &[]).is_empty());
}

/// Activations as int8 products see them, by the formula in the docs of `int8`. Which way a tie goes is decided in f32.
fn rounded(x: &[f32]) -> Vec<f64> {
    x.chunks(64)
        .flat_map(|block| {
            let largest = block.iter().fold(0.0f32, |a, v| a.max(v.abs()));
            let steps = if largest == 0.0 { 0.0 } else { 127.0 / largest };
            block.iter().map(move |v| f64::from((v * steps).round_ties_even()) * f64::from(largest / 127.0))
        })
        .collect()
}

#[test]
fn int8_products_are_those_of_the_rounded_activations_on_both_instruction_sets() {
    for bits in Bits::ALL {
        for (rows, cols, group) in [(5, 256, 32), (9, 1000, 128), (3, 24, 8), (11, 320, 40), (4, 21, 21), (7, 130, 130)]
        {
            let w = Weights::random(Format::Packed(bits), rows, cols, group, 7);
            for m_rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 70] {
                let mut x = activations(m_rows, cols, 8);
                // The extremes of a block, and a block of zeros.
                (x[0], x[1]) = (-1.0, 1.0);
                x[cols - cols % 64..cols].fill(0.0);
                let isa = Isa::best().with_int8_activations();
                let y = product(isa, &w, &x);
                let portable = product(Isa::portable().with_int8_activations(), &w, &x);
                assert!(y.iter().zip(&portable).all(|(a, b)| a.to_bits() == b.to_bits()), "{bits} [{rows}, {cols}]");
                for (m, x) in x.chunks(cols).enumerate() {
                    let x = rounded(x);
                    for n in 0..rows {
                        let row = w.matrix().row(n);
                        let products = row.iter().zip(&x).map(|(w, x)| f64::from(*w) * x);
                        let (exact, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                        let error = (f64::from(y[m * rows + n]) - exact).abs();
                        // What rounds: one scale a block and at most cols / 64 additions a lane, and the seven of the fold.
                        let bound = size * f64::from(f32::EPSILON) * (cols as f64 / 64.0 + 10.0);
                        assert!(error <= bound, "{bits} [{rows}, {cols}] g{group}: error {error:e} over {bound:e}");
                    }
                }
            }
        }
    }
}

#[test]
fn int8_products_of_the_largest_integers_do_not_overflow() {
    for bits in Bits::ALL {
        for fill in [0x00, 0xff] {
            let (rows, cols) = (3, 256);
            let mut w = Weights::random(Format::Packed(bits), rows, cols, cols, 1);
            w.bytes.fill(fill);
            for sign in [1.0, -1.0] {
                let x = vec![sign; 2 * cols];
                let expected: f64 = w.matrix().row(1).iter().map(|w| f64::from(*w) * f64::from(sign)).sum();
                for isa in isas() {
                    let y = product(isa, &w, &x)[1];
                    assert!((f64::from(y) - expected).abs() <= expected.abs() * 1e-6, "{bits} {y} {expected}");
                }
            }
        }
    }
}

#[test]
fn int8_activations_hide_no_nan_and_survive_the_smallest_numbers() {
    let w = Weights::random(Format::Packed(Bits::Four), 4, 128, 32, 1);
    for isa in [Isa::portable(), Isa::best()].map(Isa::with_int8_activations) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = activations(2, 128, 2);
            x[70] = bad;
            let y = product(isa, &w, &x);
            assert!(y[..4].iter().all(|v| v.is_nan()) && y[4..].iter().all(|v| v.is_finite()), "{bad}: {y:?}");
        }
        for tiny in [f32::from_bits(1), f32::MIN_POSITIVE, f32::MIN_POSITIVE * 127.0] {
            assert!(product(isa, &w, &[tiny; 128]).iter().all(|v| v.abs() < 1e-30));
        }
    }
}
