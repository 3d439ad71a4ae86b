//! `chiku bake diff`.

use std::process::ExitCode;

use anyhow::Result;
use bake::{Context, diff};
use clap::Args;

use super::open;
use crate::exit::GATE_FAILED;
use crate::interrupt;
use crate::output::{Unit, bar};

#[derive(Args)]
#[command(
    after_help = "Packed linears are compared by the weights they stand for. Where b was made from a by removing layers or head rows, a is \
seen without them.\n\nExit code: 0 where tensors and config.json are the same, 1 where they differ, as diff(1) has it.\n\nExamples:\n  chiku \
bake diff nano nano-int4\n  chiku bake diff nano nano-10 --json"
)]
pub struct DiffArgs {
    /// The first checkpoint.
    #[arg(value_name = "A")]
    pub a: String,
    /// The second checkpoint.
    #[arg(value_name = "B")]
    pub b: String,
    /// Print the differences as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &DiffArgs, quiet: bool) -> Result<ExitCode> {
    let (a, b) = (open(&args.a)?, open(&args.b)?);
    let progress = bar("comparing", 0, Unit::Bytes, quiet);
    let update = |done, total| {
        progress.set_length(total);
        progress.set_position(done);
    };
    let difference = diff::run(&a, &b, &Context { cancel: interrupt::flag()?, progress: &update })?;
    progress.finish_and_clear();
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&difference)?);
    } else if !quiet {
        crate::out!("{difference}");
    }
    Ok(if difference.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(GATE_FAILED) })
}
