//! What a user sees: progress bars on a terminal, nothing in a pipe; sizes and intervals spelled one way everywhere.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// `println!` for results: a reader that has gone away (`chiku ... | head -1`) ends the program quietly, as it ends other programs.
#[macro_export]
macro_rules! outln {
    () => { $crate::output::write(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::output::write(format_args!("{}\n", format_args!($($arg)*))) };
}

/// `print!` in the same way.
#[macro_export]
macro_rules! out {
    ($($arg:tt)*) => { $crate::output::write(format_args!($($arg)*)) };
}

/// `eprintln!` that does not mind a closed standard error.
#[macro_export]
macro_rules! errln {
    ($($arg:tt)*) => { $crate::output::remark(format_args!("{}\n", format_args!($($arg)*))) };
}

/// `eprint!` in the same way.
#[macro_export]
macro_rules! err {
    ($($arg:tt)*) => { $crate::output::remark(format_args!($($arg)*)) };
}

/// Writes to standard error if anybody listens.
pub fn remark(text: std::fmt::Arguments) {
    let _ = std::io::stderr().lock().write_fmt(text);
}

/// Writes to standard output and flushes, so that text streams.
pub fn write(text: std::fmt::Arguments) {
    let mut out = std::io::stdout().lock();
    if let Err(e) = out.write_fmt(text).and_then(|()| out.flush()) {
        if e.kind() != std::io::ErrorKind::BrokenPipe {
            remark(format_args!("error: standard output: {e}\n"));
            std::process::exit(i32::from(crate::exit::INPUT));
        }
        std::process::exit(i32::from(crate::exit::BROKEN_PIPE));
    }
}

/// A file that appears under its name only when it is whole.
pub struct PartialFile {
    file: tempfile::NamedTempFile,
    target: PathBuf,
}

impl PartialFile {
    /// Checks that `target` can be written, before any work is done for it. `inputs` are what the work reads: none of them is
    /// replaced.
    pub fn create(target: &Path, inputs: &[PathBuf]) -> Result<PartialFile> {
        if let Ok(meta) = target.metadata() {
            if !meta.is_file() {
                bail!("{}: exists and is not a regular file; give another name", target.display());
            }
            let same =
                |input: &PathBuf| input.canonicalize().is_ok_and(|i| target.canonicalize().is_ok_and(|t| t == i));
            if inputs.iter().any(same) {
                bail!("{}: is one of the files being read; give another name", target.display());
            }
        }
        let dir = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The usual mode of a new file, less what the user's mask takes.
        let mode = std::fs::Permissions::from_mode(0o666);
        let file = tempfile::Builder::new().prefix(".chiku-partial-").permissions(mode).tempfile_in(dir);
        let file = file.with_context(|| format!("{}: cannot write there", dir.display()))?;
        Ok(PartialFile { file, target: target.to_path_buf() })
    }

    /// The file.
    pub fn file(&mut self) -> &mut File {
        self.file.as_file_mut()
    }

    /// Gives it its name.
    pub fn finish(self) -> Result<()> {
        let writing = || format!("{}: cannot write", self.target.display());
        self.file.as_file().sync_all().with_context(writing)?;
        self.file.persist(&self.target).with_context(writing)?;
        Ok(())
    }
}

/// A progress bar on standard error; hidden in a pipe or with `--quiet`.
pub fn bar(what: &str, total: u64, unit: Unit, quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let template = match unit {
        Unit::Bytes => "{msg:>18} [{bar:30}] {bytes}/{total_bytes} {eta}",
        Unit::Count => "{msg:>18} [{bar:30}] {pos}/{len} {eta}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_string());
    bar
}

/// What a bar counts.
#[derive(Clone, Copy)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Prompts, records, tokens.
    Count,
}

/// Bytes as megabytes of 10^6.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}
