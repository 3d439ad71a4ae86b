//! `chiku bench gap`: public against private prompts.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use bench::gap::{ChangeGap, Gap, Request};
use bench::import::field_run::FieldRun;
use bench::protocol::Protocol;
use bench::stats::{BootstrapOptions, Estimate, Throughput};
use clap::Args;
use serde_json::json;

use super::measure::{Measuring, Side, measure};
use super::prompts::PromptArgs;
use crate::args::EngineArgs;
use crate::draft::DraftArgs;
use crate::exit::INTERRUPTED;
use crate::interrupt;

#[derive(Args)]
#[command(
    after_help = "Three sources: --pairs, totals of runs with both results; --public and --private, runs with their requests (results files, \
whose last record counts, or directories of the field); or neither, which measures --model on both prompt sets. Private prompts stay in \
their file: a record holds the hash and the number of a set.

Examples:
  chiku bench gap --pairs public_private.csv --json
  chiku bench gap --public public.jsonl --private private.jsonl --base-public before-public.jsonl --base-private before-private.jsonl
  chiku bench gap --model nano --drafter nano --limit 32 --max-tokens 64"
)]
pub struct GapArgs {
    /// CSV with config, public_tps, private_tps and verdict; pairs with a rounded value are left out.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["public", "private"])]
    pub pairs: Option<PathBuf>,
    /// Runs on public prompts, pooled prompt by prompt.
    #[arg(long, value_name = "PATH", num_args = 1.., requires = "private")]
    pub public: Vec<PathBuf>,
    /// Runs on private prompts.
    #[arg(long, value_name = "PATH", num_args = 1.., requires = "public")]
    pub private: Vec<PathBuf>,
    /// Public runs before a change, on the same prompts: did it help only in public?
    #[arg(long, value_name = "PATH", num_args = 1.., requires_all = ["base_private", "public"])]
    pub base_public: Vec<PathBuf>,
    /// Private runs before the change.
    #[arg(long, value_name = "PATH", num_args = 1.., requires_all = ["base_public", "private"])]
    pub base_private: Vec<PathBuf>,
    /// Tolerated loss, as a fraction of the public result.
    #[arg(long, default_value_t = 0.05, value_name = "FRACTION")]
    pub gate: f64,
    /// What to measure where no runs are given: a checkpoint directory, or `nano`.
    #[arg(long, value_name = "DIR|nano", default_value = "nano")]
    pub model: String,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Public prompts to measure: `public`, `heldout`, or a file.
    #[arg(long, default_value = "public", value_name = "FILE|public|heldout")]
    pub public_prompts: String,
    /// Private prompts to measure.
    #[arg(long, default_value = "heldout", value_name = "FILE|public|heldout")]
    pub private_prompts: String,
    /// Prompts of each set to measure, from its start.
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub limit: usize,
    /// Tokens of each completion that is measured.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub max_tokens: usize,
    /// Seed of the intervals.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &GapArgs, quiet: bool) -> Result<ExitCode> {
    let options = BootstrapOptions { seed: args.seed, ..Default::default() };
    if let Some(path) = &args.pairs {
        return of_pairs(path, args.json, options.level);
    }
    let (public, private) = match args.public.is_empty() {
        false => (read(&args.public)?, read(&args.private)?),
        true => match measured(args, quiet)? {
            Some(sides) => sides,
            None => return Ok(ExitCode::from(INTERRUPTED)),
        },
    };
    let gap = Gap::new(&public, &private, args.gate * 100.0, &options)?;
    let change = match args.base_public.is_empty() {
        true => None,
        false => {
            let (a, b) = (read(&args.base_public)?, read(&args.base_private)?);
            Some(ChangeGap::new([&a, &b], [&public, &private], &options)?)
        }
    };
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&json!({"gap": gap, "change": change}))?);
        return Ok(ExitCode::SUCCESS);
    }
    let percent = |e: &Estimate| format!("{:.2} % [{:.2}, {:.2}]", e.value, e.interval.low, e.interval.high);
    crate::outln!("public {:.2} tokens/s over {} prompts", gap.public_tps, gap.public_prompts);
    crate::outln!("private {:.2} tokens/s over {} prompts", gap.private_tps, gap.private_prompts);
    crate::outln!("gap {} (over both prompt sets)", percent(&gap.delta_pct));
    if let Some(p) = &gap.parts {
        crate::outln!("  acceptance {}", percent(&p.acceptance));
        crate::outln!("  context length {}", percent(&p.context_length));
        crate::outln!("  residual {}", percent(&p.residual));
    }
    let g = &gap.gate;
    crate::outln!(
        "a one-shot gate of {:.1} %: the choice of prompts alone has a standard error of {:.2} %; valid with probability {:.2}",
        g.gate_pct,
        g.standard_error_pct,
        g.p_valid
    );
    if let Some(c) = &change {
        crate::outln!("the change: public {}, private {}", percent(&c.public_pct), percent(&c.private_pct));
        crate::outln!("  more in public than in private: {}", percent(&c.difference_pct));
        if c.public_only {
            crate::outln!("  this change helps only in public");
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn of_pairs(path: &Path, json: bool, level: f64) -> Result<ExitCode> {
    let r = bench::import::pairs::read(path)?.report(level)?;
    if json {
        crate::outln!("{}", serde_json::to_string_pretty(&r)?);
        return Ok(ExitCode::SUCCESS);
    }
    let i = r.interval.interval;
    crate::outln!(
        "{} exact pairs ({} rounded and {} one-sided rows left out), published",
        r.pairs,
        r.rounded,
        r.one_sided
    );
    crate::outln!(
        "loss {:.2} % [{:.2}, {:.2}], sd {:.2}, from {:.2} to {:.2}",
        r.mean_delta_pct,
        i.low,
        i.high,
        r.sd,
        r.min,
        r.max
    );
    if let (Some(most), Some(least)) = (r.valid_max, r.invalid_min) {
        crate::outln!("{} valid, at most {most:.3} %; {} invalid, at least {least:.3} %", r.valid, r.invalid);
    }
    for c in &r.configs {
        let interval = c.interval.map_or_else(
            || "one pair, no interval".to_string(),
            |e| format!("[{:.2}, {:.2}]", e.interval.low, e.interval.high),
        );
        let few = if c.few { ", fewer than 5 pairs" } else { "" };
        crate::outln!("  {:.2} % {interval} ({} pairs{few}) {}", c.mean_delta_pct, c.pairs, c.config);
    }
    Ok(ExitCode::SUCCESS)
}

/// The requests of some runs, pooled prompt by prompt.
fn read(paths: &[PathBuf]) -> Result<Vec<Request>> {
    let mut pooled: Vec<(String, Request)> = Vec::new();
    for (i, path) in paths.iter().enumerate() {
        let run = one(path)?;
        if i == 0 {
            pooled = run;
            continue;
        }
        if run.len() != pooled.len() || run.iter().zip(&pooled).any(|(a, b)| a.0 != b.0) {
            bail!(
                "{}: runs other prompts than {}; only runs of the same prompts can be pooled",
                path.display(),
                paths[0].display()
            );
        }
        for ((_, sum), (_, r)) in pooled.iter_mut().zip(run) {
            sum.total.tokens += r.total.tokens;
            sum.total.seconds += r.total.seconds;
            sum.steps = sum.steps.zip(r.steps).map(|((n, t), (m, u))| (n + m, t + u));
        }
    }
    Ok(pooled.into_iter().map(|(_, r)| r).collect())
}

fn one(path: &Path) -> Result<Vec<(String, Request)>> {
    if path.is_dir() {
        let run = FieldRun::read(path, &BootstrapOptions::default())?;
        if run.samples.is_empty() {
            bail!("{}: the run does not hold the time of each request", path.display());
        }
        let request = |(i, total): (usize, &Throughput)| (i.to_string(), Request { total: *total, steps: None });
        return Ok(run.samples.iter().enumerate().map(request).collect());
    }
    let log = bench::log::read_uniform(path)?;
    for skipped in &log.skipped {
        crate::errln!("warning: {}: line {} is skipped: {}", path.display(), skipped.line, skipped.reason);
    }
    let Some(record) = log.records.last() else { bail!("{}: no record", path.display()) };
    if !record.complete {
        crate::errln!("warning: {}: the last record is incomplete", path.display());
    }
    Ok(record.samples.iter().map(|s| (s.id.clone(), Request::from(s))).collect())
}

/// Both prompt sets, measured with the same model; `None` after an interrupt.
fn measured(args: &GapArgs, quiet: bool) -> Result<Option<(Vec<Request>, Vec<Request>)>> {
    let sides = [Side::load(&args.model, &args.engine, Some(args.draft.clone()))?];
    // Two short runs: a long wait for a steady machine would take more time than they do.
    let protocol = Protocol { max_tokens: args.max_tokens, warmup_limit_ms: 2000, ..Default::default() };
    let side = |prompts: &str| -> Result<Vec<Request>> {
        let set = PromptArgs { prompts: prompts.into(), chat: false, raw: false };
        let prompts = set.read(&sides[0].model, args.limit)?;
        let how =
            Measuring { protocol: &protocol, seed: args.seed, discarded: &[], quiet, results: None, profile: false };
        let records = measure(&sides, &prompts, &how)?.records;
        if let Some(failure) = records.iter().find_map(|r| r.failure.as_ref()) {
            bail!("the run ended early: {failure}");
        }
        Ok(records.iter().flat_map(|r| r.samples.iter().map(Request::from)).collect())
    };
    let (public, private) = (side(&args.public_prompts)?, side(&args.private_prompts)?);
    Ok((!interrupt::pressed()).then_some((public, private)))
}
