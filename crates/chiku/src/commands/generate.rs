//! `chiku generate`: continue a prompt, streaming.

use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use runtime::generate::{GenerateOptions, Generation, greedy};
use runtime::speculative::speculative;
use runtime::template::ChatTemplate;
use runtime::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::stats;
use crate::args::ModelArgs;
use crate::draft::DraftArgs;
use crate::exit::INTERRUPTED;
use crate::interrupt;

#[derive(Args)]
#[command(after_help = "Examples:
  chiku generate --model nano --prompt \"Call me\" --max-tokens 40
  chiku generate --model ./gemma-4-E4B-it --chat --prompt \"What is a kernel?\"
  chiku generate --model nano --token-ids 2,313,635 --ignore-eos --json
  chiku generate --model nano --drafter nano --k 7 --tree 1,1,1,1 --prompt \"Call me\" --stats")]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub input: Input,
    /// Most tokens to produce.
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub max_tokens: usize,
    /// Run through end-of-text and end-of-turn tokens.
    #[arg(long)]
    pub ignore_eos: bool,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Print what the drafts yielded: tokens a step, acceptance by depth, times, the best shape.
    #[arg(long)]
    pub stats: bool,
    /// Print one JSON object at the end (`token_ids`, `text`, `timings`) instead of streaming text.
    #[arg(long)]
    pub json: bool,
}

/// The prompt: text, a file, or ids.
#[derive(Args)]
#[group(required = true, multiple = false, id = "prompt_source")]
pub struct PromptSource {
    /// Text to continue.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// File with the text to continue, taken as it is (a newline at its end included); `-` for standard input.
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// Token ids to continue, comma-separated, taken as they are.
    #[arg(long, value_delimiter = ',', value_parser = crate::args::token_id, value_name = "ID,ID,...")]
    pub token_ids: Option<Vec<u32>>,
}

#[derive(Args)]
pub struct Input {
    #[command(flatten)]
    pub source: PromptSource,
    /// Wrap the text as one user turn in the model's chat template.
    #[arg(long, conflicts_with = "token_ids")]
    pub chat: bool,
}

impl Input {
    /// Token ids of the prompt. A tokenizer is only needed for text.
    fn ids(&self, dir: &Path, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
        let text = match (&self.source.prompt, &self.source.prompt_file, &self.source.token_ids) {
            (_, _, Some(ids)) => return Ok(ids.clone()),
            (Some(text), _, _) => text.clone(),
            (_, Some(path), _) => read_text(path)?,
            _ => bail!("give a prompt: --prompt, --prompt-file or --token-ids"),
        };
        let Some(tokenizer) = tokenizer else {
            bail!("{}: there is no tokenizer.json, so a prompt must be given as --token-ids", dir.display());
        };
        if !self.chat {
            return Ok(tokenizer.encode(&text)?);
        }
        let Some(template) = ChatTemplate::open(dir)? else {
            bail!(
                "{}: there is no chat template (chat_template.jinja); leave out --chat to continue the text itself",
                dir.display()
            );
        };
        Ok(tokenizer.encode_verbatim(&template.render_user(&text)?)?)
    }
}

/// Largest prompt file, in bytes: more than the longest context holds.
const PROMPT_LIMIT: u64 = 16 << 20;

fn read_text(path: &Path) -> Result<String> {
    let mut text = String::new();
    if path.as_os_str() == "-" {
        std::io::stdin().take(PROMPT_LIMIT).read_to_string(&mut text).context("standard input")?;
    } else {
        let bytes = runtime::files::read(path, PROMPT_LIMIT)?;
        text = String::from_utf8(bytes).with_context(|| format!("{}: the prompt is not UTF-8", path.display()))?;
    }
    Ok(text)
}

pub fn run(args: &GenerateArgs, quiet: bool) -> Result<ExitCode> {
    let dir = args.model.dir()?;
    let tokenizer_file = dir.join(runtime::tokenizer::TOKENIZER_FILE);
    let tokenizer = if tokenizer_file.exists() { Some(Tokenizer::open(&dir)?) } else { None };
    let model = args.model.load()?;
    let prompt = args.input.ids(&dir, tokenizer.as_ref())?;
    let mut engine = args.model.engine.engine(&model)?;
    let stop_ids = if args.ignore_eos { vec![] } else { model.checkpoint().generation().stop_ids.clone() };
    let options = GenerateOptions { max_tokens: args.max_tokens, stop_ids, ..Default::default() };
    let mut drafting = args.draft.drafting(&model)?;
    if args.stats && drafting.is_none() {
        bail!("--stats is about drafts: give --drafter DIR or --draft ngram");
    }

    interrupt::flag()?;
    interrupt::at_once(true);
    let mut stream = tokenizer.as_ref().map(Tokenizer::stream);
    let mut text = String::new();
    let mut failure = None;
    let on_token = |id| {
        interrupt::at_once(false);
        let piece = match stream.as_mut().map(|s| s.push(id)) {
            Some(Ok(piece)) => piece,
            Some(Err(e)) => {
                failure = Some(anyhow::Error::from(e));
                return ControlFlow::Break(());
            }
            // Without a tokenizer the ids themselves are the text.
            None => format!("{id} "),
        };
        text += &piece;
        if !args.json {
            crate::out!("{piece}");
        }
        if interrupt::pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let (generation, speculation) = match &mut drafting {
        None => (greedy(&mut engine, &prompt, &options, on_token)?, None),
        Some(d) => {
            let (g, s) = speculative(&mut engine, &mut *d.drafter, &prompt, &d.shape, &options, on_token)?;
            (g, Some(s))
        }
    };
    if let Some(e) = failure {
        return Err(e);
    }
    let rest = stream.map(|mut s| s.finish()).unwrap_or_default();
    text += &rest;
    if args.json {
        let mut report = report(&generation, &prompt, &text, &engine);
        if let Some(speculation) = &speculation {
            report["speculation"] = stats::json(speculation);
        }
        crate::outln!("{report}");
    } else {
        crate::outln!("{rest}");
        if !quiet {
            crate::errln!("{}", remark(&generation, prompt.len()));
        }
    }
    if let Some(speculation) = &speculation {
        if args.stats && !args.json {
            crate::err!("{}", stats::text(speculation));
        }
        if speculation.looks_mismatched() {
            crate::errln!("warning: {}", stats::MISMATCH);
        }
    }
    let interrupted = interrupt::pressed();
    Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// Tokens a second over the steps after the first token.
fn decode_rate(g: &Generation) -> Option<f64> {
    let (ms, tokens) = (g.decode_ms(), g.token_ids.len().saturating_sub(1));
    (ms > 0.0).then(|| tokens as f64 / ms * 1e3)
}

fn remark(g: &Generation, prompt: usize) -> String {
    let rate = decode_rate(g).map_or_else(String::new, |r| format!(", {r:.1} tokens/s after the first"));
    let (tokens, reason) = (g.token_ids.len(), g.stop.as_str());
    format!("[{prompt} prompt tokens in {:.1} ms; {tokens} tokens ({reason}){rate}]", g.prefill_ms)
}

fn report(g: &Generation, prompt: &[u32], text: &str, engine: &runtime::Engine) -> Value {
    json!({
        "token_ids": g.token_ids,
        "text": text,
        "prompt_token_ids": prompt,
        "stop_reason": g.stop.as_str(),
        "timings": {
            "kind": "measured",
            "prefill_ms": g.prefill_ms,
            "decode_ms": g.decode_ms(),
            "step_ms": g.step_ms,
            "tokens_per_s": decode_rate(g),
            "backend": "cpu",
            "isa": engine.isa(),
            "threads": engine.threads(),
            "peak_rss_bytes": super::doctor::peak_rss_bytes(),
        },
    })
}
