//! Errors of this crate. Each says which file, line, field or record is concerned and what would have been accepted.

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong between a file of records and a verdict. A *failed gate* is no error: it is a report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a path.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is larger than any valid one of its kind.
    #[error("{}: {found} bytes, but a file of this kind has at most {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Size in bytes.
        found: u64,
        /// Largest size accepted, in bytes.
        limit: u64,
    },
    /// A line of a JSONL file is not a JSON object.
    #[error("{}:{line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A field of a JSONL file is missing, has the wrong type, or contradicts another one.
    #[error("{}:{line}: field `{field}`: expected {expected}, found {found}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Name of the field, with an index for an element of a list: `target_token_ids[3]`.
        field: String,
        /// What would have been accepted.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// Two lines have the same key.
    #[error("{}:{line}: `{key}` was already used on line {first_line}", path.display())]
    Duplicate {
        /// The file.
        path: PathBuf,
        /// Line number of the second use, from 1.
        line: usize,
        /// The key.
        key: String,
        /// Line number of the first use.
        first_line: usize,
    },
    /// A file without a single record.
    #[error("{}: no records", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The model failed on one record or prompt.
    #[error("`{id}`: {source}")]
    Model {
        /// The record or prompt.
        id: String,
        /// The runtime's error.
        source: Box<runtime::Error>,
    },
    /// A record's target is a token that the head lacks, so that there is no perplexity to compare.
    #[error(
        "`{record}`: target token {token_id} has no row in the head ({tokens} such tokens in all); leave out such records"
    )]
    Pruned {
        /// The first such record.
        record: String,
        /// The first such token.
        token_id: u32,
        /// Different tokens of the records that the head lacks.
        tokens: usize,
    },
    /// A journal that cannot be continued. It is left as it is.
    #[error("{}: {reason}", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// Weights could not be quantised.
    #[error(transparent)]
    Bake(#[from] bake::Error),
    /// An option of a search leaves nothing to search.
    #[error("{option}: expected {expected}, found {found}")]
    Search {
        /// Name of the option.
        option: &'static str,
        /// What would have been accepted.
        expected: String,
        /// The value given.
        found: String,
    },
    /// Nothing was given to score or to compare.
    #[error("nothing to do: {what}")]
    Nothing {
        /// What is missing.
        what: &'static str,
    },
    /// An option has a value that makes no sense.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// What would have been accepted.
        expected: &'static str,
        /// The value given.
        found: String,
    },
    /// A path returned something else than was asked for: a defect of that path, not of the model.
    #[error("path `{path}`, prompt `{id}`: {reason}")]
    Path {
        /// Name of the path.
        path: String,
        /// The prompt.
        id: String,
        /// What is wrong.
        reason: String,
    },
    /// The caller asked to stop before there was anything to report.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// For `map_err`: an I/O error with the path and what was tried.
    pub fn io<'a>(path: &'a Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error + 'a {
        move |source| Error::Io { path: path.to_path_buf(), action, source }
    }
}
