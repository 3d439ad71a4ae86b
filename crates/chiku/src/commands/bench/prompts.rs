//! The prompt set of a command.

use std::path::PathBuf;

use anyhow::Result;
use bench::prompts::{Form, PromptSet};
use clap::Args;
use ppl::paths::Prompt;
use runtime::Model;
use runtime::template::ChatTemplate;
use runtime::tokenizer::Tokenizer;

/// A prompt set.
#[derive(Args, Clone)]
pub struct PromptArgs {
    /// Prompts: `public` or `heldout` (embedded, for nano), or a file: JSONL with `id` and `prompt`, or the field's sharegpt JSON.
    #[arg(long, default_value = "public", value_name = "FILE|public|heldout")]
    pub prompts: String,
    /// Put every prompt into the chat template [default for sharegpt files].
    #[arg(long, conflicts_with = "raw")]
    pub chat: bool,
    /// Continue every prompt as plain text [default for JSONL files].
    #[arg(long)]
    pub raw: bool,
}

impl PromptArgs {
    /// The set, its first `limit` prompts alone.
    pub fn set(&self, limit: usize) -> Result<PromptSet> {
        let path = match self.prompts.as_str() {
            name @ ("public" | "heldout") => runtime::nano::directory()?.join(format!("prompts/{name}.jsonl")),
            path => PathBuf::from(path),
        };
        let mut set = PromptSet::read(&path)?;
        if self.chat {
            set = set.with_form(Form::Chat);
        } else if self.raw {
            set = set.with_form(Form::Raw);
        }
        Ok(set.take(limit))
    }

    /// The set (its identity, for records) and the first `limit` prompts as tokens of `model`.
    pub fn read(&self, model: &Model, limit: usize) -> Result<(PromptSet, Vec<Prompt>)> {
        let set = self.set(limit)?;
        let dir = model.checkpoint().dir();
        let (tokenizer, template) = (Tokenizer::open(dir)?, ChatTemplate::open(dir)?);
        let prompts = set.encode(|p| bench::engine::encode(p, &tokenizer, template.as_ref()))?;
        Ok((set, prompts))
    }
}
