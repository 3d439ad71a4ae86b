//! The best token of each row, chosen by the head's own product: what the choice among logits in memory is.

use kernels::{
    device::{Buffer, Emulation, Launch},
    gemm::{GemmError, Input, Output},
    layout::Format,
    step::{StepError, decide::Sequence},
};

use crate::case::{Case, SIXTEEN, Weights, emulation, words};

/// The ranks of all rows, which hold logit and token, and whether a logit was no number.
pub type Chosen = (Vec<u32>, bool);

/// As the head's product chooses, or from its logits, for the first `rows` rows. `with` changes the product's launch.
pub fn chosen(
    case: &Case,
    rows: usize,
    ids: Option<&Buffer>,
    cap: Option<f32>,
    fused: bool,
    with: impl Fn(Launch) -> Launch,
) -> Result<Chosen, GemmError> {
    let sequence = Sequence::new(&case.device, 8, 1)?;
    sequence.begin(&[1], 8)?;
    let (x, logits) = case.buffers(&SIXTEEN[..rows]);
    let best = sequence.best(ids, cap);
    let output = if fused { Output::Best(best) } else { Output::Plain(&logits) };
    let launch = with(case.linear.launch(Input::Rows(&x), rows, output, &case.scratch)?);
    // SAFETY: what the library planned; a planted mistake is an error of the emulator.
    unsafe { case.device.launch(&launch) }?;
    if !fused {
        // SAFETY: as above.
        unsafe { case.device.launch(&sequence.choose(&logits, ids, rows, case.n, cap)?) }?;
    }
    Ok((words(best.ranks()), words(sequence.state())[8] != 0))
}

/// Tokens in descending order, so that among equals the last channel wins.
pub fn descending(case: &Case) -> Buffer {
    let ids: Vec<u8> = (0..case.n as u32).flat_map(|i| (9000 - 3 * i).to_le_bytes()).collect();
    case.device.constant("ids", &ids).unwrap()
}

fn cases() -> Vec<Case> {
    vec![
        Case::new(Format::Int4, 208, 784, 784),
        Case::new(Format::Bf16, 144, 272, 272),
        Case::new(Format::Int4, 320, 512, 32),
        Case::new(Format::Int8, 80, 256, 128),
    ]
}

#[test]
fn the_products_own_choice_is_that_among_its_logits() {
    for case in cases() {
        let ids = descending(&case);
        for rows in [1, 2, 7, 8, 9, 16] {
            // A softcap so low that every positive logit is the same: the lowest token wins.
            for (ids, cap) in [(None, None), (Some(&ids), Some(30.0)), (None, Some(1e-3)), (Some(&ids), Some(1e-3))] {
                let of = |fused| chosen(&case, rows, ids, cap, fused, |launch| launch).unwrap();
                let expected = of(false);
                assert_eq!(of(true), expected, "{:?}, {rows} rows, cap {cap:?}", case.weights.format);
                assert!(!expected.1 && expected.0[..2 * rows].iter().all(|&w| w != 0));
            }
        }
    }
}

#[test]
fn any_grid_chooses_the_same_in_any_schedule() {
    for case in cases() {
        let expected = chosen(&case, 11, None, Some(1e-3), false, |launch| launch).unwrap();
        for (i, multiprocessors) in [1, 7, 80].into_iter().enumerate() {
            for seed in [0, 2 + i as u64] {
                case.device.emulate(Emulation { multiprocessors, ..emulation(seed) });
                let found = chosen(&case, 11, None, Some(1e-3), true, |launch| launch).unwrap();
                assert_eq!(found, expected, "{multiprocessors} blocks, schedule {seed}");
            }
        }
    }
}

#[test]
fn a_logit_that_is_no_number_is_told() {
    for bad in [f32::NAN, f32::INFINITY] {
        let weights = Weights::random(Format::Int4, 80, 256, 128);
        let mut x: Vec<f32> = (0..16 * 256).map(|i| (i % 7) as f32).collect();
        x[5 * 256 + 77] = bad;
        let case = Case::with(Format::Int4, weights, x);
        for rows in [5, 6, 16] {
            let of = |fused| chosen(&case, rows, None, Some(30.0), fused, |launch| launch).unwrap();
            assert_eq!(of(true).1, rows > 5, "{bad}, {rows} rows");
            assert_eq!(of(false), of(true), "{bad}, {rows} rows");
        }
    }
}

#[test]
fn choices_that_do_not_fit_are_refused() {
    let case = Case::new(Format::Int4, 80, 256, 128);
    let few = case.device.constant("ids", &[0; 79 * 4]).unwrap();
    let error = chosen(&case, 1, Some(&few), None, true, |launch| launch).unwrap_err();
    assert!(matches!(error, GemmError::Step(StepError::Short { expected: 320, found: 316, .. })), "{error}");
    let sequence = Sequence::new(&case.device, 8, 1).unwrap();
    let (x, _) = case.buffers(&[0; 17]);
    let wide = case.linear.launch(Input::Rows(&x), 17, Output::Best(sequence.best(None, None)), &case.scratch);
    assert!(matches!(wide, Err(GemmError::Step(StepError::Shape { what: "rows", .. }))));
}
