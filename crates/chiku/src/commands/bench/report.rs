//! `chiku bench report`: everything on one page.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use bench::report::{Inputs, Paths};
use clap::Args;
use serde_json::json;

use crate::output::PartialFile;

#[derive(Args)]
#[command(
    after_help = "The page loads nothing from anywhere, and the same files give the same bytes. Measured, projected and published numbers \
share neither a column nor an axis. A section without data says what would fill it.

Examples:
  chiku bench report -o report.html
  chiku bench acceptance --model nano --drafter nano --json > target/nano-mtp.json
  chiku bench report --acceptance target/nano-mtp.json -o report.html
  chiku bench report --results results --board leaderboard.json --draws draws.csv --pairs pairs.csv -o report.html"
)]
pub struct ReportArgs {
    /// Folder of results files [default: results, where there is one].
    #[arg(long, value_name = "DIR")]
    pub results: Option<PathBuf>,
    /// A leaderboard (JSON; see `bench import board`).
    #[arg(long, value_name = "FILE")]
    pub board: Option<PathBuf>,
    /// Repeated runs of others (CSV; see `bench import draws`).
    #[arg(long, value_name = "FILE")]
    pub draws: Option<PathBuf>,
    /// Public and private results of others (CSV; see `bench gap`).
    #[arg(long, value_name = "FILE")]
    pub pairs: Option<PathBuf>,
    /// A server's step-time log (see `bench import steptime`).
    #[arg(long, value_name = "FILE")]
    pub steptime: Option<PathBuf>,
    /// What `bench acceptance --json` printed; may be given several times.
    #[arg(long, value_name = "FILE")]
    pub acceptance: Vec<PathBuf>,
    /// What `bench profile --json` printed; may be given several times.
    #[arg(long, value_name = "FILE")]
    pub profile: Vec<PathBuf>,
    /// File to write.
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Print what was read as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &ReportArgs, quiet: bool) -> Result<ExitCode> {
    let results = args.results.clone().or_else(default_results);
    let (board, draws, pairs, steptime) =
        (args.board.clone(), args.draws.clone(), args.pairs.clone(), args.steptime.clone());
    let (acceptance, profiles) = (args.acceptance.clone(), args.profile.clone());
    let one = [&board, &draws, &pairs, &steptime];
    let mut read: Vec<PathBuf> = one.into_iter().flatten().chain(&acceptance).chain(&profiles).cloned().collect();
    let inputs =
        Inputs::read(&Paths { results: results.clone(), board, draws, pairs, steptime, acceptance, profiles })?;
    read.extend(results.iter().flat_map(|dir| inputs.files.iter().map(|f| dir.join(&f.name))));
    let mut file = PartialFile::create(&args.out, &read)?;
    let page = bench::report::render(&inputs)?;
    file.file().write_all(page.as_bytes()).with_context(|| format!("{}: cannot write", args.out.display()))?;
    file.finish()?;
    let records: usize = inputs.files.iter().map(|f| f.log.records.len()).sum();
    let skipped: usize = inputs.files.iter().map(|f| f.log.skipped.len()).sum();
    let claims = inputs.board.as_ref().map_or(0, |(_, b)| b.claims.len());
    if args.json {
        let said = json!({
            "out": args.out, "bytes": page.len(), "files": inputs.files.len(), "records": records, "skipped_lines": skipped,
            "claims": claims,
        });
        crate::outln!("{}", serde_json::to_string_pretty(&said)?);
    } else if !quiet {
        crate::outln!("{}: {records} records, {claims} claims, {} kB", args.out.display(), page.len() / 1000);
    }
    if skipped > 0 {
        crate::errln!("warning: {skipped} lines of results files are no records; the page lists them");
    }
    Ok(ExitCode::SUCCESS)
}

/// The folder that `bench run` appends to, where it exists.
pub fn default_results() -> Option<PathBuf> {
    Some(Path::new("results")).filter(|p| p.is_dir()).map(Path::to_path_buf)
}
