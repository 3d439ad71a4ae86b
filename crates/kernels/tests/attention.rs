//! `attention.cuh` on the emulator, beyond what the self-test checks on every device (`kernels::selftest`): schedules, races, recorded
//! graphs, long contexts, refusals.

#![cfg(target_arch = "x86_64")]

use half::bf16;
use kernels::{
    device::{Device, Emulation, exchange},
    selftest::cases::{
        attention::{Case, Planned, chain},
        bits16, bytes16, worst,
    },
    step::{
        Own, StepError,
        attention::Attention,
        kv::{KvCache, KvShape},
    },
};

const PLAIN: Emulation = Emulation { checked: false, seed: 0, abort_after: 0, multiprocessors: 80 };

fn checked(seed: u64) -> Emulation {
    Emulation { seed, ..Emulation::default() }
}

fn case(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>, context: usize) -> Case {
    Case::new(&Device::emulated(PLAIN).unwrap(), heads, kv_heads, head_dim, window, context).unwrap()
}

#[test]
fn any_grid_and_any_schedule_gives_the_same_bits() {
    for (heads, kv_heads, dim, window) in [(4, 2, 16, Some(40)), (8, 2, 256, Some(64)), (4, 2, 512, None)] {
        let case = case(heads, kv_heads, dim, window, 256);
        case.cache(case.seen(126).start..134, 0xff).unwrap();
        case.put(128, Own::Side(0)).unwrap();
        let mut rows = chain(126, 8);
        rows.push((128, Own::Side(0)));
        let expected = case.run(&rows).unwrap();
        for (i, multiprocessors) in [1, 7, 72, 80, 132].into_iter().enumerate() {
            case.device.emulate(Emulation { multiprocessors, ..checked(i as u64) });
            assert_eq!(case.run(&rows).unwrap(), expected, "{multiprocessors} multiprocessors");
        }
    }
}

#[test]
fn random_schedules_of_a_small_case_find_no_race() {
    let case = case(4, 2, 32, Some(24), 128);
    case.cache(case.seen(60).start..70, 0xff).unwrap();
    let expected = case.run(&chain(60, 9)).unwrap();
    for seed in 0..20 {
        case.device.emulate(Emulation { multiprocessors: 3, ..checked(seed) });
        assert_eq!(case.run(&chain(60, 9)).unwrap(), expected, "seed {seed}");
    }
}

#[test]
fn a_missing_barrier_is_a_race() {
    let case = case(4, 2, 32, Some(24), 128);
    case.cache(case.seen(60).start..70, 0xff).unwrap();
    case.device.emulate(checked(0));
    // SAFETY: the planted kernel takes the same arguments.
    unsafe { case.device.alter(Some(exchange(&[("attention_any", "attention_no_barrier")]))) };
    let error = case.run(&chain(60, 9)).unwrap_err().to_string();
    assert!(error.contains("RACE"), "{error}");
}

#[test]
fn a_graph_recorded_at_one_length_serves_any_other() {
    let case = case(4, 2, 32, Some(70), 512);
    case.cache(0..8, 0xff).unwrap();
    let Planned { launches, queries, out } = case.plan(&chain(3, 2), 80).unwrap();
    // SAFETY: typed launches.
    let graph = unsafe { case.device.record(launches.to_vec()) }.unwrap();
    let width = case.width();
    for begin in [0, 3, 62, 69, 70, 128, 300, 510, 1] {
        case.cache_for(begin, 2).unwrap();
        let expected = case.run(&chain(begin, 2)).unwrap().concat();
        queries.write(0, &bytes16(&case.queries[begin * width..(begin + 2) * width])).unwrap();
        out.fill(0).unwrap();
        graph.replay().unwrap();
        assert_eq!(bits16(&out, 0, 2 * width).unwrap(), expected, "at {begin}");
    }
}

#[test]
fn long_contexts_cross_every_kind_of_chunk() {
    // One head of 16: what matters is where the borders are.
    for (window, positions) in [
        (None, vec![4094, 4096, 4200, 16_383, 16_384, 20_000]),
        (None, vec![131_071]),
        (Some(512), vec![4097, 4600, 16_500, 131_060]),
    ] {
        let case = case(1, 1, 16, window, 131_072);
        for position in positions {
            case.cache_for(position, 2).unwrap();
            let rows = chain(position, 2);
            let out = case.run(&rows).unwrap();
            assert_eq!(out[1], case.run(&rows[1..]).unwrap()[0], "position {position}");
            let (exact, naive) = case.references(rows[0]);
            let ours = worst(out[0].iter().map(|&b| bf16::from_bits(b).to_f32()), &exact);
            assert!(ours <= 2.0 * worst(naive, &exact), "position {position}: {ours:e}");
        }
    }
}

#[test]
fn keys_and_values_are_read_once_for_up_to_16_packed_rows() {
    let case = case(2, 1, 64, None, 256);
    case.device.emulate(checked(0));
    case.cache(0..208, 0xff).unwrap();
    let rows = chain(200, 8);
    let Planned { launches, .. } = case.plan(&rows, 80).unwrap();
    // SAFETY: typed launches.
    unsafe { case.device.launch(&launches[0]) }.unwrap();
    let read = case.kv.buffer().traffic().unwrap().read;
    // The last row sees 207 positions: keys and values of 64 components.
    assert_eq!(read, 207 * 2 * 64 * 2);
}

#[test]
fn attention_that_does_not_fit_is_refused() {
    let case = case(4, 2, 32, Some(24), 128);
    let buffer = |rows: usize| case.device.allocate("rows", rows * 4 * 32 * 2).unwrap();
    let (q, out) = (buffer(4), buffer(4));
    let good = Attention {
        queries: &q,
        heads: 4,
        kv: &case.kv,
        layer: 0,
        window: Some(24),
        table: &case.table,
        rows: 4,
        out: &out,
    };
    assert!(good.launches(&case.scratch, 80).is_ok());
    let refused = |a: Attention| match a.launches(&case.scratch, 80) {
        Err(StepError::Shape { what, .. }) => what,
        Err(StepError::Short { name, .. }) => {
            if name == "rows" {
                "short"
            } else {
                "other"
            }
        }
        _ => "nothing",
    };
    assert_eq!(refused(Attention { rows: 0, ..good }), "rows");
    assert_eq!(refused(Attention { rows: 17, ..good }), "rows");
    assert_eq!(refused(Attention { rows: 5, ..good }), "short");
    assert_eq!(refused(Attention { heads: 3, ..good }), "query heads");
    assert_eq!(refused(Attention { layer: 1, ..good }), "key/value layer");
    assert_eq!(refused(Attention { window: None, ..good }), "window");
    for head_dim in [0, 8, 24, 528] {
        let shape = KvShape { kv_heads: 1, head_dim, window: None };
        assert!(matches!(KvCache::new(&case.device, &[shape], 64), Err(StepError::Shape { what: "head_dim", .. })));
    }
    assert!(matches!(case.table.set(&[(0, Own::Side(16))]), Err(StepError::Shape { what: "side slot", .. })));
    // Rows further apart than a step's are an error of the launch, not a write into other memory.
    case.cache(0..0, 0xff).unwrap();
    let Planned { launches, .. } = case.plan(&[(0, Own::Cached), (140, Own::Cached)], 80).unwrap();
    // SAFETY: typed launches.
    let error = unsafe { case.device.launch(&launches[0]) }.unwrap_err();
    assert!(error.to_string().contains("trap"), "{error}");
}
