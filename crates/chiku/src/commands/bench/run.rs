//! `chiku bench run`: the protocol on one or two models, and a record of it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use bench::environment::Environment;
use bench::export::field;
use bench::protocol::{Output, Protocol};
use bench::record::{Discarded, Record};
use clap::{Args, ValueEnum};
use runtime::tokenizer::Tokenizer;

pub use super::measure::binary;
use super::measure::{Measured, Measuring, Side, append, measure, recover};
use super::prompts::PromptArgs;
use super::served::{self, ServedArgs};
use super::{interleave, processes, programs};
use crate::args::EngineArgs;
use crate::draft::DraftArgs;
use crate::exit::{INPUT, INTERRUPTED};
use crate::interrupt;
use crate::output::megabytes;

#[derive(Args)]
#[command(
    after_help = "The protocol is the field's: greedy, one request at a time, warm-ups first, end-of-text ignored; tokens/s are all \
completion tokens over the wall time of the whole sequence, prefill inside. Ctrl-C keeps what is done.

A prompt file that is none of the public sets is private: the record holds its hash and counts, neither its name nor its ids. The \
directory of `--export field` does hold the prompts, as the field's files do.

Examples:
  chiku bench run --model nano --limit 16 --max-tokens 64
  chiku bench run --model nano-int4 --against nano --limit 32 --out samples.jsonl
  chiku bench run --model nano --node-id node-7 --out draw-7.jsonl
  chiku bench run --interleave base deeper.toml --limit 32
  chiku bench run --interleave other-binary.toml base --processes 8 --limit 32
  chiku bench run --url http://127.0.0.1:8000 --chat --limit 16
  chiku bench run --processes 5 --limit 32 --out draws.jsonl
  chiku bench run --model nano --drafter nano --limit 16 --profile
  chiku bench run --model nano --prompts eval_prompts_sharegpt.json --export field --export-dir my-run"
)]
pub struct RunArgs {
    /// A checkpoint directory in Hugging Face layout, or `nano` for the embedded model.
    #[arg(long, value_name = "DIR|nano", default_value = "nano")]
    pub model: String,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Decode this checkpoint plainly, alternately with --model on the same prompts, and compare.
    #[arg(long, value_name = "DIR|nano")]
    pub against: Option<String>,
    /// Run two configurations alternately (A B, B A, ...) on the same prompts, and compare. Each is a TOML file, its fields named as
    /// the options are (model, draft, drafter, k, tree, centroids, draft-convention, precision, threads, context, label), and binary:
    /// the chiku to run it with; or `base`: what the last good record of this machine ran. Where one names a binary, whole runs take
    /// turns, each in a process of its own.
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["model", "against", "draft", "drafter", "k", "tree",
        "centroids", "draft_convention", "backend", "precision", "threads", "context", "label"])]
    pub interleave: Vec<String>,
    #[command(flatten)]
    pub served: ServedArgs,
    /// Run this often, each in a process of its own, and pool the runs [default: 1; 6 pairs where a configuration names a program].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N", visible_alias = "draws",
        overrides_with = "processes")]
    pub processes: Option<u16>,
    #[command(flatten)]
    pub prompts: PromptArgs,
    /// Prompts to run, from the start of the set.
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub limit: usize,
    /// Tokens of each completion.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub max_tokens: usize,
    /// Untimed requests before the first timed one.
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub warmup: usize,
    /// Longest time to wait, with further warm-ups, until 5 consecutive steps agree within 1 %; 0: they need not.
    #[arg(long, default_value_t = 10.0, value_parser = seconds, value_name = "SECONDS")]
    pub warmup_limit: f64,
    /// End a completion at end-of-text instead of running through it.
    #[arg(long)]
    pub stop_at_eos: bool,
    /// Seed of the interval's resampling.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Name of the configuration in reports [default: the last component of --model].
    #[arg(long, conflicts_with = "url", value_name = "NAME")]
    pub label: Option<String>,
    /// Name of this machine among like ones, for the record: two records with the same one are draws of one node.
    #[arg(long, value_parser = node_id, value_name = "ID")]
    pub node_id: Option<String>,
    /// A run that was thrown away before this one, and why, for the record; may be given again.
    #[arg(long, value_name = "REASON")]
    pub discarded: Vec<String>,
    /// Write the run in the format of others, too.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub export: Option<ExportFormat>,
    /// New directory for --export [default: the record's file with `.field` in the place of its extension].
    #[arg(long, requires = "export", value_name = "DIR")]
    pub export_dir: Option<PathBuf>,
    /// JSONL file to append the record to [default: results/YEAR/MACHINE-MONTH.jsonl].
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// After the run, take a step apart by op on some of its prompts (as `bench profile` does), and measure the read bandwidth of this
    /// machine, which takes 1 GB of memory: `bench history` then shows what each op takes of the roofline.
    #[arg(long, conflicts_with = "url")]
    pub profile: bool,
    /// Print the records as JSON, without the samples.
    #[arg(long)]
    pub json: bool,
}

/// `--export`.
#[derive(Clone, Copy, ValueEnum)]
pub enum ExportFormat {
    /// summary.json, benchmark.jsonl, decode_outputs.jsonl of the field's job.
    Field,
}

/// A time that is not negative.
pub fn seconds(text: &str) -> std::result::Result<f64, String> {
    text.parse()
        .ok()
        .filter(|s| (0.0..=1e6).contains(s))
        .ok_or_else(|| "a number of seconds from 0 on is needed".into())
}

/// A name without blanks and control characters, as node names are.
pub fn node_id(text: &str) -> std::result::Result<String, String> {
    let plain = |c: char| c.is_ascii_graphic();
    if (1..=128).contains(&text.len()) && text.chars().all(plain) {
        Ok(text.to_string())
    } else {
        Err("expected 1 to 128 printable characters without blanks".into())
    }
}

impl RunArgs {
    fn protocol(&self) -> Protocol {
        Protocol {
            warmup_prompts: self.warmup,
            max_tokens: self.max_tokens,
            ignore_eos: !self.stop_at_eos,
            warmup_limit_ms: (self.warmup_limit * 1e3) as u64,
            ..Default::default()
        }
    }

    /// The results file.
    fn path(&self) -> PathBuf {
        let monthly = || bench::log::monthly(Path::new("results"), &Environment::capture().machine());
        self.out.clone().unwrap_or_else(monthly)
    }

    /// Where to export to, if at all.
    fn export_dir(&self, path: &Path) -> Option<PathBuf> {
        self.export.map(|_| self.export_dir.clone().unwrap_or_else(|| path.with_extension("field")))
    }
}

pub fn run(args: &RunArgs, quiet: bool) -> Result<ExitCode> {
    let path = args.path();
    let export_dir = args.export_dir(&path);
    let two = args.against.is_some() || !args.interleave.is_empty();
    let processes = args.processes.unwrap_or(1);
    if export_dir.is_some() && (two || processes > 1) {
        bail!("--export writes one run of one configuration");
    }
    // Nothing is measured for a place that cannot be written; inputs that cannot be read come first, and leave no folder behind.
    let places = || -> Result<()> {
        bench::log::check(&path)?;
        recover(&path)?;
        export_dir.as_deref().map(field::check).transpose()?;
        Ok(())
    };
    if let Some(sides) = interleave::of_programs(&args.interleave, &path)? {
        places()?;
        return programs::run(args, &sides, &path, quiet);
    }
    if processes > 1 {
        return processes::run(processes.into(), &path, args.seed, args.json, quiet);
    }
    let (protocol, discarded) = (args.protocol(), thrown_away(&args.discarded));
    if let Some(url) = &args.served.url {
        let set = args.prompts.set(args.limit)?;
        places()?;
        let (mut record, outputs, journal) =
            served::measure(&args.served, url, &set, &protocol, (args.seed, &discarded), &path, quiet)?;
        record.node.clone_from(&args.node_id);
        append(&path, std::slice::from_ref(&record), journal)?;
        if let Some(dir) = &export_dir {
            let texts: Vec<String> = outputs.iter().map(|o| o.text().unwrap_or_default().to_string()).collect();
            export(dir, &record, &set, None, &outputs, &texts)?;
        }
        return finish(args, &path, export_dir.as_deref(), &[record], quiet);
    }
    let sides = sides(args, &path)?;
    let prompts = interleave::prompts(&args.prompts, &sides, args.limit)?;
    places()?;
    let (results, profile) = (Some(path.as_path()), args.profile);
    let how = Measuring { protocol: &protocol, seed: args.seed, discarded: &discarded, quiet, results, profile };
    let Measured { mut records, outputs, journal } = measure(&sides, &prompts, &how)?;
    records.iter_mut().for_each(|r| r.node.clone_from(&args.node_id));
    append(&path, &records, journal)?;
    if let (Some(dir), Some(record), Some(outputs)) = (&export_dir, records.last(), outputs.last()) {
        let tokenizer = Tokenizer::open(sides[0].model.checkpoint().dir())?;
        let text = |o: &Output| tokenizer.decode(o.ids().unwrap_or_default());
        let texts = outputs.iter().map(text).collect::<runtime::Result<Vec<String>>>()?;
        export(dir, record, &prompts.0, Some(&prompts.1), outputs, &texts)?;
    }
    finish(args, &path, export_dir.as_deref(), &records, quiet)
}

/// What is measured: one model, or two in turn.
fn sides(args: &RunArgs, path: &Path) -> Result<Vec<Side>> {
    if !args.interleave.is_empty() {
        return interleave::sides(&args.interleave, path);
    }
    let mut sides = Vec::new();
    if let Some(baseline) = &args.against {
        let mut plain = Side::load(baseline, &args.engine, None)?;
        plain.label += "-plain";
        sides.push(plain);
    }
    let mut side = Side::load(&args.model, &args.engine, Some(args.draft.clone()))?;
    side.label = args.label.clone().unwrap_or(side.label);
    sides.push(side);
    Ok(sides)
}

fn thrown_away(reasons: &[String]) -> Vec<Discarded> {
    reasons.iter().map(|reason| Discarded { what: "a run".into(), reason: reason.clone() }).collect()
}

/// Writes the run as a directory of the field; nothing where no request was finished.
fn export(
    dir: &Path,
    record: &Record,
    prompts: &bench::prompts::PromptSet,
    prompt_ids: Option<&[ppl::paths::Prompt]>,
    outputs: &[Output],
    texts: &[String],
) -> Result<()> {
    if record.samples.is_empty() {
        return Ok(());
    }
    let run = field::FieldRun {
        model: &record.target.label,
        prompts,
        prompt_ids,
        protocol: &record.protocol,
        planned: record.planned,
        samples: &record.samples,
        outputs,
        texts,
    };
    run.write(dir).with_context(|| "the record is written, the export is not")
}

/// Shows the records that were appended to `path`, and says how it ended.
fn finish(args: &RunArgs, path: &Path, exported: Option<&Path>, records: &[Record], quiet: bool) -> Result<ExitCode> {
    if args.json {
        let bare: Vec<Record> = records.iter().map(|r| Record { samples: vec![], ..r.clone() }).collect();
        crate::outln!("{}", serde_json::to_string_pretty(&bare)?);
    } else {
        records.iter().for_each(print);
        if !quiet {
            crate::outln!("record: {}", path.display());
            if let Some(dir) = exported.filter(|d| d.exists()) {
                crate::outln!("exported: {}", dir.display());
            }
        }
    }
    if let Some(failure) = records.iter().find_map(|r| r.failure.as_ref()) {
        crate::errln!("error: the run ended early: {failure}");
        return Ok(ExitCode::from(INPUT));
    }
    Ok(if interrupt::pressed() { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

fn print(r: &Record) {
    let Some(result) = &r.result else {
        crate::outln!("{}: nothing was measured", r.target.label);
        return;
    };
    let interval = result.interval.map_or_else(String::new, |i| {
        format!(" [{:.1}, {:.1}] ({:.0} % over prompts; machine noise is not in it)", i.low, i.high, i.level * 100.0)
    });
    crate::outln!("{}: {:.1} tokens/s{interval}, measured", r.target.label, result.tokens_per_s);
    let state = if r.complete { "" } else { ", INCOMPLETE" };
    let (done, planned) = (result.prompts, r.planned);
    crate::outln!("  {done} of {planned} prompts x {} tokens in {:.2} s{state}", r.protocol.max_tokens, result.wall_s);
    if let (Some(prefill), Some(step), Some(tokens)) = (result.prefill_ms, result.step_ms, result.tokens_per_step) {
        crate::outln!("  median prefill {prefill:.2} ms, median step {step:.3} ms, {tokens:.2} tokens a step");
    }
    if r.warmup.is_some_and(|w| w.steady == Some(false)) {
        crate::outln!("  the machine was not steady: no 5 consecutive warm-up steps agreed within 1 %");
    }
    if let Some(bytes) = &result.bytes_per_step {
        crate::outln!("  {} of weights a step (projected)", megabytes(bytes.value as u64));
    }
    crate::outln!("  trajectory {}", &result.trajectory[..16]);
    if let Some(c) = &r.comparison {
        let i = c.speedup.interval;
        crate::outln!(
            "  {} is {:.3} [{:.3}, {:.3}] times as fast as {} ({:.0} % over {} prompts)",
            c.b,
            c.speedup.value,
            i.low,
            i.high,
            c.a,
            i.level * 100.0,
            c.pairs
        );
        if let Some(t) = &c.typical {
            crate::outln!("  typical prompt {:.3} [{:.3}, {:.3}], in this process", t.value, t.low, t.high);
        }
        if let (Some(steps), Some(tokens)) = (&c.step_rate, &c.tokens_per_step) {
            crate::outln!("  {:.3} times the steps a second, {:.3} times the tokens a step", steps.value, tokens.value);
        }
        if let Some(verdict) = &c.verdict {
            crate::outln!("  verdict on {}: {verdict}", c.b);
        }
    }
}
