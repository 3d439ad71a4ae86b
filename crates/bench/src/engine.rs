//! The in-process engine as a target.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use runtime::Engine;
use runtime::drafter::Drafter;
use runtime::generate::{GenerateOptions, PREFILL_CHUNK, StopReason, greedy};
use runtime::speculate::Shape;
use runtime::speculative::speculative;

use crate::error::Result;
use crate::prompts::{Form, Prompt};
use crate::protocol::{Failure, Input, Output, Sample, Target};

/// The CPU engine of this process.
pub struct EngineTarget<'a> {
    label: String,
    engine: Engine,
    stop_ids: Vec<u32>,
    drafting: Option<(Box<dyn Drafter>, Shape)>,
    cancel: &'a AtomicBool,
}

impl<'a> EngineTarget<'a> {
    /// An engine under a name. `stop_ids` end a completion where end-of-sequence is not ignored; `cancel` ends one in progress.
    pub fn new(label: &str, engine: Engine, stop_ids: Vec<u32>, cancel: &'a AtomicBool) -> EngineTarget<'a> {
        EngineTarget { label: label.to_string(), engine, stop_ids, drafting: None, cancel }
    }

    /// Decodes speculatively.
    pub fn with_drafts(mut self, drafter: Box<dyn Drafter>, shape: Shape) -> EngineTarget<'a> {
        self.drafting = Some((drafter, shape));
        self
    }

    /// Runs on the threads of another target, where it has as many, as targets that are compared should. On threads of their own, two
    /// engines on one model differed by 7 to 10 % (standard deviation of 80 comparisons of 16 prompts, on two threads of an EPYC), and on
    /// the same threads by 1 to 2 %: `cargo bench -p bench --bench alike`, `results/2026/bench/amd-epyc-2t-alike-12.txt`.
    pub fn on_threads_of(mut self, other: &EngineTarget<'_>) -> EngineTarget<'a> {
        self.engine.share_threads(&other.engine);
        self
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl Target for EngineTarget<'_> {
    fn label(&self) -> &str {
        &self.label
    }

    fn generate(
        &mut self,
        prompt: &Input,
        max_tokens: usize,
        ignore_eos: bool,
    ) -> std::result::Result<Sample, Failure> {
        let Input::Ids(prompt) = prompt else {
            return Err(Failure::Failed("the engine takes token ids, not text".into()));
        };
        let stop_ids = if ignore_eos { Vec::new() } else { self.stop_ids.clone() };
        let options = GenerateOptions { max_tokens, stop_ids, prefill_chunk: PREFILL_CHUNK };
        let cancel = self.cancel;
        let watch = |_| if cancel.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let engine = &mut self.engine;
        let made = match &mut self.drafting {
            None => greedy(engine, prompt, &options, watch),
            Some((drafter, shape)) => {
                speculative(engine, &mut **drafter, prompt, shape, &options, watch).map(|(made, _)| made)
            }
        };
        let made = made.map_err(|e| Failure::Failed(e.to_string()))?;
        match made.stop {
            StopReason::Cancelled => Err(Failure::Cancelled),
            StopReason::Context => {
                let (have, context) = (made.token_ids.len(), self.engine.context());
                Err(Failure::Failed(format!("the context of {context} was full after {have} tokens")))
            }
            StopReason::Stop | StopReason::Length => {
                let (prompt_tokens, output) = (prompt.len(), Output::Ids(made.token_ids));
                Ok(Sample { prompt_tokens, output, prefill_ms: made.prefill_ms, step_ms: made.step_ms })
            }
        }
    }
}

/// Tokens of a prompt in its form: the text with `<bos>`, or the chat template's rendering, which holds its own.
///
/// # Errors
/// Of the runtime; a chat prompt for a checkpoint without a template.
pub fn encode(
    prompt: &Prompt,
    tokenizer: &runtime::tokenizer::Tokenizer,
    template: Option<&runtime::template::ChatTemplate>,
) -> Result<Vec<u32>> {
    match (prompt.form, template) {
        (Form::Raw, _) => Ok(tokenizer.encode(&prompt.text)?),
        (Form::Chat, Some(template)) => Ok(tokenizer.encode_verbatim(&template.render_user(&prompt.text)?)?),
        (Form::Chat, None) => Err(crate::Error::Option {
            option: "prompts",
            expected: "raw text, since the checkpoint has no chat template",
            found: format!("the chat turn `{}`", prompt.id),
        }),
    }
}
