//! `chiku bake quantize`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use bake::Strategy;
use bake::method::Method;
use bake::precision::PrecisionPlan;
use bake::quant::Bits;
use bake::quantize::QuantizeOptions;
use clap::{Args, ValueEnum};

use super::calibration::CalibrationArgs;
use super::{ParentArgs, TargetArgs, bake_with, open};

#[derive(Args)]
#[command(after_help = "int4 and int8 are the standard pack-quantized format; int3 and int2 only this program reads.

A plan is a TOML file of rules; the first that matches a module decides, and what it leaves out follows the options:
  [[rule]]
  modules = \"*.mlp.{gate,up}_proj\"    # glob, or a list of them, over names such as layers.3.mlp.up_proj and lm_head
  bits = 3                            # also: group = N or channel = true, method = \"rtn\", \"mse\" or \"gptq\"
  [[rule]]
  modules = \"layers.0.*\"
  keep = true                         # stays dense

Examples:
  chiku bake quantize --model nano --group 32 --out nano-int4
  chiku bake quantize --model nano --bits 3 --method mse --group 32 --out nano-int3
  chiku bake quantize --model nano --bits 3 --method gptq --calibration prompts/public.jsonl --group 32 --out nano-gptq
  chiku bake quantize --model nano --group 32 --plan plan.toml --out nano-mixed")]
pub struct QuantizeArgs {
    /// A bf16 or f32 checkpoint directory, or `nano`.
    #[arg(long, value_name = "DIR|nano")]
    pub model: String,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub parent: ParentArgs,
    /// Width of a weight: 8, 4, 3 or 2.
    #[arg(long, default_value = "4", value_name = "BITS", value_parser = parse_bits)]
    pub bits: Bits,
    /// Who chooses scales and integers.
    #[arg(long, value_enum, default_value = "rtn")]
    pub method: MethodArg,
    /// Inputs that share a scale: 32, 64, 128 or any other multiple of 8.
    #[arg(long, default_value_t = 128, value_name = "N", conflicts_with = "per_channel")]
    pub group: usize,
    /// One scale an output row instead of groups.
    #[arg(long)]
    pub per_channel: bool,
    /// Scales of an untied head: `channel`, or `group` for the same as the body.
    #[arg(long, value_enum, default_value = "channel")]
    pub head: HeadScales,
    /// TOML file of rules that give single linears other bits, scales or methods, or keep them dense.
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    #[command(flatten)]
    pub calibration: CalibrationArgs,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum HeadScales {
    /// One scale a row.
    Channel,
    /// As in the body.
    Group,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum MethodArg {
    /// Round to nearest; the largest magnitude of a group sets its scale.
    Rtn,
    /// Round to nearest; each group takes the scale with the least squared error.
    Mse,
    /// Rounding errors are made up for by later weights; needs --calibration.
    Gptq,
}

fn parse_bits(text: &str) -> Result<Bits, String> {
    text.parse().ok().and_then(Bits::new).ok_or_else(|| "expected 8, 4, 3 or 2".to_string())
}

pub fn run(args: &QuantizeArgs, quiet: bool) -> Result<ExitCode> {
    let parent = open(&args.model)?;
    let strategy = if args.per_channel { Strategy::Channel } else { Strategy::Group(args.group) };
    let options = QuantizeOptions {
        bits: args.bits,
        method: match args.method {
            MethodArg::Rtn => Method::Rtn,
            MethodArg::Mse => Method::Mse,
            MethodArg::Gptq => Method::Gptq,
        },
        strategy,
        head: match args.head {
            HeadScales::Channel => Strategy::Channel,
            HeadScales::Group => strategy,
        },
        precision: args.plan.as_deref().map(PrecisionPlan::read).transpose()?.unwrap_or_default(),
        gptq: args.calibration.read(&parent)?,
        write: args.parent.write(&args.target),
    };
    bake_with(&args.target, quiet, |c| bake::quantize::run(&parent, &args.target.out, &options, c))
}
