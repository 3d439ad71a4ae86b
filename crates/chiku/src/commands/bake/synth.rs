//! `chiku bake synth`.

use std::process::ExitCode;

use anyhow::Result;
use bake::Strategy;
use bake::synth::{Shape, SynthOptions};
use clap::{Args, ValueEnum};

use super::{TargetArgs, bake_with};

#[derive(Args)]
#[command(after_help = "Example:\n  chiku bake synth --shape e4b --layers 8 --vocab 16384 --int4 128 --out e4b-8")]
pub struct SynthArgs {
    /// Widths of the model.
    #[arg(long, value_enum)]
    pub shape: ShapeArg,
    /// Decoder layers [default: the real model's].
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Rows of the embedding tables [default: the real model's].
    #[arg(long, value_name = "N")]
    pub vocab: Option<usize>,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// Write the linears as int4 with this group size instead of bf16.
    #[arg(long, value_name = "GROUP")]
    pub int4: Option<usize>,
    /// Leave out keys and values of KV-shared layers, which published checkpoints store and nothing reads.
    #[arg(long)]
    pub strip_inert_kv: bool,
    #[command(flatten)]
    pub target: TargetArgs,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum ShapeArg {
    /// Gemma 4 E4B.
    E4b,
    /// The embedded model.
    Nano,
}

pub fn run(args: &SynthArgs, quiet: bool) -> Result<ExitCode> {
    let shape = match args.shape {
        ShapeArg::E4b => Shape::E4b,
        ShapeArg::Nano => Shape::Nano,
    };
    let options = SynthOptions {
        layers: args.layers.unwrap_or(shape.layers()),
        vocab: args.vocab.unwrap_or(shape.vocab()),
        seed: args.seed,
        int4: args.int4.map(Strategy::Group),
        inert_kv: !args.strip_inert_kv,
        force: args.target.force,
        ..SynthOptions::new(shape)
    };
    bake_with(&args.target, quiet, |c| bake::synth::run(&args.target.out, &options, c))
}
