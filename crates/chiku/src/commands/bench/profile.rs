//! `chiku bench profile`: what a step's time is made of.

use std::process::ExitCode;

use anyhow::Result;
use bench::profile::{Profile, profile};
use bench::record::{Figure, Kind, Record};
use clap::Args;
use ppl::paths::Prompt;
use runtime::Model;
use runtime::drafter::NgramDrafter;
use runtime::speculate::Shape;
use serde_json::json;

use super::measure::{Measuring, Side, environment};
use super::prompts::PromptArgs;
use crate::args::{EngineArgs, ModelArgs};
use crate::draft::{DraftArgs, Drafting};
use crate::exit::INTERRUPTED;
use crate::interrupt;
use crate::output::{Unit, bar};

#[derive(Args)]
#[command(
    after_help = "The rows add up to the wall time of decoding; `residual` is what no step claims, `verify: other` what of the target's \
pass no op claims. Prefill is not in it.

Examples:
  chiku bench profile --model nano
  chiku bench profile --model nano --drafter nano --k 7 --json"
)]
pub struct ProfileArgs {
    /// A checkpoint directory in Hugging Face layout, or `nano` for the embedded model.
    #[arg(long, value_name = "DIR|nano", default_value = "nano")]
    pub model: String,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub prompts: PromptArgs,
    /// Prompts to run, from the start of the set.
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub limit: usize,
    /// Tokens of each completion, running through end-of-text.
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub max_tokens: usize,
    /// Print the profile as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Prompts of a run that are taken apart.
const PROMPTS: usize = 4;
/// Tokens of each.
const TOKENS: usize = 64;

/// Takes a step apart by op on the first prompts of a run, for each of its records, and holds it against this machine's read bandwidth.
pub fn attach(records: &mut [Record], sides: &[Side], prompts: &[Prompt], how: &Measuring) -> Result<()> {
    let cancel = interrupt::flag()?;
    if interrupt::pressed() || records.iter().any(|r| !r.complete) {
        return Ok(());
    }
    let bandwidth = bench::bandwidth::measure()?;
    let prompts = &prompts[..prompts.len().min(PROMPTS)];
    let progress = bar("profiling", (prompts.len() * sides.len()) as u64, Unit::Count, how.quiet);
    for (record, side) in records.iter_mut().zip(sides) {
        let Drafting { mut drafter, shape } = side.draft.as_ref().map_or_else(plain, |d| drafting(d, &side.model))?;
        let mut engine = side.engine.engine(&side.model)?;
        let tokens = how.protocol.max_tokens.min(TOKENS);
        let p = profile(&mut engine, &mut *drafter, &shape, prompts, tokens, cancel, || progress.inc(1))?;
        let Some(value) = bandwidth.read else { continue };
        let read = Figure { kind: Kind::Measured, value, source: bandwidth.source.clone() };
        record.profile = Some(p.against(&side.model, read));
    }
    progress.finish_and_clear();
    Ok(())
}

/// Plain decoding is a draft of nothing.
fn plain() -> Result<Drafting> {
    Ok(Drafting { drafter: Box::new(NgramDrafter), shape: Shape::chain(0)? })
}

fn drafting(draft: &DraftArgs, model: &Model) -> Result<Drafting> {
    draft.drafting(model)?.map_or_else(plain, Ok)
}

pub fn run(args: &ProfileArgs, quiet: bool) -> Result<ExitCode> {
    let source = ModelArgs { model: args.model.clone(), engine: args.engine.clone() };
    let model = source.load()?;
    let Drafting { mut drafter, shape } = drafting(&args.draft, &model)?;
    let prompts = args.prompts.read(&model, args.limit)?.1;
    let mut engine = args.engine.engine(&model)?;
    let machine = environment();
    let cancel = interrupt::flag()?;
    let progress = bar("profiling", prompts.len() as u64, Unit::Count, quiet);
    let p = profile(&mut engine, &mut *drafter, &shape, &prompts, args.max_tokens, cancel, || progress.inc(1))?;
    progress.finish_and_clear();
    if args.json {
        let mut value = serde_json::to_value(&p)?;
        let name = if shape.depth() == 0 { "none" } else { drafter.name() };
        let target = json!({"model": args.model, "backend": "cpu", "isa": engine.isa(), "threads": engine.threads(),
            "draft": name, "tree": shape.to_string()});
        (value["machine"], value["target"]) = (machine.machine().into(), target);
        crate::outln!("{}", serde_json::to_string_pretty(&value)?);
    } else {
        print(&p);
    }
    Ok(if interrupt::pressed() { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

fn print(p: &Profile) {
    crate::outln!(
        "{} prompts, {} steps of {:.3} ms, {:.2} tokens a step, prefill {:.2} ms (measured)",
        p.prompts,
        p.steps,
        p.ms_per_step,
        p.tokens_per_step,
        p.prefill_ms
    );
    for part in &p.parts {
        crate::outln!("{:>26} {:9.4} ms {:6.2} %", part.name, part.ms_per_step, part.percent);
    }
}
