//! Rows of bf16 or f16 in, f32 out, in every format.

use kernels::{
    device::{Buffer, Emulation},
    gemm::{GemmError, Input, MOST_ROWS, Operands, Output},
    layout::Format,
};

use crate::case::{Case, KINDS, Kind, ROWS, SIXTEEN, emulation, worst};

/// Shapes with fewer units than stages, more, several segments, padding in both directions; every kind of group.
const SHAPES: [(usize, usize, usize); 8] = [
    (64, 256, 128),
    (16, 16, 128),
    (80, 1040, 32),
    (128, 2560, 64),
    (144, 336, 128),
    (64, 2304, 2304),
    (208, 784, 784),
    (64, 512, 32),
];

/// A few of them for each format; together all of them.
fn cases() -> impl Iterator<Item = Case> {
    KINDS.into_iter().enumerate().flat_map(|(i, kind)| {
        let all = kind == Kind::from(Format::Int4);
        let picked: Vec<_> = if all { SHAPES.to_vec() } else { (2..6).map(|s| SHAPES[(s + i % 2) % 8]).collect() };
        picked.into_iter().map(move |(n, k, group)| Case::new(kind, n, k, group))
    })
}

fn name(case: &Case) -> String {
    format!("{:?} [{}, {}] in groups of {}", case.kind, case.n, case.k, case.weights.group)
}

#[test]
fn errors_are_those_of_plain_sums() {
    for kind in KINDS {
        for (n, k, group) in SHAPES {
            let case = Case::new(kind, n, k, group);
            let (exact, naive) = case.references(16);
            let y = case.run(&SIXTEEN).unwrap();
            let ours = worst(y.into_iter().map(|v| f32::from_bits(v).into()), &exact);
            let plain = worst(naive.into_iter().map(f64::from), &exact);
            assert!(ours <= 2.0 * plain, "{}: {ours:e}, plain sums {plain:e}", name(&case));
        }
    }
}

#[test]
fn sums_are_added_in_the_promised_order() {
    for case in cases() {
        assert_eq!(case.run(&SIXTEEN[..3]).unwrap(), case.in_order(3), "{}", name(&case));
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let order = [11, 3, 7, 0, 14, 9, 5, 1, 15, 2, 8, 13, 4, 12, 6, 10];
    for case in cases() {
        let alone: Vec<Vec<u32>> = SIXTEEN.iter().map(|&r| case.run(&[r]).unwrap()).collect();
        for m in 1..=16 {
            let together = case.run(&order[..m]).unwrap();
            for (place, &row) in order[..m].iter().enumerate() {
                assert_eq!(together[place * case.n..][..case.n], alone[row], "{}, row {row} of {m}", name(&case));
            }
        }
    }
}

#[test]
fn a_row_of_a_prompt_has_the_bits_of_a_decoded_one() {
    for case in cases() {
        let all: Vec<usize> = (0..ROWS).rev().collect();
        let decoded: Vec<u32> = all.chunks(16).flat_map(|rows| case.run(rows).unwrap()).collect();
        for m in [17, 32, 33, ROWS] {
            assert_eq!(case.run(&all[..m]).unwrap(), decoded[..m * case.n], "{}, {m} rows", name(&case));
        }
    }
}

#[test]
fn any_grid_gives_the_same_bits_in_any_schedule() {
    for (i, kind) in KINDS.into_iter().enumerate() {
        let (n, k, group) = [(128, 2560, 64), (208, 784, 784), (80, 1040, 32)][i % 3];
        let case = Case::new(kind, n, k, group);
        let expected = case.run(&SIXTEEN).unwrap();
        for (i, multiprocessors) in [1, 7, 72, 80, 132].into_iter().enumerate() {
            for seed in [0, 1 + i as u64] {
                case.device.emulate(Emulation { multiprocessors, ..emulation(seed) });
                let found = case.run(&SIXTEEN).unwrap();
                assert_eq!(found, expected, "{}, {multiprocessors} multiprocessors, seed {seed}", name(&case));
            }
        }
        case.device.emulate(Emulation { checked: false, ..emulation(0) });
        assert_eq!(case.run(&SIXTEEN).unwrap(), expected, "unchecked");
    }
}

#[test]
fn rows_beyond_the_last_are_not_read_and_not_written() {
    // The buffers are exactly as long as the rows: an access beyond them is an error of the emulator.
    let case = Case::new(Format::Int4, 80, 272, 32);
    for m in (1..=16).chain([17, 31, 40]) {
        let (x, y) = case.buffers(&(0..m).collect::<Vec<_>>());
        case.linear.run(Input::Rows(&x), m, Output::Plain(&y), &case.scratch).unwrap();
        assert_eq!(y.traffic().unwrap().written, (m * 80 * 4) as u64);
    }
}

#[test]
fn weights_are_read_once_and_every_product_counted() {
    for kind in KINDS {
        let format = kind.0;
        for (rows, tiles) in [(1, 1), (8, 1), (16, 2)] {
            let (n, k) = (320, 2560);
            let case = Case::new(kind, n, k, 128);
            case.run(&SIXTEEN[..rows]).unwrap();
            let [weights, scales] = case.linear.buffers();
            assert_eq!(weights.traffic().unwrap().read, (n * k * format.bits() / 8) as u64, "{format:?}, {rows} rows");
            let scales = scales.traffic().map_or(0, |t| t.read);
            let expected = if format == Format::Bf16 { 0 } else { (n * k / 128 * 2) as u64 };
            assert_eq!(scales, expected, "{format:?}, {rows} rows");
            assert_eq!(case.device.counts().unwrap().products, (n / 16 * k / 16 * tiles) as u64, "{rows} rows");
            let partial = case.scratch.partial().traffic().unwrap();
            assert_eq!(partial.read, partial.written, "every segment's sum is added once");
        }
    }
}

#[test]
fn a_product_after_an_aborted_one_is_right_once_the_counters_are_reset() {
    let case = Case::new(Format::Int4, 64, 2560, 128);
    let expected = case.run(&SIXTEEN).unwrap();
    let mut late = false;
    for abort_after in [10, 2_000, 20_000, 60_000] {
        case.device.emulate(Emulation { abort_after, ..emulation(0) });
        assert!(case.run(&SIXTEEN).unwrap_err().to_string().contains("ended here on request"));
        case.device.emulate(emulation(0));
        // Without the reset, a launch that got as far as a counter takes the wrong block for the last.
        late |= !matches!(case.run(&SIXTEEN), Ok(y) if y == expected);
        case.scratch.reset().unwrap();
        assert_eq!(case.run(&SIXTEEN).unwrap(), expected);
        assert_eq!(case.run(&SIXTEEN).unwrap(), expected, "the counters are zero again");
    }
    assert!(late, "no abort came between the first counter and the last");
}

#[test]
fn one_flipped_bit_of_weights_scales_or_inputs_shows() {
    let (n, k, group) = (64, 2560, 128);
    for kind in KINDS {
        let format = kind.0;
        let case = Case::new(kind, n, k, group);
        let expected = case.run(&SIXTEEN).unwrap();
        let differs = |changed: &Case| -> Vec<usize> {
            let y = changed.run(&SIXTEEN).unwrap();
            (0..y.len()).filter(|&i| y[i] != expected[i]).collect()
        };
        let row_bytes = case.weights.packed.len() / n;
        for bit in 0..8 {
            let mut weights = case.weights.clone();
            weights.packed[17 * row_bytes + row_bytes / 3 * 2 / 4 * 4] ^= 1 << bit;
            let changed = differs(&Case::with(kind, weights, case.x.clone()));
            assert!(!changed.is_empty() && changed.iter().all(|i| i % n == 17), "{format:?}, bit {bit}: {changed:?}");
        }
        if format != Format::Bf16 {
            let mut weights = case.weights.clone();
            weights.scales[(33 * k / group + 7) * 2] ^= 0x10;
            let changed = differs(&Case::with(kind, weights, case.x.clone()));
            assert!(!changed.is_empty() && changed.iter().all(|i| i % n == 33), "{format:?}: {changed:?}");
        }
        let mut x = case.x.clone();
        x[5 * k + 2559] = -x[5 * k + 2559];
        let changed = differs(&Case::with(kind, case.weights.clone(), x));
        // A weight of zero does not see its input.
        assert!(changed.len() > n / 2 && changed.iter().all(|i| i / n == 5), "{format:?}: {changed:?}");
    }
}

#[test]
fn products_that_do_not_fit_are_refused() {
    let case = Case::new(Format::Int4, 64, 256, 128);
    let (x, y) = case.buffers(&SIXTEEN);
    let run = |x: &Buffer, rows, y: &Buffer| case.linear.run(Input::Rows(x), rows, Output::Plain(y), &case.scratch);
    assert!(matches!(run(&x, 0, &y), Err(GemmError::Rows { rows: 0 })));
    assert!(matches!(run(&x, MOST_ROWS + 1, &y), Err(GemmError::Rows { .. })));
    let short = case.device.allocate("short", 8 * 256 * 2).unwrap();
    match run(&short, 9, &y) {
        Err(GemmError::Short { name, expected, found, .. }) => {
            assert_eq!((name.as_str(), expected, found), ("short", 9 * 256 * 2, 8 * 256 * 2));
        }
        other => panic!("{other:?}"),
    }
    let dot = case.linear.run(Input::Int8(&x, &x), 1, Output::Plain(&y), &case.scratch);
    assert!(matches!(dot, Err(GemmError::Kind { format: Format::Int4, .. })));
    let halves = case.linear.run(Input::Halves(&x), 1, Output::Plain(&y), &case.scratch);
    assert!(matches!(halves, Err(GemmError::Kind { expected: "bf16 inputs", .. })));
    let case = Case::new(Kind(Format::Int3, Operands::F16), 64, 256, 128);
    let bf16 = case.linear.run(Input::Rows(&x), 1, Output::Plain(&y), &case.scratch);
    assert!(matches!(bf16, Err(GemmError::Kind { expected: "f16 inputs with the operands that were chosen", .. })));
    let wide = Case::new(Format::Int8, 64, 256, 128).linear.with_operands(Operands::F16);
    assert!(matches!(wide, Err(GemmError::Kind { format: Format::Int8, .. })));
}

#[test]
fn operands_follow_the_largest_input() {
    for (largest, expected) in
        [(8188.0, Operands::F16), (-8188.0, Operands::F16), (8189.0, Operands::Bf16), (f32::NAN, Operands::Bf16)]
    {
        assert_eq!(Operands::for_largest(largest), expected, "{largest}");
    }
}

/// What the emulator costs at full size; run with `--ignored --nocapture`.
#[test]
#[ignore = "full size, for measuring"]
fn the_largest_matrix_of_e4b() {
    let case = Case::new(Format::Int4, 10240, 2560, 128);
    let (x, y) = case.buffers(&SIXTEEN);
    for checked in [false, true] {
        case.device.emulate(Emulation { checked, ..emulation(0) });
        let begin = std::time::Instant::now();
        case.linear.run(Input::Rows(&x), 16, Output::Plain(&y), &case.scratch).unwrap();
        let seconds = begin.elapsed().as_secs_f64();
        println!("[10240, 2560] at 16 rows, checked {checked}: {seconds:.2} s, {:?}", case.device.counts().unwrap());
    }
}
