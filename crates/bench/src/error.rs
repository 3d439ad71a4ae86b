//! Errors of this crate.

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong around a measurement. A target that fails *during* a run is no error: the run is kept, marked incomplete,
/// with the reason.
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
    /// A JSON file is not valid JSON.
    #[error("{}: not valid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where parsing stopped and why.
        source: serde_json::Error,
    },
    /// A field of a JSON file is missing or has the wrong type.
    #[error("{}: field `{field}`: expected {expected}, found {found}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Path of the field, for example `[3].conversations[0].value`.
        field: String,
        /// What would have been accepted.
        expected: &'static str,
        /// What the file says.
        found: String,
    },
    /// A line of a text or CSV file is not what it should be.
    #[error("{}:{line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// A file is of the right kind, and holds nothing that could be used.
    #[error("{}: {what}", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// What is missing, and what would help.
        what: String,
    },
    /// An answer that the given data cannot support.
    #[error("refused: {reason}")]
    Refused {
        /// Why, and what to give instead.
        reason: String,
    },
    /// A line, field or duplicate of a JSONL file.
    #[error(transparent)]
    Jsonl(#[from] Box<ppl::Error>),
    /// The runtime refused something before a run began.
    #[error(transparent)]
    Runtime(#[from] Box<runtime::Error>),
    /// A checkpoint for a measurement could not be made.
    #[error(transparent)]
    Bake(#[from] Box<bake::Error>),
    /// A set of prompts without a prompt.
    #[error("{}: no prompts", path.display())]
    NoPrompts {
        /// The file.
        path: PathBuf,
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
    /// Too few samples for a statistic.
    #[error("{what} needs at least {needed} samples, and there are {found}")]
    TooFew {
        /// The statistic.
        what: &'static str,
        /// Samples that it needs.
        needed: usize,
        /// Samples given.
        found: usize,
    },
    /// A sample that no measurement can give.
    #[error("sample {index}: {reason}")]
    Sample {
        /// Index of the sample, from 0.
        index: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A results file holds records of several schemas.
    #[error(
        "{}:{line}: a record of schema {found} among those of schema {expected}, which alone this program reads; analyse them apart",
        path.display()
    )]
    Schema {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Schema of that line.
        found: u64,
        /// Schema that this program reads.
        expected: u32,
    },
    /// Another process holds the lock of a results file.
    #[error("{}: locked by another process for {waited_s} s; retry, or write to another file", path.display())]
    Locked {
        /// The file.
        path: PathBuf,
        /// How long this process waited.
        waited_s: u64,
    },
    /// A server cannot be measured.
    #[error("{url}: {reason}")]
    Server {
        /// Its address.
        url: String,
        /// What it did.
        reason: String,
    },
    /// A record cannot be written as JSON.
    #[error("cannot write the record as JSON: {source}")]
    Encode {
        /// The reason.
        source: serde_json::Error,
    },
}

impl Error {
    /// For `map_err`: an I/O error with the path and what was tried.
    pub fn io<'a>(path: &'a Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error + 'a {
        move |source| Error::Io { path: path.to_path_buf(), action, source }
    }
}

impl From<ppl::Error> for Error {
    fn from(e: ppl::Error) -> Error {
        Error::Jsonl(Box::new(e))
    }
}

impl From<runtime::Error> for Error {
    fn from(e: runtime::Error) -> Error {
        Error::Runtime(Box::new(e))
    }
}

impl From<bake::Error> for Error {
    fn from(e: bake::Error) -> Error {
        Error::Bake(Box::new(e))
    }
}
