//! The drafter's passes on a device as on the emulator: those of f64, and the same bits by a kernel a phase and by one persistent kernel, on
//! any grid.

use super::{Check, Failure, Measurement, Subject, cases::draft::Case, wrong};
use crate::step::{decide::CANDIDATES, draft::Format, kv::KvStorage};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "draft accuracy",
        what: "drafts and states of several passes are those of f64, with bf16 weights and with int8 ones",
        timed: false,
        run: accuracy,
    },
    Check {
        name: "draft persistent",
        what: "one cooperative kernel of all passes has the bits of a kernel a phase, on any grid, on every run",
        timed: false,
        run: persistent,
    },
];

/// Queries and weights of the softmax are bf16: logits closer than this may change places.
const CLOSE: f64 = 0.05;

fn accuracy(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let blocks = subject.properties.emulated.then_some(3);
    let (bf16, int8) = (KvStorage::Bf16, KvStorage::Int8);
    for (length, back, clustered, storage) in [
        (2, 0, true, bf16),
        (19, 1, false, bf16),
        (22, 0, true, bf16),
        (70, 0, true, bf16),
        (150, 1, true, bf16),
        (70, 0, true, int8),
    ] {
        let case = Case::cached_as(&subject.device, length, storage)?;
        let drafter = case.drafter(back, clustered, Format::Bf16)?;
        let depth = 3;
        let (drafts, state) = case.by_phases(&drafter, depth, blocks)?;
        let (mut token, mut exact) = (case.newest()?, case.state());
        for (d, candidates) in drafts.chunks_exact(CANDIDATES).enumerate() {
            let (ranked, next) = case.reference(token, &exact, back, clustered);
            for (i, draft) in candidates.iter().enumerate() {
                let found = ranked.iter().find(|r| r.0 == *draft);
                if !found.is_some_and(|found| (found.1 - ranked[i].1).abs() < CLOSE) {
                    return wrong(format!(
                        "behind {length} tokens, depth {d}: {draft} as number {i}; in f64 {:?}",
                        &ranked[..5]
                    ));
                }
            }
            token = candidates[0];
            exact = next;
        }
        let spread = exact.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
        for (found, expected) in state.iter().map(|&b| f64::from(f32::from_bits(b))).zip(&exact) {
            if found.is_nan() || (found - expected).abs() > 0.02 * spread {
                return wrong(format!("behind {length} tokens: {found} in the state, in f64 {expected}"));
            }
        }
    }
    let case = Case::new(&subject.device, 60)?;
    let (_, exact) = case.reference(case.newest()?, &case.state(), 0, true);
    let spread = exact.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
    let (_, state) = case.by_phases(&case.drafter(0, true, Format::Int8)?, 1, blocks)?;
    let errors = state.iter().zip(&exact).map(|(&b, e)| (f64::from(f32::from_bits(b)) - e).abs());
    let error = errors.fold(0.0, |most: f64, e| if most.is_nan() || e.is_nan() { f64::NAN } else { most.max(e) });
    if error.is_nan() || error > 0.1 * spread {
        return wrong(format!("int8 weights: an error of {error} in a state up to {spread}"));
    }
    Ok(Vec::new())
}

fn persistent(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let all = subject.properties.multiprocessors;
    let grids: Vec<u32> =
        if subject.properties.emulated { vec![1, 3, 8] } else { vec![1, 2, 7, all.min(72), all.min(80), all] };
    for (length, clustered, format, storage) in [
        (70, true, Format::Bf16, KvStorage::Bf16),
        (70, true, Format::Int8, KvStorage::Bf16),
        (9, false, Format::Bf16, KvStorage::Bf16),
        (70, true, Format::Bf16, KvStorage::Int8),
        (30, true, Format::Int8, KvStorage::Int8),
    ] {
        let case = Case::cached_as(&subject.device, length, storage)?;
        let drafter = case.drafter(0, clustered, format)?;
        let depth = subject.size(7, 2);
        let expected = case.by_phases(&drafter, depth, Some(grids[1]))?;
        for &blocks in &grids {
            for run in 0..subject.size(20, 1) {
                let found = case.persistent(&drafter, depth, Some(blocks))?;
                if found != expected {
                    return wrong(format!(
                        "{format:?} weights behind {length} tokens, {blocks} blocks, run {run}: one kernel drafts {:?}, a kernel a phase {:?}, \
                         or the states differ",
                        found.0, expected.0
                    ));
                }
            }
            if case.by_phases(&drafter, depth, Some(blocks))? != expected {
                return wrong(format!("{format:?} weights behind {length} tokens: {blocks} blocks have other bits"));
            }
        }
    }
    Ok(Vec::new())
}
