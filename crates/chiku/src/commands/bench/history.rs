//! `chiku bench history`: speed over commits.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use bench::history::{History, Series, kind_name};
use bench::record::Record;
use clap::Args;
use serde::de::IgnoredAny;

#[derive(Args)]
#[command(
    after_help = "Runs of one configuration on one machine form a series, in the order of their time. A change point says where to look; \
`bench compare` decides whether a commit is slower. `GB/s` is the projected bytes of a step over its measured time; below a run of \
`bench run --profile` stands what each op takes of the read bandwidth that was measured with it.

Examples:
  chiku bench history
  chiku bench history --results results --json"
)]
pub struct HistoryArgs {
    /// Folder of results files.
    #[arg(long, default_value = "results", value_name = "DIR")]
    pub results: PathBuf,
    /// Print the history as JSON.
    #[arg(long)]
    pub json: bool,
}

/// What is needed of a record: not the single requests.
type Run = Record<IgnoredAny>;

pub fn run(args: &HistoryArgs) -> Result<ExitCode> {
    let mut records: Vec<Run> = Vec::new();
    for path in bench::log::files(&args.results)? {
        let log = bench::log::read_uniform_as::<Run>(&path)?;
        for skipped in &log.skipped {
            crate::errln!("warning: {}: line {} is left out: {}", path.display(), skipped.line, skipped.reason);
        }
        records.extend(log.records);
    }
    if records.is_empty() {
        bail!("{}: no records; `chiku bench run` makes one", args.results.display());
    }
    let history = History::new(&records.iter().collect::<Vec<_>>())?;
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&history)?);
        return Ok(ExitCode::SUCCESS);
    }
    history.series.iter().for_each(print);
    if history.left_out > 0 {
        crate::outln!("{} records were cut short or have no result, and are left out", history.left_out);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(s: &Series) {
    crate::outln!("{} ({}): {}", s.configuration.label, kind_name(s.kind), s.configuration.describe());
    crate::outln!(
        "  {:<20}  {:<9} {:>11} {:>9} {:>11} {:>8}",
        "time",
        "commit",
        "tokens/s",
        "ms/step",
        "tokens/step",
        "GB/s"
    );
    let or_dash = |v: Option<f64>, digits: usize| v.map_or("-".into(), |v| format!("{v:.digits$}"));
    for (i, p) in s.points.iter().enumerate() {
        let commit = p.commit.as_deref().map_or("-", |c| c.get(..9).unwrap_or(c));
        if let Some(c) = s.changes.iter().find(|c| c.at == i) {
            let step = c.step_speed_pct.map_or(String::new(), |s| format!(", the speed of a step {s:+.1} %"));
            let text = if c.other_text { "; the runs wrote different text" } else { "" };
            crate::outln!("  -- {:+.1} % from here{step}{text}", c.change_pct);
        }
        crate::outln!(
            "  {:<20}  {commit:<9} {:>11.2} {:>9} {:>11} {:>8}",
            p.time,
            p.tokens_per_s,
            or_dash(p.step_ms, 3),
            or_dash(p.tokens_per_step, 3),
            or_dash(p.gb_per_s, 2)
        );
        if let Some(r) = &p.roofline {
            let ops: Vec<String> = r.ops.iter().map(|o| format!("{} {:.0} %", o.op, o.percent)).collect();
            crate::outln!("    of {:.1} GB/s (projected): {}", r.read_gb_per_s.value, ops.join(", "));
        }
    }
    if s.points.len() > 2 && s.changes.is_empty() {
        crate::outln!("  no change of level in {} runs", s.points.len());
    }
}
