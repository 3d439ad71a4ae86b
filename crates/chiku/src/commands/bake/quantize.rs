//! `chiku bake quantize`.

use std::process::ExitCode;

use anyhow::Result;
use bake::Strategy;
use bake::quantize::QuantizeOptions;
use clap::{Args, ValueEnum};

use super::{ParentArgs, TargetArgs, bake_with, open};

#[derive(Args)]
#[command(after_help = "Example:\n  chiku bake quantize --model nano --group 32 --out nano-int4")]
pub struct QuantizeArgs {
    /// A bf16 or f32 checkpoint directory, or `nano`.
    #[arg(long, value_name = "DIR|nano")]
    pub model: String,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub parent: ParentArgs,
    /// Inputs that share a scale: 32, 64, 128 or any other multiple of 8.
    #[arg(long, default_value_t = 128, value_name = "N", conflicts_with = "per_channel")]
    pub group: usize,
    /// One scale an output row instead of groups.
    #[arg(long)]
    pub per_channel: bool,
    /// Scales of an untied head: `channel`, or `group` for the same as the body.
    #[arg(long, value_enum, default_value = "channel")]
    pub head: HeadScales,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum HeadScales {
    /// One scale a row.
    Channel,
    /// As in the body.
    Group,
}

pub fn run(args: &QuantizeArgs, quiet: bool) -> Result<ExitCode> {
    let parent = open(&args.model)?;
    let strategy = if args.per_channel { Strategy::Channel } else { Strategy::Group(args.group) };
    let head = match args.head {
        HeadScales::Channel => Strategy::Channel,
        HeadScales::Group => strategy,
    };
    let options = QuantizeOptions { strategy, head, write: args.parent.write(&args.target) };
    bake_with(&args.target, quiet, |c| bake::quantize::run(&parent, &args.target.out, &options, c))
}
