//! Prompt look-up: what followed the last tokens the last time they occurred.
//!
//! No weights and no state: each step looks for the longest suffix (3, 2 or 1 tokens) that occurs earlier, latest occurrence first,
//! and proposes what came after it. Saxena, "Prompt Lookup Decoding" (2023).

use super::{Draft, DraftContext, Drafter};
use crate::error::Result;
use crate::speculate::Shape;

/// Longest suffix that is looked up.
const LONGEST: usize = 3;

/// Drafts from the sequence itself.
#[derive(Debug, Default)]
pub struct NgramDrafter;

impl Drafter for NgramDrafter {
    fn name(&self) -> &'static str {
        "ngram"
    }

    fn draft(&mut self, context: &DraftContext, shape: &Shape) -> Result<Draft> {
        let ranked = continuation(context.tokens, shape.depth()).iter().map(|&t| vec![t]).collect();
        Ok(Draft { ranked })
    }
}

/// At most `count` tokens that followed the latest earlier occurrence of the longest known suffix.
fn continuation(tokens: &[u32], count: usize) -> &[u32] {
    for n in (1..=LONGEST.min(tokens.len().saturating_sub(1))).rev() {
        let (earlier, suffix) = (&tokens[..tokens.len() - 1], &tokens[tokens.len() - n..]);
        if let Some(at) = earlier.windows(n).rposition(|w| w == suffix) {
            let begin = at + n;
            return &tokens[begin..tokens.len().min(begin + count)];
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_and_latest_match_wins() {
        assert_eq!(continuation(&[1, 2, 3, 9, 1, 2, 3], 2), [9, 1]);
        assert_eq!(continuation(&[1, 2, 8, 3, 2, 9, 1, 2], 1), [8]);
        assert_eq!(continuation(&[5, 6, 5, 7, 5], 3), [7, 5]);
        assert_eq!(continuation(&[1, 2, 3], 4), [0u32; 0]);
        assert_eq!(continuation(&[4], 4), [0u32; 0]);
        assert_eq!(continuation(&[4, 4], 4), [4]);
    }
}
