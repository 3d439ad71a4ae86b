//! The one error type of this crate. Every variant says which file or tensor, what was expected, what was found, and what to
//! do; errors of the reading side pass through unchanged.

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong in a bake or an inspection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The parent checkpoint could not be read.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
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
    /// The caller's cancel flag was set; nothing was left under the target's name.
    #[error("cancelled; nothing was written to {}", target.display())]
    Cancelled {
        /// The directory that would have been written.
        target: PathBuf,
    },
    /// The bake ended early, and what it had done was kept.
    #[error(
        "{tensors} finished tensors are kept in {}; go on with --resume, or remove that directory: {source}",
        partial.display()
    )]
    Kept {
        /// The partial directory.
        partial: PathBuf,
        /// Tensors (with the scales and shapes that are made with them) in it that need not be made again.
        tensors: usize,
        /// Why it ended.
        source: Box<Error>,
    },
    /// There is no unfinished bake that this one could go on with.
    #[error("{}: cannot resume: {reason}", target.display())]
    Resume {
        /// The target.
        target: PathBuf,
        /// Why, for each unfinished bake of this target, and what to do.
        reason: String,
    },
    /// A file that lists SHA-256 sums holds something else.
    #[error("{}: expected the SHA-256 of `{name}` (64 hexadecimal digits), found `{found}`; correct or remove the file", path.display())]
    Manifest {
        /// The list.
        path: PathBuf,
        /// The file that it speaks of.
        name: String,
        /// What stands there.
        found: String,
    },
    /// A file is not the one that its publisher listed.
    #[error("{}: its SHA-256 is {found}, but {manifest} says {expected}; fetch the file again", path.display())]
    Sum {
        /// The file.
        path: PathBuf,
        /// Who says otherwise.
        manifest: String,
        /// The sum stated.
        expected: String,
        /// The sum of the bytes.
        found: String,
    },
    /// The target exists and `force` was not given.
    #[error("{} exists already; choose another name, or replace it with --force", path.display())]
    TargetExists {
        /// The target.
        path: PathBuf,
    },
    /// The target cannot be written for a reason that `force` does not lift.
    #[error("{}: not a usable target: {reason}", path.display())]
    Target {
        /// The target.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
    /// The file system has too little room for the output.
    #[error(
        "{}: {needed} bytes are needed, {available} are free; free {} bytes, or choose a target on another disk",
        path.display(), needed.saturating_sub(*available)
    )]
    DiskSpace {
        /// Directory that was asked.
        path: PathBuf,
        /// Bytes that the output and a small reserve take.
        needed: u64,
        /// Bytes free to this user.
        available: u64,
    },
    /// A weight is NaN or infinite.
    #[error("{}: tensor `{tensor}`: element {index} is {value}; fetch the checkpoint again", path.display())]
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
    /// A linear in memory cannot be quantised.
    #[error("`{module}` {reason}")]
    Weights {
        /// The linear.
        module: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A tensor is not what this bake can work on.
    #[error("{}: tensor `{tensor}`: expected {expected}, found {found}; {hint}", path.display())]
    Tensor {
        /// The file that holds it.
        path: PathBuf,
        /// Full name.
        tensor: String,
        /// Type and shape that would have been accepted.
        expected: String,
        /// Type and shape in the file.
        found: String,
        /// What to do.
        hint: String,
    },
    /// A file of rules for the width of single linears that is not one, or does not fit the checkpoint.
    #[error("{}: {reason}", path.display())]
    PrecisionPlan {
        /// The file.
        path: PathBuf,
        /// Which rule, and what is wrong with it.
        reason: String,
    },
    /// The parent is quantised already.
    #[error(
        "{}: already quantised (tensor `{tensor}`); quantising twice loses quality: start from the bf16 checkpoint instead",
        path.display()
    )]
    AlreadyQuantised {
        /// The checkpoint directory.
        path: PathBuf,
        /// The first packed tensor.
        tensor: String,
    },
    /// A keepset that the head cannot be pruned to.
    #[error("keepset: {reason}")]
    Keepset {
        /// Which rule it breaks.
        reason: String,
    },
    /// A checkpoint whose descent is not known.
    #[error("{}: {reason}", path.display())]
    Lineage {
        /// The directory.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// A recipe that cannot be followed.
    #[error("{}: {reason}", path.display())]
    Recipe {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and where.
        reason: String,
    },
    /// A step of a recipe failed.
    #[error("step {number} ({bake}): {source}")]
    Step {
        /// Counted from 1.
        number: usize,
        /// Name of the bake.
        bake: &'static str,
        /// Why.
        source: Box<Error>,
    },
    /// Too little calibration text.
    #[error(
        "{origin}: {found} calibration tokens, {wanted} wanted; give a longer file, or ask for fewer with --calibration-tokens"
    )]
    Calibration {
        /// Name of the file.
        origin: String,
        /// Tokens asked for.
        wanted: usize,
        /// Tokens there.
        found: usize,
    },
    /// A plan with calibrated linears was written before they were quantised.
    #[error("{module}: `gptq` weights have not been computed; run the bake through `quantize::run`")]
    Uncalibrated {
        /// The linear.
        module: String,
    },
    /// An option is out of its range.
    #[error("option {option}: expected {expected}, found {found}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// The accepted range.
        expected: String,
        /// The value given.
        found: String,
    },
    /// The output would not be a consistent checkpoint. Nothing was written.
    #[error(
        "the result would be inconsistent, so nothing was written:\n  {}\nsee `chiku bake inspect --strict` on the parent",
        problems.join("\n  ")
    )]
    Inconsistent {
        /// One line a contradiction between configuration and tensors.
        problems: Vec<String>,
    },
    /// A JSON value of `config.json` has another type than an edit needs.
    #[error("{}: field `{field}`: expected {expected}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Dotted name.
        field: String,
        /// What the edit needs.
        expected: &'static str,
    },
}

impl Error {
    /// Whether the same bake may get further another time: it was stopped, or the system refused something.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, Error::Cancelled { .. } | Error::Io { .. } | Error::DiskSpace { .. })
    }

    /// For `map_err`: an I/O error with the path and what was tried.
    pub(crate) fn io<'a>(path: &'a Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error + 'a {
        move |source| Error::Io { path: path.to_path_buf(), action, source }
    }
}
