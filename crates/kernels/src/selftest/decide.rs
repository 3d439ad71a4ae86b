//! What a step decides, on a device as on the emulator, against the same rules in plain words.

use half::bf16;

use super::{
    Check, Failure, Measurement, Subject,
    cases::{
        bytes16,
        decide::{Case, accepted, chosen, continuation, run},
        floats, ids, numbers, read32, words,
    },
    vectors::random,
    wrong,
};
use crate::step::{
    decide::{CANDIDATES, Ended, Sequence, Tree},
    kv::{KvCache, KvShape, KvStorage},
    rows::NO_TOKEN,
};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "decide choice",
        what: "the best token is the largest logit, among equals the lowest id, and NaN ends the sequence",
        timed: false,
        run: choice,
    },
    Check {
        name: "decide score",
        what: "log-softmax of targets is that of f64, after the softcap",
        timed: false,
        run: score,
    },
    Check {
        name: "decide steps",
        what: "whole sequences accept, salvage, stop and record what the rules say",
        timed: false,
        run: steps,
    },
    Check {
        name: "decide settle",
        what: "an accepted branch moves into the chain in every layer, and nothing else moves",
        timed: false,
        run: settle,
    },
    Check {
        name: "decide look-up",
        what: "drafts are what followed the longest and latest match",
        timed: false,
        run: look_up,
    },
];

/// Random numbers one after another: the decisions of a test sequence.
struct Dice {
    seed: u32,
    thrown: usize,
}

impl Dice {
    fn new(seed: u32) -> Dice {
        Dice { seed, thrown: 0 }
    }

    /// From `low` up to `high`, which is not among them.
    fn below(&mut self, low: usize, high: usize) -> usize {
        self.thrown += 1;
        low + random(self.seed, self.thrown) as usize % (high - low)
    }

    fn token(&mut self, low: u32, high: u32) -> u32 {
        self.below(low as usize, high as usize) as u32
    }
}

fn choice(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let device = &subject.device;
    let expect = |what: &str, logits: &[f32], tokens: Option<&[u32]>, expected: u32| {
        let found = chosen(device, logits, tokens)?;
        if found == (expected, None) {
            return Ok(());
        }
        wrong(format!("{what}, of {} logits: {found:?} is chosen, not {expected}", logits.len()))
    };
    let mut dice = Dice::new(1);
    for count in [1, 7, 255, 256, subject.size(262_144, 5000)] {
        let mut logits: Vec<f32> = numbers(count as u32, count, 20.0);
        let (best, other) = (dice.below(0, count), dice.below(0, count));
        logits[best] = 25.0;
        expect("the largest", &logits, None, best as u32)?;
        // The same logit again, before or after.
        logits[other] = 25.0;
        expect("the first of two", &logits, None, best.min(other) as u32)?;
        // A pruned head whose rows are in no order: the lowest token counts, not the lowest row.
        let tokens: Vec<u32> = (0..count).map(|i| 1_000_000 - i as u32).collect();
        expect("the lowest token of two", &logits, Some(&tokens), tokens[best.max(other)])?;
    }
    expect("zeros of both signs are equal", &[-0.0, 0.0], None, 0)?;
    expect("zeros of both signs are equal", &[0.0, -0.0], None, 0)?;
    expect("what the softcap makes equal is equal", &[900.0, 1000.0], None, 0)?;
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let found = chosen(device, &[1.0, bad, 2.0], None)?;
        if found != (NO_TOKEN, Some(Ended::BadLogits)) {
            return wrong(format!("a logit of {bad}: {found:?} instead of the sequence's end"));
        }
    }
    Ok(Vec::new())
}

fn score(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let device = &subject.device;
    let sequence = Sequence::new(device, 8, 1)?;
    let rows = 3;
    for (count, cap) in [(1, None), (300, Some(30.0)), (2000, None), (subject.size(262_144, 9000), Some(5.0))] {
        let logits = numbers(11, rows * count, 20.0);
        let targets = [(count - 1) as i32, -1, 0];
        let out = device.allocate("out", rows * 12)?;
        let of_rows = ids(device, &targets.map(|t| t as u32))?;
        run(device, &sequence.score(&floats(device, &logits)?, &of_rows, &out, rows, count, cap)?)?;
        for (row, found) in read32(&out)?.chunks_exact(3).enumerate() {
            let capped = |z: f32| cap.map_or(f64::from(z), |c| f64::from(c) * (f64::from(z) / f64::from(c)).tanh());
            let values: Vec<f64> = logits[row * count..][..count].iter().map(|&z| capped(z)).collect();
            let top = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = values.iter().map(|v| (v - top).exp()).sum();
            let target = usize::try_from(targets[row]).map_or(f64::NEG_INFINITY, |t| values[t]);
            let near = |found: f32, expected: f64, most: f64| {
                f64::from(found) == expected || (f64::from(found) - expected).abs() <= most * expected.abs().max(1.0)
            };
            if !near(found[0], top, 1e-5) || !near(found[1] / sum as f32, 1.0, 2e-5) || !near(found[2], target, 1e-5) {
                return wrong(format!("{count} logits, row {row}: {found:?} for [{top}, {sum}, {target}]"));
            }
        }
    }
    Ok(Vec::new())
}

/// A language in which a token has one successor in each step.
fn next(token: u32, step: usize) -> u32 {
    1 + random(step as u32 * 31 + token, 0) % 8
}

fn steps(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let (mut dice, mut salvaged) = (Dice::new(7), 0);
    let trees: [&[usize]; 6] = [&[], &[0; 7], &[0; 15], &[1, 1, 1, 1, 0, 0, 0], &[4, 2, 1], &[2, 2, 2, 2, 1]];
    for branches in trees {
        for _ in 0..subject.size(20, 4) {
            let context = dice.below(6, 40);
            let case = Case::new(&subject.device, branches, context, 9)?;
            let mut all: Vec<u32> = (0..dice.below(1, 6)).map(|_| dice.token(4, 9)).collect();
            let mut room = dice.below(1, 30);
            case.sequence.begin(&all, room)?;
            for step in 0..40 {
                let base = all.len() - 1;
                case.sequence.set_drafts(&drafts(&mut dice, branches.len(), all[base], step))?;
                case.step(|tokens, row| next(tokens[row].min(8), step))?;
                let record = case.sequence.record(step)?;
                let rows = &record.rows[..case.tree.rows()];
                let choices: Vec<u32> = rows.iter().map(|&t| next(t.min(8), step)).collect();
                let expected = accepted(branches, rows, &choices, (base, context, room));
                if rows[0] != all[base] || record != expected {
                    return wrong(format!("branches {branches:?}, step {step}: {record:?} for {expected:?}"));
                }
                salvaged += usize::from(record.branch.is_some());
                room -= record.output.len();
                all.extend(&record.output);
                if case.sequence.base()? != all.len() - 1 {
                    return wrong(format!(
                        "branches {branches:?}, step {step}: the state is not behind what is output"
                    ));
                }
                if record.ended.is_some() {
                    // Steps that were replayed ahead change nothing.
                    case.step(|_, _| 4)?;
                    if case.sequence.recorded()? != step + 1 || case.sequence.base()? != all.len() - 1 {
                        return wrong(format!("branches {branches:?}: a step after the end changes the state"));
                    }
                    break;
                }
            }
        }
    }
    if salvaged < 10 {
        return wrong(format!("only {salvaged} branches were accepted: the sequences do not test that"));
    }
    // A branch that holds the choice at another depth than its own is none.
    let case = Case::new(&subject.device, &[0, 1], 40, 9)?;
    case.sequence.begin(&[4], 30)?;
    case.sequence.set_drafts(&[vec![6], vec![7, 5]])?;
    case.step(|tokens, row| if row == 0 { 5 } else { tokens[row] })?;
    let record = case.sequence.record(0)?;
    if (&record.output[..], record.accepted, record.branch) != (&[5], 0, None) {
        return wrong(format!("a branch of depth 2 holds the choice at depth 1: {record:?}"));
    }
    Ok(Vec::new())
}

/// Candidates for every depth, right mostly, the main one mostly; sometimes fewer depths than there is room for.
fn drafts(dice: &mut Dice, depth: usize, newest: u32, step: usize) -> Vec<Vec<u32>> {
    let (mut ranked, mut at) = (Vec::new(), newest);
    for _ in 0..depth {
        let mut candidates: Vec<u32> = (0..CANDIDATES).map(|_| dice.token(1, 9)).collect();
        candidates[usize::from(dice.below(0, 5) > 2)] = next(at, step);
        at = candidates[0];
        ranked.push(candidates);
    }
    if dice.below(0, 5) == 0 {
        ranked.truncate(dice.below(0, depth + 1));
    }
    ranked
}

fn settle(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    settle_in(subject, KvStorage::Bf16)?;
    settle_in(subject, KvStorage::Int8)
}

fn settle_in(subject: &Subject, storage: KvStorage) -> Result<Vec<Measurement>, Failure> {
    let case = Case::new(&subject.device, &[1, 2], 40, 9)?;
    let shapes = [
        KvShape { kv_heads: 2, head_dim: 16, window: Some(6) },
        KvShape { kv_heads: 1, head_dim: 48, window: None },
        KvShape { kv_heads: 2, head_dim: 32, window: Some(100) },
    ];
    let kv = KvCache::with_storage(&case.device, &shapes, 40, storage)?;
    // Every byte tells where it is.
    let all: Vec<u8> = (0..kv.buffer().bytes()).map(|i| (i * 7 % 251) as u8).collect();
    kv.buffer().write(0, &all)?;
    let width = 24;
    let hidden: Vec<u8> = bytes16(&(0..6 * width).map(|i| bf16::from_f32(i as f32)).collect::<Vec<_>>());
    let rows = case.device.constant("hidden", &hidden)?;
    let carried = case.device.allocate("carried", width * 2)?;
    let layers = case.sequence.layer_table(&kv)?;
    let settle = case.sequence.settle(case.tree, &kv, &layers, &rows, &carried, width)?;
    let read = |buffer: &crate::device::Buffer| -> Result<Vec<u8>, Failure> {
        let mut bytes = vec![0; buffer.bytes()];
        buffer.read(0, &mut bytes)?;
        Ok(bytes)
    };
    let mut expected = all.clone();
    // Base at position 30, the first draft accepted, the second one rejected for the second branch of depth 2: slot 2, row 5.
    case.sequence.begin(&[4; 31], 30)?;
    case.sequence.set_drafts(&[vec![5, 6], vec![7, 8, 2]])?;
    case.step(|_, row| [5, 2, 4, 4, 4, 6][row])?;
    for layer in kv.layers() {
        let bytes = layer.position_bytes();
        for part in 0..2 {
            let to = layer.offsets[part] + 32 % layer.capacity * bytes;
            let from = layer.offsets[2 + part] + 2 * bytes;
            expected[to..to + bytes].copy_from_slice(&all[from..from + bytes]);
        }
    }
    run(&case.device, &settle)?;
    if read(kv.buffer())? != expected || read(&carried)? != hidden[5 * width * 2..] {
        return wrong("an accepted branch's key, value or state is not where it belongs, or another one moved");
    }
    // Without a branch nothing moves, and the state is that of the last accepted draft.
    case.sequence.set_drafts(&[vec![5, 6], vec![7, 8, 2]])?;
    case.step(|_, row| [5, 4, 4, 4, 4, 4][row])?;
    run(&case.device, &settle)?;
    if read(kv.buffer())? != expected || read(&carried)? != hidden[width * 2..2 * width * 2] {
        return wrong("without an accepted branch a key or value moved, or the state is not the last accepted row's");
    }
    Ok(Vec::new())
}

fn look_up(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let mut dice = Dice::new(3);
    let sequence = Sequence::new(&subject.device, 2000, 1)?;
    let tree = Tree::new(&[1, 0, 0, 0, 0])?;
    for _ in 0..subject.size(200, 40) {
        let (length, kinds) = (dice.below(1, 900), dice.token(1, 40));
        let tokens: Vec<u32> = (0..length).map(|_| dice.token(0, kinds)).collect();
        sequence.begin(&tokens, 10)?;
        run(&subject.device, &sequence.look_up(tree))?;
        let drafts = words(sequence.drafts())?;
        let mut expected = continuation(&tokens, 5).to_vec();
        expected.resize(5, NO_TOKEN);
        let drafts = &drafts[..5 * CANDIDATES];
        let main: Vec<u32> = drafts.iter().step_by(CANDIDATES).copied().collect();
        let others = drafts.iter().enumerate().filter(|(i, _)| i % CANDIDATES > 0);
        if main != expected || others.into_iter().any(|(_, &t)| t != NO_TOKEN) {
            return wrong(format!("after {length} tokens of {kinds} kinds: {main:?} for {expected:?}"));
        }
    }
    Ok(Vec::new())
}
