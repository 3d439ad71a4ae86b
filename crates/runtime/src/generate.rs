//! Greedy generation: prefill in chunks, then one row a step.

use std::ops::ControlFlow;
use std::time::Instant;

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::logits::Logits;

/// Rows of one prefill pass, unless told otherwise. Enough to share each expansion of a weight tile, small enough for the
/// activations to stay in cache.
pub const PREFILL_CHUNK: usize = 64;

/// When to stop, and how to prefill.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Most tokens to produce.
    pub max_tokens: usize,
    /// Generation ends after any of these; empty to run through them.
    pub stop_ids: Vec<u32>,
    /// Rows of one prefill pass; changes speed, never a bit.
    pub prefill_chunk: usize,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions { max_tokens: 256, stop_ids: vec![], prefill_chunk: PREFILL_CHUNK }
    }
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token was produced (it is the last of the ids).
    Stop,
    /// `max_tokens` were produced.
    Length,
    /// The context is full.
    Context,
    /// The caller asked to end.
    Cancelled,
}

impl StopReason {
    /// Name in JSON output.
    pub fn as_str(self) -> &'static str {
        match self {
            StopReason::Stop => "stop",
            StopReason::Length => "length",
            StopReason::Context => "context",
            StopReason::Cancelled => "cancelled",
        }
    }
}

/// What was generated, and how long it took.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Produced ids, a stop token included.
    pub token_ids: Vec<u32>,
    /// Time to the first token in ms: the prompt, and its argmax.
    pub prefill_ms: f64,
    /// Time of each later step in ms. A plain step yields one token, a speculative one up to K + 1.
    pub step_ms: Vec<f64>,
    /// Why it ended.
    pub stop: StopReason,
}

impl Generation {
    /// Time of all steps after the first token, in ms.
    pub fn decode_ms(&self) -> f64 {
        // Summed from +0: an empty sum would be -0.
        self.step_ms.iter().fold(0.0, |sum, ms| sum + ms)
    }
}

/// Appends a prompt to the engine's sequence in chunks; returns the logits of its last token.
pub fn prefill(engine: &mut Engine, prompt: &[u32], chunk: usize) -> Result<Logits> {
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    if engine.len() + prompt.len() > engine.context() {
        return Err(Error::ContextFull {
            wanted: engine.len() + prompt.len(),
            limit: engine.context(),
            model_limit: engine.model().config().max_position_embeddings,
        });
    }
    let chunk = chunk.max(1);
    let last_begin = (prompt.len() - 1) / chunk * chunk;
    for part in prompt[..last_begin].chunks(chunk) {
        engine.extend(part, 0..0)?;
    }
    let last = &prompt[last_begin..];
    engine.extend(last, last.len() - 1..last.len())
}

/// Continues `prompt` greedily from an empty sequence. `on_token` sees every id as it is produced and may end the generation.
pub fn greedy(
    engine: &mut Engine,
    prompt: &[u32],
    options: &GenerateOptions,
    on_token: impl FnMut(u32) -> ControlFlow<()> + Send,
) -> Result<Generation> {
    engine.on_its_threads(|engine| decode(engine, prompt, options, on_token))
}

fn decode(
    engine: &mut Engine,
    prompt: &[u32],
    options: &GenerateOptions,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Generation> {
    engine.reset();
    let mut out = Generation { token_ids: vec![], prefill_ms: 0.0, step_ms: vec![], stop: StopReason::Length };
    let started = Instant::now();
    let mut logits = prefill(engine, prompt, options.prefill_chunk)?;
    if options.max_tokens == 0 {
        out.prefill_ms = ms_since(started);
        return Ok(out);
    }
    let mut token = logits.argmax(0)?;
    out.prefill_ms = ms_since(started);
    loop {
        out.token_ids.push(token);
        let ended = on_token(token).is_break();
        if let Some(stop) = stop_reason(engine, &out.token_ids, options, ended) {
            out.stop = stop;
            return Ok(out);
        }
        let started = Instant::now();
        logits = engine.extend(&[token], 0..1)?;
        token = logits.argmax(0)?;
        out.step_ms.push(ms_since(started));
    }
}

/// Why a generation ends after its newest token; `None` where it goes on.
pub(crate) fn stop_reason(
    engine: &Engine,
    token_ids: &[u32],
    options: &GenerateOptions,
    cancelled: bool,
) -> Option<StopReason> {
    match () {
        _ if token_ids.last().is_some_and(|t| options.stop_ids.contains(t)) => Some(StopReason::Stop),
        _ if cancelled => Some(StopReason::Cancelled),
        _ if token_ids.len() == options.max_tokens => Some(StopReason::Length),
        _ if engine.len() == engine.context() => Some(StopReason::Context),
        _ => None,
    }
}

pub(crate) fn ms_since(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e3
}
