//! How fast this very device reads and copies: what every fraction of peak is a fraction of.

use super::{Check, Failure, Measurement, Subject, median, words, wrong};
use crate::device::{Argument, Buffer, Launch};

pub(super) const CHECKS: &[Check] = &[
    Check { name: "read", what: "all of a large buffer is read, and how fast", timed: true, run: read },
    Check { name: "copy", what: "all of a large buffer is copied, and how fast", timed: true, run: copy },
];

/// Word i of the contents is `i * FACTOR + SEED`.
const FACTOR: u32 = 0x9e37_79b9;
const SEED: u32 = 12_345;
/// Threads of a block of `probe_read` and `probe_copy`.
const THREADS: u32 = 512;
/// Blocks a multiprocessor that are tried: how many are best depends on the GPU.
const BLOCKS: [usize; 3] = [1, 2, 3];

/// The sum of so many words of the contents.
fn sum_of(words: u64) -> u32 {
    let pairs = if words.is_multiple_of(2) {
        (words / 2).wrapping_mul(words.wrapping_sub(1))
    } else {
        words.wrapping_mul(words.wrapping_sub(1) / 2)
    };
    (pairs as u32).wrapping_mul(FACTOR).wrapping_add((words as u32).wrapping_mul(SEED))
}

/// A buffer with the known contents.
pub(super) fn pattern(subject: &Subject, bytes: usize) -> Result<Buffer, Failure> {
    let x = subject.device.allocate("x", bytes)?;
    let launch = Launch {
        kernel: "probe_pattern",
        grid: [subject.blocks(4), 1, 1],
        block: 256,
        shared_bytes: 0,
        cooperative: false,
        arguments: vec![x.at(0), Argument::U64(bytes as u64 / 16), Argument::U32(FACTOR), Argument::U32(SEED)],
    };
    // SAFETY: x has so many vectors.
    unsafe { subject.device.launch(&launch) }?;
    Ok(x)
}

/// Reads `bytes` of `x` from `offset` on. Every thread adds what it read to its word of `y`, at `y_offset`.
pub(super) fn reading(x: &Buffer, offset: usize, bytes: usize, y: &Buffer, y_offset: usize, blocks: u32) -> Launch {
    Launch {
        kernel: "probe_read",
        grid: [blocks, 1, 1],
        block: THREADS,
        shared_bytes: 0,
        cooperative: false,
        arguments: vec![x.at(offset), y.at(y_offset), Argument::U64(bytes as u64 / 16)],
    }
}

/// Bytes of `y` for one launch of [`reading`].
pub(super) fn sums_bytes(blocks: u32) -> usize {
    (blocks * THREADS * 4) as usize
}

/// Fails where reading the whole buffer does not give the sum that its contents have.
fn verify(subject: &Subject, x: &Buffer, blocks: u32) -> Result<(), Failure> {
    let y = subject.zeros("sums", sums_bytes(blocks))?;
    // SAFETY: whole vectors of x, a word of y for every thread.
    let graph = unsafe { subject.record([reading(x, 0, x.bytes(), &y, 0, blocks)]) }?;
    let expected = sum_of(x.bytes() as u64 / 4);
    for times in 1..=2_u32 {
        graph.replay()?;
        let found = words(&y)?.into_iter().fold(0, u32::wrapping_add);
        if found != expected.wrapping_mul(times) {
            return wrong(format!(
                "{} bytes read {times} times sum to {found:08x}, not {expected:08x} each",
                x.bytes()
            ));
        }
    }
    Ok(())
}

/// A GiB, or an eighth of a smaller memory; a few KiB on the emulator, odd enough to need every loop of the kernels.
fn bytes(subject: &Subject) -> usize {
    let eighth = subject.properties.memory_bytes.unwrap_or(usize::MAX) / 8;
    subject.size(eighth.min(1 << 30), 16 * (4 * 512 * 17 + 77)) / 16 * 16
}

/// The best of several grids.
fn fastest(
    subject: &Subject,
    candidates: Vec<(u64, Vec<f64>, usize)>,
    what: &str,
) -> Result<Vec<Measurement>, Failure> {
    let best = candidates.into_iter().min_by(|a, b| median(&a.1).total_cmp(&median(&b.1)));
    let Some((bytes, samples, each)) = best else { return Ok(Vec::new()) };
    Ok(vec![subject.rate(format!("{what}, {each} blocks a multiprocessor"), bytes, samples)?])
}

fn read(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let bytes = bytes(subject);
    let x = pattern(subject, bytes)?;
    let mut candidates = Vec::new();
    for each in BLOCKS {
        let blocks = subject.blocks(each);
        verify(subject, &x, blocks)?;
        let y = subject.zeros("sums", sums_bytes(blocks))?;
        // SAFETY: as in `verify`.
        let graph = unsafe { subject.record([reading(&x, 0, bytes, &y, 0, blocks)]) }?;
        let samples = subject.time("reads", &graph, &[&y])?;
        candidates.extend(samples.map(|samples| (bytes as u64, samples, each)));
    }
    subject.read_gb_s.set(None);
    let mut measured = fastest(subject, candidates, "reads")?;
    if let Some(read) = measured.first_mut() {
        if let Some(bus) = subject.properties.bus_gb_s {
            super::within_peak("reads, by the width and clock of the bus", read.value, f64::from(bus))?;
        }
        subject.read_gb_s.set(Some(read.value));
        read.of_peak = Some(1.0);
    }
    Ok(measured)
}

fn copy(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let bytes = bytes(subject) / 32 * 16;
    let x = pattern(subject, bytes)?;
    let y = subject.device.allocate("copy", bytes)?;
    let mut candidates = Vec::new();
    for each in BLOCKS {
        let launch = Launch {
            kernel: "probe_copy",
            grid: [subject.blocks(each), 1, 1],
            block: THREADS,
            shared_bytes: 0,
            cooperative: false,
            arguments: vec![x.at(0), y.at(0), Argument::U64(bytes as u64 / 16)],
        };
        // SAFETY: both have so many vectors.
        let graph = unsafe { subject.record([launch]) }?;
        let samples = subject.time("copies", &graph, &[&y])?;
        verify(subject, &y, subject.blocks(1))?;
        candidates.extend(samples.map(|samples| (2 * bytes as u64, samples, each)));
    }
    fastest(subject, candidates, "copies, reads and writes counted")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_the_contents_is_known() {
        for words in [0, 1, 2, 3, 4, 1000, 1003, 70_001] {
            let added =
                (0..words).fold(0_u32, |sum, i| sum.wrapping_add((i as u32).wrapping_mul(FACTOR).wrapping_add(SEED)));
            assert_eq!(sum_of(words), added, "{words}");
        }
    }
}
