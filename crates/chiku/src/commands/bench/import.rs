//! `chiku bench import`: what files of others say.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use bench::import::board::{Board, Verification};
use bench::import::engines::{self, Tool, Unit};
use bench::import::field_run::FieldRun;
use bench::import::{draws, steptime};
use bench::luck::Group;
use bench::stats::BootstrapOptions;
use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

#[derive(Subcommand)]
pub enum ImportCommand {
    /// Repeated runs (CSV: group, tps, trajectory_cluster): how much of their spread is the trajectory.
    #[command(after_help = "Example:\n  chiku bench import draws draws.csv --json")]
    Draws(FileArgs),
    /// A server's step-time log: median times of the target's pass and of drafting.
    #[command(after_help = "Example:\n  chiku bench import steptime job_logs.txt --json")]
    Steptime(FileArgs),
    /// A leaderboard (JSON): rows and their states.
    #[command(after_help = "Example:\n  chiku bench import board leaderboard.json --json")]
    Board(FileArgs),
    /// A run's directory (benchmark.jsonl, decode_outputs.jsonl, summary.json): speed and trajectory.
    #[command(after_help = "Example:\n  chiku bench import run results/my-run --json")]
    Run(FileArgs),
    /// Results of `llama-bench -o json`.
    #[command(after_help = "Example:\n  chiku bench import llama-bench bench.json --json")]
    LlamaBench(FileArgs),
    /// Results of `vllm bench serve --save-result` or `vllm bench throughput --output-json`.
    #[command(after_help = "Example:\n  chiku bench import vllm result.json --json")]
    Vllm(FileArgs),
    /// Results of `hyperfine --export-json`.
    #[command(after_help = "Example:\n  chiku bench import hyperfine times.json --json")]
    Hyperfine(FileArgs),
    /// Our own records, of many nodes, into one results file; what it holds already is not added again.
    #[command(
        after_help = "Every file is read before anything is written.\n\nExample:\n  chiku bench import records draws/draw-*.jsonl --out draws.jsonl"
    )]
    Records(RecordsArgs),
}

#[derive(Args)]
pub struct RecordsArgs {
    /// Results files, as `bench run --node-id ... --out` wrote them.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Results file to append to.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Print what was done as JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct FileArgs {
    /// What to read.
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Print as JSON.
    #[arg(long)]
    pub json: bool,
}

impl ImportCommand {
    pub fn json(&self) -> bool {
        match self {
            ImportCommand::Records(a) => a.json,
            ImportCommand::Draws(a)
            | ImportCommand::Steptime(a)
            | ImportCommand::Board(a)
            | ImportCommand::Run(a)
            | ImportCommand::LlamaBench(a)
            | ImportCommand::Vllm(a)
            | ImportCommand::Hyperfine(a) => a.json,
        }
    }
}

pub fn run(command: &ImportCommand) -> Result<ExitCode> {
    let (value, text) = match command {
        ImportCommand::Records(args) => of_records(args)?,
        ImportCommand::Draws(a) => of_draws(&a.path)?,
        ImportCommand::Steptime(a) => of_steptime(&a.path)?,
        ImportCommand::Board(a) => of_board(&a.path)?,
        ImportCommand::Run(a) => of_run(&a.path)?,
        ImportCommand::LlamaBench(a) => of_engine(&a.path, Tool::LlamaBench)?,
        ImportCommand::Vllm(a) => of_engine(&a.path, Tool::Vllm)?,
        ImportCommand::Hyperfine(a) => of_engine(&a.path, Tool::Hyperfine)?,
    };
    if command.json() {
        crate::outln!("{}", serde_json::to_string_pretty(&value)?);
    } else {
        crate::out!("{text}");
    }
    Ok(ExitCode::SUCCESS)
}

type Said = (Value, String);

fn of_records(args: &RecordsArgs) -> Result<Said> {
    let merged = bench::merge::merge(&args.files, &args.out)?;
    for (path, s) in &merged.skipped {
        crate::errln!("warning: {}: line {} is left out: {}", path.display(), s.line, s.reason);
    }
    let (added, known, nodes) = (merged.added, merged.known, merged.nodes);
    let text = format!("{}: {added} records added, {known} known, {nodes} nodes\n", args.out.display());
    Ok((serde_json::to_value(&merged)?, text))
}

fn of_draws(path: &std::path::Path) -> Result<Said> {
    let mut groups = Map::new();
    let mut text = format!(
        "{:>4} {:>8} {:>7} {:>8} {:>10} {:>9}  group (published)\n",
        "n", "mean", "sd", "classes", "explained", "within %"
    );
    let read = draws::read(path)?;
    if read.iter().all(|(_, draws)| draws.len() < 2) {
        return Err(bench::Error::TooFew {
            what: "draws of one group, to say what spreads them,",
            needed: 2,
            found: 1,
        }
        .into());
    }
    for (name, draws) in read {
        let g = Group::new(&draws)?;
        let or_dash = |v: Option<f64>, digits: usize| v.map_or("-".into(), |v| format!("{v:.digits$}"));
        text += &format!(
            "{:>4} {:>8.2} {:>7} {:>8} {:>10} {:>9}  {name}\n",
            g.n,
            g.mean,
            or_dash(g.sd, 2),
            g.classes,
            or_dash(g.explained, 3),
            or_dash(g.within_sd_pct, 3)
        );
        groups.insert(name, serde_json::to_value(&g)?);
    }
    Ok((json!({"kind": "published", "groups": groups}), text))
}

fn of_steptime(path: &std::path::Path) -> Result<Said> {
    let t = steptime::read(path)?;
    let draft = t.draft_ms_p50.map_or("nothing drafted".into(), |d| format!("draft {d:.3} ms"));
    let text = format!("exec {:.3} ms, {draft} (medians over {} passes, published)\n", t.exec_ms_p50, t.n);
    Ok((serde_json::to_value(&t)?, text))
}

fn of_board(path: &std::path::Path) -> Result<Said> {
    let board = Board::read(path)?;
    let [valid, pending, invalid] =
        [Verification::Valid, Verification::Pending, Verification::Invalid].map(|state| board.count(state));
    let (rows, masked) = (board.claims.len(), board.masked_valid());
    let fastest = |state| board.fastest(state).map(|c| json!({"agent": c.agent, "tps": c.tps, "method": c.method}));
    let value = json!({
        "rows": rows, "valid": valid, "pending": pending, "invalid": invalid, "masked_valid": masked,
        "fastest_valid": fastest(Verification::Valid), "fastest_pending": fastest(Verification::Pending),
        "claims": board.claims,
    });
    let mut text = format!("{rows} rows: {valid} valid, {pending} pending, {invalid} invalid (published)\n");
    for (name, state) in [("valid", Verification::Valid), ("pending", Verification::Pending)] {
        if let Some(c) = board.fastest(state) {
            text += &format!("fastest {name}: {:.2} tokens/s, {} of {}\n", c.tps, c.method, c.agent);
        }
    }
    if masked > 0 {
        text += &format!("{masked} valid rows are slower than another row of the same agent\n");
    }
    Ok((value, text))
}

fn of_run(path: &std::path::Path) -> Result<Said> {
    let r = FieldRun::read(path, &BootstrapOptions::default())?;
    let interval = r.interval.map_or_else(String::new, |i| format!(" [{:.1}, {:.1}] (over prompts)", i.low, i.high));
    let mut text =
        format!("{:.2} tokens/s{interval}, {} prompts in {:.2} s (published)\n", r.tps, r.prompts, r.ms_total / 1e3);
    match (&r.trajectory, &r.trajectory_missing) {
        (Some(t), _) => text += &format!("trajectory {t}\n"),
        (None, why) => text += &format!("no trajectory: {}\n", why.as_deref().unwrap_or("unknown")),
    }
    Ok((serde_json::to_value(&r)?, text))
}

fn of_engine(path: &std::path::Path, tool: Tool) -> Result<Said> {
    let rows = engines::read(path, tool)?;
    let mut text = String::new();
    for r in &rows {
        let unit = if r.unit == Unit::Seconds { "s" } else { "tokens/s" };
        let sd = r.sd.map_or_else(String::new, |sd| format!(", sd {sd:.3}"));
        text += &format!("{}: {:.3} {unit}{sd} ({}, published)\n", r.name, r.mean, r.tool);
    }
    Ok((json!({"measurements": rows}), text))
}
