//! `decide.cuh` on the emulator, beyond what the self-test checks on every device (`kernels::selftest`): where rows are, refusals.

#![cfg(target_arch = "x86_64")]

use kernels::{
    device::{Device, Emulation},
    selftest::cases::{
        decide::{Case, run},
        floats, words,
    },
    step::{
        Own, StepError,
        decide::{Sequence, Tree},
    },
};

fn device() -> Device {
    Device::emulated(Emulation { multiprocessors: 3, ..Emulation::default() }).unwrap()
}

#[test]
fn rows_are_the_newest_token_the_main_drafts_and_further_candidates() {
    let case = Case::new(&device(), &[1, 0, 2], 40, 9).unwrap();
    case.sequence.begin(&[4, 4, 8], 30).unwrap();
    case.sequence.set_drafts(&[vec![5, 6], vec![7], vec![2, 8, 4, 5]]).unwrap();
    run(&case.device, &case.sequence.place(case.tree)).unwrap();
    let read = |b, n| words(b).unwrap()[..n].iter().map(|&w| w as i32).collect::<Vec<_>>();
    assert_eq!(read(case.sequence.tokens.buffer(), 7), [8, 5, 7, 2, 6, 8, 4]);
    let places = [[2, -1], [3, -1], [4, -1], [5, -1], [3, 0], [5, 1], [5, 2]];
    assert_eq!(read(case.sequence.table.buffer(), 14), places.concat());
}

#[test]
fn shapes_that_no_step_has_are_refused() {
    let shape = |branches: &[usize]| match Tree::new(branches) {
        Err(StepError::Shape { what, .. }) => what,
        _ => "fine",
    };
    assert_eq!(shape(&[0; 16]), "depth of the chain");
    assert_eq!(shape(&[5]), "branches at one depth");
    assert_eq!(shape(&[4, 4, 4, 1]), "rows");
    assert_eq!(shape(&[4, 4, 3, 0]), "fine");
    let device = device();
    let sequence = Sequence::new(&device, 8, 2).unwrap();
    assert!(sequence.begin(&[], 1).is_err());
    assert!(sequence.begin(&[1; 9], 1).is_err());
    assert!(matches!(sequence.record(0), Err(StepError::Shape { what: "step", .. })));
    assert!(sequence.set_drafts(&vec![vec![1]; 16]).is_err());
    let logits = floats(&device, &[0.0; 16]).unwrap();
    assert!(matches!(sequence.choose(&logits, None, 2, 9, None), Err(StepError::Short { .. })));
    assert!(sequence.table.set(&[(0, Own::None)]).is_ok());
}
