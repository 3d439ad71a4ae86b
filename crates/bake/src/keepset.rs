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

/// Which tokens to keep beside those that always stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Tokens that occur at least this often; 0 admits all.
    pub min_count: u64,
    /// Tokens in total, those always kept included; `None` for as many as there are.
    pub size: Option<usize>,
}

/// A keepset from counts (one entry a token of the vocabulary), ascending. `always` is kept whatever its count; then come the
/// most frequent tokens, of equals the lowest id, which byte-pair vocabularies give to the commonest pieces.
///
/// # Errors
/// [`Error::Keepset`] where `size` is below the number of tokens always kept, or not enough tokens occur to fill it.
pub fn choose(counts: &[u64], choice: Choice, always: &[u32]) -> Result<Keepset> {
    let refuse = |reason: String| Err(Error::Keepset { reason });
    let mut keep = vec![false; counts.len()];
    for &id in always {
        match keep.get_mut(id as usize) {
            Some(k) => *k = true,
            None => return refuse(format!("special token {id} is not below the vocabulary of {}", counts.len())),
        }
    }
    let fixed = keep.iter().filter(|k| **k).count();
    let mut others: Vec<usize> = (0..counts.len()).filter(|&id| !keep[id] && counts[id] >= choice.min_count).collect();
    if let Some(size) = choice.size {
        if size < fixed {
            return refuse(format!("a size of {size} has no room for the {fixed} tokens that are always kept"));
        }
        if others.len() < size - fixed {
            let found = fixed + others.len();
            return refuse(format!(
                "a size of {size} cannot be filled: only {found} tokens are kept or occur often enough"
            ));
        }
        others.sort_by_key(|&id| (std::cmp::Reverse(counts[id]), id));
        others.truncate(size - fixed);
    }
    others.into_iter().for_each(|id| keep[id] = true);
    let ids = keep.iter().enumerate().filter(|(_, k)| **k).map(|(id, _)| id as u32).collect();
    from_ids(ids, counts.len())
}

/// [`choose`] by count alone.
pub fn build(counts: &[u64], min_count: u64, special: &[u32]) -> Result<Keepset> {
    choose(counts, Choice { min_count, size: None }, special)
}

/// A keepset with the tokens `more` appended that it lacks, in their order. Rows that were there keep their place.
pub fn with(keepset: &Keepset, more: &[u32]) -> Result<Keepset> {
    let mask = keepset.mask();
    let lacking = more.iter().filter(|&&id| !mask.get(id as usize).copied().unwrap_or(false));
    from_ids(keepset.ids.iter().chain(lacking).copied().collect(), keepset.full_vocab)
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
    /// Texts of the stream.
    pub records: usize,
    /// Of these, texts with a token that has no row: what they say changes.
    pub records_changed: usize,
    /// Ids without a row and how often each occurs, most frequent first, then ascending.
    pub missing: Vec<(u32, u64)>,
}

impl Coverage {
    /// Covered share, 0 to 1; 1 for an empty stream.
    pub fn share(&self) -> f64 {
        if self.tokens == 0 { 1.0 } else { self.covered as f64 / self.tokens as f64 }
    }
}

/// Coverage of a stream, as one text. Ids outside the vocabulary count as missing.
pub fn coverage(keepset: &Keepset, tokens: impl IntoIterator<Item = u32>) -> Coverage {
    coverage_by_record(keepset, &[tokens.into_iter().collect()])
}

/// Coverage of several texts.
pub fn coverage_by_record(keepset: &Keepset, records: &[Vec<u32>]) -> Coverage {
    let mask = keepset.mask();
    let has_row = |id: u32| mask.get(id as usize).copied().unwrap_or(false);
    let (mut tokens, mut records_changed, mut missing) = (0, 0, BTreeMap::<u32, u64>::new());
    for record in records {
        tokens += record.len() as u64;
        let lost = record.iter().filter(|id| !has_row(**id));
        records_changed += usize::from(lost.clone().count() > 0);
        lost.for_each(|id| *missing.entry(*id).or_default() += 1);
    }
    let covered = tokens - missing.values().sum::<u64>();
    let mut missing: Vec<_> = missing.into_iter().collect();
    missing.sort_by_key(|&(id, n)| (std::cmp::Reverse(n), id));
    Coverage { tokens, covered, records: records.len(), records_changed, missing }
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
    fn a_size_is_filled_by_frequency_and_then_by_id() {
        let counts = count([5, 5, 3, 3, 3, 9, 7], 10).unwrap();
        let ids = |size, min_count| choose(&counts, Choice { min_count, size: Some(size) }, &[8, 0]).map(|k| k.ids);
        assert_eq!(ids(2, 0).unwrap(), [0, 8]);
        assert_eq!(ids(4, 0).unwrap(), [0, 3, 5, 8]);
        // 7 and 9 occur once each, the lower comes first; then those that never occur.
        assert_eq!(ids(5, 0).unwrap(), [0, 3, 5, 7, 8]);
        assert_eq!(ids(8, 0).unwrap(), [0, 1, 2, 3, 5, 7, 8, 9]);
        assert!(ids(1, 0).unwrap_err().to_string().contains("no room for the 2 tokens"));
        assert!(ids(7, 1).unwrap_err().to_string().contains("only 6 tokens"));
        assert_eq!(ids(6, 1).unwrap(), [0, 3, 5, 7, 8, 9]);
    }

    #[test]
    fn rows_keep_their_place_when_tokens_are_added() {
        let keep = from_ids(vec![7, 3], 10).unwrap();
        assert_eq!(with(&keep, &[3, 9, 1]).unwrap().ids, [7, 3, 9, 1]);
        assert!(with(&keep, &[10]).is_err());
    }

    #[test]
    fn texts_that_change_are_counted() {
        let keep = from_ids(vec![3, 5], 10).unwrap();
        let c = coverage_by_record(&keep, &[vec![3, 5], vec![9, 9, 3], vec![], vec![7]]);
        assert_eq!((c.tokens, c.covered, c.records, c.records_changed), (6, 3, 4, 2));
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
