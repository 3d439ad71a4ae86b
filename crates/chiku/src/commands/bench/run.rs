//! `chiku bench run`: the protocol on one or two models, and a record of it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use bench::compare::Comparison;
use bench::engine::EngineTarget;
use bench::environment::{Binary, CheckpointHash, Environment};
use bench::prompts::PromptSet;
use bench::protocol::{self, Monotonic, Protocol, Run};
use bench::record::{Figure, Kind, Record, Setup, TargetInfo};
use bench::stats::BootstrapOptions;
use clap::Args;
use ppl::paths::Prompt;
use runtime::Model;

use super::prompts::PromptArgs;
use crate::args::{EngineArgs, ModelArgs};
use crate::draft::DraftArgs;
use crate::exit::{INPUT, INTERRUPTED};
use crate::interrupt;
use crate::output::{Unit, bar, megabytes};

#[derive(Args)]
#[command(
    after_help = "The protocol is the field's: greedy, one request at a time, warm-ups first, end-of-text ignored; tokens/s are all \
completion tokens over the wall time of the whole sequence, prefill inside. Ctrl-C keeps what is done.

Examples:
  chiku bench run --model nano --limit 16 --max-tokens 64
  chiku bench run --model nano-int4 --against nano --limit 32 --out samples.jsonl
  chiku bench run --model nano --node-id node-7 --out draw-7.jsonl"
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
    /// End a completion at end-of-text instead of running through it.
    #[arg(long)]
    pub stop_at_eos: bool,
    /// Seed of the interval's resampling.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Name of this machine among like ones, for the record: two records with the same one are draws of one node.
    #[arg(long, value_parser = node_id, value_name = "ID")]
    pub node_id: Option<String>,
    /// JSONL file to append the record to [default: results/YEAR/MACHINE-MONTH.jsonl].
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print the records as JSON, without the samples.
    #[arg(long)]
    pub json: bool,
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

/// A loaded model to be timed.
pub struct Side {
    /// Name in reports.
    pub label: String,
    /// The model.
    pub model: Arc<Model>,
    /// Who drafts for it.
    pub draft: Option<DraftArgs>,
}

/// Times one or two models. Two are run alternately; the second record then holds the comparison with the first.
pub fn measure(
    sides: &[Side],
    engine: &EngineArgs,
    (set, prompts): &(PromptSet, Vec<Prompt>),
    protocol: &Protocol,
    seed: u64,
    quiet: bool,
) -> Result<Vec<Record>> {
    let cancel = interrupt::flag()?;
    let environment = Environment::capture();
    if let (Some(load), Some(cpus)) = (environment.load_1m, environment.cpus)
        && load > cpus as f64
    {
        crate::errln!(
            "warning: the load is {load:.1} on {cpus} processors: times will say more about the neighbours than about this program"
        );
    }
    let mut targets = Vec::new();
    let mut flags = Vec::new();
    for side in sides {
        let stop_ids = side.model.checkpoint().generation().stop_ids.clone();
        let target = EngineTarget::new(&side.label, engine.engine(&side.model)?, stop_ids, cancel);
        flags.push(vec![format!("isa={}", target.engine().isa())]);
        let drafting = match &side.draft {
            Some(draft) => draft.drafting(&side.model)?.map(|d| (draft.flags(&d), d)),
            None => None,
        };
        targets.push(match drafting {
            None => target,
            Some((set, d)) => {
                flags.last_mut().into_iter().for_each(|f| f.extend_from_slice(&set));
                target.with_drafts(d.drafter, d.shape)
            }
        });
    }
    let mut infos: Vec<(TargetInfo, CheckpointHash)> = Vec::new();
    for ((side, target), flags) in sides.iter().zip(&targets).zip(flags) {
        let info = TargetInfo {
            label: side.label.clone(),
            backend: "cpu".into(),
            precision: runtime::Precision::from(engine.precision).as_str().into(),
            threads: target.engine().threads(),
            flags,
        };
        infos.push((info, CheckpointHash::of(&side.label, side.model.checkpoint())?));
    }

    let progress = bar("measuring", (prompts.len() * sides.len()) as u64, Unit::Count, quiet);
    let mut show = |p: protocol::Progress<'_>| {
        if !p.warmup {
            progress.set_position(p.done as u64);
        }
    };
    let context = protocol::Context { clock: &Monotonic::start(), cancel, progress: &mut show };
    let runs: Vec<Run> = match &mut targets[..] {
        [one] => vec![protocol::run(one, prompts, protocol, context)?],
        [a, b] => protocol::interleave(a, b, prompts, protocol, context)?.into(),
        _ => bail!("one or two models can be measured, not {}", sides.len()),
    };
    progress.finish_and_clear();

    let options = BootstrapOptions { seed, ..Default::default() };
    let comparison = match &runs[..] {
        [a, b] if a.samples.len().min(b.samples.len()) >= 2 => Some(Comparison::new(a, b, &options)?),
        _ => None,
    };
    let mut records = Vec::new();
    for ((run, side), (target, checkpoint)) in runs.into_iter().zip(sides).zip(infos) {
        let setup = Setup {
            binary: binary(),
            environment: environment.clone(),
            target,
            checkpoint,
            prompts: set.clone(),
            protocol: protocol.clone(),
        };
        let mut record = Record::measured(run, setup, &options)?;
        if let Some(result) = &mut record.result {
            result.bytes_per_step = Some(Figure {
                kind: Kind::Projected,
                value: side.model.step_weight_bytes() as f64,
                source: "sum of the sizes of all matrices that a step multiplies with, each read once".into(),
            });
        }
        records.push(record);
    }
    if let Some(last) = records.last_mut() {
        last.comparison = comparison;
    }
    Ok(records)
}

pub fn binary() -> Binary {
    let planted = if cfg!(feature = "planted-slow-step") { "-planted-slow-step" } else { "" };
    let commit = Some(env!("CHIKU_BUILD_COMMIT").to_string()).filter(|c| !c.is_empty());
    Binary { version: env!("CARGO_PKG_VERSION").into(), commit: commit.map(|c| c + planted) }
}

pub fn run(args: &RunArgs, quiet: bool) -> Result<ExitCode> {
    let side = |model: &str, draft: Option<DraftArgs>| -> Result<Side> {
        let source = ModelArgs { model: model.into(), engine: args.engine.clone() };
        let label = model.trim_end_matches('/').rsplit('/').next().unwrap_or(model).to_string();
        Ok(Side { label, model: source.load()?, draft })
    };
    let mut sides = Vec::new();
    if let Some(baseline) = &args.against {
        let mut plain = side(baseline, None)?;
        plain.label += "-plain";
        sides.push(plain);
    }
    sides.push(side(&args.model, Some(args.draft.clone()))?);
    let prompts = args.prompts.read(&sides[0].model, args.limit)?;
    let protocol = Protocol {
        warmup_prompts: args.warmup,
        max_tokens: args.max_tokens,
        ignore_eos: !args.stop_at_eos,
        ..Default::default()
    };
    let path = match &args.out {
        Some(path) => path.clone(),
        None => bench::log::monthly(Path::new("results"), &Environment::capture().machine()),
    };
    bench::log::check(&path)?;
    let mut records = measure(&sides, &args.engine, &prompts, &protocol, args.seed, quiet)?;
    records.iter_mut().for_each(|r| r.node.clone_from(&args.node_id));
    for record in &records {
        if let Some(torn) = bench::log::append(&path, record)? {
            crate::errln!("warning: {}: line {} is torn and was closed: {}", path.display(), torn.line, torn.reason);
        }
    }
    if args.json {
        let bare: Vec<Record> = records.iter().map(|r| Record { samples: vec![], ..r.clone() }).collect();
        crate::outln!("{}", serde_json::to_string_pretty(&bare)?);
    } else {
        records.iter().for_each(print);
        if !quiet {
            crate::outln!("record: {}", path.display());
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
    if let Some(bytes) = &result.bytes_per_step {
        crate::outln!("  {} of weights a step (projected)", megabytes(bytes.value as u64));
    }
    crate::outln!("  trajectory {}", &result.trajectory[..16]);
    if let Some(c) = &r.comparison {
        let i = c.speedup.interval;
        crate::outln!(
            "  {} is {:.3} [{:.3}, {:.3}] times as fast as {} over {} prompts",
            c.b,
            c.speedup.value,
            i.low,
            i.high,
            c.a,
            c.pairs
        );
        if let (Some(steps), Some(tokens)) = (&c.step_rate, &c.tokens_per_step) {
            crate::outln!("  {:.3} times the steps a second, {:.3} times the tokens a step", steps.value, tokens.value);
        }
        if let Some(verdict) = &c.verdict {
            crate::outln!("  verdict on {}: {verdict}", c.b);
        }
    }
}
