//! `decide.cuh` on the emulator, against plain references of the same rules.

#![cfg(target_arch = "x86_64")]

use half::bf16;
use kernels::{
    device::{Buffer, Device, DeviceError, Emulation, Launch},
    step::{
        Own, StepError,
        decide::{CANDIDATES, Ended, Sequence, StepRecord, Tree},
        kv::{KvCache, KvShape},
        rows::NO_TOKEN,
    },
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

fn device(checked: bool) -> Device {
    Device::emulated(Emulation { checked, multiprocessors: 3, ..Emulation::default() }).unwrap()
}

fn run(device: &Device, launch: &Launch) -> Result<(), DeviceError> {
    // SAFETY: typed launches.
    unsafe { device.launch(launch) }
}

fn buffer(device: &Device, bytes: Vec<u8>) -> Buffer {
    let buffer = device.allocate("data", bytes.len()).unwrap();
    buffer.write(0, &bytes).unwrap();
    buffer
}

fn floats(device: &Device, values: &[f32]) -> Buffer {
    buffer(device, values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

fn ids(device: &Device, values: &[u32]) -> Buffer {
    device.constant("ids", &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()).unwrap()
}

/// A sequence, and everything that a step of it needs beside a model.
struct Case {
    device: Device,
    sequence: Sequence,
    tree: Tree,
    stops: Buffer,
    /// Tokens of the vocabulary.
    vocabulary: usize,
}

impl Case {
    fn new(branches: &[usize], context: usize, vocabulary: usize) -> Case {
        let device = device(true);
        let sequence = Sequence::new(&device, context, 4).unwrap();
        let stops = ids(&device, &[1, 3]);
        Case { sequence, tree: Tree::new(branches).unwrap(), stops, vocabulary, device }
    }

    /// One step with the choices that `choose` makes for the rows' tokens, by logits that have their peak there.
    fn step(&self, choose: impl Fn(&[u32], usize) -> u32) {
        run(&self.device, &self.sequence.place(self.tree)).unwrap();
        let rows = self.tree.rows();
        let mut bytes = vec![0; rows * 4];
        self.sequence.tokens.buffer().read(0, &mut bytes).unwrap();
        let tokens: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect();
        let mut logits = vec![-1.0; rows * self.vocabulary];
        for row in 0..rows {
            logits[row * self.vocabulary + choose(&tokens, row) as usize] = 2.0;
        }
        let logits = floats(&self.device, &logits);
        run(&self.device, &self.sequence.choose(&logits, None, rows, self.vocabulary, Some(30.0)).unwrap()).unwrap();
        run(&self.device, &self.sequence.accept(self.tree, &self.stops, 2).unwrap()).unwrap();
    }
}

/// Tokens, logits as rows, softcap: what is chosen.
fn chosen(logits: &[f32], tokens: Option<&[u32]>, kernel: Option<&'static str>) -> (u32, Option<Ended>) {
    let device = device(true);
    let sequence = Sequence::new(&device, 8, 1).unwrap();
    sequence.begin(&[5], 8).unwrap();
    let tree = Tree::new(&[]).unwrap();
    run(&device, &sequence.place(tree)).unwrap();
    let table = tokens.map(|t| ids(&device, t));
    let from = floats(&device, logits);
    let mut launch = sequence.choose(&from, table.as_ref(), 1, logits.len(), Some(30.0)).unwrap();
    launch.kernel = kernel.unwrap_or(launch.kernel);
    run(&device, &launch).unwrap();
    run(&device, &sequence.accept(tree, &ids(&device, &[0]), 0).unwrap()).unwrap();
    let record = sequence.record(0).unwrap();
    (record.output.first().copied().unwrap_or(NO_TOKEN), record.ended)
}

#[test]
fn the_best_token_is_the_largest_logit_and_among_equals_the_lowest_id() {
    let mut random = StdRng::seed_from_u64(1);
    for count in [1, 7, 255, 256, 5000] {
        let mut logits: Vec<f32> = (0..count).map(|_| random.random_range(-40.0f32..20.0)).collect();
        let best = random.random_range(0..count);
        logits[best] = 25.0;
        assert_eq!(chosen(&logits, None, None).0, best as u32);
        // The same logit again, before and after.
        let other = random.random_range(0..count);
        logits[other] = 25.0;
        assert_eq!(chosen(&logits, None, None).0, best.min(other) as u32);
        // A pruned head whose rows are in no order: the lowest token counts, not the lowest row.
        let tokens: Vec<u32> = (0..count).map(|i| 100_000 - i as u32).collect();
        assert_eq!(chosen(&logits, Some(&tokens), None).0, tokens[best.max(other)]);
    }
    assert_eq!(chosen(&[-0.0, 0.0], None, None).0, 0);
    assert_eq!(chosen(&[0.0, -0.0], None, None).0, 0);
    // What the softcap makes equal is equal.
    assert_eq!(chosen(&[900.0, 1000.0], None, None).0, 0);
    assert_eq!(chosen(&[1.0, 1.0], None, Some("best_token_highest_tie")).0, 1, "the planted mistake shows");
}

#[test]
fn a_logit_that_is_no_number_ends_the_sequence() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!(chosen(&[1.0, bad, 2.0], None, None), (NO_TOKEN, Some(Ended::BadLogits)));
    }
}

/// The rules, plainly. Returns what is output, and what is accepted.
fn reference(
    branches: &[usize],
    rows: &[u32],
    choices: &[u32],
    (base, context, room): (usize, usize, usize),
) -> (StepRecord, usize) {
    let main = branches.len();
    let usable = main.min(context - base - 1);
    let n = (0..usable).take_while(|&i| rows[1 + i] == choices[i]).count();
    let depths: Vec<usize> = branches.iter().enumerate().flat_map(|(d, &b)| vec![d + 1; b]).collect();
    let held = |b: &usize| depths[*b] == n + 1 && n < usable && rows[1 + main + b] == choices[n];
    let branch = (0..depths.len()).find(held);
    let last = branch.map_or(n, |b| 1 + main + b);
    let mut emitted = rows[1..=n].to_vec();
    emitted.push(choices[n]);
    emitted.extend(branch.map(|_| choices[last]));
    let stop = emitted.iter().position(|t| [1, 3].contains(t)).map_or(usize::MAX, |i| i + 1);
    let kept = emitted.len().min(stop).min(room);
    emitted.truncate(kept);
    let ended = match () {
        _ if kept == stop => Some(Ended::StopToken),
        _ if kept == room => Some(Ended::Length),
        _ if base + kept == context => Some(Ended::Context),
        _ => None,
    };
    let mut padded = rows.to_vec();
    padded.resize(16, 0);
    (StepRecord { output: emitted, accepted: n, branch, ended, rows: padded }, last)
}

#[test]
fn steps_accept_what_the_rules_say() {
    let mut random = StdRng::seed_from_u64(7);
    let mut salvaged = 0;
    for branches in [vec![], vec![0; 7], vec![0; 15], vec![1, 1, 1, 1, 0, 0, 0], vec![4, 2, 1], vec![2, 2, 2, 2, 1]] {
        for _ in 0..6 {
            let context = random.random_range(6..40);
            let case = Case::new(&branches, context, 9);
            let tokens: Vec<u32> = (0..random.random_range(1..6)).map(|_| random.random_range(4..9)).collect();
            let mut room = random.random_range(1..30);
            case.sequence.begin(&tokens, room).unwrap();
            let mut all = tokens.clone();
            // A language in which a token has one successor, mostly; drafts are right, mostly.
            let next = |t: u32, seed: u64| StdRng::seed_from_u64(seed * 31 + u64::from(t)).random_range(1..9u32);
            for step in 0..40 {
                let base = all.len() - 1;
                assert_eq!(case.sequence.base().unwrap(), base);
                let mut ranked: Vec<Vec<u32>> = Vec::new();
                let mut at = all[base];
                for _ in 0..branches.len() {
                    let right = next(at, step);
                    let mut candidates: Vec<u32> = (0..CANDIDATES).map(|_| random.random_range(1..9)).collect();
                    candidates[if random.random_bool(0.6) { 0 } else { 1 }] = right;
                    at = candidates[0];
                    ranked.push(candidates);
                }
                if random.random_bool(0.2) {
                    ranked.truncate(random.random_range(0..=branches.len()));
                }
                case.sequence.set_drafts(&ranked).unwrap();
                case.step(|tokens, row| next(tokens[row].min(8), step));
                let record = case.sequence.record(step as usize).unwrap();
                let rows = &record.rows[..case.tree.rows()];
                assert_eq!(rows[0], all[base]);
                let choices: Vec<u32> = rows.iter().map(|&t| next(t.min(8), step)).collect();
                let (expected, _) = reference(&branches, rows, &choices, (base, context, room));
                assert_eq!(record, expected);
                salvaged += usize::from(record.branch.is_some());
                room -= record.output.len();
                all.extend(&record.output);
                if record.ended.is_some() {
                    // Steps that were replayed ahead change nothing.
                    case.step(|_, _| 4);
                    assert_eq!(case.sequence.recorded().unwrap(), step as usize + 1);
                    assert_eq!(case.sequence.base().unwrap(), all.len() - 1);
                    break;
                }
            }
        }
    }
    assert!(salvaged > 10, "{salvaged} branches were accepted");
}

#[test]
fn a_branch_elsewhere_than_after_the_accepted_drafts_is_refused() {
    let case = Case::new(&[0, 1], 40, 9);
    let choose = |tokens: &[u32], row: usize| if row == 0 { 5 } else { tokens[row] };
    let begin = || {
        case.sequence.begin(&[4], 30).unwrap();
        // The first draft is rejected; the branch of depth 2 happens to hold the choice at depth 1.
        case.sequence.set_drafts(&[vec![6], vec![7, 5]]).unwrap();
    };
    begin();
    case.step(choose);
    let record = case.sequence.record(0).unwrap();
    assert_eq!((record.output, record.accepted, record.branch), (vec![5], 0, None));
    // Without the rule it is accepted.
    begin();
    run(&case.device, &case.sequence.place(case.tree)).unwrap();
    let mut logits = vec![0.0; 4 * 9];
    [5, 6, 7, 5].iter().enumerate().for_each(|(row, t)| logits[row * 9 + t] = 1.0);
    let logits = floats(&case.device, &logits);
    run(&case.device, &case.sequence.choose(&logits, None, 4, 9, None).unwrap()).unwrap();
    let mut launch = case.sequence.accept(case.tree, &case.stops, 2).unwrap();
    launch.kernel = "accept_any_branch";
    run(&case.device, &launch).unwrap();
    assert_eq!(case.sequence.record(0).unwrap().branch, Some(0));
}

#[test]
fn rows_are_the_newest_token_the_main_drafts_and_further_candidates() {
    let case = Case::new(&[1, 0, 2], 40, 9);
    case.sequence.begin(&[4, 4, 8], 30).unwrap();
    case.sequence.set_drafts(&[vec![5, 6], vec![7], vec![2, 8, 4, 5]]).unwrap();
    run(&case.device, &case.sequence.place(case.tree)).unwrap();
    let read = |b: &Buffer, n: usize| {
        let mut bytes = vec![0; n * 4];
        b.read(0, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|&b| i32::from_le_bytes(b)).collect::<Vec<_>>()
    };
    assert_eq!(read(case.sequence.tokens.buffer(), 7), [8, 5, 7, 2, 6, 8, 4]);
    let places = [[2, -1], [3, -1], [4, -1], [5, -1], [3, 0], [5, 1], [5, 2]];
    assert_eq!(read(case.sequence.table.buffer(), 14), places.concat());
}

#[test]
fn an_accepted_branch_moves_into_the_chain_in_every_layer() {
    let case = Case::new(&[1, 2], 40, 9);
    let shapes = [
        KvShape { kv_heads: 2, head_dim: 16, window: Some(6) },
        KvShape { kv_heads: 1, head_dim: 48, window: None },
        KvShape { kv_heads: 2, head_dim: 32, window: Some(100) },
    ];
    let kv = KvCache::new(&case.device, &shapes, 40).unwrap();
    // Every byte tells where it is.
    let all: Vec<u8> = (0..kv.buffer().bytes()).map(|i| (i * 7 % 251) as u8).collect();
    kv.buffer().write(0, &all).unwrap();
    let width = 24;
    let hidden: Vec<bf16> = (0..6 * width).map(|i| bf16::from_f32(i as f32)).collect();
    let hidden_buffer = buffer(&case.device, hidden.iter().flat_map(|v| v.to_le_bytes()).collect());
    let carried = case.device.allocate("carried", width * 2).unwrap();
    let layers = case.sequence.layer_table(&kv).unwrap();

    // Base at position 30, the first draft accepted, the second one rejected for the second branch of depth 2: slot 2, row 5.
    case.sequence.begin(&[4; 31], 30).unwrap();
    case.sequence.set_drafts(&[vec![5, 6], vec![7, 8, 2]]).unwrap();
    case.step(|_, row| [5, 2, 4, 4, 4, 6][row]);
    assert_eq!(case.sequence.record(0).unwrap().output, [5, 2, 6]);
    let settle = case.sequence.settle(case.tree, &kv, &layers, &hidden_buffer, &carried, width).unwrap();
    run(&case.device, &settle).unwrap();
    let mut expected = all.clone();
    for layer in kv.layers() {
        let bytes = layer.shape.width() * 2;
        for part in 0..2 {
            let to = layer.offsets[part] + 32 % layer.capacity * bytes;
            let from = layer.offsets[2 + part] + 2 * bytes;
            expected[to..to + bytes].copy_from_slice(&all[from..from + bytes]);
        }
    }
    let mut found = vec![0; expected.len()];
    kv.buffer().read(0, &mut found).unwrap();
    assert!(found == expected);
    let mut state = vec![0; width * 2];
    carried.read(0, &mut state).unwrap();
    assert_eq!(state, hidden[5 * width..].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());

    // Without a branch nothing moves, and the state is that of the last accepted draft.
    case.sequence.set_drafts(&[vec![5, 6], vec![7, 8, 2]]).unwrap();
    case.step(|_, row| [5, 4, 4, 4, 4, 4][row]);
    run(&case.device, &settle).unwrap();
    kv.buffer().read(0, &mut found).unwrap();
    assert!(found == expected);
    carried.read(0, &mut state).unwrap();
    assert_eq!(state, hidden[width..2 * width].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
}

/// As runtime's n-gram drafter.
fn continuation(tokens: &[u32], count: usize) -> &[u32] {
    for n in (1..=3.min(tokens.len() - 1)).rev() {
        let (earlier, suffix) = (&tokens[..tokens.len() - 1], &tokens[tokens.len() - n..]);
        if let Some(at) = earlier.windows(n).rposition(|w| w == suffix) {
            return &tokens[at + n..tokens.len().min(at + n + count)];
        }
    }
    &[]
}

#[test]
fn look_up_finds_the_longest_and_latest_match() {
    let mut random = StdRng::seed_from_u64(3);
    let device = device(true);
    let sequence = Sequence::new(&device, 2000, 1).unwrap();
    let tree = Tree::new(&[1, 0, 0, 0, 0]).unwrap();
    for _ in 0..60 {
        let (length, kinds) = (random.random_range(1..900), random.random_range(1..40));
        let tokens: Vec<u32> = (0..length).map(|_| random.random_range(0..kinds)).collect();
        sequence.begin(&tokens, 10).unwrap();
        run(&device, &sequence.look_up(tree)).unwrap();
        let mut bytes = vec![0; 5 * CANDIDATES * 4];
        sequence.drafts().read(0, &mut bytes).unwrap();
        let drafts: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect();
        let mut expected = continuation(&tokens, 5).to_vec();
        expected.resize(5, NO_TOKEN);
        let main: Vec<u32> = drafts.chunks(CANDIDATES).map(|c| c[0]).collect();
        assert_eq!(main, expected, "{tokens:?}");
        assert!(drafts.chunks(CANDIDATES).all(|c| c[1..].iter().all(|&t| t == NO_TOKEN)));
    }
}

#[test]
fn scores_are_those_of_a_softmax() {
    let device = device(true);
    let sequence = Sequence::new(&device, 8, 1).unwrap();
    let mut random = StdRng::seed_from_u64(11);
    for (count, cap) in [(1, None), (300, Some(30.0)), (70_000, Some(5.0)), (2000, None)] {
        let rows = 3;
        let logits: Vec<f32> = (0..rows * count).map(|_| random.random_range(-20.0f32..20.0)).collect();
        let targets = [(count - 1) as i32, -1, 0];
        let out = device.allocate("out", rows * 12).unwrap();
        let targets_buffer = buffer(&device, targets.iter().flat_map(|t| t.to_le_bytes()).collect());
        let from = floats(&device, &logits);
        let launch = sequence.score(&from, &targets_buffer, &out, rows, count, cap).unwrap();
        device.emulate(Emulation { checked: count < 5000, ..Emulation::default() });
        run(&device, &launch).unwrap();
        let mut bytes = vec![0; rows * 12];
        out.read(0, &mut bytes).unwrap();
        let found: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        for (row, found) in found.chunks(3).enumerate() {
            let capped = |z: f32| cap.map_or(f64::from(z), |c| f64::from(c) * (f64::from(z) / f64::from(c)).tanh());
            let values: Vec<f64> = logits[row * count..][..count].iter().map(|&z| capped(z)).collect();
            let top = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = values.iter().map(|v| (v - top).exp()).sum();
            assert!((f64::from(found[0]) - top).abs() < 1e-5 * top.abs().max(1.0));
            assert!((f64::from(found[1]) / sum - 1.0).abs() < 1e-5, "{} for {sum}", found[1]);
            let target = targets[row];
            let expected = if target < 0 { f64::NEG_INFINITY } else { values[target as usize] };
            assert!(f64::from(found[2]) == expected || (f64::from(found[2]) - expected).abs() < 1e-5 * 20.0);
        }
    }
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
    let device = device(true);
    let sequence = Sequence::new(&device, 8, 2).unwrap();
    assert!(sequence.begin(&[], 1).is_err());
    assert!(sequence.begin(&[1; 9], 1).is_err());
    assert!(matches!(sequence.record(0), Err(StepError::Shape { what: "step", .. })));
    assert!(sequence.set_drafts(&vec![vec![1]; 16]).is_err());
    let logits = floats(&device, &[0.0; 16]);
    assert!(matches!(sequence.choose(&logits, None, 2, 9, None), Err(StepError::Short { .. })));
    assert!(sequence.table.set(&[(0, Own::None)]).is_ok());
}
