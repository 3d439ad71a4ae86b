//! The protocol of a run: batch 1, greedy, one request at a time, warm-ups first and untimed.
//!
//! Tokens a second is what the field reports: all completion tokens over the wall time of the whole sequence of requests, with
//! prefill, and whatever else happens between two requests, inside. To make the parts add up to the whole, a sample's time is a
//! *lap*: from the end of the previous request to the end of this one.
//!
//! A run never loses what is done. A cancel or a failing target ends it early; the samples up to there are returned, marked
//! incomplete, with the reason where there is one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use ppl::identity::token_sha256;
use ppl::paths::Prompt;

/// What is run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protocol {
    /// Untimed requests before the first timed one; the first prompts, from the start again where there are fewer.
    pub warmup_prompts: usize,
    /// Tokens of a warm-up request; at most `max_tokens` are asked for.
    pub warmup_tokens: usize,
    /// Tokens of a timed request.
    pub max_tokens: usize,
    /// Run through end-of-sequence, so that every request yields `max_tokens`.
    pub ignore_eos: bool,
}

impl Default for Protocol {
    /// The field's timed stage: 4 warm-ups, 512 tokens, end-of-sequence ignored. A warm-up of 32 tokens touches every weight and
    /// raises the clocks.
    fn default() -> Self {
        Protocol { warmup_prompts: 4, warmup_tokens: 32, max_tokens: 512, ignore_eos: true }
    }
}

/// What a target returns for one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Completion tokens.
    pub token_ids: Vec<u32>,
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
    fn generate(&mut self, prompt: &[u32], max_tokens: usize, ignore_eos: bool)
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// SHA-256 of the completion's ids, as the field computes it.
    pub token_sha256: String,
}

/// A run of one target.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// The target's label.
    pub label: String,
    /// Finished requests, in order.
    pub samples: Vec<PromptSample>,
    /// Requests that were planned.
    pub planned: usize,
    /// All of them were finished.
    pub complete: bool,
    /// Why not, unless it was a cancel.
    pub failure: Option<String>,
}

impl Run {
    fn new(label: &str, planned: usize) -> Run {
        let samples = Vec::with_capacity(planned);
        Run { label: label.to_string(), samples, planned, complete: false, failure: None }
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

    let total = protocol.warmup_prompts * targets.len();
    let mut done = 0;
    for request in 0..protocol.warmup_prompts {
        let prompt = &prompts[request % prompts.len()];
        for t in order(request) {
            if ctx.cancel.load(Ordering::Relaxed) {
                return Ok(runs);
            }
            let tokens = protocol.warmup_tokens.min(protocol.max_tokens);
            if let Err(failure) = request_sample(&mut *targets[t], prompt, tokens, protocol.ignore_eos) {
                runs[t].failure = reason(failure, "warm-up", &prompt.id);
                return Ok(runs);
            }
            done += 1;
            (ctx.progress)(Progress { label: targets[t].label(), warmup: true, done, total, tokens_per_s: None });
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
                prompt_tokens: prompt.token_ids.len(),
                completion_tokens: sample.token_ids.len(),
                wall_ms: now - lap,
                prefill_ms: sample.prefill_ms,
                decode_ms: sample.step_ms.iter().sum(),
                step_ms: sample.step_ms,
                token_sha256: token_sha256(&sample.token_ids),
            });
            lap = now;
            done += 1;
            let tokens_per_s = runs[t].tokens_per_s();
            (ctx.progress)(Progress { label: targets[t].label(), warmup: false, done, total, tokens_per_s });
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
    if let Some(empty) = prompts.iter().find(|p| p.token_ids.is_empty()) {
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
    let sample = target.generate(&prompt.token_ids, tokens, ignore_eos)?;
    let found = sample.token_ids.len();
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
