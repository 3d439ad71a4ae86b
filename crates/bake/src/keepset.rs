//! Choosing and judging the tokens that a pruned head keeps.
//!
//! A keepset must come from what the model *generates*, not from the file it is scored on: the field's 12 288-row set covers
//! every target of its perplexity file and yet loses 1 % of the tokens of the full model's own output.
//! Hence counts of generated tokens in, coverage of any other stream out.

use std::collections::BTreeMap;

use runtime::checkpoint::Keepset;
use serde::Serialize;

use crate::error::{Error, Result};

/// How often each token occurs; index is the id.
///
/// # Errors
/// [`Error::Keepset`] for an id that is not below `vocab`.
pub fn count(tokens: impl IntoIterator<Item = u32>, vocab: usize) -> Result<Vec<u64>> {
    let mut counts = vec![0; vocab];
    for id in tokens {
        match counts.get_mut(id as usize) {
            Some(c) => *c += 1,
            None => {
                return Err(Error::Keepset { reason: format!("token {id} is not below the vocabulary of {vocab}") });
            }
        }
    }
    Ok(counts)
}

/// The keepset of all tokens that occur at least `min_count` times, and of `special` ones whatever their count; ascending.
///
/// `counts` has one entry a token of the vocabulary. `min_count` 0 keeps everything.
pub fn build(counts: &[u64], min_count: u64, special: &[u32]) -> Result<Keepset> {
    let mut keep: Vec<bool> = counts.iter().map(|&c| c >= min_count).collect();
    for &id in special {
        match keep.get_mut(id as usize) {
            Some(k) => *k = true,
            None => {
                let reason = format!("special token {id} is not below the vocabulary of {}", counts.len());
                return Err(Error::Keepset { reason });
            }
        }
    }
    let ids = keep.iter().enumerate().filter(|(_, k)| **k).map(|(id, _)| id as u32).collect();
    from_ids(ids, counts.len())
}

/// A keepset of given ids, in the given order.
pub fn from_ids(ids: Vec<u32>, full_vocab: usize) -> Result<Keepset> {
    check(&ids, full_vocab)?;
    Ok(Keepset { ids, full_vocab })
}

/// The rules of a keepset: not empty, ids below the vocabulary, none twice.
pub(crate) fn check(ids: &[u32], vocab: usize) -> Result<()> {
    let refuse = |reason: String| Err(Error::Keepset { reason });
    if ids.is_empty() {
        return refuse("it keeps no token at all; lower --min-count or name special tokens".into());
    }
    let mut seen = vec![false; vocab];
    for &id in ids {
        match seen.get_mut(id as usize) {
            None => return refuse(format!("token {id} is not below the vocabulary of {vocab}")),
            Some(true) => return refuse(format!("token {id} is listed twice")),
            Some(new) => *new = true,
        }
    }
    Ok(())
}

/// How much of a token stream a keepset can produce.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Coverage {
    /// Tokens of the stream.
    pub tokens: u64,
    /// Of these, tokens with a row.
    pub covered: u64,
    /// Ids without a row and how often each occurs, most frequent first, then ascending.
    pub missing: Vec<(u32, u64)>,
}

impl Coverage {
    /// Covered share, 0 to 1; 1 for an empty stream.
    pub fn share(&self) -> f64 {
        if self.tokens == 0 { 1.0 } else { self.covered as f64 / self.tokens as f64 }
    }
}

/// Coverage of a stream. Ids outside the vocabulary count as missing.
pub fn coverage(keepset: &Keepset, tokens: impl IntoIterator<Item = u32>) -> Coverage {
    let mask = keepset.mask();
    let (mut total, mut missing) = (0, BTreeMap::<u32, u64>::new());
    for id in tokens {
        total += 1;
        if !mask.get(id as usize).copied().unwrap_or(false) {
            *missing.entry(id).or_default() += 1;
        }
    }
    let covered = total - missing.values().sum::<u64>();
    let mut missing: Vec<_> = missing.into_iter().collect();
    missing.sort_by_key(|&(id, n)| (std::cmp::Reverse(n), id));
    Coverage { tokens: total, covered, missing }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_and_special_tokens_are_kept_in_order() {
        let counts = count([5, 5, 3, 3, 3, 9, 7], 10).unwrap();
        let keep = build(&counts, 2, &[9, 0]).unwrap();
        assert_eq!(keep, Keepset { ids: vec![0, 3, 5, 9], full_vocab: 10 });
        assert_eq!(build(&counts, 0, &[]).unwrap().ids.len(), 10);
    }

    #[test]
    fn coverage_counts_every_occurrence() {
        let keep = from_ids(vec![3, 5], 10).unwrap();
        let c = coverage(&keep, [5, 5, 3, 9, 7, 9, 11, 5]);
        assert_eq!((c.tokens, c.covered), (8, 4));
        assert_eq!(c.missing, [(9, 2), (7, 1), (11, 1)]);
        assert_eq!(c.share(), 0.5);
        assert_eq!(coverage(&keep, []).share(), 1.0);
    }

    #[test]
    fn impossible_keepsets_say_why() {
        for (result, want) in [
            (build(&[0, 0], 1, &[]).err(), "no token at all"),
            (build(&[1, 1], 1, &[2]).err(), "special token 2"),
            (from_ids(vec![1, 1], 2).err(), "twice"),
            (from_ids(vec![2], 2).err(), "not below"),
            (count([2], 2).err(), "not below"),
        ] {
            let message = result.unwrap().to_string();
            assert!(message.contains(want), "{message}");
        }
    }
}
