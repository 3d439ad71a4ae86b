//! Typed access to the fields of a JSON object, with errors that give the dotted name, what was expected and what is there.

use std::path::Path;

use serde_json::{Map, Value};

use super::DIMENSION_LIMIT;
use crate::error::{Error, Result};

/// A JSON object and its dotted name.
#[derive(Clone)]
pub(super) struct Fields<'a> {
    path: &'a Path,
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub fn new(path: &'a Path, prefix: &str, value: &'a Value) -> Result<Fields<'a>> {
        match value {
            Value::Object(map) => Ok(Fields { path, prefix: prefix.into(), map }),
            other => Err(Error::Field {
                path: path.to_path_buf(),
                field: if prefix.is_empty() { "(the file)".into() } else { prefix.into() },
                expected: "an object".into(),
                found: short(other),
            }),
        }
    }

    pub fn path(&self) -> &Path {
        self.path
    }

    fn name(&self, field: &str) -> String {
        if self.prefix.is_empty() { field.into() } else { format!("{}.{field}", self.prefix) }
    }

    pub fn wrong(&self, field: &str, expected: &str, found: String) -> Error {
        let (path, field) = (self.path.to_path_buf(), self.name(field));
        Error::Field { path, field, expected: expected.into(), found }
    }

    pub fn unsupported(&self, field: &str, what: &str) -> Error {
        Error::Unsupported {
            path: self.path.to_path_buf(),
            what: format!("{what} (`{}`)", self.name(field)),
            hint: "this program runs dense Gemma 4 models such as E2B and E4B".into(),
        }
    }

    /// `None` where the field is absent or null.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    fn typed<T>(&self, field: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.get(field) {
            None => Ok(None),
            Some(v) => read(v).map(Some).ok_or_else(|| self.wrong(field, expected, short(v))),
        }
    }

    fn required<T>(&self, field: &str, expected: &str, found: Option<T>) -> Result<T> {
        found.ok_or_else(|| self.wrong(field, expected, "nothing".into()))
    }

    pub fn optional_object(&self, field: &str) -> Result<Option<Fields<'a>>> {
        self.get(field).map(|v| Fields::new(self.path, &self.name(field), v)).transpose()
    }

    pub fn object(&self, field: &str) -> Result<Fields<'a>> {
        let found = self.optional_object(field)?;
        self.required(field, "an object", found)
    }

    pub fn keys(&self) -> impl Iterator<Item = &'a String> {
        self.map.keys()
    }

    fn optional_dimension(&self, field: &str) -> Result<Option<usize>> {
        let expected = format!("a whole number up to {DIMENSION_LIMIT}");
        self.typed(field, &expected, |v| v.as_u64().filter(|&n| n <= DIMENSION_LIMIT as u64).map(|n| n as usize))
    }

    /// A size that may be 0 or absent.
    pub fn dimension_or(&self, field: &str, default: usize) -> Result<usize> {
        Ok(self.optional_dimension(field)?.unwrap_or(default))
    }

    /// A size of at least 1.
    pub fn dimension(&self, field: &str) -> Result<usize> {
        let found = self.optional_dimension(field)?;
        match self.required(field, "a positive whole number", found)? {
            0 => Err(self.wrong(field, "a positive whole number", "0".into())),
            n => Ok(n),
        }
    }

    pub fn optional_boolean(&self, field: &str) -> Result<Option<bool>> {
        self.typed(field, "true or false", Value::as_bool)
    }

    pub fn boolean(&self, field: &str, default: bool) -> Result<bool> {
        Ok(self.optional_boolean(field)?.unwrap_or(default))
    }

    pub fn optional_number(&self, field: &str) -> Result<Option<f64>> {
        self.typed(field, "a number", Value::as_f64)
    }

    pub fn number(&self, field: &str, default: f64) -> Result<f64> {
        Ok(self.optional_number(field)?.unwrap_or(default))
    }

    pub fn string(&self, field: &str, default: &str) -> Result<String> {
        Ok(self.typed(field, "a string", |v| v.as_str().map(String::from))?.unwrap_or_else(|| default.into()))
    }

    /// A list of strings; an absent one is an error.
    pub fn strings(&self, field: &str) -> Result<Vec<String>> {
        let read = |v: &Value| v.as_array()?.iter().map(|s| s.as_str().map(String::from)).collect();
        let found = self.typed(field, "a list of strings", read)?;
        self.required(field, "a list of strings", found)
    }
}

/// A value for a message: whole if short, its kind if long.
fn short(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".into(),
        Value::Array(a) => format!("a list of {}", a.len()),
        other => other.to_string().chars().take(80).collect(),
    }
}
