//! `attention.cuh` on the emulator: accurate, free of races, the same bits for a row in any company, and blind to what it must not see.

#![cfg(target_arch = "x86_64")]

use half::bf16;
use kernels::{
    device::{Buffer, Device, DeviceError, Emulation, Launch},
    step::{
        Own, Rows, StepError,
        attention::{Attention, AttentionScratch},
        kv::{KvCache, KvShape},
    },
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Keys and values of one layer and queries of one sequence: what a position holds is the same wherever it is asked for.
struct Case {
    device: Device,
    heads: usize,
    shape: KvShape,
    kv: KvCache,
    scratch: AttentionScratch,
    table: Rows,
    /// `[positions, kv_heads, head_dim]`.
    keys: Vec<bf16>,
    values: Vec<bf16>,
    /// `[positions, heads, head_dim]`.
    queries: Vec<bf16>,
}

/// What takes the place of the two kernels: mistakes of `attention_planted.cu`.
type Kernels = [Option<&'static str>; 2];
const RIGHT: Kernels = [None, None];

fn checked(seed: u64) -> Emulation {
    Emulation { seed, ..Emulation::default() }
}

const PLAIN: Emulation = Emulation { checked: false, seed: 0, abort_after: 0, multiprocessors: 80 };

fn numbers(n: usize, spread: f32, random: &mut StdRng) -> Vec<bf16> {
    (0..n).map(|_| bf16::from_f32(random.random_range(-spread..spread))).collect()
}

fn bytes(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

impl Case {
    /// A context of `context` positions, none of them cached yet.
    fn new(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>, context: usize) -> Case {
        let mut random = StdRng::seed_from_u64((heads * 1000 + head_dim + context) as u64);
        let device = Device::emulated(PLAIN).unwrap();
        let shape = KvShape { kv_heads, head_dim, window };
        let kv = KvCache::new(&device, &[shape], context).unwrap();
        let scratch = AttentionScratch::new(&device, heads, &[shape], context).unwrap();
        let table = Rows::new(&device).unwrap();
        let positions = context + 16;
        // Scores of a standard deviation of about 2: weights neither equal nor all in one key.
        let spread = (12.0 / (head_dim as f32).sqrt()).sqrt();
        let keys = numbers(positions * shape.width(), spread, &mut random);
        let values = numbers(positions * shape.width(), 1.0, &mut random);
        let queries = numbers(positions * heads * head_dim, spread, &mut random);
        Case { device, heads, shape, kv, scratch, table, keys, values, queries }
    }

    fn emulate(&self, emulation: Emulation) {
        self.device.emulate(emulation);
    }

    /// Puts keys and values of `positions` where they belong; all else is NaN.
    fn cache(&self, positions: std::ops::Range<usize>) {
        self.kv.buffer().fill(0xff).unwrap();
        positions.for_each(|p| self.put(p, Own::Cached));
    }

    /// Puts key and value of a position into the cache, or into a side slot.
    fn put(&self, position: usize, own: Own) {
        let (layer, width) = (self.kv.layers()[0], self.shape.width());
        let (place, part) = match own {
            Own::Side(slot) => (slot, 2),
            _ => (position % layer.capacity, 0),
        };
        for (part, from) in [(part, &self.keys), (part + 1, &self.values)] {
            let at = layer.offsets[part] + place * width * 2;
            self.kv.buffer().write(at, &bytes(&from[position * width..(position + 1) * width])).unwrap();
        }
    }

    /// Buffers for rows, filled; the launches.
    fn plan(&self, rows: &[(usize, Own)], kernels: Kernels) -> ([Launch; 2], Buffer) {
        let width = self.heads * self.shape.head_dim;
        self.table.set(rows).unwrap();
        let queries = self.device.allocate("queries", rows.len() * width * 2).unwrap();
        let q: Vec<bf16> = rows.iter().flat_map(|&(p, _)| &self.queries[p * width..(p + 1) * width]).copied().collect();
        queries.write(0, &bytes(&q)).unwrap();
        let out = self.device.allocate("out", rows.len() * width * 2).unwrap();
        let attention = Attention {
            queries: &queries,
            heads: self.heads,
            kv: &self.kv,
            layer: 0,
            window: self.shape.window,
            table: &self.table,
            rows: rows.len(),
            out: &out,
        };
        let mut launches = attention.launches(&self.scratch, self.device.properties().multiprocessors).unwrap();
        for (launch, kernel) in launches.iter_mut().zip(kernels) {
            launch.kernel = kernel.unwrap_or(launch.kernel);
        }
        (launches, out)
    }

    fn try_run(&self, rows: &[(usize, Own)], kernels: Kernels) -> Result<Vec<u16>, DeviceError> {
        let (launches, out) = self.plan(rows, kernels);
        for launch in &launches {
            // SAFETY: typed launches of this shape; the planted kernels take the same arguments.
            unsafe { self.device.launch(launch) }?;
        }
        let mut read = vec![0; out.bytes()];
        out.read(0, &mut read).unwrap();
        Ok(read.as_chunks::<2>().0.iter().map(|&b| u16::from_le_bytes(b)).collect())
    }

    /// Output of every row, as bits.
    fn run(&self, rows: &[(usize, Own)]) -> Vec<Vec<u16>> {
        self.run_with(rows, RIGHT)
    }

    fn run_with(&self, rows: &[(usize, Own)], kernels: Kernels) -> Vec<Vec<u16>> {
        let out = self.try_run(rows, kernels).unwrap();
        out.chunks_exact(self.heads * self.shape.head_dim).map(<[u16]>::to_vec).collect()
    }

    /// Cached positions that a row sees.
    fn seen(&self, position: usize) -> std::ops::Range<usize> {
        self.shape.window.map_or(0, |w| (position + 1).saturating_sub(w))..position
    }

    /// Output of a row in f64, and by plain f32 sums with weights and result rounded as a bf16 implementation does.
    fn references(&self, position: usize, own: Own) -> (Vec<f64>, Vec<f32>) {
        let (dim, width) = (self.shape.head_dim, self.shape.width());
        let mut exact = Vec::new();
        let mut naive = Vec::new();
        let mut positions: Vec<usize> = self.seen(position).collect();
        if own != Own::None {
            positions.push(position);
        }
        for head in 0..self.heads {
            let q = &self.queries[(position * self.heads + head) * dim..][..dim];
            let at = |p: usize| p * width + head / (self.heads / self.shape.kv_heads) * dim;
            let dot = |p: usize| q.iter().zip(&self.keys[at(p)..][..dim]);
            let scores: Vec<f64> =
                positions.iter().map(|&p| dot(p).map(|(a, b)| a.to_f64() * b.to_f64()).sum()).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let plain: Vec<f32> =
                positions.iter().map(|&p| dot(p).map(|(a, b)| a.to_f32() * b.to_f32()).sum()).collect();
            let top = plain.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let rounded: Vec<f32> = plain.iter().map(|s| bf16::from_f32((s - top).exp()).to_f32()).collect();
            let plain_sum: f32 = rounded.iter().sum();
            for d in 0..dim {
                let value = |p: usize| self.values[at(p) + d];
                exact.push(weights.iter().zip(&positions).map(|(w, &p)| w * value(p).to_f64()).sum::<f64>() / sum);
                let out: f32 = rounded.iter().zip(&positions).map(|(w, &p)| w * value(p).to_f32()).sum();
                naive.push(bf16::from_f32(out / plain_sum).to_f32());
            }
        }
        (exact, naive)
    }
}

fn worst(values: impl Iterator<Item = f32>, exact: &[f64]) -> f64 {
    values.zip(exact).map(|(v, e)| (f64::from(v) - e).abs()).fold(0.0, |a, b| if b.is_nan() { b } else { a.max(b) })
}

fn chain(begin: usize, rows: usize) -> Vec<(usize, Own)> {
    (begin..begin + rows).map(|p| (p, Own::Cached)).collect()
}

/// Heads, key/value heads, head size, window: every kernel, odd sizes, no grouping, a window shorter than a step, one of E4B's shapes each.
const SHAPES: [(usize, usize, usize, Option<usize>); 8] = [
    (4, 2, 16, Some(8)),
    (4, 1, 48, None),
    (3, 1, 80, Some(100)),
    (2, 2, 64, None),
    (8, 2, 256, Some(64)),
    (8, 2, 512, None),
    (6, 2, 128, Some(65)),
    (20, 1, 32, Some(33)),
];

/// Where steps begin: at nothing, within and at borders of tiles, chunks and windows.
const BEGINNINGS: [usize; 9] = [0, 1, 5, 31, 57, 63, 64, 120, 190];

#[test]
fn errors_are_those_of_a_plain_implementation() {
    for (heads, kv_heads, dim, window) in SHAPES {
        let case = Case::new(heads, kv_heads, dim, window, 256);
        let (mut ours, mut plain) = (0.0f64, 0.0f64);
        for begin in BEGINNINGS {
            case.cache(case.seen(begin).start..begin + 3);
            let rows = chain(begin, 3);
            for (&(position, own), out) in rows.iter().zip(case.run(&rows)) {
                let (exact, naive) = case.references(position, own);
                let error = worst(out.iter().map(|&b| bf16::from_bits(b).to_f32()), &exact);
                assert!(!error.is_nan(), "position {position} sees what it must not, or nothing");
                ours = ours.max(error);
                plain = plain.max(worst(naive.into_iter(), &exact));
            }
        }
        assert!(ours <= 2.0 * plain, "{heads} heads of {dim}: {ours:e}, plain {plain:e}");
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let order = [11, 3, 7, 0, 14, 9, 5, 1, 15, 2, 8, 13, 4, 12, 6, 10];
    for (heads, kv_heads, dim, window) in SHAPES {
        let case = Case::new(heads, kv_heads, dim, window, 256);
        // All numbers of rows where that is quick.
        let most: Vec<usize> = if dim < 128 { (1..=16).collect() } else { vec![2, 8, 16] };
        for (begin, counts) in [(57, most), (0, vec![16]), (184, vec![7])] {
            case.cache(case.seen(begin).start..begin + 16);
            let alone: Vec<_> = chain(begin, 16).iter().map(|&row| case.run(&[row]).remove(0)).collect();
            for m in counts {
                let rows: Vec<_> = order[..m].iter().map(|&i| (begin + i, Own::Cached)).collect();
                for (&i, out) in order.iter().zip(case.run(&rows)) {
                    assert_eq!(out, alone[i], "{heads} heads of {dim}, row {i} of {m} at {begin}");
                }
            }
        }
    }
}

#[test]
fn chunk_borders_at_the_base_of_the_step_show() {
    let case = Case::new(4, 1, 48, None, 256);
    case.cache(0..136);
    let planted = [Some("attention_border_at_base"), Some("combine_border_at_base")];
    let alone: Vec<_> = chain(120, 16).iter().map(|&row| case.run_with(&[row], planted).remove(0)).collect();
    assert_ne!(case.run_with(&chain(120, 16), planted), alone);
    assert_eq!(case.run(&chain(120, 16))[3], case.run(&chain(123, 1))[0]);
}

#[test]
fn an_own_key_before_rounding_shows() {
    let case = Case::new(4, 1, 48, None, 256);
    case.cache(0..28);
    let planted = [None, Some("combine_self_unrounded")];
    let alone: Vec<_> = chain(20, 8).iter().map(|&row| case.run_with(&[row], planted).remove(0)).collect();
    assert_ne!(case.run_with(&chain(20, 8), planted), alone);
}

#[test]
fn a_branch_has_the_bits_of_a_plain_row() {
    for (heads, kv_heads, dim, window) in SHAPES {
        let case = Case::new(heads, kv_heads, dim, window, 256);
        let begin = 120;
        // What a branch's position would hold as a row of the chain, decoded plainly.
        let plain: Vec<_> = (1..5)
            .map(|d| {
                case.cache(case.seen(begin).start..begin + d + 1);
                case.run(&chain(begin + d, 1)).remove(0)
            })
            .collect();
        // The step has the chain, and for each of depths 1 to 4 the same token as a branch in a side slot.
        case.cache(case.seen(begin).start..begin + 5);
        let slots = [3, 0, 15, 7];
        let mut rows = chain(begin, 5);
        for (i, slot) in slots.into_iter().enumerate() {
            case.put(begin + 1 + i, Own::Side(slot));
            rows.push((begin + 1 + i, Own::Side(slot)));
        }
        let out = case.run(&rows);
        for i in 0..4 {
            assert_eq!(out[1 + i], plain[i], "chain, depth {}", i + 1);
            assert_eq!(out[5 + i], plain[i], "branch, depth {}", i + 1);
        }
        // A branch's own key is the one in its slot, whatever the chain holds at its position.
        case.cache(case.seen(begin).start..begin + 1);
        case.put(begin + 1, Own::Side(3));
        assert_eq!(case.run(&[(begin + 1, Own::Side(3))])[0], plain[0]);
    }
}

#[test]
fn a_query_without_a_key_of_its_own_sees_the_cache_only() {
    for (window, begin) in [(Some(9), 7), (Some(9), 40), (None, 130)] {
        let case = Case::new(4, 2, 32, window, 256);
        case.cache(case.seen(begin).start..begin);
        let (exact, naive) = case.references(begin, Own::None);
        let out = case.run(&[(begin, Own::None)]).remove(0);
        let ours = worst(out.iter().map(|&b| bf16::from_bits(b).to_f32()), &exact);
        assert!(ours <= 2.0 * worst(naive.into_iter(), &exact), "{ours:e}");
    }
}

#[test]
fn any_grid_and_any_schedule_gives_the_same_bits() {
    for (heads, kv_heads, dim, window) in [(4, 2, 16, Some(40)), (8, 2, 256, Some(64)), (4, 2, 512, None)] {
        let case = Case::new(heads, kv_heads, dim, window, 256);
        case.cache(case.seen(126).start..134);
        case.put(128, Own::Side(0));
        let mut rows = chain(126, 8);
        rows.push((128, Own::Side(0)));
        let expected = case.run(&rows);
        for (i, multiprocessors) in [1, 7, 72, 80, 132].into_iter().enumerate() {
            case.emulate(Emulation { multiprocessors, ..checked(i as u64) });
            assert_eq!(case.run(&rows), expected, "{multiprocessors} multiprocessors");
        }
    }
}

#[test]
fn random_schedules_of_a_small_case_find_no_race() {
    let case = Case::new(4, 2, 32, Some(24), 128);
    case.cache(case.seen(60).start..70);
    let expected = case.run(&chain(60, 9));
    for seed in 0..20 {
        case.emulate(Emulation { multiprocessors: 3, ..checked(seed) });
        assert_eq!(case.run(&chain(60, 9)), expected, "seed {seed}");
    }
}

#[test]
fn a_missing_barrier_is_a_race() {
    let case = Case::new(4, 2, 32, Some(24), 128);
    case.cache(case.seen(60).start..70);
    case.emulate(checked(0));
    let error = case.try_run(&chain(60, 9), [Some("attention_no_barrier"), None]).unwrap_err().to_string();
    assert!(error.contains("RACE"), "{error}");
}

#[test]
fn a_bound_one_too_far_reads_the_poison() {
    let case = Case::new(4, 2, 32, None, 128);
    case.cache(0..61);
    let planted = [Some("attention_bound_too_far"), None];
    let nan = |rows: &[Vec<u16>]| rows.concat().iter().any(|&b| bf16::from_bits(b).is_nan());
    // The row's own key is counted twice; the next one is poison.
    assert_ne!(case.run_with(&chain(60, 1), planted), case.run(&chain(60, 1)));
    assert!(nan(&case.run_with(&[(61, Own::None)], planted)));
    assert!(!nan(&case.run(&[(61, Own::None)])));
}

#[test]
fn chunks_are_merged_in_the_order_of_the_table() {
    // Equal weights, and sums of values that cancel in one order only: in the other, what is small is lost beside what is large.
    let mut case = Case::new(1, 1, 16, None, 256);
    case.queries.fill(bf16::ZERO);
    for (position, value) in case.values.chunks_exact_mut(16).enumerate() {
        value.fill(bf16::from_f32(match position / 64 {
            0 => 1e10,
            1 => -1e10,
            _ => 1.0,
        }));
    }
    case.cache(0..192);
    let rows = [(192, Own::None)];
    let third = bf16::from_f32(1.0 / 3.0).to_bits();
    assert_eq!(case.run(&rows)[0], [third; 16]);
    let swapped = case.run_with(&rows, [None, Some("combine_swapped_chunks")]);
    assert_eq!(swapped[0], [0; 16]);
}

#[test]
fn a_graph_recorded_at_one_length_serves_any_other() {
    let case = Case::new(4, 2, 32, Some(70), 512);
    case.cache(0..8);
    let (launches, out) = case.plan(&chain(3, 2), RIGHT);
    let queries = match &launches[0].arguments[0] {
        kernels::device::Argument::Pointer(buffer, _) => buffer.clone(),
        _ => unreachable!(),
    };
    // SAFETY: typed launches.
    let graph = unsafe { case.device.record(launches.to_vec()) }.unwrap();
    let width = case.heads * case.shape.head_dim;
    for begin in [0, 3, 62, 69, 70, 128, 300, 510, 1] {
        case.cache(case.seen(begin).start..begin + 2);
        let expected = case.run(&chain(begin, 2)).concat();
        queries.write(0, &bytes(&case.queries[begin * width..(begin + 2) * width])).unwrap();
        out.fill(0).unwrap();
        graph.replay().unwrap();
        let mut read = vec![0; out.bytes()];
        out.read(0, &mut read).unwrap();
        let read: Vec<u16> = read.as_chunks::<2>().0.iter().map(|&b| u16::from_le_bytes(b)).collect();
        assert_eq!(read, expected, "at {begin}");
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
        let case = Case::new(1, 1, 16, window, 131_072);
        for position in positions {
            case.cache(case.seen(position).start..position + 2);
            let rows = chain(position, 2);
            let out = case.run(&rows);
            assert_eq!(out[1], case.run(&rows[1..])[0], "position {position}");
            let (exact, naive) = case.references(position, Own::Cached);
            let ours = worst(out[0].iter().map(|&b| bf16::from_bits(b).to_f32()), &exact);
            assert!(ours <= 2.0 * worst(naive.into_iter(), &exact), "position {position}: {ours:e}");
        }
    }
}

#[test]
fn keys_and_values_are_read_once_for_up_to_16_packed_rows() {
    let case = Case::new(2, 1, 64, None, 256);
    case.emulate(checked(0));
    case.cache(0..208);
    let rows = chain(200, 8);
    let (launches, _) = case.plan(&rows, RIGHT);
    // SAFETY: typed launches.
    unsafe { case.device.launch(&launches[0]) }.unwrap();
    let read = case.kv.buffer().traffic().unwrap().read;
    // The last row sees 207 positions: keys and values of 64 components.
    assert_eq!(read, 207 * 2 * 64 * 2);
}

#[test]
fn attention_that_does_not_fit_is_refused() {
    let case = Case::new(4, 2, 32, Some(24), 128);
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
    case.cache(0..0);
    let (launches, _) = case.plan(&[(0, Own::Cached), (140, Own::Cached)], RIGHT);
    // SAFETY: typed launches.
    let error = unsafe { case.device.launch(&launches[0]) }.unwrap_err();
    assert!(error.to_string().contains("trap"), "{error}");
}
