//! `chiku logits`: the door for outside comparison. Writes what the model says about given token ids, in f32.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use runtime::Logits;
use runtime::generate::PREFILL_CHUNK;
use serde_json::json;

use crate::args::ModelArgs;
use crate::exit::Interrupted;
use crate::interrupt;
use crate::output::{PartialFile, Unit, bar};

#[derive(Args)]
#[command(
    after_help = "The file holds `logits` [T, vocab], after the softcap. For a pruned head it also holds `logits_kept` \
[T, kept] in row order, and `logits` is minus infinity for every pruned token.

Example:
  chiku logits --model nano --token-ids 2,313,635 --backend cpu --precision f32 --out logits.safetensors"
)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids, comma-separated, taken as they are (no begin-of-text token is added).
    #[arg(long, value_delimiter = ',', value_parser = crate::args::token_id, required = true, value_name = "ID,ID,...")]
    pub token_ids: Vec<u32>,
    /// File to write; appears only when it is whole.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Print a JSON object that describes the file.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &LogitsArgs, quiet: bool) -> Result<ExitCode> {
    let model = args.model.load()?;
    let mut engine = args.model.engine.engine(&model)?;
    let head = model.head_rows();
    let layout = Layout::new(args.token_ids.len(), head.vocab(), head.is_pruned().then_some(head.len()));
    interrupt::flag()?;

    let inputs: Vec<PathBuf> = model.checkpoint().shards().iter().map(|s| s.path.clone()).collect();
    let mut part = PartialFile::create(&args.out, &inputs)?;
    let writing = || format!("{}: cannot write", args.out.display());
    layout.write_header(part.file()).with_context(writing)?;
    let progress = bar("logits", args.token_ids.len() as u64, Unit::Count, quiet);
    for (i, chunk) in args.token_ids.chunks(PREFILL_CHUNK).enumerate() {
        if interrupt::pressed() {
            return Err(Interrupted.into());
        }
        let logits = engine.extend(chunk, 0..chunk.len())?;
        for r in 0..chunk.len() {
            // A NaN that reached a file would be compared with NaN and found different, with no word about the cause.
            logits.argmax(r)?;
            layout.write_row(part.file(), i * PREFILL_CHUNK + r, &logits, r).with_context(writing)?;
        }
        progress.inc(chunk.len() as u64);
    }
    progress.finish_and_clear();
    part.finish()?;
    if args.json {
        crate::outln!(
            "{}",
            json!({"out": args.out, "tokens": layout.tokens, "vocab": layout.vocab, "kept": layout.kept})
        );
    } else if !quiet {
        crate::errln!("{}: logits [{}, {}] in f32", args.out.display(), layout.tokens, layout.vocab);
    }
    Ok(ExitCode::SUCCESS)
}

/// Where the rows of both tensors lie in the file.
struct Layout {
    tokens: usize,
    vocab: usize,
    kept: Option<usize>,
    header: Vec<u8>,
}

impl Layout {
    fn new(tokens: usize, vocab: usize, kept: Option<usize>) -> Layout {
        let full = tokens * vocab * 4;
        let mut tensors = json!({"logits": {"dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, full]}});
        if let Some(kept) = kept {
            let end = full + tokens * kept * 4;
            tensors["logits_kept"] = json!({"dtype": "F32", "shape": [tokens, kept], "data_offsets": [full, end]});
        }
        let mut text = tensors.to_string().into_bytes();
        // Spaces up to a multiple of eight keep the data aligned for readers that map the file.
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend(text);
        Layout { tokens, vocab, kept, header }
    }

    fn write_header(&self, file: &File) -> std::io::Result<()> {
        file.write_all_at(&self.header, 0)
    }

    fn write_row(&self, file: &File, row: usize, logits: &Logits, r: usize) -> std::io::Result<()> {
        let (values, start) = (logits.row(r), self.header.len());
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let full = match self.kept {
            None => bytes(values),
            Some(kept) => {
                let at = start + self.tokens * self.vocab * 4 + row * kept * 4;
                file.write_all_at(&bytes(values), at as u64)?;
                let mut full = vec![f32::NEG_INFINITY; self.vocab];
                values.iter().enumerate().for_each(|(i, v)| full[logits.head().token(i) as usize] = *v);
                bytes(&full)
            }
        };
        file.write_all_at(&full, (start + row * self.vocab * 4) as u64)
    }
}
