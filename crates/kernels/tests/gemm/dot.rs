//! Int8 weights with int8 inputs, beyond what the self-test checks on every device: every number of rows, cuts, refusals.

use kernels::{
    device::{Device, Emulation},
    gemm::{GemmError, Input, Output},
    layout::Format,
    selftest::cases::dot::{Case, ROWS},
};

use crate::case::{SIXTEEN, emulation};

fn case(n: usize, k: usize) -> Case {
    Case::new(&Device::emulated(emulation(0)).unwrap(), n, k, None).unwrap()
}

fn expected(case: &Case, rows: usize) -> Vec<u32> {
    (0..rows).flat_map(|row| case.reference(row)).collect()
}

#[test]
fn products_of_integers_are_those_of_the_cpu_bit_for_bit() {
    let case = case(80, 1040);
    let expected = expected(&case, ROWS);
    for m in (1..=16).chain([17, 33, ROWS]) {
        let rows: Vec<usize> = (0..m).collect();
        assert_eq!(case.run(&rows).unwrap(), expected[..m * 80], "{m} rows");
    }
}

#[test]
fn any_cut_gives_the_same_integers() {
    let case = case(128, 2560);
    let expected = expected(&case, 16);
    for (i, multiprocessors) in [1, 7, 72, 80, 132].into_iter().enumerate() {
        case.device.emulate(Emulation { multiprocessors, ..emulation(i as u64) });
        assert_eq!(case.run(&SIXTEEN).unwrap(), expected);
    }
    let [weights, _] = case.linear.buffers();
    assert_eq!(weights.traffic().unwrap().read, 128 * 2560);
}

#[test]
fn a_residual_stream_is_no_integer() {
    let case = case(64, 256);
    let y = case.device.allocate("y", 64 * 4).unwrap();
    let refused = case.linear.run(Input::Rows(&y), 1, Output::Plain(&y), &case.scratch);
    assert!(matches!(refused, Err(GemmError::Kind { format: Format::Int8Dot, .. })));
}
