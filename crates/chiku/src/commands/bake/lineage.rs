//! `chiku bake lineage`.

use std::process::ExitCode;

use anyhow::Result;
use bake::Error;
use bake::lineage::{self, FileCheck};
use clap::Args;
use serde_json::json;

use crate::args::model_dir;
use crate::exit::GATE_FAILED;
use crate::interrupt;

#[derive(Args)]
#[command(
    after_help = "A generation that changed more than one thing is flagged: a difference then has no single cause. With --parent, files \
that are not the recorded ones end the command with exit code 1.\n\nExamples:\n  chiku bake lineage nano-int4\n  chiku bake lineage nano-int4 --parent nano --json"
)]
pub struct LineageArgs {
    /// A checkpoint directory that a bake wrote.
    #[arg(value_name = "DIR")]
    pub model: String,
    /// Hash this directory and compare it with the parent that the checkpoint names.
    #[arg(long, value_name = "DIR|nano")]
    pub parent: Option<String>,
    /// Print the family as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &LineageArgs, quiet: bool) -> Result<ExitCode> {
    let dir = model_dir(&args.model)?;
    let family = lineage::family(&dir)?;
    let cancel = interrupt::flag()?;
    let go_on = || match cancel.load(std::sync::atomic::Ordering::Relaxed) {
        false => Ok(()),
        true => Err(Error::Cancelled { target: dir.clone() }),
    };
    let checks: Option<Vec<FileCheck>> = match &args.parent {
        Some(parent) => Some(lineage::verify(&dir, &model_dir(parent)?, go_on)?),
        None => None,
    };
    if args.json {
        let value = json!({"generations": family.generations, "flags": family.flags, "parent_files": checks});
        crate::outln!("{}", serde_json::to_string_pretty(&value)?);
    } else {
        crate::out!("{family}");
        for check in checks.iter().flatten().filter(|c| c.state != "same" || !quiet) {
            crate::outln!("{}: {}", check.name, check.state);
        }
    }
    let same = checks.iter().flatten().all(|c| c.state == "same");
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::from(GATE_FAILED) })
}
