//! `chiku bench acceptance`: what a drafter yields.

use std::ops::ControlFlow;
use std::process::ExitCode;

use anyhow::{Result, bail};
use bench::acceptance::{AcceptanceReport, PromptDrafts, Yield};
use bench::stats::BootstrapOptions;
use clap::Args;
use runtime::generate::GenerateOptions;
use runtime::speculative::speculative;

use super::prompts::PromptArgs;
use crate::args::{EngineArgs, ModelArgs};
use crate::draft::DraftArgs;
use crate::exit::INTERRUPTED;
use crate::interrupt;
use crate::output::{Unit, bar};

#[derive(Args)]
#[command(after_help = "Example:\n  chiku bench acceptance --model nano --drafter nano --prompts heldout --k 7")]
pub struct AcceptanceArgs {
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
    #[arg(long, default_value_t = 80, value_name = "N")]
    pub limit: usize,
    /// Tokens of each completion; ends at end-of-text.
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub max_tokens: usize,
    /// Seed of the interval's resampling.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &AcceptanceArgs, quiet: bool) -> Result<ExitCode> {
    let source = ModelArgs { model: args.model.clone(), engine: args.engine.clone() };
    let model = source.load()?;
    let Some(mut drafting) = args.draft.drafting(&model)? else {
        bail!("give a drafter: --drafter DIR, or --draft ngram");
    };
    let prompts = args.prompts.read(&model, args.limit)?.1;
    let mut engine = args.engine.engine(&model)?;
    let stop_ids = model.checkpoint().generation().stop_ids.clone();
    let options = GenerateOptions { max_tokens: args.max_tokens, stop_ids, ..Default::default() };
    interrupt::flag()?;
    let progress = bar("drafting", prompts.len() as u64, Unit::Count, quiet);
    let mut yields = Vec::new();
    let go_on = || if interrupt::pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    for prompt in &prompts {
        let (drafter, shape) = (&mut *drafting.drafter, &drafting.shape);
        let (made, speculation) = speculative(&mut engine, drafter, &prompt.token_ids, shape, &options, |_| go_on())?;
        if interrupt::pressed() {
            break;
        }
        yields.push(PromptDrafts { token_ids: made.token_ids, speculation });
        progress.inc(1);
    }
    progress.finish_and_clear();
    let report = AcceptanceReport::new(&yields, &BootstrapOptions { seed: args.seed, ..Default::default() })?;
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        let (name, shape) = (drafting.drafter.name(), &drafting.shape);
        crate::outln!("{name}, depth {}, {} rows, {} prompts (measured)", shape.depth(), shape.rows(), report.prompts);
        print_yield("all steps", &report.all);
        print_yield("outside loops", &report.off_loop);
        crate::outln!("{:.0} % of the steps are in repetition loops", report.loop_share * 100.0);
    }
    if report.mismatch {
        crate::errln!("warning: {}", crate::commands::stats::MISMATCH);
    }
    Ok(if interrupt::pressed() { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

fn print_yield(name: &str, y: &Yield) {
    let tokens = y.tokens_per_step.map_or_else(String::new, |e| {
        format!("{:.3} tokens a step [{:.3}, {:.3}]", e.value, e.interval.low, e.interval.high)
    });
    let depths: Vec<String> = y.accept_by_depth.iter().map(|a| format!("{:.0}%", a * 100.0)).collect();
    crate::outln!("{name:>14}: {} steps, {tokens}, accepted by depth {}", y.steps, depths.join(" "));
}
