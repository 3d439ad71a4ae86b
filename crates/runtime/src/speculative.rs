//! Speculative decoding: draft, verify in one pass, accept, emit. Chain and star are one loop; a draft without branches is a
//! chain.
//!
//! What comes out is what [`crate::generate::greedy`] gives, token for token, and after every step the cache holds exactly what it
//! would hold there.

use std::ops::ControlFlow;
use std::time::Instant;

use crate::drafter::{DraftContext, Drafter};
use crate::engine::Engine;
use crate::error::Result;
use crate::generate::{GenerateOptions, Generation, StopReason, ms_since, prefill, stop_reason};
use crate::logits::Logits;
use crate::speculate::{Acceptance, Branch, Outcome, Shape, accept, cut};

/// One step, for statistics and for comparison with another implementation.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Main drafts, depth by depth.
    pub main: Vec<u32>,
    /// Branches of each depth.
    pub branches: Vec<Vec<u32>>,
    /// Drafted tokens accepted, an accepted branch included, not cut at a stop token or a limit. The step yields one more.
    pub accepted: usize,
    /// The last of them is a branch.
    pub salvaged: bool,
    /// Index in the output of the first token that the step yielded.
    pub at: usize,
    /// Time of drafting in ms.
    pub draft_ms: f64,
    /// Time of the target's pass in ms.
    pub verify_ms: f64,
    /// Time of acceptance in ms: the longest prefix, and what of the cache stays.
    pub accept_ms: f64,
    /// Time of the whole step in ms; what is not in the others is the host's.
    pub total_ms: f64,
}

/// All steps of a generation. The first token comes from the prefill and belongs to none.
#[derive(Debug, Clone, Default)]
pub struct Speculation {
    /// In order.
    pub steps: Vec<Step>,
    /// Counts for the choice of a shape.
    pub acceptance: Acceptance,
}

impl Speculation {
    /// Mean tokens a step: accepted drafts and one of the target's own. `None` without steps.
    pub fn tokens_per_step(&self) -> Option<f64> {
        let accepted: usize = self.steps.iter().map(|s| s.accepted).sum();
        (!self.steps.is_empty()).then(|| accepted as f64 / self.steps.len() as f64 + 1.0)
    }

    /// Whether the drafter hardly ever hits: over at least 32 drafted steps, fewer than one in fifty has its first draft accepted.
    /// A trained drafter on its own target accepts more than half; this one more likely belongs to another.
    pub fn looks_mismatched(&self) -> bool {
        let (Some(&reached), Some(&hit)) = (self.acceptance.reached.first(), self.acceptance.main.first()) else {
            return false;
        };
        reached >= 32 && hit * 50 < reached
    }
}

/// Continues `prompt` greedily from an empty sequence, with drafts of at most `shape`. `on_token` sees every id as it is decided and
/// may end the generation. [`Generation::step_ms`] holds one entry a step.
pub fn speculative(
    engine: &mut Engine,
    drafter: &mut dyn Drafter,
    prompt: &[u32],
    shape: &Shape,
    options: &GenerateOptions,
    on_token: impl FnMut(u32) -> ControlFlow<()> + Send,
) -> Result<(Generation, Speculation)> {
    speculative_observed(engine, drafter, prompt, shape, options, on_token, &mut |_, _| {})
}

/// Sees the logits that each token was chosen from: its index in the output, and a row of `[head rows]`. Tokens that are then cut
/// off at a stop token or a limit are shown, too.
pub type LogitObserver<'a> = dyn FnMut(usize, &[f32]) + Send + 'a;

/// [`speculative`] that shows the logits behind every decision.
pub fn speculative_observed(
    engine: &mut Engine,
    drafter: &mut dyn Drafter,
    prompt: &[u32],
    shape: &Shape,
    options: &GenerateOptions,
    on_token: impl FnMut(u32) -> ControlFlow<()> + Send,
    observe: &mut LogitObserver,
) -> Result<(Generation, Speculation)> {
    engine.on_its_threads(|engine| decode(engine, drafter, prompt, shape, options, on_token, observe))
}

fn decode(
    engine: &mut Engine,
    drafter: &mut dyn Drafter,
    prompt: &[u32],
    shape: &Shape,
    options: &GenerateOptions,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    observe: &mut LogitObserver,
) -> Result<(Generation, Speculation)> {
    engine.reset();
    let mut out = Generation { token_ids: vec![], prefill_ms: 0.0, step_ms: vec![], stop: StopReason::Length };
    let mut speculation = Speculation::default();
    let started = Instant::now();
    let logits = prefill(engine, prompt, options.prefill_chunk)?;
    if options.max_tokens == 0 {
        out.prefill_ms = ms_since(started);
        return Ok((out, speculation));
    }
    let mut hidden = logits.hidden(0).to_vec();
    let mut sequence = prompt.to_vec();
    let mut emitted = vec![logits.argmax(0)?];
    observe(0, logits.row(0));
    out.prefill_ms = ms_since(started);
    loop {
        let room = options.max_tokens - out.token_ids.len();
        let kept = cut(&emitted, &options.stop_ids, room);
        let mut ended = false;
        for &token in &emitted[..kept] {
            out.token_ids.push(token);
            sequence.push(token);
            ended = on_token(token).is_break();
            if ended {
                break;
            }
        }
        // The newest token is decided but not run: the cache ends before it, wherever the output was cut.
        engine.truncate(sequence.len() - 1);
        if let Some(stop) = stop_reason(engine, &out.token_ids, options, ended) {
            out.stop = stop;
            return Ok((out, speculation));
        }
        let step = Instant::now();
        let taken = run_step(engine, drafter, &sequence, &hidden, shape)?;
        speculation.acceptance.count(&taken.ranked, &taken.choices);
        let at = out.token_ids.len();
        // The rows that chose: base and each accepted main draft, then the accepted branch.
        let rows = (0..=taken.outcome.main).chain(taken.outcome.branch.map(|_| taken.outcome.last_row));
        rows.enumerate().for_each(|(i, row)| observe(at + i, taken.logits.row(row)));
        hidden = taken.logits.hidden(taken.outcome.last_row).to_vec();
        emitted = taken.outcome.emitted;
        let total_ms = ms_since(step);
        out.step_ms.push(total_ms);
        speculation.steps.push(Step {
            main: taken.main,
            branches: taken.branches,
            accepted: emitted.len() - 1,
            salvaged: taken.outcome.branch.is_some(),
            at,
            draft_ms: taken.draft_ms,
            verify_ms: taken.verify_ms,
            accept_ms: taken.accept_ms,
            total_ms,
        });
    }
}

/// A step as it came out of the target.
struct Taken {
    ranked: Vec<Vec<u32>>,
    main: Vec<u32>,
    branches: Vec<Vec<u32>>,
    logits: Logits,
    choices: Vec<u32>,
    outcome: Outcome,
    draft_ms: f64,
    verify_ms: f64,
    accept_ms: f64,
}

/// Draft, verify, accept; the cache then ends where the accepted tokens do.
fn run_step(
    engine: &mut Engine,
    drafter: &mut dyn Drafter,
    sequence: &[u32],
    hidden: &[f32],
    shape: &Shape,
) -> Result<Taken> {
    let base = engine.len();
    // The base row takes one position, each draft one more.
    let shape = shape.limited(engine.context() - base - 1);
    let started = Instant::now();
    let mut ranked = drafter.draft(&DraftContext { engine, tokens: sequence, hidden }, &shape)?.ranked;
    ranked.truncate(shape.depth());
    let draft_ms = ms_since(started);

    let main: Vec<u32> = ranked.iter().map(|candidates| candidates[0]).collect();
    let wanted = ranked.iter().enumerate().map(|(d, candidates)| (d + 1, &candidates[1..]));
    let branches: Vec<Vec<u32>> = wanted.map(|(d, rest)| rest[..shape.branches(d).min(rest.len())].to_vec()).collect();
    let side =
        branches.iter().enumerate().flat_map(|(d, b)| b.iter().map(move |&token| Branch { depth: d + 1, token }));
    let side: Vec<Branch> = side.collect();

    let started = Instant::now();
    let chain: Vec<u32> = sequence.last().into_iter().chain(&main).copied().collect();
    let logits = engine.verify(&chain, &side)?;
    let choices = (0..logits.rows()).map(|r| logits.argmax(r)).collect::<Result<Vec<u32>>>()?;
    let verify_ms = ms_since(started);
    let started = Instant::now();
    let outcome = accept(&main, &side, &choices);
    engine.settle(base + outcome.main + 1, outcome.branch);
    let accept_ms = ms_since(started);
    Ok(Taken { ranked, main, branches, logits, choices, outcome, draft_ms, verify_ms, accept_ms })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acceptance_near_zero_over_many_steps_is_a_mismatch() {
        let run = |reached, hit| Speculation {
            acceptance: Acceptance { reached: vec![reached], main: vec![hit], salvaged: vec![[0; 4]] },
            ..Default::default()
        };
        assert!(run(100, 1).looks_mismatched());
        assert!(!run(100, 2).looks_mismatched());
        assert!(!run(31, 0).looks_mismatched(), "too few steps to tell");
        assert!(!Speculation::default().looks_mismatched());
    }
}
