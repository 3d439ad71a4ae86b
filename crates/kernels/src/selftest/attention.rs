//! Attention on a device as on the emulator: accurate, blind to what it must not see, and the same bits for a row in any company, on any
//! grid, as a branch, and whatever lies beyond its bounds.

use half::bf16;

use super::{
    Check, Failure, Measurement, Subject,
    cases::{
        attention::{BEGINNINGS, Case, Row, SHAPES, chain},
        worst,
    },
    wrong,
};
use crate::step::{
    Own,
    kv::{KvShape, KvStorage},
};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "attention accuracy",
        what: "errors against f64 are at most twice those of a plain bf16 implementation, with NaN beyond every bound",
        timed: false,
        run: accuracy,
    },
    Check {
        name: "attention bits",
        what: "a row of 16 has the bits that it has alone, in any order, on any grid, on every run",
        timed: false,
        run: bits,
    },
    Check {
        name: "attention branches",
        what: "a branch in a side slot has the bits of a plain row at its position",
        timed: false,
        run: branches,
    },
    Check {
        name: "attention stale",
        what: "what the cache holds beyond a row's bounds changes no bit, NaN included",
        timed: false,
        run: stale,
    },
    Check {
        name: "attention order",
        what: "chunks are merged in the order of their positions",
        timed: false,
        run: order,
    },
];

/// Positions of a context in which all borders of short chunks and windows are met.
const CONTEXT: usize = 256;
/// Of [`SHAPES`], those that a cache of int8 is tested in: each kernel, and more heads than have their scales in one piece.
const OF_INT8: [(usize, usize, usize, Option<usize>); 4] =
    [(4, 2, 16, Some(8)), (10, 5, 48, None), (8, 2, 256, Some(64)), (8, 2, 512, None)];
/// Grids that must not matter.
const GRIDS: [u32; 5] = [1, 7, 72, 80, 132];
/// Rows in no order.
const ORDER: [usize; 16] = [11, 3, 7, 0, 14, 9, 5, 1, 15, 2, 8, 13, 4, 12, 6, 10];

/// All shapes; those that take an emulator long come with fewer rows.
fn cases(subject: &Subject) -> Result<Vec<(Case, bool)>, Failure> {
    let large = |dim: usize| subject.properties.emulated && dim >= 128;
    let case = |(storage, (heads, kv_heads, dim, window))| {
        Ok((Case::with_storage(&subject.device, heads, kv_heads, dim, window, CONTEXT, storage)?, large(dim)))
    };
    let bf16 = SHAPES.iter().map(|&shape| (KvStorage::Bf16, shape));
    let int8 = OF_INT8.iter().map(|&shape| (KvStorage::Int8, shape));
    bf16.chain(int8).map(case).collect()
}

fn name(case: &Case) -> String {
    let window = case.shape.window.map_or("all positions".into(), |w| format!("a window of {w}"));
    let (KvShape { kv_heads, head_dim, .. }, storage) = (case.shape, case.kv.storage());
    format!("{} heads of {head_dim} over {kv_heads} in {window}, cached as {storage:?}", case.heads)
}

/// Compares rows with their references; errors are gathered over all rows of a case, as single ones may be next to nothing.
struct Errors {
    ours: f64,
    plain: f64,
}

impl Errors {
    fn add(&mut self, case: &Case, row: Row, out: &[u16]) -> Result<(), Failure> {
        let (exact, naive) = case.references(row);
        let error = worst(out.iter().map(|&b| bf16::from_bits(b).to_f32()), &exact);
        if error.is_nan() {
            return wrong(format!("{}: the row at {row:?} sees what it must not, or nothing", name(case)));
        }
        self.ours = self.ours.max(error);
        self.plain = self.plain.max(worst(naive, &exact));
        Ok(())
    }

    fn judge(&self, case: &Case) -> Result<(), Failure> {
        let Errors { ours, plain } = *self;
        if ours <= 2.0 * plain {
            return Ok(());
        }
        wrong(format!("{}: error {ours:e}, of a plain implementation {plain:e}", name(case)))
    }
}

fn accuracy(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    for (case, large) in cases(subject)? {
        let mut errors = Errors { ours: 0.0, plain: 0.0 };
        for begin in BEGINNINGS.into_iter().filter(|&b| !large || [0, 63, 120].contains(&b)) {
            case.cache_for(begin, 3)?;
            let rows = chain(begin, 3);
            for (&row, out) in rows.iter().zip(case.run(&rows)?) {
                errors.add(&case, row, &out)?;
            }
        }
        errors.judge(&case)?;
        // A drafter's query: no key of its own.
        case.cache(case.seen(71).start..71, 0xff)?;
        let row = (71, Own::None);
        errors.add(&case, row, &case.run(&[row])?[0])?;
        errors.judge(&case)?;
    }
    // Every kind of chunk, one head of 16: what matters is where the borders are.
    let long = [(None, 4200), (Some(512), 16_500), (None, 16_390), (None, 131_071), (Some(512), 131_060)];
    for &(window, position) in &long[..subject.size(long.len(), 2)] {
        let case = Case::new(&subject.device, 1, 1, 16, window, subject.size(131_072, 16_640))?;
        case.cache_for(position, 2)?;
        let rows = chain(position, 2);
        let out = case.run(&rows)?;
        let mut errors = Errors { ours: 0.0, plain: 0.0 };
        errors.add(&case, rows[0], &out[0])?;
        errors.judge(&case)?;
        if out[1] != case.run(&rows[1..])?[0] {
            return wrong(format!("{}: the row at {} has other bits than alone", name(&case), position + 1));
        }
    }
    Ok(Vec::new())
}

fn bits(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    for (case, large) in cases(subject)? {
        for begin in [57, 0, 184].into_iter().take(if large { 1 } else { 3 }) {
            // On the emulator one beginning meets every grid and number of rows, the others a few.
            let few = large || subject.properties.emulated && begin != 57;
            case.cache_for(begin, 16)?;
            let alone =
                |i: usize| -> Result<Vec<u16>, Failure> { Ok(case.run(&[(begin + i, Own::Cached)])?.remove(0)) };
            let alone: Vec<Option<Vec<u16>>> =
                (0..16).map(|i| (!few || i % 5 == 1).then(|| alone(i)).transpose()).collect::<Result<_, _>>()?;
            let same = |m: usize, blocks: u32| -> Result<(), Failure> {
                let rows: Vec<Row> = ORDER[..m].iter().map(|&i| (begin + i, Own::Cached)).collect();
                for (&i, out) in ORDER.iter().zip(case.run_on(&rows, blocks)?) {
                    if alone[i].as_ref().is_some_and(|alone| *alone != out) {
                        return wrong(format!(
                            "{}: the row at {} has other bits among {m} on {blocks} blocks than alone",
                            name(&case),
                            begin + i
                        ));
                    }
                }
                Ok(())
            };
            let own = subject.properties.multiprocessors;
            for m in [2, 7, 8, 9].into_iter().take(if few { 1 } else { 4 }) {
                same(m, own)?;
            }
            for grid in GRIDS.into_iter().take(if few { 2 } else { GRIDS.len() }) {
                same(16, grid)?;
            }
            for _ in 0..subject.size(100, 0) {
                same(16, own)?;
            }
        }
    }
    Ok(Vec::new())
}

fn branches(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let begin = 120;
    for (case, large) in cases(subject)? {
        let depths = if large { 2 } else { 4 };
        // What a branch's position would hold as a row of the chain, decoded plainly.
        let plain = |d: usize| -> Result<Vec<u16>, Failure> {
            case.cache_for(begin, d + 1)?;
            Ok(case.run(&chain(begin + d, 1))?.remove(0))
        };
        let plain: Vec<Vec<u16>> = (1..=depths).map(plain).collect::<Result<_, _>>()?;
        // The step has the chain, and for each depth the same token as a branch in a side slot.
        case.cache_for(begin, depths + 1)?;
        let mut rows = chain(begin, depths + 1);
        for (i, slot) in [3, 0, 15, 7].into_iter().take(depths).enumerate() {
            case.put(begin + 1 + i, Own::Side(slot))?;
            rows.push((begin + 1 + i, Own::Side(slot)));
        }
        let out = case.run(&rows)?;
        for (i, plain) in plain.iter().enumerate() {
            for (kind, place) in [("the chain's", 1 + i), ("a branch's", 1 + depths + i)] {
                if out[place] != *plain {
                    return wrong(format!(
                        "{}: {kind} row of depth {} has other bits than a plain one",
                        name(&case),
                        i + 1
                    ));
                }
            }
        }
        // A branch's own key is the one in its slot, whatever the chain holds at its position.
        case.cache_for(begin, 1)?;
        case.put(begin + 1, Own::Side(3))?;
        if case.run(&[(begin + 1, Own::Side(3))])?[0] != plain[0] {
            return wrong(format!("{}: a branch reads the chain's key instead of its own", name(&case)));
        }
    }
    Ok(Vec::new())
}

fn stale(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    for (case, large) in cases(subject)? {
        for begin in [61, 127].into_iter().take(if large { 1 } else { 2 }) {
            let mut expected = None;
            // NaN, zeros, and numbers that would show.
            for poison in [0xff, 0x00, 0x42] {
                case.cache(case.seen(begin).start..begin + 2, poison)?;
                let mut rows = chain(begin, 2);
                case.put(begin + 1, Own::Side(2))?;
                rows.push((begin + 1, Own::Side(2)));
                let mut out = case.run(&rows)?;
                out.extend(case.run(&[(begin + 2, Own::None)])?);
                if out.concat().iter().any(|&b| bf16::from_bits(b).is_nan()) {
                    return wrong(format!(
                        "{}: a row from {begin} on has summed NaN from beyond its bounds",
                        name(&case)
                    ));
                }
                let first = expected.get_or_insert_with(|| out.clone());
                if *first != out {
                    return wrong(format!(
                        "{}: bytes {poison:#x} beyond the bounds of rows from {begin} on show",
                        name(&case)
                    ));
                }
            }
        }
    }
    Ok(Vec::new())
}

fn order(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let case = Case::cancelling(&subject.device)?;
    let third = bf16::from_f32(1.0 / 3.0).to_bits();
    match case.run(&[(192, Own::None)])?[0].iter().find(|&&found| found != third) {
        Some(found) => wrong(format!("the sums of three chunks merge to {}, not a third", bf16::from_bits(*found))),
        None => Ok(Vec::new()),
    }
}
