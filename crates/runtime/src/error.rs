//! The one error type of this crate. Every variant holds what a user needs to act: which file, which tensor or field,
//! what was expected, what was found.

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong between a checkpoint directory and a token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a path.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried, as a verb phrase: `open`, `read`, `create the directory`.
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is not valid JSON.
    #[error("{}: not valid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where parsing stopped and why.
        source: serde_json::Error,
    },
    /// A field of a JSON file is missing, has the wrong type, or contradicts another one.
    #[error("{}: field `{field}`: expected {expected}, found {found}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Dotted name, for example `text_config.hidden_size`.
        field: String,
        /// What would have been accepted.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// The file is well formed, but asks for something that this program does not do.
    #[error("{}: {what} is not supported; {hint}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The feature.
        what: String,
        /// What would work.
        hint: String,
    },
    /// A file is larger than anything valid of its kind.
    #[error("{}: {found} bytes, but a file of this kind has at most {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Size in bytes.
        found: u64,
        /// Largest size accepted, in bytes.
        limit: u64,
    },
    /// A safetensors header breaks a rule of the format.
    #[error("{}: bad safetensors header: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Which rule, with the tensor's name where one is concerned.
        reason: String,
    },
    /// A safetensors file is shorter than its header says. A memory map would read zeros or fault there.
    #[error(
        "{}: truncated: the header describes {expected} bytes, the file has {found} ({} bytes are missing); fetch or copy it again",
        path.display(), expected - found
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Size that the header implies, in bytes.
        expected: u64,
        /// Size on disk, in bytes.
        found: u64,
    },
    /// Parts of a checkpoint contradict each other: the index and the shards, or a packed and a plain copy of one weight.
    #[error("{}: tensor `{tensor}`: {reason}", path.display())]
    Inconsistent {
        /// The file or directory.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The disagreement.
        reason: String,
    },
    /// These layers cannot be removed.
    #[error("cannot drop layers {layers:?}: {reason}")]
    Layers {
        /// What was asked, ascending.
        layers: Vec<usize>,
        /// Which rule it breaks, and what would be legal.
        reason: String,
    },
    /// A tensor that the configuration requires is in none of the files.
    #[error("{}: tensor `{tensor}` is missing (expected {expected})", path.display())]
    MissingTensor {
        /// The checkpoint directory.
        path: PathBuf,
        /// Full name.
        tensor: String,
        /// Shape and type that the configuration implies.
        expected: String,
    },
    /// A tensor has another shape or element type than the configuration implies.
    #[error("{}: tensor `{tensor}`: expected {expected}, found {found}", path.display())]
    TensorMismatch {
        /// The file that holds it.
        path: PathBuf,
        /// Full name.
        tensor: String,
        /// Shape and type that the configuration implies.
        expected: String,
        /// Shape and type in the file.
        found: String,
    },
    /// A tensor holds NaN or an infinity.
    #[error("{}: tensor `{tensor}`: element {index} is {value}; the checkpoint is damaged", path.display())]
    NonFinite {
        /// The file that holds it.
        path: PathBuf,
        /// Full name.
        tensor: String,
        /// Flat index of the first such element.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// A computed logit is NaN: the weights or the input are damaged.
    #[error(
        "the logits at position {position} are not finite (token {token}): a weight is NaN, infinite or so large that f32 overflows, \
         or a number in config.json is; `chiku bake inspect --strict` finds NaN and infinities"
    )]
    NanLogits {
        /// Absolute position, 0 is the first token.
        position: usize,
        /// Row of the vocabulary.
        token: u32,
    },
    /// `tokenizer.json` cannot be used.
    #[error("{}: not a usable tokenizer: {message}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The tokenizer library's reason.
        message: String,
    },
    /// A chat template cannot be compiled or fails on these messages.
    #[error("{}: chat template: {message}", path.display())]
    Template {
        /// The file.
        path: PathBuf,
        /// The template engine's reason, with the line.
        message: String,
    },
    /// A token id outside the model's vocabulary.
    #[error("token id {id} (at index {index}) is outside the vocabulary of {vocab} tokens")]
    TokenId {
        /// The id.
        id: u32,
        /// Its index in the given sequence.
        index: usize,
        /// Vocabulary size.
        vocab: usize,
    },
    /// A sequence that must hold at least one token holds none.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// More positions than the context allows.
    #[error(
        "{wanted} tokens do not fit into the context of {limit}; shorten the prompt or raise --context (the model allows {model_limit})"
    )]
    ContextFull {
        /// Tokens that would have to be held.
        wanted: usize,
        /// The limit in force.
        limit: usize,
        /// The model's own limit.
        model_limit: usize,
    },
    /// A context that the model cannot have.
    #[error("a context of {asked} positions; between 1 and {limit} are possible")]
    Context {
        /// Positions asked for.
        asked: usize,
        /// Most that the model allows.
        limit: usize,
    },
    /// Rows handed to a forward pass that do not continue the cached sequence.
    #[error("row {row} is at position {position}, but the sequence continues at {expected}")]
    Rows {
        /// Index of the row.
        row: usize,
        /// Its position.
        position: usize,
        /// The position that continues the sequence.
        expected: usize,
    },
    /// A draft larger than a verify pass takes.
    #[error("{found} {what}, but at most {limit} are possible")]
    Shape {
        /// What is too many.
        what: &'static str,
        /// The number asked for.
        found: usize,
        /// The largest one possible.
        limit: usize,
    },
    /// A drafter that does not belong to its target, or an option that it cannot follow.
    #[error("{}: the drafter does not fit the target: {what}: {drafter} here, {target} in the target", path.display())]
    Drafter {
        /// The drafter's directory.
        path: PathBuf,
        /// What differs.
        what: String,
        /// Value of the drafter.
        drafter: String,
        /// Value of the target.
        target: String,
    },
    /// The thread pool could not be made.
    #[error("cannot start {threads} threads: {message}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// The system's reason.
        message: String,
    },
}

impl Error {
    /// For `map_err`: an I/O error with the path and what was tried.
    pub fn io<'a>(path: &'a Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error + 'a {
        move |source| Error::Io { path: path.to_path_buf(), action, source }
    }
}
