//! `chiku bake prune-vocab`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use bake::prune_vocab::PruneVocabOptions;
use clap::Args;
use ppl::jsonl;
use runtime::checkpoint::{Checkpoint, Keepset};
use runtime::tokenizer::{TOKENIZER_FILE, Tokenizer};

use super::{TargetArgs, bake_with, open};

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

pub fn run(args: &PruneVocabArgs, quiet: bool) -> Result<ExitCode> {
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
