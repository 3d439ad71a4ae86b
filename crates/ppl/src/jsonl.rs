//! Reading JSON objects, one a line, with errors that name file, line and field.
//!
//! The checks are strict where a mistake would silently change a result: a token id is a JSON integer, never `true`, never
//! `3.0`, never negative. Fields that nobody asks for are ignored, since the field's files carry many.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Largest file read. The largest real one (128 generations of 512 tokens with their texts) has 2 MB.
const FILE_LIMIT: u64 = 1 << 30;

/// One line of a file.
#[derive(Debug)]
pub struct Line {
    path: PathBuf,
    /// Line number, from 1.
    pub number: usize,
    /// The object on it.
    pub object: Map<String, Value>,
}

/// The whole of a regular file as text. A directory, pipe or device is refused before it is opened, since reading one may
/// never end.
pub fn read_text(path: &Path) -> Result<String> {
    let meta = std::fs::metadata(path).map_err(Error::io(path, "open"))?;
    if !meta.is_file() {
        let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
        return Err(Error::Io { path: path.to_path_buf(), action: "read", source });
    }
    if meta.len() > FILE_LIMIT {
        return Err(Error::TooLarge { path: path.to_path_buf(), found: meta.len(), limit: FILE_LIMIT });
    }
    let bytes = std::fs::read(path).map_err(Error::io(path, "read"))?;
    String::from_utf8(bytes).map_err(|e| {
        let good = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = good.iter().filter(|&&b| b == b'\n').count() + 1;
        Error::Line { path: path.to_path_buf(), line, reason: "not valid UTF-8".into() }
    })
}

/// Every object of a file, in order. Blank lines are skipped; a file without any object is [`Error::Empty`].
pub fn read(path: &Path) -> Result<Vec<Line>> {
    parse(path, &read_text(path)?)
}

/// [`read`] of a file whose text the caller has; `path` is for messages.
pub fn parse(path: &Path, text: &str) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    for (index, text) in text.lines().enumerate().filter(|(_, t)| !t.trim().is_empty()) {
        let number = index + 1;
        let bad = |reason: String| Error::Line { path: path.to_path_buf(), line: number, reason };
        let value: Value = serde_json::from_str(text).map_err(|e| bad(format!("not valid JSON: {e}")))?;
        let Value::Object(object) = value else {
            return Err(bad(format!("expected a JSON object, found {}", describe(&value))));
        };
        lines.push(Line { path: path.to_path_buf(), number, object });
    }
    if lines.is_empty() { Err(Error::Empty { path: path.to_path_buf() }) } else { Ok(lines) }
}

impl Line {
    /// The value of a field; `null` counts as absent, as in the tools that write these files.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.object.get(field).filter(|v| !v.is_null())
    }

    /// The error for a field of this line.
    pub fn bad(&self, field: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::Field {
            path: self.path.clone(),
            line: self.number,
            field: field.into(),
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// The error for a key that an earlier line used.
    pub fn duplicate(&self, key: &str, first_line: usize) -> Error {
        Error::Duplicate { path: self.path.clone(), line: self.number, key: key.to_string(), first_line }
    }

    /// An identifier as text: a string, or a number in its JSON spelling.
    pub fn key(&self, field: &str) -> Result<Option<String>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s.clone())),
            Some(Value::Number(n)) => Ok(Some(n.to_string())),
            Some(other) => Err(self.bad(field, "a string or a number", describe(other))),
        }
    }

    /// A text field that may be absent.
    pub fn text(&self, field: &str) -> Result<Option<&str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.bad(field, "a string", describe(other))),
        }
    }

    /// A non-negative integer that may be absent.
    pub fn integer(&self, field: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let integer = value.as_u64().and_then(|n| usize::try_from(n).ok());
        integer.map(Some).ok_or_else(|| self.bad(field, "a non-negative integer", describe(value)))
    }

    /// A list of token ids that may be absent. `vocab` is the exclusive upper bound, where one is known.
    pub fn token_ids(&self, field: &str, vocab: Option<usize>) -> Result<Option<Vec<u32>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let Value::Array(items) = value else {
            return Err(self.bad(field, "a list of token ids", describe(value)));
        };
        let mut ids = Vec::with_capacity(items.len());
        for (i, item) in items.iter().enumerate() {
            let id = item.as_u64().and_then(|n| u32::try_from(n).ok());
            let id = id.ok_or_else(|| self.bad(format!("{field}[{i}]"), "a token id", describe(item)))?;
            if let Some(vocab) = vocab.filter(|&v| id as usize >= v) {
                let expected = format!("a token id below {vocab} (the size of the vocabulary)");
                return Err(self.bad(format!("{field}[{i}]"), expected, id.to_string()));
            }
            ids.push(id);
        }
        Ok(Some(ids))
    }

    /// [`Line::token_ids`] of a field that must exist.
    pub fn require_token_ids(&self, field: &str, vocab: Option<usize>) -> Result<Vec<u32>> {
        self.token_ids(field, vocab)?.ok_or_else(|| self.bad(field, "a list of token ids", "nothing"))
    }
}

/// A JSON value for messages: its spelling where short, its type where not.
pub fn describe(value: &Value) -> String {
    match value {
        Value::Array(a) => format!("a list of {}", a.len()),
        Value::Object(_) => "an object".into(),
        Value::String(s) if s.len() > 40 => "a long string".into(),
        other => other.to_string(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A file with the given contents, and the directory that keeps it alive.
    pub(crate) fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("records.jsonl");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[test]
    fn blank_lines_are_skipped_and_line_numbers_are_those_of_the_file() {
        let (_dir, path) = file("{\"id\": 1}\r\n\n  \n{\"id\": \"b\"}");
        let lines = read(&path).unwrap();
        assert_eq!(lines.iter().map(|l| l.number).collect::<Vec<_>>(), [1, 4]);
        assert_eq!(lines[0].key("id").unwrap().unwrap(), "1");
    }

    #[test]
    fn a_bad_line_is_named() {
        let (_dir, path) = file("{}\n{\"id\": ");
        assert!(read(&path).unwrap_err().to_string().contains("records.jsonl:2: not valid JSON"));
        let (_dir, path) = file("{}\n[1]\n");
        assert!(
            read(&path)
                .unwrap_err()
                .to_string()
                .ends_with("records.jsonl:2: expected a JSON object, found a list of 1")
        );
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("latin1");
        std::fs::write(&path, b"{}\n\"\xe4\"").unwrap();
        assert!(read(&path).unwrap_err().to_string().ends_with("latin1:2: not valid UTF-8"));
    }

    #[test]
    fn empty_files_directories_and_missing_files_are_refused() {
        let (dir, path) = file("\n\n");
        assert!(matches!(read(&path), Err(Error::Empty { .. })));
        assert!(read(dir.path()).unwrap_err().to_string().contains("not a regular file"));
        assert!(matches!(read(&dir.path().join("absent")), Err(Error::Io { action: "open", .. })));
    }

    #[test]
    fn only_integers_are_token_ids() {
        for bad in ["true", "1.0", "-1", "\"7\"", "null", "4294967296", "[1]"] {
            let (_dir, path) = file(&format!("{{\"t\": [3, {bad}]}}"));
            let message = read(&path).unwrap()[0].token_ids("t", None).unwrap_err().to_string();
            assert!(message.contains("records.jsonl:1: field `t[1]`: expected a token id, found"), "{bad}: {message}");
        }
        let (_dir, path) = file("{\"t\": [3, 9], \"u\": 3}");
        let line = &read(&path).unwrap()[0];
        assert_eq!(line.token_ids("t", Some(10)).unwrap().unwrap(), [3, 9]);
        assert!(line.token_ids("t", Some(9)).unwrap_err().to_string().contains("`t[1]`: expected a token id below 9"));
        assert!(line.token_ids("u", None).unwrap_err().to_string().contains("expected a list of token ids, found 3"));
        assert!(line.token_ids("absent", None).unwrap().is_none());
    }
}
