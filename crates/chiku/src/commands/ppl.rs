//! `chiku ppl`: perplexity over token records.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use ppl::records::{self, Record};
use ppl::score::{PplReport, ScoreOptions, score};
use runtime::tokenizer::TOKENIZER_FILE;
use runtime::{Engine, Model};

use crate::args::ModelArgs;
use crate::exit::{GATE_FAILED, INTERRUPTED};
use crate::interrupt;
use crate::output::{PartialFile, Unit, bar};

#[derive(Args)]
#[command(
    after_help = "A record is a line with `id`, `context_token_ids` and `target_token_ids`; only targets are scored. \
Where the head was pruned of a target there is no perplexity: `ppl` is null, the ids are listed, and the exit code is 1.

Examples:
  chiku ppl --model nano
  chiku ppl --model ./gemma-4-E4B-it --records ppl_ground_truth_tokens.jsonl --json"
)]
pub struct PplArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Records to score: a JSONL file [default: the embedded ones, for models with nano's tokenizer].
    #[arg(long, value_name = "FILE")]
    pub records: Option<String>,
    /// Score only the first N records.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Rows of one pass. Changes speed, never a bit.
    #[arg(long, default_value_t = 64, value_name = "ROWS")]
    pub chunk: usize,
    /// Write each record's score to this JSONL file, in the field's schema.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print the summary as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &PplArgs, quiet: bool) -> Result<ExitCode> {
    let model = args.model.load()?;
    let records = read_records(args.records.as_deref(), &model, args.limit)?;
    let inputs: Vec<PathBuf> = args.records.iter().map(PathBuf::from).collect();
    let out = args.out.as_ref().map(|path| PartialFile::create(path, &inputs)).transpose()?;
    let mut engine = args.model.engine.engine(&model)?;
    let options = ScoreOptions { chunk_rows: args.chunk };
    let mut report = score_with_bar(&mut engine, &records, &options, quiet)?;
    // An interrupted run has no whole file to give.
    if let Some(out) = out.filter(|_| report.complete) {
        write_records(out, &report)?;
    }
    if args.json {
        // Per-record scores go to --out; the summary stays one readable object.
        report.records.clear();
        crate::outln!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print(&report);
    }
    Ok(match (report.complete, report.usable()) {
        (false, _) => ExitCode::from(INTERRUPTED),
        (true, false) => ExitCode::from(GATE_FAILED),
        (true, true) => ExitCode::SUCCESS,
    })
}

/// The records of a file, or the embedded ones. Those are token ids of nano's tokenizer: scored by a model with another one they would
/// give a number without meaning.
pub fn read_records(source: Option<&str>, model: &Model, limit: Option<usize>) -> Result<Vec<Record>> {
    let path = match source {
        Some(path) => PathBuf::from(path),
        None => {
            let nano = runtime::nano::directory()?;
            let bytes = |dir: &Path| std::fs::read(dir.join(TOKENIZER_FILE)).ok();
            let dir = model.checkpoint().dir();
            if bytes(dir).is_none() || bytes(dir) != bytes(&nano) {
                bail!(
                    "{}: its tokenizer is not that of the embedded records; give records of its own with --records FILE",
                    dir.display()
                );
            }
            nano.join("prompts/ppl.jsonl")
        }
    };
    let mut records = records::read(&path, model.config().vocab_size)?;
    records.truncate(limit.unwrap_or(usize::MAX));
    Ok(records)
}

/// Scores under a progress bar and Ctrl-C.
pub fn score_with_bar(
    engine: &mut Engine,
    records: &[Record],
    options: &ScoreOptions,
    quiet: bool,
) -> Result<PplReport> {
    let progress = bar("perplexity", records.len() as u64, Unit::Count, quiet);
    let report = score(engine, records, options, interrupt::flag()?, |p| progress.set_position(p.records as u64))?;
    progress.finish_and_clear();
    Ok(report)
}

fn write_records(mut out: PartialFile, report: &PplReport) -> Result<()> {
    for record in &report.records {
        writeln!(out.file(), "{}", serde_json::to_string(record)?).context("cannot write the records")?;
    }
    out.finish()
}

fn print(r: &PplReport) {
    match r.ppl {
        Some(ppl) => crate::outln!("perplexity {ppl:.4} over {} tokens of {} records", r.num_tokens, r.num_records),
        None => crate::outln!("no perplexity: {} of the target tokens have no row in the head", r.pruned_targets.len()),
    }
    for t in r.pruned_targets.iter().take(20) {
        crate::outln!(
            "  token {} is a target {} times, first in {}",
            t.token_id,
            t.count,
            t.records.first().map_or("", |r| r)
        );
    }
    if r.pruned_targets.len() > 20 {
        crate::outln!("  ... and {} more (all with --json)", r.pruned_targets.len() - 20);
    }
    if let Some(mean) = r.mean_record_ppl {
        crate::outln!("mean of the records' perplexities {mean:.4} (gates nothing)");
    }
    if !r.complete {
        crate::outln!("interrupted: these are the records that were done");
    }
}
