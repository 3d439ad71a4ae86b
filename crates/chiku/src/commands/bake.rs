//! `chiku bake`: checkpoint surgery.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use bake::{Context, Report, WriteOptions};
use clap::{Args, Subcommand};
use runtime::checkpoint::Checkpoint;

use crate::interrupt;
use crate::output::{Unit, bar, megabytes};

mod calibration;
mod diff;
mod drop_layers;
mod inspect;
mod lineage;
mod prune_vocab;
mod quantize;
mod recipe;
mod synth;

pub use prune_vocab::always_kept;

#[derive(Subcommand)]
pub enum BakeCommand {
    /// Weights of 8, 4, 3 or 2 bits: symmetric, a scale a group of inputs or a channel, by rtn, mse or gptq.
    Quantize(quantize::QuantizeArgs),
    /// A head with rows for some tokens only; all others get logit minus infinity.
    PruneVocab(prune_vocab::PruneVocabArgs),
    /// Fewer layers, with per-layer inputs sliced and KV sharing worked out anew.
    DropLayers(drop_layers::DropLayersArgs),
    /// Several bakes in one pass, from a TOML file.
    Recipe(recipe::RecipeArgs),
    /// What a checkpoint holds, and what is wrong with it.
    Inspect(inspect::InspectArgs),
    /// Which tensors differ between two checkpoints, and by how much.
    Diff(diff::DiffArgs),
    /// The family of a checkpoint: parents by hash, and what each bake changed.
    Lineage(lineage::LineageArgs),
    /// A random checkpoint of real shape, for tests of scale.
    Synth(synth::SynthArgs),
}

impl BakeCommand {
    pub fn json(&self) -> bool {
        match self {
            BakeCommand::Quantize(a) => a.target.json,
            BakeCommand::PruneVocab(a) => a.target.json,
            BakeCommand::DropLayers(a) => a.target.json,
            BakeCommand::Recipe(a) => a.target.json,
            BakeCommand::Inspect(a) => a.json,
            BakeCommand::Diff(a) => a.json,
            BakeCommand::Lineage(a) => a.json,
            BakeCommand::Synth(a) => a.target.json,
        }
    }
}

/// What is written, and how it is reported.
#[derive(Args)]
pub struct TargetArgs {
    /// Directory to write; appears only when it is whole.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Replace an existing target, once the new one is whole.
    #[arg(long)]
    pub force: bool,
    /// Go on with an unfinished bake of this target, begun with the same options, after its last whole tensor.
    #[arg(long)]
    pub resume: bool,
    /// Print a JSON report.
    #[arg(long)]
    pub json: bool,
}

impl TargetArgs {
    /// How to write what has no parent.
    pub fn write(&self) -> WriteOptions {
        WriteOptions { force: self.force, resume: self.resume, ..WriteOptions::default() }
    }
}

/// What every bake can do with its parent.
#[derive(Args)]
pub struct ParentArgs {
    /// Compute the SHA-256 of the model's files, too, and hold them to the sums that its SHA256SUMS, *.sha256 or download cache
    /// state. Without it those are recorded as they stand.
    #[arg(long)]
    pub sha256: bool,
    /// Leave out the vision and audio towers.
    #[arg(long)]
    pub drop_towers: bool,
}

impl ParentArgs {
    /// How to write a child.
    pub fn write(&self, target: &TargetArgs) -> WriteOptions {
        WriteOptions { sha256: self.sha256, drop_towers: self.drop_towers, ..target.write() }
    }
}

pub fn run(command: &BakeCommand, quiet: bool) -> Result<ExitCode> {
    match command {
        BakeCommand::Quantize(args) => quantize::run(args, quiet),
        BakeCommand::PruneVocab(args) => prune_vocab::run(args, quiet),
        BakeCommand::DropLayers(args) => drop_layers::run(args, quiet),
        BakeCommand::Recipe(args) => recipe::run(args, quiet),
        BakeCommand::Inspect(args) => inspect::run(args, quiet),
        BakeCommand::Diff(args) => diff::run(args, quiet),
        BakeCommand::Lineage(args) => lineage::run(args, quiet),
        BakeCommand::Synth(args) => synth::run(args, quiet),
    }
}

fn open(model: &str) -> Result<Checkpoint> {
    Ok(Checkpoint::open(&crate::args::model_dir(model)?)?)
}

/// Runs a bake under a progress bar and Ctrl-C, and reports what it did.
fn bake_with(
    target: &TargetArgs,
    quiet: bool,
    work: impl FnOnce(&Context) -> bake::Result<Report>,
) -> Result<ExitCode> {
    let progress = bar("baking", 0, Unit::Bytes, quiet);
    let update = |done, total| {
        progress.set_length(total);
        progress.set_position(done);
    };
    let report = work(&Context { cancel: interrupt::flag()?, progress: &update })?;
    progress.finish_and_clear();
    if target.json {
        let mut json = serde_json::to_value(&report)?;
        json["peak_rss_bytes"] = super::doctor::peak_rss_bytes().into();
        crate::outln!("{}", serde_json::to_string_pretty(&json)?);
    } else if !quiet {
        let bytes = megabytes(report.tensor_bytes);
        crate::outln!("{}: {} tensors, {bytes} in {:.1} s", report.path.display(), report.tensors, report.seconds);
        if report.parent_bytes > 0 {
            let share = report.tensor_bytes as f64 / report.parent_bytes as f64 * 100.0;
            crate::outln!("{share:.1} % of the parent's {}", megabytes(report.parent_bytes));
        }
        if report.resumed_bytes > 0 {
            crate::outln!("{} had been written before", megabytes(report.resumed_bytes));
        }
        for left in &report.unfinished {
            crate::outln!("note: {} is left of an unfinished bake; remove it when it is not needed", left.display());
        }
        const SHOWN: usize = 4;
        let notes = &report.lineage.notes;
        notes.iter().take(SHOWN).for_each(|note| crate::outln!("note: {note}"));
        if notes.len() > SHOWN {
            crate::outln!("... and {} more notes in lineage.json", notes.len() - SHOWN);
        }
    }
    Ok(ExitCode::SUCCESS)
}
