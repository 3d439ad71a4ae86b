//! The head's rows and the tokens they stand for.

use std::collections::HashMap;

use super::{Loader, Weights};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::names;

/// Which token each row of the head stands for. A full head has a row for each; a pruned one only for the tokens of its
/// keepset, and every other token has logit minus infinity.
#[derive(Debug, PartialEq)]
pub struct HeadRows {
    vocab: usize,
    /// `None`: row r is token r.
    kept: Option<Kept>,
}

#[derive(Debug, PartialEq)]
struct Kept {
    ids: Vec<u32>,
    rows: HashMap<u32, usize>,
}

impl HeadRows {
    /// A row for every token.
    pub fn full(vocab: usize) -> HeadRows {
        HeadRows { vocab, kept: None }
    }

    /// Rows for `ids` only, in that order.
    pub fn pruned(vocab: usize, ids: Vec<u32>) -> HeadRows {
        let rows = ids.iter().enumerate().map(|(row, &id)| (id, row)).collect();
        HeadRows { vocab, kept: Some(Kept { ids, rows }) }
    }

    /// Size of the full vocabulary.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Rows of the head.
    pub fn len(&self) -> usize {
        self.kept.as_ref().map_or(self.vocab, |k| k.ids.len())
    }

    /// Whether the head has no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether some tokens have no row.
    pub fn is_pruned(&self) -> bool {
        self.kept.is_some()
    }

    /// The token of a row.
    pub fn token(&self, row: usize) -> u32 {
        self.kept.as_ref().map_or(row as u32, |k| k.ids[row])
    }

    /// The row of a token; `None` where it was pruned away or is outside the vocabulary.
    pub fn row(&self, token: u32) -> Option<usize> {
        match &self.kept {
            Some(kept) => kept.rows.get(&token).copied(),
            None => Some(token as usize).filter(|&row| row < self.vocab),
        }
    }
}

/// The untied head, if there is one, and its rows.
pub(super) fn load(loader: &Loader, checkpoint: &Checkpoint) -> Result<(Option<Weights>, HeadRows)> {
    let config = checkpoint.config();
    match (config.tie_word_embeddings, checkpoint.keepset()) {
        (true, None) => Ok((None, HeadRows::full(config.vocab_size))),
        (true, Some(_)) => Err(Error::Field {
            path: checkpoint.dir().join("config.json"),
            field: "tie_word_embeddings".into(),
            expected: "false, since the directory holds a keepset for a pruned head".into(),
            found: "true".into(),
        }),
        (false, keepset) => {
            let rows = match keepset {
                Some(k) => HeadRows::pruned(k.full_vocab, k.ids.clone()),
                None => HeadRows::full(config.vocab_size),
            };
            let head = loader.linear(names::LM_HEAD, rows.len(), config.hidden_size)?;
            Ok((Some(head), rows))
        }
    }
}
