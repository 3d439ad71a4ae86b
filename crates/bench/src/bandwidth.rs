//! Read bandwidth of this machine's memory: all cores sum a buffer that no cache holds, and the fastest round counts, since other work
//! only ever takes bandwidth away.

use std::hint::black_box;
use std::time::Instant;

use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::roofline::Bandwidth;

/// Bytes that are summed; the largest caches of a socket hold a third of it.
const BYTES: usize = 1 << 30;
/// Rounds, the first of which only brings the pages in.
const ROUNDS: usize = 6;

/// Measures; takes about a second and a gigabyte of memory.
///
/// # Errors
/// [`Error::Refused`] where that memory is not there.
pub fn measure() -> Result<Bandwidth> {
    let environment = Environment::capture();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut buffer: Vec<u64> = Vec::new();
    buffer.try_reserve_exact(BYTES / 8).map_err(|e| {
        let reason =
            format!("measuring the bandwidth needs {BYTES} bytes of memory: {e}; name a device with --device instead");
        Error::Refused { reason }
    })?;
    buffer.resize(BYTES / 8, 1);
    let gb_s = (0..ROUNDS).map(|_| round(&buffer, threads)).skip(1).fold(0.0, f64::max);
    Ok(Bandwidth {
        device: environment.machine(),
        nominal: None,
        read: Some(gb_s),
        copy: None,
        source: format!("measured here: the fastest of {} sums over {BYTES} bytes, {threads} threads", ROUNDS - 1),
    })
}

/// GB/s of one pass over the buffer.
fn round(buffer: &[u64], threads: usize) -> f64 {
    let started = Instant::now();
    std::thread::scope(|scope| {
        for part in buffer.chunks(buffer.len().div_ceil(threads)) {
            scope.spawn(move || {
                // Independent sums, so that the loop is bound by memory and not by the latency of an addition.
                let sums = part.chunks_exact(16).fold([0u64; 16], |mut sums, values| {
                    sums.iter_mut().zip(values).for_each(|(s, v)| *s = s.wrapping_add(*v));
                    sums
                });
                black_box(sums);
            });
        }
    });
    std::mem::size_of_val(buffer) as f64 / started.elapsed().as_secs_f64() / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read_by_some_thread() {
        // A tenth of a GB/s to ten TB/s: no machine is outside.
        let gb_s = round(&vec![1; 1 << 20], 3);
        assert!((0.1..10_000.0).contains(&gb_s), "{gb_s}");
    }
}
