//! `chiku bench compare`: is the second set of records faster than the first?

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use bench::compare::Verdict;
use bench::in_turn::{Basis, InTurn};
use bench::record::Record;
use clap::{Args, ValueEnum};

use crate::exit::GATE_FAILED;

#[derive(Args)]
#[command(
    after_help = "The records are paired in the order of the files, as runs in turn (base head, head base, ...) make them. `faster` and \
`slower` need an interval wholly on one side and at least the smallest effect; `same` needs the opposite shown; else it says how many \
more pairs it would take.

Exit code 1 where the verdict is that of --fail-on.

Examples:
  chiku bench compare base.jsonl head.jsonl
  chiku bench compare base.jsonl head.jsonl --min-effect 0.05 --fail-on slower"
)]
pub struct CompareArgs {
    /// Results file of the first side.
    #[arg(value_name = "BASE")]
    pub base: PathBuf,
    /// Results file of the second side, the one that is judged.
    #[arg(value_name = "HEAD")]
    pub head: PathBuf,
    /// Smallest effect that matters, as a fraction of the first side's speed.
    #[arg(long, default_value_t = bench::compare::MIN_EFFECT, value_name = "FRACTION")]
    pub min_effect: f64,
    /// Exit with 1 where this is the verdict.
    #[arg(long, value_name = "VERDICT")]
    pub fail_on: Option<FailOn>,
    /// Print the verdict as JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FailOn {
    Slower,
    Faster,
    NotEnoughData,
}

impl FailOn {
    fn is(self, verdict: &Verdict) -> bool {
        match self {
            FailOn::Slower => matches!(verdict, Verdict::Slower),
            FailOn::Faster => matches!(verdict, Verdict::Faster),
            FailOn::NotEnoughData => matches!(verdict, Verdict::NotEnoughData { .. }),
        }
    }
}

pub fn run(args: &CompareArgs) -> Result<ExitCode> {
    let (base, head) = (read(&args.base)?, read(&args.head)?);
    let result = InTurn::new(&base, &head, args.min_effect)?;
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&result)?);
    } else {
        print(&result);
    }
    let failed = args.fail_on.is_some_and(|f| f.is(&result.verdict));
    Ok(if failed { ExitCode::from(GATE_FAILED) } else { ExitCode::SUCCESS })
}

/// Records of a file; lines that are none are told, and a file without records is an error.
fn read(path: &Path) -> Result<Vec<Record>> {
    let log = bench::log::read_uniform(path)?;
    for skipped in &log.skipped {
        crate::errln!("warning: {}: line {} is left out: {}", path.display(), skipped.line, skipped.reason);
    }
    if log.records.is_empty() {
        bail!("{}: no records", path.display());
    }
    Ok(log.records)
}

/// What the pairs say.
pub fn print(v: &InTurn) {
    let what = match v.basis {
        Basis::TokensPerSecond => "tokens/s",
        Basis::StepTime => "speed of a step",
    };
    let r = &v.ratio;
    crate::outln!("{}", v.verdict);
    crate::outln!(
        "  {what}: {:.3} [{:.3}, {:.3}] times the first side's ({:.1} % interval over {} pairs); {:.1} % matter",
        r.value,
        r.low,
        r.high,
        r.level * 100.0,
        v.pairs,
        v.min_effect * 100.0
    );
    if v.basis == Basis::StepTime {
        crate::outln!(
            "  (the two sides wrote different text, so tokens/s would compare texts: judged by the time of a step)"
        );
    }
    if v.left_out > 0 {
        crate::outln!("  ({} records have no counterpart or were cut short, and are left out)", v.left_out);
    }
}
