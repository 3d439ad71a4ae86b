//! `rows.cuh` on the emulator, beyond what the self-test checks on every device (`kernels::selftest`): races, traffic, refusals.

#![cfg(target_arch = "x86_64")]

use kernels::{
    device::{Buffer, Device, Emulation, Launch, exchange},
    selftest::{
        Failure,
        cases::{
            bytes16, floats, numbers, numbers16,
            rows::{EPS, HeadCase},
            weights32,
        },
    },
    step::{
        Own, StepError,
        kv::KvStorage,
        rows::{Columns, Table, Tokens, embed, gated, norm},
    },
};

fn device() -> Device {
    Device::emulated(Emulation { multiprocessors: 3, ..Emulation::default() }).unwrap()
}

fn run(device: &Device, launch: &Launch) -> Result<(), Failure> {
    // SAFETY: typed launches; planted kernels take the same arguments.
    Ok(unsafe { device.launch(launch) }?)
}

/// 64 numbers, 16 weights, room for 64 results.
fn buffers(device: &Device) -> [Buffer; 3] {
    let y = device.allocate("y", 64 * 2).unwrap();
    [floats(device, &numbers(1, 64, 2.0)).unwrap(), weights32(device, &numbers(2, 16, 2.0)).unwrap(), y]
}

#[test]
fn a_missing_barrier_is_a_race() {
    let device = device();
    let [x, w, y] = buffers(&device);
    let launch = norm(&x, &w, &y, 2, 16, EPS).unwrap();
    run(&device, &launch).unwrap();
    // SAFETY: the planted kernel takes the same arguments.
    unsafe { device.alter(Some(exchange(&[("rms_norm", "norm_no_barrier")]))) };
    let error = run(&device, &launch).unwrap_err().to_string();
    assert!(error.contains("RACE"), "{error}");
}

#[test]
fn each_rows_key_and_value_is_written_once_and_nothing_else() {
    let device = device();
    let case = HeadCase::new(&device, 48, Some(20), KvStorage::Bf16).unwrap();
    case.table.set(&HeadCase::PLACES).unwrap();
    let rows = HeadCase::PLACES.len();
    run(&device, &case.launch(rows, true).unwrap()).unwrap();
    let written = || case.kv.buffer().traffic().unwrap().written as usize;
    assert_eq!(written(), rows * 2 * HeadCase::KV_HEADS * 48 * 2);
    // A layer without keys of its own writes none.
    run(&device, &case.launch(1, false).unwrap()).unwrap();
    assert_eq!(written(), 0);
    // A position that the rotations do not reach ends the launch.
    case.table.set(&[(HeadCase::CONTEXT + 16, Own::Cached)]).unwrap();
    let error = run(&device, &case.launch(1, true).unwrap()).unwrap_err();
    assert!(error.to_string().contains("trap"), "{error}");
}

#[test]
fn a_token_beyond_the_vocabulary_ends_the_launch() {
    let device = device();
    let [x, _, y] = buffers(&device);
    let buffer = device.constant("table", &bytes16(&numbers16(7, 4 * 16, 1.0))).unwrap();
    let table = Table { buffer, vocabulary: 4, width: 16 };
    let tokens = Tokens::new(&device).unwrap();
    tokens.set(&[3]).unwrap();
    let launch = embed(&table, &tokens, 1, &x, &y).unwrap();
    run(&device, &launch).unwrap();
    tokens.set(&[4]).unwrap();
    let error = run(&device, &launch).unwrap_err();
    assert!(error.to_string().contains("trap"), "{error}");
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let device = device();
    let [x, w, y] = buffers(&device);
    assert!(norm(&x, &w, &y, 4, 16, EPS).is_ok());
    assert!(matches!(norm(&x, &w, &y, 5, 16, EPS), Err(StepError::Short { .. })));
    assert!(matches!(norm(&x, &w, &y, 17, 1, EPS), Err(StepError::Shape { what: "rows", .. })));
    assert!(matches!(norm(&x, &w, &y, 1, 20_000, EPS), Err(StepError::Shape { what: "width of a row", .. })));
    let tokens = Tokens::new(&device).unwrap();
    assert!(tokens.set(&[0; 17]).is_err());
    let buffer = device.constant("table", &[0; 4 * 16 * 2]).unwrap();
    let e = Table { buffer, vocabulary: 4, width: 16 };
    assert!(matches!(embed(&e, &tokens, 5, &x, &y), Err(StepError::Short { .. })));
    let short = Table { vocabulary: 5, ..e };
    assert!(matches!(embed(&short, &tokens, 1, &x, &y), Err(StepError::Short { .. })));
    let half = |column| Columns { buffer: &x, column, stride: 32 };
    assert!(gated(half(0), half(16), &y, 2, 16).is_ok());
    assert!(matches!(gated(half(0), half(17), &y, 2, 16), Err(StepError::Shape { what: "last column", .. })));
}
