//! CSV files with a header, read whole and checked as they are asked.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A CSV file.
pub(super) struct Table {
    path: PathBuf,
    headers: Vec<String>,
    rows: Vec<(u64, Vec<String>)>,
}

/// One of its rows.
pub(super) struct Row<'a> {
    table: &'a Table,
    line: u64,
    fields: &'a [String],
}

impl Table {
    /// Reads a file. `columns` must be there, in any order, others are ignored.
    ///
    /// # Errors
    /// A file that cannot be read, a missing column, a row with another number of fields than the header, no row.
    pub fn read(path: &Path, columns: &[&str]) -> Result<Table> {
        let text = ppl::jsonl::read_text(path)?;
        let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text.as_bytes());
        let wrong = |e: csv::Error| {
            let line = e.position().map_or(1, csv::Position::line);
            let reason = match e.kind() {
                csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                    format!("expected {expected_len} fields as in the header, found {len}")
                }
                _ => e.to_string(),
            };
            Error::Line { path: path.to_path_buf(), line, reason }
        };
        let headers: Vec<String> = reader.headers().map_err(wrong)?.iter().map(str::to_string).collect();
        if let Some(missing) = columns.iter().find(|c| !headers.iter().any(|h| h == *c)) {
            let found = headers.join(",");
            let reason = format!("the header has no column `{missing}`; it is `{found}`");
            return Err(Error::Line { path: path.to_path_buf(), line: 1, reason });
        }
        let mut rows = Vec::new();
        for record in reader.records() {
            let record = record.map_err(wrong)?;
            let line = record.position().map_or(0, csv::Position::line);
            rows.push((line, record.iter().map(str::to_string).collect()));
        }
        if rows.is_empty() {
            return Err(Error::Empty { path: path.to_path_buf(), what: "no row below the header".into() });
        }
        Ok(Table { path: path.to_path_buf(), headers, rows })
    }

    pub fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.rows.iter().map(|(line, fields)| Row { table: self, line: *line, fields })
    }
}

impl<'a> Row<'a> {
    /// A field as text, empty where the column or the value is absent.
    pub fn text(&self, column: &str) -> &'a str {
        let index = self.table.headers.iter().position(|h| h == column);
        index.map_or("", |i| self.fields[i].as_str())
    }

    /// A field that must say something.
    pub fn required(&self, column: &str) -> Result<&'a str> {
        let text = self.text(column);
        if text.is_empty() { Err(self.wrong(column, "a value", "nothing")) } else { Ok(text) }
    }

    /// A positive finite number; `None` where the field is empty.
    pub fn positive(&self, column: &str) -> Result<Option<f64>> {
        let text = self.text(column);
        if text.is_empty() {
            return Ok(None);
        }
        let number = text.parse::<f64>().ok().filter(|v| v.is_finite() && *v > 0.0);
        number.map(Some).ok_or_else(|| self.wrong(column, "a positive finite number", text))
    }

    /// The error for a field of this row.
    pub fn wrong(&self, column: &str, expected: &str, found: &str) -> Error {
        let reason = format!("column `{column}`: expected {expected}, found {found}");
        Error::Line { path: self.table.path.clone(), line: self.line, reason }
    }
}
