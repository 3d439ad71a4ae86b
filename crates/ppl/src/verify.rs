//! The gate before any claim of speed: perplexity at most a cap, and greedy identity between computational paths.
//!
//! A gate passes only on numbers that exist: a perplexity that is absent, NaN or of an incomplete run fails, and so does an
//! identity check that compared nothing or was cut short.

use std::sync::atomic::AtomicBool;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::identity::{Divergence, Status, divergence};
use crate::paths::{Case, Path, Prompt, Trace};
use crate::score::{PplReport, PrunedTarget};

/// Perplexity allowed, relative to the reference: the field's rule, 5 % more, inclusive.
pub const PPL_TOLERANCE: f64 = 1.05;

/// The limit of the perplexity gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PplCap {
    /// Largest perplexity that passes.
    pub cap: f64,
    /// Perplexity of the model that this one is derived from, where it is known.
    pub reference: Option<f64>,
}

impl PplCap {
    /// An explicit cap, or the reference's perplexity times [`PPL_TOLERANCE`]. A cap given beside a reference wins.
    ///
    /// # Errors
    /// Neither is given, or one is not a finite number of at least 1 (no perplexity is smaller).
    pub fn new(cap: Option<f64>, reference: Option<f64>) -> Result<PplCap> {
        let check = |option, value: Option<f64>| match value {
            Some(v) if !(v.is_finite() && v >= 1.0) => {
                Err(Error::Option { option, expected: "a finite number of at least 1", found: v.to_string() })
            }
            other => Ok(other),
        };
        let (cap, reference) = (check("perplexity cap", cap)?, check("reference perplexity", reference)?);
        match cap.or(reference.map(|r| r * PPL_TOLERANCE)) {
            Some(cap) => Ok(PplCap { cap, reference }),
            None => Err(Error::Nothing { what: "neither a perplexity cap nor a reference perplexity is given" }),
        }
    }

    /// Whether a perplexity passes. Absent and NaN fail.
    pub fn passes(&self, ppl: Option<f64>) -> bool {
        ppl.is_some_and(|p| p <= self.cap)
    }
}

/// How to compare paths.
#[derive(Debug, Clone)]
pub struct PathOptions {
    /// Tokens a prompt, running through end-of-sequence.
    pub tokens: usize,
    /// Compare the logits too. Needs `tokens * kept vocabulary * 4` bytes a path, for one prompt at a time.
    pub logits: bool,
}

impl Default for PathOptions {
    fn default() -> Self {
        PathOptions { tokens: 64, logits: true }
    }
}

/// State for a progress display.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Prompts done.
    pub prompts: usize,
    /// Prompts in all.
    pub prompts_total: usize,
    /// Prompts on which a path diverged so far.
    pub divergent: usize,
}

/// One path held against the reference path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PathReport {
    /// Name of the path.
    pub path: String,
    /// Prompts whose tokens are all the same.
    pub identical_prompts: usize,
    /// Indices that differ, over all prompts.
    pub divergent_tokens: usize,
    /// Largest absolute difference of two logits of the same position and token, over the positions up to the first
    /// divergence of each prompt. `None` where the path has no logits. Row invariance means exactly 0.
    pub max_logit_delta: Option<f64>,
    /// Positions at which any logit differs in any bit.
    pub differing_rows: usize,
    /// Each prompt that diverges, in order.
    pub divergences: Vec<Divergence>,
}

/// The first divergence in the order of prompts, then paths.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FirstDivergence {
    /// Name of the path.
    pub path: String,
    /// Where and what.
    #[serde(flatten)]
    pub divergence: Divergence,
}

/// Greedy identity between paths.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IdentityReport {
    /// The verdict over all paths; [`Status::Incomparable`] where no prompt was compared.
    pub status: Status,
    /// Name of the path that the others were held against.
    pub reference: String,
    /// Prompts compared.
    pub prompts: usize,
    /// Tokens of the reference, over those prompts.
    pub tokens: usize,
    /// Prompts on which at least one path diverges.
    pub divergent_prompts: usize,
    /// Where to start looking.
    pub first_divergence: Option<FirstDivergence>,
    /// Largest over the paths.
    pub max_logit_delta: Option<f64>,
    /// All prompts were compared; `false` after a cancel.
    pub complete: bool,
    /// Each path.
    pub paths: Vec<PathReport>,
}

/// Decodes each prompt by the reference path and holds every candidate against it.
///
/// # Errors
/// [`Error::Nothing`] without prompts, candidates or tokens; [`Error::Path`] for a path that returns another number of tokens
/// than were asked for; [`Error::Model`] with the prompt. A divergence or a cancel is no error: see [`IdentityReport`].
pub fn compare_paths(
    reference: &mut dyn Path,
    candidates: &mut [&mut dyn Path],
    prompts: &[Prompt],
    options: &PathOptions,
    cancel: &AtomicBool,
    mut progress: impl FnMut(Progress),
) -> Result<IdentityReport> {
    let missing = [
        (prompts.is_empty(), "no prompts to compare paths on"),
        (candidates.is_empty(), "no path to hold against the reference"),
        (options.tokens == 0, "no tokens to decode a prompt"),
    ];
    if let Some((_, what)) = missing.into_iter().find(|m| m.0) {
        return Err(Error::Nothing { what });
    }
    let mut report = IdentityReport {
        status: Status::Incomparable,
        reference: reference.name().to_string(),
        prompts: 0,
        tokens: 0,
        divergent_prompts: 0,
        first_divergence: None,
        max_logit_delta: None,
        complete: false,
        paths: candidates.iter().map(|c| PathReport::new(c.name())).collect(),
    };
    for prompt in prompts {
        match compare_prompt(reference, candidates, prompt, options, cancel) {
            Ok((tokens, results)) => report.add(tokens, results),
            Err(Error::Cancelled) => break,
            Err(e) => return Err(e),
        }
        let (prompts_total, divergent) = (prompts.len(), report.divergent_prompts);
        progress(Progress { prompts: report.prompts, prompts_total, divergent });
    }
    report.complete = report.prompts == prompts.len();
    Ok(report)
}

/// What one candidate did on one prompt.
struct PromptResult {
    divergence: Option<Divergence>,
    max_logit_delta: Option<f64>,
    differing_rows: usize,
}

/// All candidates on one prompt; whole or not at all, so that every path has seen the same prompts.
fn compare_prompt(
    reference: &mut dyn Path,
    candidates: &mut [&mut dyn Path],
    prompt: &Prompt,
    options: &PathOptions,
    cancel: &AtomicBool,
) -> Result<(usize, Vec<PromptResult>)> {
    let case = Case { prompt, tokens: options.tokens, reference: None, logits: options.logits, cancel };
    let expected = run(reference, &case)?;
    let mut results = Vec::with_capacity(candidates.len());
    for candidate in candidates.iter_mut() {
        let found = run(*candidate, &Case { reference: Some(&expected), ..case })?;
        results.push(PromptResult::new(&prompt.id, &expected, &found));
    }
    Ok((expected.token_ids.len(), results))
}

fn run(path: &mut dyn Path, case: &Case<'_>) -> Result<Trace> {
    let trace = path.run(case)?;
    let (tokens, rows) = (trace.token_ids.len(), trace.logits.len());
    if tokens == case.tokens && (rows == 0 || rows == tokens) {
        return Ok(trace);
    }
    let reason = format!("{} tokens asked for, {tokens} returned with {rows} rows of logits", case.tokens);
    Err(Error::Path { path: path.name().to_string(), id: case.prompt.id.clone(), reason })
}

impl PromptResult {
    fn new(key: &str, expected: &Trace, found: &Trace) -> PromptResult {
        let divergence = divergence(key, &expected.token_ids, &found.token_ids);
        // After a divergence a decoding path is in another context, where a difference of logits says nothing.
        let comparable = divergence.as_ref().map_or(expected.token_ids.len(), |d| d.index + 1);
        let mut max_logit_delta = None;
        let mut differing_rows = 0;
        for (a, b) in expected.logits.iter().zip(&found.logits).take(comparable) {
            let delta = row_delta(a, b);
            differing_rows += usize::from(delta.is_some());
            max_logit_delta = Some(max_nan(max_logit_delta.unwrap_or(0.0), delta.unwrap_or(0.0)));
        }
        PromptResult { divergence, max_logit_delta, differing_rows }
    }
}

/// Largest absolute difference of two rows, NaN where one has a NaN or another length; `None` where every bit is the same.
fn row_delta(a: &[f32], b: &[f32]) -> Option<f64> {
    if a.len() != b.len() {
        return Some(f64::NAN);
    }
    let differing = a.iter().zip(b).filter(|(x, y)| x.to_bits() != y.to_bits());
    differing.map(|(&x, &y)| (f64::from(x) - f64::from(y)).abs()).reduce(max_nan)
}

/// The larger one, NaN if either is: unlike `f64::max`, which would hide it.
fn max_nan(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

impl PathReport {
    fn new(path: &str) -> PathReport {
        PathReport {
            path: path.to_string(),
            identical_prompts: 0,
            divergent_tokens: 0,
            max_logit_delta: None,
            differing_rows: 0,
            divergences: Vec::new(),
        }
    }

    fn add(&mut self, result: PromptResult) {
        self.max_logit_delta = merge_delta(self.max_logit_delta, result.max_logit_delta);
        self.differing_rows += result.differing_rows;
        match result.divergence {
            None => self.identical_prompts += 1,
            Some(d) => {
                self.divergent_tokens += d.num_divergent;
                self.divergences.push(d);
            }
        }
    }
}

fn merge_delta(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(max_nan(a, b)),
        (a, b) => a.or(b),
    }
}

impl IdentityReport {
    fn add(&mut self, tokens: usize, results: Vec<PromptResult>) {
        self.prompts += 1;
        self.tokens += tokens;
        self.divergent_prompts += usize::from(results.iter().any(|r| r.divergence.is_some()));
        for (path, result) in self.paths.iter_mut().zip(results) {
            if let (None, Some(d)) = (&self.first_divergence, &result.divergence) {
                self.first_divergence = Some(FirstDivergence { path: path.path.clone(), divergence: d.clone() });
            }
            self.max_logit_delta = merge_delta(self.max_logit_delta, result.max_logit_delta);
            path.add(result);
        }
        self.status = if self.divergent_prompts == 0 { Status::GreedyIdentical } else { Status::Divergent };
    }

    /// All prompts were compared and no token differs.
    pub fn passed(&self) -> bool {
        self.complete && self.status == Status::GreedyIdentical
    }
}

/// Verdict of the gate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyReport {
    /// Both gates passed.
    pub passed: bool,
    /// One sentence for each reason of failure.
    pub failures: Vec<String>,
    /// Identity between paths.
    pub identity: IdentityReport,
    /// Perplexity, where there is one.
    pub ppl: Option<f64>,
    /// Largest perplexity that passes.
    pub ppl_cap: f64,
    /// Perplexity of the model that this one is derived from, where it is known.
    pub reference_ppl: Option<f64>,
    /// Scored tokens behind `ppl`.
    pub ppl_tokens: usize,
    /// Targets that the head lacks.
    pub pruned_targets: Vec<PrunedTarget>,
}

impl VerifyReport {
    /// Joins the two halves.
    pub fn new(identity: IdentityReport, ppl: &PplReport, cap: PplCap) -> VerifyReport {
        let mut failures = Vec::new();
        if let Some(first) = &identity.first_divergence {
            let d = &first.divergence;
            failures.push(format!(
                "identity: {} of {} prompts diverge; first `{}` at token {}: {} chose {}, {} chose {}",
                identity.divergent_prompts,
                identity.prompts,
                d.key,
                d.index,
                identity.reference,
                token(d.expected),
                first.path,
                token(d.found),
            ));
        }
        if !identity.complete {
            failures.push(format!("identity: stopped after {} prompts", identity.prompts));
        }
        if !ppl.complete {
            failures.push(format!("perplexity: stopped after {} records", ppl.num_records));
        }
        match ppl.ppl {
            Some(p) if cap.passes(Some(p)) => {}
            Some(p) => failures.push(format!("perplexity: {p:.4} is above the cap of {:.4}", cap.cap)),
            None if ppl.pruned_targets.is_empty() => failures.push("perplexity: nothing was scored".to_string()),
            None => {
                let tokens = ppl.pruned_targets.len();
                failures.push(format!("perplexity: none, the head lacks {tokens} of the target tokens"));
            }
        }
        let passed = identity.passed() && ppl.usable() && cap.passes(ppl.ppl);
        VerifyReport {
            passed,
            failures,
            identity,
            ppl: ppl.ppl,
            ppl_cap: cap.cap,
            reference_ppl: cap.reference,
            ppl_tokens: ppl.num_tokens,
            pruned_targets: ppl.pruned_targets.clone(),
        }
    }
}

fn token(id: Option<u32>) -> String {
    id.map_or("nothing".to_string(), |id| id.to_string())
}

#[cfg(test)]
mod tests;
