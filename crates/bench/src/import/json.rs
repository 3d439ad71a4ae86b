//! JSON as Python writes it: `Infinity`, `-Infinity` and `NaN` where JSON has no number. They are read as those words, so that a file
//! with `"request_rate": Infinity` opens, and a measurement that is none of a number is named by what it says.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};

/// A document with the file that it is from, for messages.
pub(super) struct Document {
    pub path: PathBuf,
    pub value: Value,
}

const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Reads a file.
pub(super) fn read(path: &Path) -> Result<Document> {
    parse(path, &ppl::jsonl::read_text(path)?)
}

/// Parses a text; `path` is for messages.
pub(super) fn parse(path: &Path, text: &str) -> Result<Document> {
    if text.trim().is_empty() {
        return Err(Error::Empty { path: path.to_path_buf(), what: "an empty file".into() });
    }
    let value =
        serde_json::from_str(&quoted(text)).map_err(|source| Error::Json { path: path.to_path_buf(), source })?;
    Ok(Document { path: path.to_path_buf(), value })
}

/// The text with Python's words for what is no number put between quotes, outside of strings.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut in_string, mut escaped) = (text, false, false);
    while let Some(c) = rest.chars().next() {
        if !in_string && let Some(word) = WORDS.iter().find(|w| rest.starts_with(**w)) {
            out.extend(['"'].into_iter().chain(word.chars()).chain(['"']));
            rest = &rest[word.len()..];
            continue;
        }
        in_string ^= c == '"' && !escaped;
        escaped = in_string && c == '\\' && !escaped;
        out.push(c);
        rest = &rest[c.len_utf8()..];
    }
    out
}

impl Document {
    /// A value by JSON pointer; `null` counts as absent.
    pub fn at(&self, pointer: &str) -> Option<&Value> {
        self.value.pointer(pointer).filter(|v| !v.is_null())
    }

    /// The error for a value.
    pub fn wrong(&self, pointer: &str, expected: &'static str) -> Error {
        let found = self.at(pointer).map_or("nothing".into(), ppl::jsonl::describe);
        Error::Field { path: self.path.clone(), field: pointer.to_string(), expected, found }
    }

    /// A positive finite number; `None` where it is absent.
    pub fn positive(&self, pointer: &str) -> Result<Option<f64>> {
        if self.at(pointer).is_none() {
            return Ok(None);
        }
        self.require_positive(pointer).map(Some)
    }

    /// A positive finite number that must be there.
    pub fn require_positive(&self, pointer: &str) -> Result<f64> {
        let number = self.at(pointer).and_then(Value::as_f64).filter(|v| v.is_finite() && *v > 0.0);
        number.ok_or_else(|| self.wrong(pointer, "a positive finite number"))
    }

    /// A list that must be there.
    pub fn require_list(&self, pointer: &str) -> Result<&Vec<Value>> {
        self.at(pointer).and_then(Value::as_array).ok_or_else(|| self.wrong(pointer, "a list"))
    }

    /// A list of positive finite numbers; `None` where it is absent.
    pub fn positives(&self, pointer: &str) -> Result<Option<Vec<f64>>> {
        if self.at(pointer).is_none() {
            return Ok(None);
        }
        let count = self.require_list(pointer)?.len();
        (0..count).map(|i| self.require_positive(&format!("{pointer}/{i}"))).collect::<Result<_>>().map(Some)
    }

    /// A text; `None` where it is absent.
    pub fn text(&self, pointer: &str) -> Result<Option<&str>> {
        match self.at(pointer) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(_) => Err(self.wrong(pointer, "a text")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_numbers_only_outside_of_strings() {
        let text = r#"{"rate": Infinity, "low": -Infinity, "x": [NaN, 1], "text": "NaN \" Infinity \\", "n": 2}"#;
        let d = parse(Path::new("f"), text).unwrap();
        assert_eq!(d.value["text"], "NaN \" Infinity \\");
        assert_eq!((d.value["n"].as_f64(), d.value["x"][0].as_str()), (Some(2.0), Some("NaN")));
        assert_eq!(d.require_positive("/n").unwrap(), 2.0);
        let said = d.require_positive("/rate").unwrap_err().to_string();
        assert_eq!(said, "f: field `/rate`: expected a positive finite number, found \"Infinity\"");
        assert_eq!(d.value["low"], "-Infinity");
    }

    #[test]
    fn what_is_no_json_is_named() {
        assert!(parse(Path::new("f"), " \n").err().unwrap().to_string().contains("f: an empty file"));
        assert!(parse(Path::new("f"), "{").err().unwrap().to_string().contains("f: not valid JSON"));
    }
}
