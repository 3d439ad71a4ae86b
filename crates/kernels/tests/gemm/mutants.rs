//! Planted mistakes: `build.rs` compiles the sources with one change each, and every one of them must be found by what the other tests
//! ask for.

use kernels::{
    device::{Device, Launch},
    gemm::{Input, Output, Stream},
    layout::Format,
};

use crate::{
    best::{chosen, descending},
    case::{Case, SIXTEEN, emulation, words},
    heads::Attending,
};

#[path = "../../mutants.rs"]
mod planted;

/// What is wrong with a kernel for int3 in groups of 64 that takes the place of the right one at 16 rows: nothing, or the first thing that
/// the tests of this family would say.
fn finding(kernel: &'static str) -> Option<String> {
    let case = Case::new(Format::Int3, 80, 1552, 64);
    let launch = |device: &Device, launch: Launch| {
        assert_eq!(launch.kernel, "gemm_int3_g64_m16");
        // SAFETY: the arguments are those of the kernel that this one replaces; a mistake inside is an error of the emulator.
        unsafe { device.launch(&Launch { kernel, ..launch }) }
    };
    for rows in [&SIXTEEN[..], &SIXTEEN[..11]] {
        let expected = case.in_order(rows.len());
        for seed in 0..4 {
            case.device.emulate(emulation(seed));
            case.scratch.reset().unwrap();
            let (x, y) = case.buffers(rows);
            let right = case.linear.launch(Input::Rows(&x), rows.len(), Output::Plain(&y), &case.scratch).unwrap();
            if let Err(error) = launch(&case.device, right) {
                return Some(error.to_string());
            }
            if words(&y) != expected {
                return Some("other bits than the promised order gives".into());
            }
        }
    }
    // Rows of a stream with a norm: the same bits as alone.
    case.device.emulate(emulation(0));
    let k = case.k;
    let values: Vec<u8> = case.x[..16 * k].iter().flat_map(|v| (v * 1.37).to_le_bytes()).collect();
    let norm = case.device.constant("norm", &vec![0x3f; k * 2]).unwrap();
    let stream = |rows: std::ops::Range<usize>| {
        let stream = case.device.constant("stream", &values[rows.start * k * 4..rows.end * k * 4]).unwrap();
        let y = case.device.allocate("y", rows.len() * case.n * 4).unwrap();
        let input = Stream { stream: &stream, delta: None, norm: Some(&norm), eps: 1e-6, out: None };
        let right = case.linear.launch(Input::Stream(input), rows.len(), Output::Plain(&y), &case.scratch).unwrap();
        if rows.len() == 1 {
            // SAFETY: what the library planned.
            unsafe { case.device.launch(&right) }.unwrap();
        } else if let Err(error) = launch(&case.device, right) {
            return Err(error.to_string());
        }
        Ok(words(&y))
    };
    let alone: Vec<u32> = (0..16).flat_map(|row| stream(row..row + 1).unwrap()).collect();
    match stream(0..16) {
        Err(error) => return Some(error),
        Ok(together) if together != alone => return Some("a row of a stream has other bits than alone".into()),
        Ok(_) => {}
    }
    // What happens behind a product: one head of two columns, and the choice among equal logits.
    let replace = |launch: Launch| match launch.kernel {
        "gemm_int3_g64_m16" => Launch { kernel, ..launch },
        other => panic!("{other}"),
    };
    let layer = Attending::new(Format::Int3, Some(64), 1552, 80, (1, 1, false));
    let expected = layer.run(16, false, |launch| launch).unwrap();
    let ids = descending(&case);
    let choice = chosen(&case, 16, Some(&ids), Some(1e-3), false, |launch| launch).unwrap();
    for seed in 0..4 {
        layer.device.emulate(emulation(seed));
        layer.scratch.reset().unwrap();
        match layer.run(16, true, replace) {
            Err(error) => return Some(error.to_string()),
            Ok(found) if found != expected => return Some("other heads than two launches leave".into()),
            Ok(_) => {}
        }
        case.device.emulate(emulation(seed));
        match chosen(&case, 16, Some(&ids), Some(1e-3), true, replace) {
            Err(error) => return Some(error.to_string()),
            Ok(found) if found != choice => return Some("other tokens than among logits in memory".into()),
            Ok(_) => {}
        }
    }
    None
}

#[test]
fn every_planted_mistake_is_found_and_the_source_without_one_is_clean() {
    let mut wrong = Vec::new();
    for (kernel, ..) in planted::MUTANTS {
        let found = finding(kernel);
        if found.is_none() != (kernel == "gemm_mutant_none") {
            wrong.push(format!("{kernel}: {found:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
