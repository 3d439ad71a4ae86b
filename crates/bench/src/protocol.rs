//! The protocol of a run: batch 1, greedy, one request at a time, warm-ups first and untimed.
//!
//! Tokens a second is what the field reports: all completion tokens over the wall time of the whole sequence of requests, with
//! prefill, and whatever else happens between two requests, inside. To make the parts add up to the whole, a sample's time is a
//! *lap*: from the end of the previous request to the end of this one.
//!
//! The warm-ups end when the machine is steady: after the protocol's number of them, as soon as [`STEADY_STEPS`] consecutive steps of
//! each target have agreed within [`STEADY_WITHIN`], or when the time for that is up. The record says which.
//!
//! A run never loses what is done. A cancel or a failing target ends it early; the samples up to there are returned, marked
//! incomplete, with the reason where there is one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use ppl::identity::{sha256_hex, token_sha256};

/// Consecutive steps that must agree for a warm-up to end.
pub const STEADY_STEPS: usize = 5;
/// How well they must agree: the slowest is at most this fraction slower than the fastest.
pub const STEADY_WITHIN: f64 = 0.01;

/// What is to be completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Token ids, `<bos>` included.
    Ids(Vec<u32>),
    /// A text to be continued by who has a tokenizer of his own.
    Text(String),
    /// A user's turn of a chat for who has a chat template of his own.
    Chat(String),
}

impl Input {
    fn is_empty(&self) -> bool {
        match self {
            Input::Ids(ids) => ids.is_empty(),
            Input::Text(text) | Input::Chat(text) => text.is_empty(),
        }
    }
}

/// A prompt of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// What records call it.
    pub id: String,
    /// What is to be completed.
    pub input: Input,
}

impl From<&ppl::paths::Prompt> for Prompt {
    fn from(p: &ppl::paths::Prompt) -> Prompt {
        Prompt { id: p.id.clone(), input: Input::Ids(p.token_ids.clone()) }
    }
}

/// What is run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Protocol {
    /// Untimed requests before the first timed one; the first prompts, from the start again where there are fewer.
    pub warmup_prompts: usize,
    /// Tokens of a warm-up request; at most `max_tokens` are asked for.
    pub warmup_tokens: usize,
    /// Tokens of a timed request.
    pub max_tokens: usize,
    /// Run through end-of-sequence, so that every request yields `max_tokens`.
    pub ignore_eos: bool,
    /// Longest time in ms to wait, with further warm-ups, for steps that agree; 0: they need not agree.
    #[serde(default)]
    pub warmup_limit_ms: u64,
}

impl Default for Protocol {
    /// The field's timed stage: 4 warm-ups, 512 tokens, end-of-sequence ignored. A warm-up of 32 tokens touches every weight and
    /// raises the clocks. Ten seconds are allowed for steps to agree.
    fn default() -> Self {
        let (warmup_prompts, warmup_tokens, max_tokens) = (4, 32, 512);
        Protocol { warmup_prompts, warmup_tokens, max_tokens, ignore_eos: true, warmup_limit_ms: 10_000 }
    }
}

/// What a target wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Token ids.
    Ids(Vec<u32>),
    /// Token ids and the text that a server made of them.
    Shown {
        /// The ids.
        ids: Vec<u32>,
        /// The text.
        text: String,
    },
    /// Text, from a server that does not show ids, and the number of tokens that it counts.
    Text {
        /// The completion.
        text: String,
        /// Its tokens.
        tokens: usize,
    },
}

impl Output {
    /// The ids, where they are known.
    pub fn ids(&self) -> Option<&[u32]> {
        match self {
            Output::Ids(ids) | Output::Shown { ids, .. } => Some(ids),
            Output::Text { .. } => None,
        }
    }

    /// The text, where it came with the tokens.
    pub fn text(&self) -> Option<&str> {
        match self {
            Output::Ids(_) => None,
            Output::Shown { text, .. } | Output::Text { text, .. } => Some(text),
        }
    }

    /// Tokens of it.
    pub fn tokens(&self) -> usize {
        match self {
            Output::Ids(ids) | Output::Shown { ids, .. } => ids.len(),
            Output::Text { tokens, .. } => *tokens,
        }
    }

    /// SHA-256 of the ids as the field computes it, or of the text where there are no ids.
    pub fn sha256(&self) -> String {
        match self {
            Output::Ids(ids) | Output::Shown { ids, .. } => token_sha256(ids),
            Output::Text { text, .. } => sha256_hex(text.as_bytes()),
        }
    }
}

/// What a target returns for one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// The completion.
    pub output: Output,
    /// Time to the first token in ms.
    pub prefill_ms: f64,
    /// Time of each step after it in ms. A speculative step yields several tokens.
    pub step_ms: Vec<f64>,
}

/// Why a target did not return a sample.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The target saw the cancel flag. Not a failure of the run: it ends, and is incomplete.
    #[error("cancelled")]
    Cancelled,
    /// Anything else; the message is kept in the record.
    #[error("{0}")]
    Failed(String),
}

/// Something that can be timed.
pub trait Target {
    /// Short name for reports, different for the two targets of a comparison.
    fn label(&self) -> &str;

    /// Completes a prompt greedily from an empty sequence.
    ///
    /// # Errors
    /// See [`Failure`].
    fn generate(&mut self, prompt: &Input, max_tokens: usize, ignore_eos: bool)
    -> std::result::Result<Sample, Failure>;
}

/// A source of time.
pub trait Clock {
    /// Milliseconds since some fixed moment; never goes back.
    fn now_ms(&self) -> f64;
}

/// The system's monotonic clock.
pub struct Monotonic(Instant);

impl Monotonic {
    /// Starts at 0.
    pub fn start() -> Monotonic {
        Monotonic(Instant::now())
    }
}

impl Clock for Monotonic {
    fn now_ms(&self) -> f64 {
        self.0.elapsed().as_secs_f64() * 1e3
    }
}

/// One timed request, as it is kept in a record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PromptSample {
    /// The prompt.
    pub id: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the completion.
    pub completion_tokens: usize,
    /// From the end of the previous request (or the start of the sequence) to the end of this one.
    pub wall_ms: f64,
    /// Time to the first token.
    pub prefill_ms: f64,
    /// Time of all steps after it.
    pub decode_ms: f64,
    /// Time of each step after it.
    pub step_ms: Vec<f64>,
    /// SHA-256 of the completion's ids, as the field computes it; of its text where a server shows no ids.
    pub token_sha256: String,
}

/// What was run before anything was timed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Warmup {
    /// Requests of this target.
    pub requests: usize,
    /// Their steps.
    pub steps: usize,
    /// [`STEADY_STEPS`] consecutive ones agreed; `None` where the target shows no steps.
    pub steady: Option<bool>,
}

/// Watches the steps of a target's warm-ups.
#[derive(Default)]
struct Watch {
    seen: Warmup,
    recent: Vec<f64>,
}

impl Watch {
    fn see(&mut self, sample: &Sample) {
        self.seen.requests += 1;
        self.seen.steps += sample.step_ms.len();
        self.recent.extend(&sample.step_ms);
        let agree = |steps: &[f64]| {
            let (fastest, slowest) =
                steps.iter().fold((f64::INFINITY, 0f64), |(low, high), &ms| (low.min(ms), high.max(ms)));
            fastest > 0.0 && slowest <= fastest * (1.0 + STEADY_WITHIN)
        };
        if self.seen.steps > 0 {
            let steady = self.seen.steady == Some(true) || self.recent.windows(STEADY_STEPS).any(agree);
            self.seen.steady = Some(steady);
        }
        // Steps go on from one request to the next.
        self.recent.drain(..self.recent.len().saturating_sub(STEADY_STEPS - 1));
    }
}

/// A run of one target.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// The target's label.
    pub label: String,
    /// What came before.
    pub warmup: Warmup,
    /// Finished requests, in order.
    pub samples: Vec<PromptSample>,
    /// What each of them wrote.
    pub outputs: Vec<Output>,
    /// Requests that were planned.
    pub planned: usize,
    /// All of them were finished.
    pub complete: bool,
    /// Why not, unless it was a cancel.
    pub failure: Option<String>,
}

impl Run {
    /// One of which nothing is done yet.
    pub fn new(label: &str, planned: usize) -> Run {
        Run {
            label: label.to_string(),
            warmup: Warmup::default(),
            samples: Vec::new(),
            outputs: Vec::new(),
            planned,
            complete: false,
            failure: None,
        }
    }

    /// Wall time of the finished requests in seconds: the laps add up to it.
    pub fn wall_s(&self) -> f64 {
        self.samples.iter().map(|s| s.wall_ms).sum::<f64>() / 1e3
    }

    /// Completion tokens of the finished requests.
    pub fn completion_tokens(&self) -> usize {
        self.samples.iter().map(|s| s.completion_tokens).sum()
    }

    /// All completion tokens over all time; `None` before the first request is finished.
    pub fn tokens_per_s(&self) -> Option<f64> {
        Some(self.completion_tokens() as f64 / self.wall_s()).filter(|r| r.is_finite())
    }
}

/// State for a progress display.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress<'a> {
    /// Label of the target that just finished a request.
    pub label: &'a str,
    /// It was a warm-up.
    pub warmup: bool,
    /// Requests of this kind done, over all targets.
    pub done: usize,
    /// Requests of this kind planned, over all targets.
    pub total: usize,
    /// Rate of this target so far.
    pub tokens_per_s: Option<f64>,
    /// The request that was just finished; `None` for a warm-up.
    pub sample: Option<&'a PromptSample>,
}

/// What surrounds a run: time, the wish to stop, and who watches. `progress` runs inside the timed sequence and should be quick.
pub struct Context<'a> {
    /// Time.
    pub clock: &'a dyn Clock,
    /// Set to end after the request in progress.
    pub cancel: &'a AtomicBool,
    /// Called after each request.
    pub progress: &'a mut dyn FnMut(Progress<'_>),
}

/// Runs one target over the prompts, in their order.
///
/// # Errors
/// Only before anything is run: no prompts, an empty prompt, no tokens.
pub fn run(target: &mut dyn Target, prompts: &[Prompt], protocol: &Protocol, ctx: Context<'_>) -> Result<Run> {
    let mut runs = sequence(&mut [target], prompts, protocol, ctx)?;
    Ok(runs.remove(0))
}

/// Runs two targets alternately over the same prompts: A B on the first, B A on the second, A B on the third. Each leads equally
/// often, so that a drift of the machine (heat, clocks, a neighbour) hits both alike. The warm-ups alternate too.
///
/// # Errors
/// Those of [`run`], and two targets with the same label.
pub fn interleave(
    a: &mut dyn Target,
    b: &mut dyn Target,
    prompts: &[Prompt],
    protocol: &Protocol,
    ctx: Context<'_>,
) -> Result<[Run; 2]> {
    if a.label() == b.label() {
        let found = a.label().to_string();
        return Err(Error::Option { option: "labels", expected: "two different ones", found });
    }
    let mut runs = sequence(&mut [a, b], prompts, protocol, ctx)?;
    let b = runs.remove(1);
    Ok([runs.remove(0), b])
}

fn sequence(
    targets: &mut [&mut dyn Target],
    prompts: &[Prompt],
    protocol: &Protocol,
    ctx: Context<'_>,
) -> Result<Vec<Run>> {
    check(prompts, protocol)?;
    let mut runs: Vec<Run> = targets.iter().map(|t| Run::new(t.label(), prompts.len())).collect();
    let last = targets.len() - 1;
    // Even requests in the order of the targets, odd ones in reverse.
    let order = |request: usize| (0..=last).map(move |t| if request.is_multiple_of(2) { t } else { last - t });

    let mut watches: Vec<Watch> = targets.iter().map(|_| Watch::default()).collect();
    let begun = ctx.clock.now_ms();
    for request in 0.. {
        // A target without steps has nothing to agree.
        let restless = watches.iter().any(|w| w.seen.steady == Some(false));
        let waiting = restless && ctx.clock.now_ms() - begun < protocol.warmup_limit_ms as f64;
        if request >= protocol.warmup_prompts && !waiting {
            break;
        }
        let prompt = &prompts[request % prompts.len()];
        for t in order(request) {
            if ctx.cancel.load(Ordering::Relaxed) {
                return Ok(runs);
            }
            let tokens = protocol.warmup_tokens.min(protocol.max_tokens);
            match request_sample(&mut *targets[t], prompt, tokens, protocol.ignore_eos) {
                Ok(sample) => watches[t].see(&sample),
                Err(failure) => {
                    runs[t].failure = reason(failure, "warm-up", &prompt.id);
                    return Ok(runs);
                }
            }
            runs[t].warmup = watches[t].seen;
            let done = watches.iter().map(|w| w.seen.requests).sum();
            let total = protocol.warmup_prompts.max(request + 1) * targets.len();
            let label = targets[t].label();
            (ctx.progress)(Progress { label, warmup: true, done, total, tokens_per_s: None, sample: None });
        }
    }

    let total = prompts.len() * targets.len();
    let mut done = 0;
    let mut lap = ctx.clock.now_ms();
    for (request, prompt) in prompts.iter().enumerate() {
        for t in order(request) {
            if ctx.cancel.load(Ordering::Relaxed) {
                return Ok(runs);
            }
            let sample = match request_sample(&mut *targets[t], prompt, protocol.max_tokens, protocol.ignore_eos) {
                Ok(sample) => sample,
                Err(failure) => {
                    runs[t].failure = reason(failure, "request", &prompt.id);
                    return Ok(runs);
                }
            };
            let now = ctx.clock.now_ms();
            runs[t].samples.push(PromptSample {
                id: prompt.id.clone(),
                prompt_tokens: sample.prompt_tokens,
                completion_tokens: sample.output.tokens(),
                wall_ms: now - lap,
                prefill_ms: sample.prefill_ms,
                decode_ms: sample.step_ms.iter().sum(),
                step_ms: sample.step_ms,
                token_sha256: sample.output.sha256(),
            });
            runs[t].outputs.push(sample.output);
            lap = now;
            done += 1;
            let (label, tokens_per_s, sample) = (targets[t].label(), runs[t].tokens_per_s(), runs[t].samples.last());
            (ctx.progress)(Progress { label, warmup: false, done, total, tokens_per_s, sample });
        }
    }
    runs.iter_mut().for_each(|r| r.complete = true);
    Ok(runs)
}

fn check(prompts: &[Prompt], protocol: &Protocol) -> Result<()> {
    let bad = |option, expected, found: &str| Err(Error::Option { option, expected, found: found.to_string() });
    if prompts.is_empty() {
        return bad("prompts", "at least one", "none");
    }
    if let Some(empty) = prompts.iter().find(|p| p.input.is_empty()) {
        return bad("prompts", "at least one token in each", &format!("none in `{}`", empty.id));
    }
    if protocol.max_tokens == 0 {
        return bad("max_tokens", "at least 1", "0");
    }
    if protocol.warmup_prompts > 0 && protocol.warmup_tokens == 0 {
        return bad("warmup_tokens", "at least 1", "0");
    }
    Ok(())
}

/// One request, with what it returned checked: a target that yields other than it was asked for would be timed for other work.
fn request_sample(
    target: &mut dyn Target,
    prompt: &Prompt,
    tokens: usize,
    ignore_eos: bool,
) -> std::result::Result<Sample, Failure> {
    let sample = target.generate(&prompt.input, tokens, ignore_eos)?;
    let found = sample.output.tokens();
    if found > tokens || (ignore_eos && found < tokens) || found == 0 {
        return Err(Failure::Failed(format!("{found} tokens returned where {tokens} were asked for")));
    }
    let mut times = std::iter::once(&sample.prefill_ms).chain(&sample.step_ms);
    match times.find(|t| !(t.is_finite() && **t >= 0.0)) {
        Some(time) => Err(Failure::Failed(format!("a time of {time} ms returned"))),
        None => Ok(sample),
    }
}

fn reason(failure: Failure, what: &str, id: &str) -> Option<String> {
    match failure {
        Failure::Cancelled => None,
        Failure::Failed(message) => Some(format!("{what} `{id}`: {message}")),
    }
}

#[cfg(test)]
mod tests;
