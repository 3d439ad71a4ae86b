//! Chunks of the key sequence.
//!
//! `out(r) = merge(chunks of [0, p(r)) in table order; self term of r)`. Chunk borders are *absolute positions*, never a
//! function of the length, of the step's base or of the number of rows, so that a row at position p folds the same sums in
//! the same order whether it is computed alone, in a chain, or as the last row of a long prefill.

use std::ops::Range;

/// Chunk length below [`MEDIUM_FROM`].
const SHORT: usize = 64;
/// First position of the medium chunks.
const MEDIUM_FROM: usize = 4096;
/// Chunk length from [`MEDIUM_FROM`] on.
const MEDIUM: usize = 256;
/// First position of the long chunks.
const LONG_FROM: usize = 16384;
/// Chunk length from [`LONG_FROM`] on.
const LONG: usize = 1024;

/// The end of the chunk that holds `position`.
pub fn chunk_end(position: usize) -> usize {
    let length = match position {
        p if p < MEDIUM_FROM => SHORT,
        p if p < LONG_FROM => MEDIUM,
        _ => LONG,
    };
    (position / length + 1) * length
}

/// How many chunks end at or before `position`: the number of the chunk that holds it.
pub fn chunk_index(position: usize) -> usize {
    let (short, medium) = (MEDIUM_FROM / SHORT, (LONG_FROM - MEDIUM_FROM) / MEDIUM);
    match position {
        p if p < MEDIUM_FROM => p / SHORT,
        p if p < LONG_FROM => short + (p - MEDIUM_FROM) / MEDIUM,
        p => short + medium + (p - LONG_FROM) / LONG,
    }
}

/// The pieces of `keys` between chunk borders, in order. Pieces at the ends may be partial; none is empty.
pub fn chunks(keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut at = keys.start;
    std::iter::from_fn(move || {
        let begin = at;
        at = chunk_end(begin).min(keys.end);
        (begin < keys.end).then_some(begin..at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borders_are_absolute() {
        assert_eq!(chunks(0..130).collect::<Vec<_>>(), [0..64, 64..128, 128..130]);
        assert_eq!(chunks(70..130).collect::<Vec<_>>(), [70..128, 128..130]);
        assert_eq!(chunks(4090..4360).collect::<Vec<_>>(), [4090..4096, 4096..4352, 4352..4360]);
        assert_eq!(chunks(16300..17500).collect::<Vec<_>>(), [16300..16384, 16384..17408, 17408..17500]);
        assert_eq!(chunks(5..5).count(), 0);
    }

    #[test]
    fn chunks_are_numbered_in_order() {
        for (number, chunk) in chunks(0..140_000).enumerate() {
            assert_eq!((chunk_index(chunk.start), chunk_index(chunk.end - 1)), (number, number));
        }
    }

    #[test]
    fn longer_contexts_only_append() {
        let long: Vec<_> = chunks(0..20_000).collect();
        for end in [1, 63, 64, 65, 4095, 4096, 4097, 16384, 19_999] {
            let short: Vec<_> = chunks(0..end).collect();
            assert_eq!(short[..short.len() - 1], long[..short.len() - 1]);
        }
    }
}
