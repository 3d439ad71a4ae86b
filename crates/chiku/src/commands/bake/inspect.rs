//! `chiku bake inspect`.

use std::process::ExitCode;

use anyhow::Result;
use bake::Context;
use bake::inspect::InspectOptions;
use clap::Args;

use super::open;
use crate::exit::GATE_FAILED;
use crate::interrupt;
use crate::output::{Unit, bar};

#[derive(Args)]
#[command(
    after_help = "With --strict or --against, problems end the command with exit code 1.\n\nExamples:\n  chiku bake inspect nano\n  chiku bake inspect nano-int4 --strict --json"
)]
pub struct InspectArgs {
    /// A checkpoint directory, or `nano`.
    #[arg(value_name = "DIR|nano")]
    pub model: String,
    /// Also read every float and hold every tensor to the configuration.
    #[arg(long)]
    pub strict: bool,
    /// The checkpoint that this one was made from by removing layers: compare whose keys and values the shared layers read.
    #[arg(long, value_name = "DIR|nano")]
    pub against: Option<String>,
    /// List every tensor on a line of its own instead of one line for all layers.
    #[arg(long)]
    pub tensors: bool,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &InspectArgs, quiet: bool) -> Result<ExitCode> {
    let checkpoint = open(&args.model)?;
    let parent = args.against.as_deref().map(open).transpose()?;
    let progress = bar("reading", 0, Unit::Bytes, quiet);
    let update = |done, total| {
        progress.set_length(total);
        progress.set_position(done);
    };
    let options = InspectOptions { strict: args.strict, against: parent.as_ref() };
    let context = Context { cancel: interrupt::flag()?, progress: &update };
    let inspection = bake::inspect::run(&checkpoint, &options, &context)?;
    progress.finish_and_clear();
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&inspection)?);
    } else {
        crate::out!("{inspection}");
        if args.tensors {
            crate::out!("\n{}", inspection.table());
        }
    }
    let asked = args.strict || args.against.is_some();
    let failed = asked && !inspection.problems.is_empty();
    Ok(if failed { ExitCode::from(GATE_FAILED) } else { ExitCode::SUCCESS })
}
