//! `chiku bake drop-layers`.

use std::process::ExitCode;

use anyhow::Result;
use bake::drop_layers::DropLayersOptions;
use clap::Args;
use runtime::config::Rule;

use super::{ParentArgs, TargetArgs, bake_with, open};

#[derive(Args)]
#[command(after_help = "Example:\n  chiku bake drop-layers --model nano --layers 2,8 --out nano-10")]
pub struct DropLayersArgs {
    /// A checkpoint directory, or `nano`.
    #[arg(long, value_name = "DIR|nano")]
    pub model: String,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub parent: ParentArgs,
    /// Layers to remove, comma-separated, counted from 0.
    #[arg(long, value_delimiter = ',', required = true, value_name = "L,L,...")]
    pub layers: Vec<usize>,
    /// Remove them although this rule speaks against it; the refusal names the rule.
    #[arg(long, value_name = "CHECK", value_parser = rule)]
    pub allow: Vec<Rule>,
    /// Also leave out keys and values stored for KV-shared layers, which nothing reads.
    #[arg(long)]
    pub strip_inert_kv: bool,
}

pub fn run(args: &DropLayersArgs, quiet: bool) -> Result<ExitCode> {
    let parent = open(&args.model)?;
    let options = DropLayersOptions {
        layers: args.layers.clone(),
        allow: args.allow.clone(),
        strip_inert_kv: args.strip_inert_kv,
        write: args.parent.write(&args.target),
    };
    bake_with(&args.target, quiet, |c| bake::drop_layers::run(&parent, &args.target.out, &options, c))
}

fn rule(name: &str) -> Result<Rule, String> {
    Rule::named(name).ok_or_else(|| format!("the checks are {}", Rule::ALL.map(Rule::name).join(", ")))
}
