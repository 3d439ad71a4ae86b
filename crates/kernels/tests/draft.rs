//! `draft.cuh` on the emulator, beyond what the self-test checks on every device (`kernels::selftest`): schedules, races, rounds after a
//! fault, refusals.

#![cfg(target_arch = "x86_64")]

use kernels::{
    device::{Device, Emulation, exchange},
    selftest::cases::draft::{Case, Sizes},
    step::{
        StepError,
        draft::{DraftClusters, DraftModel, Drafter, Format},
    },
};

const PLAIN: Emulation = Emulation { checked: false, seed: 0, abort_after: 0, multiprocessors: 3 };

fn case(length: usize) -> Case {
    Case::new(&Device::emulated(PLAIN).unwrap(), length).unwrap()
}

#[test]
fn int8_weights_take_half_the_memory() {
    let case = case(60);
    let [wide, narrow] = [Format::Bf16, Format::Int8].map(|f| case.drafter(0, true, f).unwrap().weight_bytes());
    assert!(narrow < wide * 2 / 3, "{narrow} of {wide}");
}

#[test]
fn no_schedule_of_the_persistent_kernel_has_a_race() {
    let case = case(40);
    let drafter = case.drafter(0, true, Format::Bf16).unwrap();
    let expected = case.persistent(&drafter, 2, None).unwrap();
    for seed in 0..3 {
        case.device.emulate(Emulation { multiprocessors: 2 + seed as u32, seed, ..Emulation::default() });
        assert!(case.persistent(&drafter, 2, None).unwrap() == expected, "seed {seed}");
    }
    // Without one of the barriers.
    // SAFETY: the planted kernel takes the same arguments.
    unsafe { case.device.alter(Some(exchange(&[("draft_all_bf16", "draft_all_dropped_barrier")]))) };
    let error = case.persistent(&drafter, 1, None).unwrap_err().to_string();
    assert!(error.contains("RACE") || error.contains("stale"), "{error}");
}

#[test]
fn a_round_after_an_aborted_one_is_right() {
    let case = case(40);
    let drafter = case.drafter(0, true, Format::Bf16).unwrap();
    let expected = case.persistent(&drafter, 1, None).unwrap();
    case.device.emulate(Emulation { multiprocessors: 2, abort_after: 30_000, ..Emulation::default() });
    assert!(case.persistent(&drafter, 1, None).is_err());
    case.device.emulate(Emulation { checked: false, multiprocessors: 2, ..Emulation::default() });
    assert!(case.persistent(&drafter, 1, None).unwrap() == expected);
}

#[test]
fn a_drafter_that_does_not_fit_is_refused() {
    let case = case(10);
    let [sliding, full] = &case.rotations;
    let refused = |model: DraftModel<'_>| {
        let made = Drafter::new(&case.device, &model, Format::Bf16, &case.kv, &case.embedding, [sliding, full]);
        match made.map(|_| ()) {
            Err(StepError::Shape { what, .. }) => what,
            Err(_) => "something else",
            Ok(()) => "nothing",
        }
    };
    let good = || case.model(0, true);
    assert_eq!(refused(good()), "nothing");
    assert_eq!(refused(DraftModel { heads: 3, ..good() }), "query heads of the drafter");
    assert_eq!(refused(DraftModel { head: case.centroids.view(), ..good() }), "head of the drafter");
    assert_eq!(refused(DraftModel { back: 2, ..good() }), "position of the drafter's query");
    assert_eq!(refused(DraftModel { window: Sizes::SMALL.window + 2, ..good() }), "window of the drafter");
    let clusters = |chosen| Some(DraftClusters { centroids: case.centroids.view(), order: &case.order, chosen });
    assert_eq!(refused(DraftModel { clusters: clusters(13), ..good() }), "clusters looked into");
    let drafter = case.drafter(0, true, Format::Bf16).unwrap();
    assert!(drafter.launches(&case.sequence, &case.carried, 16).is_err());
    let short = case.device.allocate("short", Sizes::SMALL.backbone).unwrap();
    assert!(matches!(drafter.persistent(&case.sequence, &short, 1), Err(StepError::Short { .. })));
}
