//! `chiku bench export`: records for other tools.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use bench::export::{Format, export};
use clap::{Args, ValueEnum};

use crate::output::PartialFile;

#[derive(Args)]
#[command(after_help = "Examples:
  chiku bench export results/2026/*.jsonl --format markdown
  chiku bench export results/2026/machine-01.jsonl --format bencher --out bmf.json")]
pub struct ExportArgs {
    /// Results files.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// For whom.
    #[arg(long, value_enum, default_value = "json")]
    pub format: FormatArg,
    /// File to write instead of standard output.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// The same as --format json.
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
}

/// `--format`.
#[derive(Clone, Copy, ValueEnum)]
pub enum FormatArg {
    /// A list of rows.
    Json,
    /// A row a line.
    Jsonl,
    /// A header and rows.
    Csv,
    /// A table.
    Markdown,
    /// Prometheus text, each configuration's last run.
    Prometheus,
    /// github-action-benchmark (customBiggerIsBetter), each configuration's last run.
    GithubActionBenchmark,
    /// Bencher Metric Format, each configuration's last run.
    Bencher,
}

impl From<FormatArg> for Format {
    fn from(f: FormatArg) -> Format {
        match f {
            FormatArg::Json => Format::Json,
            FormatArg::Jsonl => Format::Jsonl,
            FormatArg::Csv => Format::Csv,
            FormatArg::Markdown => Format::Markdown,
            FormatArg::Prometheus => Format::Prometheus,
            FormatArg::GithubActionBenchmark => Format::GithubActionBenchmark,
            FormatArg::Bencher => Format::Bencher,
        }
    }
}

pub fn run(args: &ExportArgs) -> Result<ExitCode> {
    let mut records = Vec::new();
    for path in &args.files {
        let log = bench::log::read_uniform(path)?;
        for skipped in &log.skipped {
            crate::errln!("warning: {}: line {} is skipped: {}", path.display(), skipped.line, skipped.reason);
        }
        records.extend(log.records);
    }
    let empty = records.iter().filter(|r| r.result.is_none()).count();
    if empty > 0 {
        crate::errln!("warning: {empty} records without a result are left out");
    }
    let text = export(&records, args.format.into())?;
    match &args.out {
        None => crate::out!("{text}"),
        Some(path) => {
            let mut file = PartialFile::create(path, &args.files)?;
            file.file().write_all(text.as_bytes()).with_context(|| format!("{}: cannot write", path.display()))?;
            file.finish()?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
