//! What launches cost, and that graphs hold what a decode step needs of them.

use std::time::Instant;

use super::{Check, Failure, Measurement, REPLAYS, Subject, bandwidth, median, words, wrong};
use crate::device::{Argument, Buffer, Command, Launch};

pub(super) const CHECKS: &[Check] = &[
    Check { name: "empty graph", what: "what replaying nothing costs the host", timed: true, run: empty_graph },
    Check {
        name: "kernel in a graph",
        what: "every kernel of a replayed graph runs, and what one more costs",
        timed: true,
        run: count,
    },
    Check {
        name: "boundary",
        what: "memory time lost where one kernel ends and the next begins",
        timed: true,
        run: boundary,
    },
    Check {
        name: "grid barrier",
        what: "blocks of a cooperative kernel in a graph meet, and what a meeting costs",
        timed: true,
        run: grid_barrier,
    },
    Check {
        name: "pinned ring",
        what: "a replayed graph hands words to the host without being waited for",
        timed: false,
        run: ring,
    },
];

/// The cost of one of `more - fewer` things, from the times with more and with fewer of them: what both have cancels.
fn each(what: &str, fewer: Option<Vec<f64>>, more: Option<Vec<f64>>, difference: usize) -> Vec<Measurement> {
    let (Some(fewer), Some(more)) = (fewer, more) else { return Vec::new() };
    let value = (median(&more) - median(&fewer)) * 1e3 / difference as f64;
    vec![Measurement { what: what.into(), value, unit: "us", of_peak: None, samples_ms: more }]
}

fn empty_graph(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    // SAFETY: nothing is launched.
    let graph = unsafe { subject.record::<Command>([]) }?;
    graph.replay()?;
    if subject.properties.emulated {
        return Ok(Vec::new());
    }
    let stream = subject.device.stream()?;
    let mut samples_ms = Vec::new();
    for _ in 0..REPLAYS * 10 {
        let begin = Instant::now();
        stream.replay(&graph)?;
        stream.synchronize()?;
        samples_ms.push(begin.elapsed().as_secs_f64() * 1e3);
    }
    let value = median(&samples_ms) * 1e3;
    let what = "an empty graph, replayed and waited for, by the host's clock".into();
    Ok(vec![Measurement { what, value, unit: "us", of_peak: None, samples_ms }])
}

/// y[block] += step.
fn counting(y: &Buffer, blocks: u32, step: u32) -> Launch {
    Launch {
        kernel: "probe_count",
        grid: [blocks, 1, 1],
        block: 256,
        shared_bytes: 0,
        cooperative: false,
        arguments: vec![y.at(0), Argument::U32(step)],
    }
}

fn count(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let blocks = subject.blocks(1);
    let (fewer, more) = (subject.size(100, 3), subject.size(300, 8));
    let y = subject.zeros("counts", blocks as usize * 4)?;
    let mut times = Vec::new();
    for launches in [fewer, more] {
        let commands = (1..=launches as u32).map(|step| counting(&y, blocks, step));
        // SAFETY: a word a block.
        let graph = unsafe { subject.record(commands) }?;
        y.fill(0)?;
        graph.replay()?;
        graph.replay()?;
        let expected = (launches * (launches + 1)) as u32;
        if let Some(found) = words(&y)?.into_iter().find(|&found| found != expected) {
            return wrong(format!("two replays of {launches} kernels count to {found}, not {expected}"));
        }
        times.push(subject.time("counts", &graph, &[&y])?);
    }
    let more_times = times.pop().flatten();
    Ok(each("one more small kernel in a graph", times.pop().flatten(), more_times, more - fewer))
}

fn boundary(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let pieces = subject.size(64, 4);
    let bytes = subject.size(256 << 20, 4 * 16 * 512 * 16);
    let blocks = subject.blocks(2);
    let x = bandwidth::pattern(subject, bytes)?;
    let y = subject.zeros("sums", pieces * bandwidth::sums_bytes(blocks))?;
    let mut times = Vec::new();
    let mut sums = Vec::new();
    for launches in [1, pieces] {
        let one = |i| {
            let (from, to) = (i * (bytes / launches), i * bandwidth::sums_bytes(blocks));
            bandwidth::reading(&x, from, bytes / launches, &y, to, blocks)
        };
        // SAFETY: whole vectors of x, a word of y for every thread of every launch.
        let graph = unsafe { subject.record((0..launches).map(one)) }?;
        y.fill(0)?;
        graph.replay()?;
        sums.push(words(&y)?.into_iter().fold(0, u32::wrapping_add));
        times.push(subject.time("reads in pieces", &graph, &[&y])?);
    }
    if sums[0] != sums[1] {
        return wrong(format!("{pieces} pieces sum to {:08x}, the whole to {:08x}", sums[1], sums[0]));
    }
    let in_pieces = times.pop().flatten();
    let what = format!("dead time of a boundary, from {} MiB read in 1 and in {pieces} kernels", bytes >> 20);
    Ok(each(&what, times.pop().flatten(), in_pieces, pieces - 1))
}

fn grid_barrier(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let blocks = subject.blocks(1);
    let (fewer, more) = (subject.size(100, 3), subject.size(1100, 6));
    let state = subject.zeros("state", blocks as usize * 8)?;
    let barrier = subject.zeros("barrier", 12)?;
    let mut times = Vec::new();
    for rounds in [fewer, more] {
        let launch = Launch {
            kernel: "probe_barrier",
            grid: [blocks, 1, 1],
            block: 256,
            shared_bytes: 0,
            cooperative: true,
            arguments: vec![state.at(0), barrier.at(0), Argument::I32(rounds as i32)],
        };
        // SAFETY: two words a block, and three.
        let graph = unsafe { subject.record([launch]) }?;
        times.push(subject.time("grid barriers", &graph, &[&state])?);
        let state = words(&state)?;
        let half = rounds % 2 * blocks as usize;
        if let Some(found) = state[half..][..blocks as usize].iter().find(|&&found| found != rounds as u32) {
            return wrong(format!("after {rounds} grid barriers a block has seen {found} rounds"));
        }
        if words(&barrier)?.iter().any(|&count| count != 0) {
            return wrong("a grid barrier leaves its counters behind");
        }
    }
    let more_times = times.pop().flatten();
    let what = format!("a grid barrier of {blocks} blocks in a cooperative kernel in a graph");
    Ok(each(&what, times.pop().flatten(), more_times, more - fewer))
}

fn ring(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let count = 500_u32;
    let contents: Vec<u8> = (0..count).flat_map(|i| (i * 3 + 1).to_le_bytes()).collect();
    let x = subject.device.constant("tokens", &contents)?;
    let ring = subject.device.pinned("ring", count as usize + 1)?;
    let launch = Launch {
        kernel: "probe_post",
        grid: [1, 1, 1],
        block: 32,
        shared_bytes: 0,
        cooperative: false,
        arguments: vec![x.at(0), ring.buffer().at(0), Argument::U32(count)],
    };
    // SAFETY: so many words of x, and one more of the ring.
    let graph = unsafe { subject.record([launch]) }?;
    let stream = subject.device.stream()?;
    for round in 0..subject.size(100, 2) {
        for i in 0..ring.words() {
            ring.store(i, 0)?;
        }
        stream.replay(&graph)?;
        let deadline = Instant::now();
        while ring.load(0)? == 0 {
            if deadline.elapsed().as_secs() >= 5 {
                return wrong(format!("round {round}: nothing arrives in 5 seconds"));
            }
            std::hint::spin_loop();
        }
        for i in 0..count {
            let found = ring.load(i as usize + 1)?;
            if found != i * 3 + 1 {
                return wrong(format!(
                    "round {round}: word {i} is {found} when the word in front says that all are there"
                ));
            }
        }
        stream.synchronize()?;
    }
    Ok(Vec::new())
}
