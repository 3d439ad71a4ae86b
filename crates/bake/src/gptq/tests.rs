//! The arithmetic against the textbook, on matrices small enough for plain code.

use ndarray::Array2;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::hessian::{Factor, Hessian};
use super::solve::{Solved, solve};
use super::*;
use crate::method::{self, Method};
use crate::quant::{Arithmetic, Bits};

fn packing(bits: Bits, group: usize) -> ByRow {
    ByRow { method: Method::Mse, bits, group, arithmetic: Arithmetic::F32 }
}

/// Inputs that hang together: mixtures of fewer sources, and some noise.
fn inputs(rows: usize, width: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    let sources = (width / 3).max(1);
    let mix: Vec<f32> = (0..sources * width).map(|_| rng.random_range(-1.0..1.0)).collect();
    let mut x = Vec::new();
    for _ in 0..rows {
        let source: Vec<f32> = (0..sources).map(|_| rng.random_range(-1.0..1.0)).collect();
        for j in 0..width {
            let mixed: f32 = source.iter().enumerate().map(|(s, v)| v * mix[s * width + j]).sum();
            x.push(mixed + rng.random_range(-0.1..0.1));
        }
    }
    x
}

fn weights(rows: usize, width: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    (0..rows * width).map(|_| rng.random_range(-1.0f32..1.0) * rng.random_range(0.0f32..1.0)).collect()
}

fn hessian(x: &[f32], width: usize) -> Hessian {
    let mut h = Hessian::new(width);
    h.add(x);
    h
}

/// `sum x x^T + damping * mean(diagonal)` the slow way.
fn moments(x: &[f32], width: usize, damping: f64) -> Vec<Vec<f64>> {
    let mut h = vec![vec![0.0; width]; width];
    for row in x.chunks_exact(width) {
        for (h, a) in h.iter_mut().zip(row) {
            h.iter_mut().zip(row).for_each(|(h, b)| *h += f64::from(*a) * f64::from(*b));
        }
    }
    let mean = (0..width).map(|i| h[i][i]).sum::<f64>() / width as f64;
    (0..width).for_each(|i| h[i][i] += damping * mean);
    h
}

fn quadratic(e: &[f64], h: &[Vec<f64>]) -> f64 {
    h.iter().zip(e).map(|(h, a)| a * h.iter().zip(e).map(|(h, b)| h * b).sum::<f64>()).sum()
}

fn inverse(h: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let n = h.len();
    let mut a: Vec<Vec<f64>> = h.to_vec();
    let mut out: Vec<Vec<f64>> = (0..n).map(|i| (0..n).map(|j| f64::from(u8::from(i == j))).collect()).collect();
    for i in 0..n {
        let pivot = a[i][i];
        for j in 0..n {
            (a[i][j], out[i][j]) = (a[i][j] / pivot, out[i][j] / pivot);
        }
        for r in (0..n).filter(|&r| r != i) {
            let f = a[r][i];
            for j in 0..n {
                (a[r][j], out[r][j]) = (a[r][j] - f * a[i][j], out[r][j] - f * out[i][j]);
            }
        }
    }
    out
}

fn dequantised(solved: &Solved, width: usize, packing: &ByRow) -> Vec<f32> {
    let mut out = vec![0.0; solved.fields.len()];
    let scales = solved.scales.chunks_exact(width / packing.group);
    for ((o, f), s) in out.chunks_exact_mut(width).zip(solved.fields.chunks_exact(width)).zip(scales) {
        quant::dequantise_row(f, s, packing.group, packing.bits, o);
    }
    out
}

/// Scale of the group that begins at input j: the error of an input costs what it leaves when all later ones make up for it,
/// which is the reciprocal of the first entry of the inverse of the Hessian from that input on.
fn textbook_scale(w: &[f64], h: &[Vec<f64>], begin: usize, packing: &ByRow) -> f64 {
    let end = begin + packing.group;
    let left = |j: usize| inverse(&h[j..].iter().map(|r| r[j..].to_vec()).collect::<Vec<_>>());
    let costs: Vec<f64> = (begin..end).map(|j| 1.0 / left(j)[0][0]).collect();
    let (low, high) = (f64::from(packing.bits.q_min()), f64::from(packing.bits.q_max()));
    let absmax = w[begin..end].iter().fold(0f32, |m, v| m.max(v.abs() as f32));
    let grid = std::iter::once(quant::scale(absmax, packing.bits, packing.arithmetic));
    let grid = grid.chain(method::grid(absmax, packing.bits)).map(|s| s.to_f64());
    let loss = |s: f64| -> f64 {
        let error = |v: &f64| v - (v / s).clamp(low, high).round_ties_even() * s;
        w[begin..end].iter().zip(&costs).map(|(v, c)| c * error(v).powi(2)).sum()
    };
    grid.min_by(|a, b| loss(*a).total_cmp(&loss(*b))).unwrap()
}

/// The method as it is usually told: after each weight, what is left is moved by the inverse Hessian of what is left. Returns
/// integers, and how far the nearest one was from a tie.
fn textbook(row: &[f32], h: &[Vec<f64>], packing: &ByRow) -> Vec<(i32, f64)> {
    let n = row.len();
    let mut w: Vec<f64> = row.iter().map(|v| f64::from(*v)).collect();
    let (low, high) = (f64::from(packing.bits.q_min()), f64::from(packing.bits.q_max()));
    let mut scale = 0.0;
    let mut out = Vec::new();
    for j in 0..n {
        if j % packing.group == 0 {
            scale = textbook_scale(&w, h, j, packing);
        }
        let quotient = (w[j] / scale).clamp(low, high);
        let q = quotient.round_ties_even();
        out.push((q as i32, ((quotient - q).abs() - 0.5).abs()));
        let left: Vec<Vec<f64>> = h[j..].iter().map(|r| r[j..].to_vec()).collect();
        let inverse = inverse(&left);
        let error = (w[j] - q * scale) / inverse[0][0];
        for (w, i) in w[j..].iter_mut().zip(&inverse[0]) {
            *w -= error * i;
        }
    }
    out
}

#[test]
fn the_factors_multiply_to_the_damped_hessian() {
    let rng = &mut ChaCha8Rng::seed_from_u64(1);
    for (width, order) in [(1, Order::Natural), (37, Order::Natural), (300, Order::Natural), (150, Order::Activation)] {
        // Fewer rows than inputs for the wide one: singular without damping; more than are added at once.
        let x = inputs(if width == 37 { 1100 } else { 120 }, width, rng);
        let h = moments(&x, width, 0.01);
        let Factor { order: places, unit, pivots } = hessian(&x, width).factor(0.01, order).unwrap();
        assert_eq!(places.is_sorted(), order == Order::Natural || width == 1);
        let largest = (0..width).map(|i| h[i][i]).fold(0.0, f64::max);
        for i in 0..width {
            for j in i..width {
                let u = |a: usize, b: usize| if a == b { 1.0 } else { f64::from(unit[[a, b]]) };
                let got: f64 = (j..width).map(|m| u(i, m) * pivots[m] * u(j, m)).sum();
                let want = h[places[i]][places[j]];
                assert!((got - want).abs() < 1e-5 * largest, "{width}: [{i}, {j}] is {got}, expected {want}");
            }
        }
    }
}

#[test]
fn it_is_the_textbook_method() {
    let rng = &mut ChaCha8Rng::seed_from_u64(2);
    let (rows, width) = (40, 48);
    let (mut same, mut better) = (0, 0);
    for bits in [Bits::Two, Bits::Three, Bits::Four] {
        for group in [8, 16] {
            let packing = packing(bits, group);
            let x = inputs(200, width, rng);
            let w = weights(rows, width, rng);
            let h = moments(&x, width, 0.05);
            let solved = solve(&hessian(&x, width).factor(0.05, Order::Natural).unwrap(), &w, &packing).unwrap();
            for (r, row) in w.chunks_exact(width).enumerate() {
                let fields = &solved.fields[r * width..(r + 1) * width];
                let want = textbook(row, &h, &packing);
                // From a tie on, the two may part.
                let clear = want.iter().take_while(|(_, margin)| *margin > 1e-3).count();
                let agree = fields.iter().zip(&want).take_while(|(f, q)| i32::from(**f) + bits.q_min() == q.0).count();
                // A row where rounding to nearest was better parts anywhere.
                if agree >= clear {
                    same += 1;
                } else {
                    better += 1;
                }
            }
        }
    }
    assert!(same > 220 && better < 20, "{same} rows as in the textbook, {better} others");
}

/// The errors that it reports are those of its result, and never larger than those of rounding to nearest.
#[test]
fn errors_are_what_they_are_said_to_be() {
    let rng = &mut ChaCha8Rng::seed_from_u64(3);
    for (width, group, bits) in [(96, 32, Bits::Three), (320, 64, Bits::Two), (160, 160, Bits::Four)] {
        let packing = packing(bits, group);
        let (x, w) = (inputs(90, width, rng), weights(50, width, rng));
        let h = moments(&x, width, 0.02);
        let nearest = dequantised(&rounded(&w, width, &packing).unwrap(), width, &packing);
        for order in [Order::Natural, Order::Activation] {
            let solved = solve(&hessian(&x, width).factor(0.02, order).unwrap(), &w, &packing).unwrap();
            let result = dequantised(&solved, width, &packing);
            let total = |other: &[f32]| -> f64 {
                let errors: Vec<f64> = w.iter().zip(other).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
                errors.chunks_exact(width).map(|e| quadratic(e, &h)).sum()
            };
            let close = |a: f64, b: f64| (a - b).abs() < 1e-4 * b;
            assert!(close(solved.errors.signal, total(&vec![0.0; w.len()])), "{width} {order:?}: signal");
            assert!(close(solved.errors.nearest, total(&nearest)), "{width} {order:?}: nearest");
            assert!(close(solved.errors.gptq, total(&result)), "{width} {order:?}: {:?}", solved.errors);
            assert!(solved.errors.gptq < 0.7 * solved.errors.nearest, "{width} {order:?}: {:?}", solved.errors);
        }
    }
}

proptest! {
    #[test]
    fn it_is_never_worse_than_rounding_to_nearest(
        seed in any::<u64>(), groups in 1usize..5, rows in 1usize..8, samples in 0usize..40,
        bits in prop::sample::select(&Bits::ALL[..]), activation in any::<bool>(),
    ) {
        let rng = &mut ChaCha8Rng::seed_from_u64(seed);
        let (width, packing) = (groups * 16, packing(bits, 16));
        let order = if activation { Order::Activation } else { Order::Natural };
        let (x, w) = (inputs(samples, width, rng), weights(rows, width, rng));
        let Solved { errors, .. } = solve(&hessian(&x, width).factor(0.01, order).unwrap(), &w, &packing).unwrap();
        prop_assert!(errors.gptq <= errors.nearest, "{:?}", errors);
    }
}

#[test]
fn with_independent_inputs_it_rounds_to_nearest() {
    let rng = &mut ChaCha8Rng::seed_from_u64(4);
    let (width, packing) = (64, packing(Bits::Three, 32));
    let w = weights(33, width, rng);
    let want = rounded(&w, width, &packing).unwrap();
    // Each input alone, all with the same energy; and no input at all.
    let alone: Vec<f32> = (0..width).flat_map(|i| (0..width).map(move |j| f32::from(u8::from(i == j)))).collect();
    for x in [alone.clone(), vec![], vec![0.0; 3 * width]] {
        for order in [Order::Natural, Order::Activation] {
            let solved = solve(&hessian(&x, width).factor(0.01, order).unwrap(), &w, &packing).unwrap();
            assert!(solved.fields == want.fields && solved.scales == want.scales, "{} rows {order:?}", x.len() / width);
        }
    }
    // Where energies differ, scales favour the inputs that have more; integers are still the nearest.
    let uneven: Vec<f32> = alone.iter().enumerate().map(|(i, v)| v * (1 + i % width) as f32).collect();
    let solved = solve(&hessian(&uneven, width).factor(0.01, Order::Natural).unwrap(), &w, &packing).unwrap();
    let scale = |i: usize| solved.scales[i / packing.group].to_f32();
    let fields = w.iter().enumerate().map(|(i, w)| ((w / scale(i)).round_ties_even().clamp(-4.0, 3.0) + 4.0) as u8);
    assert!(solved.fields.iter().copied().eq(fields));
    assert!(solved.errors.gptq < 0.99 * solved.errors.nearest, "{:?}", solved.errors);
}

#[test]
fn inputs_that_are_always_zero_are_rounded_to_nearest_and_disturb_nothing() {
    let rng = &mut ChaCha8Rng::seed_from_u64(5);
    let (width, packing) = (64, packing(Bits::Three, 32));
    let mut x = inputs(200, width, rng);
    x.chunks_exact_mut(width).for_each(|row| row[3..9].fill(0.0));
    let w = weights(20, width, rng);
    let solved = solve(&hessian(&x, width).factor(0.01, Order::Activation).unwrap(), &w, &packing).unwrap();
    let nearest = rounded(&w, width, &packing).unwrap();
    for r in 0..20 {
        let dead = r * width + 3..r * width + 9;
        assert_eq!(solved.fields[dead.clone()], nearest.fields[dead], "row {r}");
    }
    assert!(solved.errors.gptq < 0.8 * solved.errors.nearest, "{:?}", solved.errors);
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let rng = &mut ChaCha8Rng::seed_from_u64(6);
    let (width, packing) = (416, packing(Bits::Three, 32));
    let (x, w) = (inputs(700, width, rng), weights(130, width, rng));
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let factor = hessian(&x, width).factor(0.01, Order::Natural).unwrap();
            let bits: Vec<u64> = factor.pivots.iter().map(|p| p.to_bits()).collect();
            let solved = solve(&factor, &w, &packing).unwrap();
            (bits, factor.unit, solved.fields, solved.scales, solved.errors)
        })
    };
    let (one, many): (_, _) = (on(1), on(5));
    let units = |m: &Array2<f32>| m.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert!(one.0 == many.0 && units(&one.1) == units(&many.1), "factors");
    assert!(one.2 == many.2 && one.3 == many.3 && one.4 == many.4, "results");
}

#[test]
fn a_hessian_that_is_no_hessian_is_refused() {
    let x = vec![f32::NAN; 32];
    assert!(hessian(&x, 32).factor(0.01, Order::Natural).is_err());
    for bad in [0.0, -0.1, 1.5, f64::NAN] {
        assert!(check_damping(bad).is_err(), "{bad}");
    }
}

#[test]
fn calibration_text_is_cut_and_counted() {
    let sequences = || vec![vec![1; 100], vec![], vec![2; 3000], vec![3; 10]];
    let c = Calibration::new("file", sequences(), 3000).unwrap();
    assert_eq!((c.tokens(), c.sequences.len()), (3000, 3));
    assert_eq!(c.sequences.iter().map(Vec::len).collect::<Vec<_>>(), [100, 2048, 852]);
    let message = Calibration::new("file", sequences(), 3111).unwrap_err().to_string();
    assert!(message.contains("file: 3110 calibration tokens, 3111 wanted"), "{message}");
    assert!(matches!(
        Calibration::new("file", sequences(), 5),
        Err(Error::Option { option: "calibration-tokens", .. })
    ));
}

#[test]
fn a_layer_that_the_configuration_does_not_know_has_no_inputs() {
    let nano = runtime::nano::directory().unwrap();
    let checkpoint = runtime::checkpoint::Checkpoint::open(&nano).unwrap();
    let (config, name) = (checkpoint.config(), names::LAYER_LINEARS[0]);
    assert!(Gptq::fits(config, Linear::Layer(0, name)));
    assert!(!Gptq::fits(config, Linear::Layer(config.layers.len(), name)));
}
