//! `chiku bake synth`.

use std::num::NonZeroUsize;
use std::process::ExitCode;

use anyhow::Result;
use bake::synth::{Shape, SynthOptions};
use bake::{Strategy, WriteOptions};
use clap::{Args, ValueEnum};

use super::{TargetArgs, bake_with};

#[derive(Args)]
#[command(after_help = "Examples:
  chiku bake synth --shape e4b --layers 8 --vocab 16384 --int4 128 --out e4b-8
  chiku bake synth --shape e4b --towers --shards 4 --sparse --out e4b-shape")]
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
    /// Write vision and audio towers, too.
    #[arg(long)]
    pub towers: bool,
    /// Zeros that take no disk instead of random weights, for what only looks at shapes.
    #[arg(long)]
    pub sparse: bool,
    /// Spread the tensors over so many files of about equal size, with an index.
    #[arg(long, value_name = "N")]
    pub shards: Option<NonZeroUsize>,
    #[command(flatten)]
    pub target: TargetArgs,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum ShapeArg {
    /// Gemma 4 E4B.
    E4b,
    /// Gemma 4 E2B.
    E2b,
    /// The embedded model.
    Nano,
}

pub fn run(args: &SynthArgs, quiet: bool) -> Result<ExitCode> {
    let shape = match args.shape {
        ShapeArg::E4b => Shape::E4b,
        ShapeArg::E2b => Shape::E2b,
        ShapeArg::Nano => Shape::Nano,
    };
    let options = SynthOptions {
        layers: args.layers.unwrap_or(shape.layers()),
        vocab: args.vocab.unwrap_or(shape.vocab()),
        seed: args.seed,
        int4: args.int4.map(Strategy::Group),
        inert_kv: !args.strip_inert_kv,
        towers: args.towers,
        sparse: args.sparse,
        write: WriteOptions { shards: args.shards, ..args.target.write() },
        ..SynthOptions::new(shape)
    };
    bake_with(&args.target, quiet, |c| bake::synth::run(&args.target.out, &options, c))
}
