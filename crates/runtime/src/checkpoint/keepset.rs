//! The keepset of a pruned head: which token each row of `lm_head` stands for.
//!
//! The field's convention is a side file `pck04_keepset.json`, `{"keep_ids": [...], "full_vocab": V}` (`vocab_size` in older
//! files). Row r of the head belongs to token `keep_ids[r]`; every other token has logit minus infinity.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};
use crate::files;

/// Name of the side file.
pub const KEEPSET_FILE: &str = "pck04_keepset.json";

/// No vocabulary is larger; a file that claims more would only cost memory.
const VOCAB_LIMIT: u64 = 1 << 24;

/// A checked keepset.
#[derive(Debug, Clone, PartialEq)]
pub struct Keepset {
    /// Token id of every head row, in row order, without repetition.
    pub ids: Vec<u32>,
    /// Size of the vocabulary that the ids come from.
    pub full_vocab: usize,
}

impl Keepset {
    /// Reads and checks a keepset file.
    pub fn read(path: &Path) -> Result<Keepset> {
        Keepset::from_json(&files::read_json(path)?, path)
    }

    /// A keepset from the bytes of a file; `path` is for messages.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Keepset> {
        let json = serde_json::from_slice(bytes).map_err(|source| Error::Json { path: path.to_path_buf(), source })?;
        Keepset::from_json(&json, path)
    }

    fn from_json(json: &Value, path: &Path) -> Result<Keepset> {
        let full_vocab = json.get("full_vocab").or_else(|| json.get("vocab_size"));
        let full_vocab = match full_vocab.and_then(Value::as_u64) {
            Some(v) if v > 0 && v <= VOCAB_LIMIT => v as usize,
            _ => {
                return Err(field(path, "full_vocab", "the vocabulary size, a positive integer", full_vocab));
            }
        };
        let list = json.get("keep_ids");
        let Some(list) = list.and_then(Value::as_array) else {
            return Err(field(path, "keep_ids", "a list of token ids", list));
        };
        let mut ids = Vec::with_capacity(list.len());
        let mut seen = HashSet::new();
        for (i, value) in list.iter().enumerate() {
            let id = value.as_u64().filter(|&id| id < full_vocab as u64);
            let Some(id) = id else {
                let expected = format!("a token id below {full_vocab}");
                return Err(field(path, &format!("keep_ids[{i}]"), &expected, Some(value)));
            };
            if !seen.insert(id) {
                return Err(field(path, &format!("keep_ids[{i}]"), "every id once", Some(value)));
            }
            ids.push(id as u32);
        }
        if ids.is_empty() {
            return Err(field(path, "keep_ids", "at least one token id", Some(&Value::Array(vec![]))));
        }
        Ok(Keepset { ids, full_vocab })
    }

    /// Whether a token has a row.
    pub fn mask(&self) -> Vec<bool> {
        let mut mask = vec![false; self.full_vocab];
        for &id in &self.ids {
            mask[id as usize] = true;
        }
        mask
    }
}

fn field(path: &Path, field: &str, expected: &str, found: Option<&Value>) -> Error {
    let found = match found {
        None => "nothing".into(),
        Some(Value::Array(a)) if a.is_empty() => "an empty list".into(),
        Some(v) => v.to_string().chars().take(80).collect(),
    };
    Error::Field { path: PathBuf::from(path), field: field.into(), expected: expected.into(), found }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Keepset> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(KEEPSET_FILE);
        std::fs::write(&path, text).unwrap();
        Keepset::read(&path)
    }

    #[test]
    fn both_spellings_are_read() {
        let new = read(r#"{"keep_ids":[3,1],"full_vocab":5}"#).unwrap();
        assert_eq!(new, read(r#"{"keep_ids":[3,1],"vocab_size":5}"#).unwrap());
        assert_eq!(new.mask(), [false, true, false, true, false]);
    }

    #[test]
    fn bad_keepsets_name_the_entry() {
        for (text, want) in [
            (r#"{"keep_ids":[1]}"#, "full_vocab"),
            (r#"{"keep_ids":[1],"full_vocab":0}"#, "full_vocab"),
            (r#"{"full_vocab":4}"#, "keep_ids"),
            (r#"{"keep_ids":[],"full_vocab":4}"#, "empty"),
            (r#"{"keep_ids":[1,4],"full_vocab":4}"#, "keep_ids[1]"),
            (r#"{"keep_ids":[1,1],"full_vocab":4}"#, "every id once"),
            (r#"{"keep_ids":[-1],"full_vocab":4}"#, "keep_ids[0]"),
            (r#"{"keep_ids":["a"],"full_vocab":4}"#, "keep_ids[0]"),
            (r#"{"keep_ids":[1"#, "JSON"),
        ] {
            let message = read(text).unwrap_err().to_string();
            assert!(message.contains(want), "{text}: {message}");
        }
    }
}
