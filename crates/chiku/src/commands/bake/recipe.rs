//! `chiku bake recipe`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use bake::recipe::{self, Recipe};
use clap::Args;

use super::{ParentArgs, TargetArgs, bake_with, open};
use crate::output::megabytes;

#[derive(Args)]
#[command(after_help = "All steps are done in one pass; no intermediate checkpoint is written.

Examples:
  chiku bake recipe recipes/osoi5.toml --set keepset=keepset-12k.json --model e4b --out e4b-osoi5
  chiku bake recipe mine.toml --model nano --out nano-mine --dry-run")]
pub struct RecipeArgs {
    /// The recipe, a TOML file with steps.
    #[arg(value_name = "FILE")]
    pub recipe: PathBuf,
    /// A checkpoint directory, or `nano`.
    #[arg(long, value_name = "DIR|nano")]
    pub model: String,
    /// A value for a parameter of the recipe.
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// Say what would be written, and write nothing.
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub parent: ParentArgs,
}

pub fn run(args: &RecipeArgs, quiet: bool) -> Result<ExitCode> {
    let recipe = Recipe::read(&args.recipe, &values(&args.set)?)?;
    let parent = open(&args.model)?;
    if !args.dry_run {
        return bake_with(&args.target, quiet, |c| {
            recipe::run(&parent, &args.target.out, &recipe, args.parent.write(&args.target), c)
        });
    }
    let mut plan = recipe::plan(&parent, &recipe)?;
    plan.set_drop_towers(args.parent.drop_towers);
    let preview = recipe::preview(&plan, &args.target.out)?;
    if args.target.json {
        crate::outln!("{}", serde_json::to_string_pretty(&preview)?);
    } else {
        crate::outln!("{}: {}", recipe.name, recipe.description);
        crate::outln!(
            "{} in the files, {} read a step",
            megabytes(preview.components.total()),
            megabytes(preview.bytes_per_step.total)
        );
        crate::outln!("body {}, head {}", megabytes(preview.components.body), megabytes(preview.components.head));
        preview.lineage.notes.iter().for_each(|note| crate::outln!("note: {note}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// `NAME=VALUE` pairs.
fn values(pairs: &[String]) -> Result<BTreeMap<String, String>> {
    let mut out = BTreeMap::new();
    for pair in pairs {
        let Some((name, value)) = pair.split_once('=') else { bail!("--set {pair}: expected NAME=VALUE") };
        if out.insert(name.to_string(), value.to_string()).is_some() {
            bail!("--set {name} is given twice");
        }
    }
    Ok(out)
}
