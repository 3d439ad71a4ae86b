//! What a user sees: progress bars on a terminal, nothing in a pipe; sizes and intervals spelled one way everywhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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
