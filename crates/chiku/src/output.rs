//! What a user sees: progress bars on a terminal, nothing in a pipe; sizes and intervals spelled one way everywhere.

use std::io::{IsTerminal, Write};

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

/// Writes to standard output and flushes, so that text streams.
pub fn write(text: std::fmt::Arguments) {
    let mut out = std::io::stdout().lock();
    if let Err(e) = out.write_fmt(text).and_then(|()| out.flush()) {
        if e.kind() != std::io::ErrorKind::BrokenPipe {
            eprintln!("error: standard output: {e}");
            std::process::exit(i32::from(crate::exit::INPUT));
        }
        std::process::exit(i32::from(crate::exit::BROKEN_PIPE));
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
