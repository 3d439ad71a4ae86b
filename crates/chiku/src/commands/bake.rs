//! `chiku bake`: checkpoint surgery.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use bake::drop_layers::DropLayersOptions;
use bake::inspect::InspectOptions;
use bake::prune_vocab::PruneVocabOptions;
use bake::quantize::QuantizeOptions;
use bake::synth::{Shape, SynthOptions};
use bake::{Context, Report, Strategy};
use clap::{Args, Subcommand, ValueEnum};
use ppl::jsonl;
use runtime::checkpoint::{Checkpoint, Keepset};
use runtime::tokenizer::{TOKENIZER_FILE, Tokenizer};

use crate::exit::GATE_FAILED;
use crate::interrupt;
use crate::output::{Unit, bar, megabytes};

#[derive(Subcommand)]
pub enum BakeCommand {
    /// int4 weights: symmetric, round to nearest, a scale a group of inputs or a channel.
    Quantize(QuantizeArgs),
    /// A head with rows for some tokens only; all others get logit minus infinity.
    PruneVocab(PruneVocabArgs),
    /// Fewer layers, with per-layer inputs sliced and KV sharing worked out anew.
    DropLayers(DropLayersArgs),
    /// What a checkpoint holds, and what is wrong with it.
    Inspect(InspectArgs),
    /// A random checkpoint of real shape, for tests of scale.
    Synth(SynthArgs),
}

impl BakeCommand {
    pub fn json(&self) -> bool {
        match self {
            BakeCommand::Quantize(a) => a.target.json,
            BakeCommand::PruneVocab(a) => a.target.json,
            BakeCommand::DropLayers(a) => a.target.json,
            BakeCommand::Inspect(a) => a.json,
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
    /// Print a JSON report.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(after_help = "Example:\n  chiku bake quantize --model nano --group 32 --out nano-int4")]
pub struct QuantizeArgs {
    /// A bf16 or f32 checkpoint directory, or `nano`.
    #[arg(long, value_name = "DIR|nano")]
    pub model: String,
    #[command(flatten)]
    pub target: TargetArgs,
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

#[derive(Args)]
#[command(after_help = "Examples:
  chiku bake prune-vocab --model nano-int4 --keepset keepset.json --out nano-pruned
  chiku bake prune-vocab --model nano --from-tokens decode_outputs.jsonl --min-count 2 --out nano-pruned")]
pub struct PruneVocabArgs {
    /// A checkpoint directory, or `nano`.
    #[arg(long, value_name = "DIR|nano")]
    pub model: String,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub source: KeepsetSource,
    /// With --from-tokens: keep tokens that occur at least this often. Control and byte tokens are always kept.
    #[arg(long, default_value_t = 1, value_name = "N", conflicts_with = "keepset")]
    pub min_count: u64,
}

#[derive(Args)]
#[group(required = true, multiple = false, id = "keepset_source")]
pub struct KeepsetSource {
    /// Keepset file: {"keep_ids": [...], "full_vocab": V}.
    #[arg(long, value_name = "FILE")]
    pub keepset: Option<PathBuf>,
    /// JSONL of generated tokens (`completion_token_ids` or `token_ids` in each line) to build the keepset from.
    #[arg(long, value_name = "FILE")]
    pub from_tokens: Option<PathBuf>,
}

#[derive(Args)]
#[command(after_help = "Example:\n  chiku bake drop-layers --model nano --layers 2,8 --out nano-10")]
pub struct DropLayersArgs {
    /// A checkpoint directory, or `nano`.
    #[arg(long, value_name = "DIR|nano")]
    pub model: String,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Layers to remove, comma-separated, counted from 0.
    #[arg(long, value_delimiter = ',', required = true, value_name = "L,L,...")]
    pub layers: Vec<usize>,
    /// Also leave out keys and values stored for KV-shared layers, which nothing reads.
    #[arg(long)]
    pub strip_inert_kv: bool,
}

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
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

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

pub fn run(command: &BakeCommand, quiet: bool) -> Result<ExitCode> {
    match command {
        BakeCommand::Quantize(args) => {
            let parent = open(&args.model)?;
            let strategy = if args.per_channel { Strategy::Channel } else { Strategy::Group(args.group) };
            let head = match args.head {
                HeadScales::Channel => Strategy::Channel,
                HeadScales::Group => strategy,
            };
            let options = QuantizeOptions { strategy, head, force: args.target.force };
            bake_with(&args.target, quiet, |c| bake::quantize::run(&parent, &args.target.out, &options, c))
        }
        BakeCommand::PruneVocab(args) => prune_vocab(args, quiet),
        BakeCommand::DropLayers(args) => {
            let parent = open(&args.model)?;
            let options = DropLayersOptions {
                layers: args.layers.clone(),
                strip_inert_kv: args.strip_inert_kv,
                force: args.target.force,
            };
            bake_with(&args.target, quiet, |c| bake::drop_layers::run(&parent, &args.target.out, &options, c))
        }
        BakeCommand::Inspect(args) => inspect(args, quiet),
        BakeCommand::Synth(args) => {
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
        crate::outln!("{}", serde_json::to_string_pretty(&report)?);
    } else if !quiet {
        let bytes = megabytes(report.tensor_bytes);
        crate::outln!("{}: {} tensors, {bytes} in {:.1} s", report.path.display(), report.tensors, report.seconds);
        if report.parent_bytes > 0 {
            let share = report.tensor_bytes as f64 / report.parent_bytes as f64 * 100.0;
            crate::outln!("{share:.1} % of the parent's {}", megabytes(report.parent_bytes));
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

fn prune_vocab(args: &PruneVocabArgs, quiet: bool) -> Result<ExitCode> {
    let parent = open(&args.model)?;
    let vocab = parent.config().vocab_size;
    let (keep, origin) = match (&args.source.keepset, &args.source.from_tokens) {
        (Some(path), _) => (Keepset::read(path)?, file_name(path)),
        (_, Some(path)) => {
            let counts = bake::keepset::count(read_tokens(path, vocab)?, vocab)?;
            let origin = format!("tokens of {} that occur at least {} times", file_name(path), args.min_count);
            (bake::keepset::build(&counts, args.min_count, &always_kept(&parent)?)?, origin)
        }
        _ => bail!("give a keepset: --keepset or --from-tokens"),
    };
    let options = PruneVocabOptions { origin, force: args.target.force };
    bake_with(&args.target, quiet, |c| bake::prune_vocab::run(&parent, &args.target.out, &keep, &options, c))
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Control tokens, byte tokens and stop tokens of a checkpoint. A tokenizer is needed to know them.
pub fn always_kept(checkpoint: &Checkpoint) -> Result<Vec<u32>> {
    if checkpoint.file(TOKENIZER_FILE).is_none() {
        bail!(
            "{}: there is no tokenizer.json to tell which tokens must always be kept; give a --keepset file instead",
            checkpoint.dir().display()
        );
    }
    let mut ids = Tokenizer::open(checkpoint.dir())?.structural_ids();
    ids.extend(&checkpoint.generation().stop_ids);
    // A tokenizer may know more tokens than the model has rows for.
    ids.retain(|&id| (id as usize) < checkpoint.config().vocab_size);
    Ok(ids)
}

fn read_tokens(path: &Path, vocab: usize) -> Result<Vec<u32>> {
    let mut tokens = Vec::new();
    for line in jsonl::read(path)? {
        let ids = line.token_ids("completion_token_ids", Some(vocab))?;
        tokens.extend(match ids {
            Some(ids) => ids,
            None => line.require_token_ids("token_ids", Some(vocab))?,
        });
    }
    Ok(tokens)
}

fn inspect(args: &InspectArgs, quiet: bool) -> Result<ExitCode> {
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
    }
    let asked = args.strict || args.against.is_some();
    let failed = asked && !inspection.problems.is_empty();
    Ok(if failed { ExitCode::from(GATE_FAILED) } else { ExitCode::SUCCESS })
}
