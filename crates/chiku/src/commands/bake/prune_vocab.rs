//! `chiku bake prune-vocab`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use bake::keepset::{self, Choice};
use bake::prune_vocab::PruneVocabOptions;
use clap::Args;
use ppl::jsonl::{self, Line};
use runtime::checkpoint::{Checkpoint, Keepset};
use runtime::tokenizer::{TOKENIZER_FILE, Tokenizer};

use super::{ParentArgs, TargetArgs, bake_with, open};

#[derive(Args)]
#[command(
    after_help = "A keepset must be judged on what the model writes and on text it has not been fitted to, not on the file that \
gates the perplexity: give both to --coverage.

Examples:
  chiku bake prune-vocab --model nano-int4 --keepset keepset.json --out nano-pruned
  chiku bake prune-vocab --model nano --from-tokens decode_outputs.jsonl --min-count 2 \\
      --keep-targets prompts/ppl.jsonl --coverage heldout=heldout.jsonl --out nano-pruned
  chiku bake prune-vocab --model nano --from-text corpus.txt --size 1024 --out nano-1024"
)]
pub struct PruneVocabArgs {
    /// A checkpoint directory, or `nano`.
    #[arg(long, value_name = "DIR|nano")]
    pub model: String,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub parent: ParentArgs,
    #[command(flatten)]
    pub source: KeepsetSource,
    /// Build the keepset of tokens that occur at least this often [default: 1; 0 with --size]. Control and byte tokens are
    /// always kept.
    #[arg(long, value_name = "N", conflicts_with = "keepset")]
    pub min_count: Option<u64>,
    /// Build a keepset of this many tokens: those always kept, then the most frequent, then the lowest ids.
    #[arg(long, value_name = "N", conflicts_with = "keepset")]
    pub size: Option<usize>,
    /// JSONL of perplexity records whose target tokens are all kept: a pruned target has no finite perplexity.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub keep_targets: Vec<PathBuf>,
    /// Report what share of these tokens the head can still produce (JSONL; `completion_token_ids`, `token_ids`, the scored
    /// part of perplexity records, `text` or `prompt`).
    #[arg(long, value_name = "NAME=FILE")]
    pub coverage: Vec<String>,
}

#[derive(Args)]
#[group(required = true, multiple = true, id = "keepset_source")]
pub struct KeepsetSource {
    /// Keepset file: {"keep_ids": [...], "full_vocab": V}.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["from_tokens", "from_text"])]
    pub keepset: Option<PathBuf>,
    /// JSONL of tokens to build the keepset from, best of generated ones (fields as for --coverage).
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub from_tokens: Vec<PathBuf>,
    /// UTF-8 text to build the keepset from (or .jsonl with `text`), tokenised with the model's tokenizer.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub from_text: Vec<PathBuf>,
}

pub fn run(args: &PruneVocabArgs, quiet: bool) -> Result<ExitCode> {
    let parent = open(&args.model)?;
    let streams = Streams { parent: &parent, vocab: parent.config().vocab_size };
    let mut targets = Vec::new();
    for path in &args.keep_targets {
        let records = ppl::records::read(path, streams.vocab)?;
        targets.extend(records.iter().flat_map(|r| r.token_ids[r.scored.clone()].iter().copied()));
    }
    targets.sort_unstable();
    targets.dedup();
    let (keep, origin) = match &args.source.keepset {
        Some(path) => {
            let keep = Keepset::read(path)?;
            let added = keepset::with(&keep, &targets)?;
            let more = added.ids.len() - keep.ids.len();
            let origin = match more {
                0 => file_name(path),
                _ => format!("{}, and {more} evaluation targets that it lacks", file_name(path)),
            };
            (added, origin)
        }
        None => streams.build(args, &targets)?,
    };
    let mut coverage = BTreeMap::new();
    for (name, path) in named_files(&args.coverage)? {
        coverage.insert(name, keepset::coverage_by_record(&keep, &streams.records(&path)?));
    }
    let options = PruneVocabOptions {
        origin,
        targets: targets.len(),
        missing_structural: missing(&keep, &parent),
        coverage,
        write: args.parent.write(&args.target),
    };
    bake_with(&args.target, quiet, |c| bake::prune_vocab::run(&parent, &args.target.out, &keep, &options, c))
}

/// Token streams of files, for one model.
struct Streams<'a> {
    parent: &'a Checkpoint,
    vocab: usize,
}

impl Streams<'_> {
    fn build(&self, args: &PruneVocabArgs, targets: &[u32]) -> Result<(Keepset, String)> {
        let (mut tokens, mut names) = (Vec::new(), Vec::new());
        for path in &args.source.from_tokens {
            tokens.extend(self.records(path)?.into_iter().flatten());
            names.push(file_name(path));
        }
        for path in &args.source.from_text {
            if path.extension().is_some_and(|e| e == "jsonl") {
                tokens.extend(self.records(path)?.into_iter().flatten());
            } else {
                tokens.extend(self.encode(&jsonl::read_text(path)?)?);
            }
            names.push(file_name(path));
        }
        let counts = keepset::count(tokens, self.vocab)?;
        let mut always = always_kept(self.parent)?;
        always.extend(targets);
        let choice = Choice { size: args.size, min_count: args.min_count.unwrap_or(u64::from(args.size.is_none())) };
        let mut origin = format!("tokens of {} that occur at least {} times", names.join(", "), choice.min_count);
        if let Some(size) = choice.size {
            origin += &format!(", the {size} most frequent with those always kept");
        }
        if !targets.is_empty() {
            origin += &format!(", and {} evaluation targets", targets.len());
        }
        Ok((keepset::choose(&counts, choice, &always)?, origin))
    }

    /// The tokens of each record of a file.
    fn records(&self, path: &Path) -> Result<Vec<Vec<u32>>> {
        jsonl::read(path)?.iter().map(|line| self.tokens(line)).collect()
    }

    fn tokens(&self, line: &Line) -> Result<Vec<u32>> {
        for field in ["completion_token_ids", "token_ids"] {
            if let Some(ids) = line.token_ids(field, Some(self.vocab))? {
                return Ok(ids);
            }
        }
        if line.get("target_token_ids").is_some() || line.get("prompt_token_ids").is_some() {
            let record = ppl::records::parse(line, self.vocab)?;
            return Ok(record.token_ids[record.scored].to_vec());
        }
        let text = ["text", "generated_text", "prompt"].into_iter().find(|f| line.get(f).is_some()).unwrap_or("text");
        match line.text(text)? {
            Some(text) => self.encode(text),
            None => {
                let expected = "`completion_token_ids`, `token_ids`, `target_token_ids`, `text` or `prompt`";
                Err(line.bad("completion_token_ids", expected, "none of them").into())
            }
        }
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(tokenizer(self.parent, "to read text")?.encode_verbatim(text)?)
    }
}

/// `NAME=FILE` pairs.
fn named_files(pairs: &[String]) -> Result<Vec<(String, PathBuf)>> {
    let mut out: Vec<(String, PathBuf)> = Vec::new();
    for pair in pairs {
        let Some((name, path)) = pair.split_once('=').filter(|(n, p)| !n.is_empty() && !p.is_empty()) else {
            bail!("--coverage {pair}: expected NAME=FILE");
        };
        if out.iter().any(|(n, _)| n == name) {
            bail!("--coverage: the name {name} is given twice");
        }
        out.push((name.to_string(), path.into()));
    }
    Ok(out)
}

/// Control, byte and stop tokens that a given keepset leaves out. Unknown, and so none, without a tokenizer.
fn missing(keep: &Keepset, parent: &Checkpoint) -> usize {
    let mask = keep.mask();
    let absent = |id: &&u32| !mask.get(**id as usize).copied().unwrap_or(false);
    always_kept(parent).map_or(0, |ids| ids.iter().filter(absent).count())
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

fn tokenizer(checkpoint: &Checkpoint, what_for: &str) -> Result<Tokenizer> {
    if checkpoint.file(TOKENIZER_FILE).is_none() {
        bail!("{}: there is no {TOKENIZER_FILE} {what_for}; give a --keepset file instead", checkpoint.dir().display());
    }
    Ok(Tokenizer::open(checkpoint.dir())?)
}

/// Control tokens, byte tokens and stop tokens of a checkpoint. A tokenizer is needed to know them.
pub fn always_kept(checkpoint: &Checkpoint) -> Result<Vec<u32>> {
    let mut ids = tokenizer(checkpoint, "to tell which tokens must always be kept")?.structural_ids();
    ids.extend(&checkpoint.generation().stop_ids);
    // A tokenizer may know more tokens than the model has rows for.
    ids.retain(|&id| (id as usize) < checkpoint.config().vocab_size);
    Ok(ids)
}
