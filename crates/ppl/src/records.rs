//! Perplexity records: token sequences of which a span is scored. The schema is the field's, so that its ground-truth file
//! and ours are read by the same code.
//!
//! What always holds of a [`Record`]: `1 <= score_start < score_end <= token_ids.len()`, every id is in the vocabulary, and
//! ids are unique in a set. Position 0 (`<bos>`) has nothing before it and is never scored; neither is the context.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use crate::error::Result;
use crate::jsonl::{self, Line};

/// Fields that may hold the first scored index of the `prompt_token_ids` form, in the order in which they are looked up.
const START_FIELDS: [&str; 3] = ["score_token_start", "target_start", "score_start"];
/// The same for one past the last scored index.
const END_FIELDS: [&str; 3] = ["score_token_end", "target_end", "score_end"];

/// One sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Identifier, unique in its file.
    pub id: String,
    /// Context and target, `<bos>` first.
    pub token_ids: Vec<u32>,
    /// Indices of `token_ids` whose probability is scored.
    pub scored: Range<usize>,
}

impl Record {
    /// Number of scored tokens.
    pub fn num_tokens(&self) -> usize {
        self.scored.len()
    }
}

/// Reads a file of records. `vocab` is the model's vocabulary size, kept or not: a pruned token is a valid target, which the
/// score then reports.
///
/// Two forms of a record: `context_token_ids` and `target_token_ids`, or `prompt_token_ids` with an optional first
/// (`score_token_start`, `target_start` or `score_start`; default 1) and one past the last scored index (the same names
/// with `end`; default the length).
///
/// # Errors
/// A line, field, duplicate id or token that breaks a rule, with its file and line; a file without records.
pub fn read(path: &Path, vocab: usize) -> Result<Vec<Record>> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut records = Vec::new();
    for line in jsonl::read(path)? {
        let record = parse(&line, vocab)?;
        if let Some(first) = seen.insert(record.id.clone(), line.number) {
            return Err(line.duplicate(&record.id, first));
        }
        records.push(record);
    }
    Ok(records)
}

/// The record on one line; see [`read`].
pub fn parse(line: &Line, vocab: usize) -> Result<Record> {
    let id = line.key("id")?.ok_or_else(|| line.bad("id", "a string or a number", "nothing"))?;
    let (token_ids, scored) = if line.get("prompt_token_ids").is_some() {
        prompt_form(line, vocab)?
    } else {
        let mut ids = line.require_token_ids("context_token_ids", Some(vocab))?;
        let target = line.require_token_ids("target_token_ids", Some(vocab))?;
        if target.is_empty() {
            return Err(line.bad("target_token_ids", "at least one token to score", "an empty list"));
        }
        // Without a context the first target token is position 0, which nothing predicts.
        let start = ids.len().max(1);
        ids.extend(target);
        let end = ids.len();
        if start == end {
            return Err(line.bad(
                "target_token_ids",
                "a token after the first position, which is never scored",
                "one token without a context",
            ));
        }
        (ids, start..end)
    };
    Ok(Record { id, token_ids, scored })
}

fn prompt_form(line: &Line, vocab: usize) -> Result<(Vec<u32>, Range<usize>)> {
    // A line in both forms would be scored by one of them and misread by who meant the other.
    for field in ["context_token_ids", "target_token_ids"] {
        if line.get(field).is_some() {
            return Err(line.bad(field, "nothing beside `prompt_token_ids`", "a second form of the same record"));
        }
    }
    let ids = line.require_token_ids("prompt_token_ids", Some(vocab))?;
    let (start_field, start) = first_of(line, &START_FIELDS, 1)?;
    let (end_field, end) = first_of(line, &END_FIELDS, ids.len())?;
    if end > ids.len() {
        return Err(line.bad(end_field, format!("at most {} (the number of tokens)", ids.len()), end.to_string()));
    }
    let start = start.max(1);
    if start >= end {
        let expected = format!("an index below the end of the scored span ({end})");
        return Err(line.bad(start_field, expected, start.to_string()));
    }
    Ok((ids, start..end))
}

fn first_of(line: &Line, fields: &[&'static str; 3], default: usize) -> Result<(&'static str, usize)> {
    for field in fields {
        if let Some(value) = line.integer(field)? {
            return Ok((field, value));
        }
    }
    Ok((fields[0], default))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jsonl::tests::file;

    fn read_one(text: &str) -> Result<Record> {
        let (_dir, path) = file(text);
        read(&path, 100).map(|mut r| r.remove(0))
    }

    fn message(text: &str) -> String {
        read_one(text).unwrap_err().to_string()
    }

    #[test]
    fn context_and_target_form_scores_the_target() {
        let r = read_one(r#"{"id": "a", "context_token_ids": [2, 5, 6], "target_token_ids": [7, 99], "other": {}}"#)
            .unwrap();
        assert_eq!(r, Record { id: "a".into(), token_ids: vec![2, 5, 6, 7, 99], scored: 3..5 });
        assert_eq!(r.num_tokens(), 2);
    }

    #[test]
    fn the_first_position_is_never_scored() {
        let r = read_one(r#"{"id": 7, "context_token_ids": [], "target_token_ids": [2, 5, 6]}"#).unwrap();
        assert_eq!((r.id.as_str(), r.scored), ("7", 1..3));
        let r = read_one(r#"{"id": "a", "prompt_token_ids": [2, 5, 6], "score_start": 0}"#).unwrap();
        assert_eq!(r.scored, 1..3);
        assert!(message(r#"{"id": "a", "context_token_ids": [], "target_token_ids": [2]}"#).contains("never scored"));
        assert!(message(r#"{"id": "a", "prompt_token_ids": [2]}"#).contains("`score_token_start`"));
    }

    #[test]
    fn prompt_form_takes_its_span_from_any_of_the_names() {
        let span = |fields: &str| {
            read_one(&format!(r#"{{"id": "a", "prompt_token_ids": [2, 3, 4, 5, 6]{fields}}}"#)).map(|r| r.scored)
        };
        assert_eq!(span("").unwrap(), 1..5);
        assert_eq!(span(r#", "score_token_start": 2, "target_start": 3"#).unwrap(), 2..5);
        assert_eq!(span(r#", "target_start": 3, "target_end": 4"#).unwrap(), 3..4);
        assert_eq!(span(r#", "score_start": 4, "score_end": 5"#).unwrap(), 4..5);
        assert!(span(r#", "score_end": 6"#).unwrap_err().to_string().contains("`score_end`: expected at most 5"));
        assert!(span(r#", "score_start": 3, "score_end": 3"#).unwrap_err().to_string().contains("below the end"));
        assert!(span(r#", "score_start": 1.5"#).unwrap_err().to_string().contains("a non-negative integer, found 1.5"));
        assert!(span(r#", "target_token_ids": [1]"#).unwrap_err().to_string().contains("second form"));
    }

    #[test]
    fn bad_records_are_refused_with_their_place() {
        assert!(message(r#"{"context_token_ids": [2], "target_token_ids": [3]}"#).contains(":1: field `id`"));
        assert!(message(r#"{"id": true, "context_token_ids": [2], "target_token_ids": [3]}"#).contains("found true"));
        assert!(message(r#"{"id": "a", "context_token_ids": [2], "target_token_ids": []}"#).contains("an empty list"));
        assert!(message(r#"{"id": "a", "context_token_ids": [2]}"#).contains("`target_token_ids`: expected a list"));
        assert!(message(r#"{"id": "a", "context_token_ids": [2], "target_token_ids": [100]}"#).contains("below 100"));
        assert!(
            message(r#"{"id": "a", "context_token_ids": [true], "target_token_ids": [1]}"#)
                .contains("`context_token_ids[0]`")
        );
        let good = r#"{"id": "a", "context_token_ids": [2], "target_token_ids": [3]}"#;
        assert!(message(&format!("{good}\n\n{good}")).ends_with(":3: `a` was already used on line 1"));
    }
}
