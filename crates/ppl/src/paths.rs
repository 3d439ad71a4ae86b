//! Computational paths: different ways of one checkpoint to arrive at the next token. They must agree.
//!
//! A path is given a prompt and a number of tokens, runs *through* end-of-sequence, and returns the token it chooses at each
//! position, with the logits where it has them. The reference path is [`OneRow`], plain autoregressive decoding. A candidate
//! either decodes by itself (a drafting path) or judges the reference's tokens ([`Rescore`], what the verifier of a
//! speculative step does); both are compared index by index, so one more draft mode is one more implementation of [`Path`].

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use runtime::Engine;
use runtime::drafter::Drafter;
use runtime::generate::{GenerateOptions, PREFILL_CHUNK, greedy};
use runtime::speculate::Shape;
use runtime::speculative::speculative_observed;

use crate::error::{Error, Result};
use crate::forward::{Forward, Rows};

/// A prompt with the tokens it is encoded to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Identifier for reports.
    pub id: String,
    /// Tokens, `<bos>` first.
    pub token_ids: Vec<u32>,
}

/// What a path is asked.
pub struct Case<'a> {
    /// The prompt.
    pub prompt: &'a Prompt,
    /// Number of tokens to choose, at least 1.
    pub tokens: usize,
    /// What the reference path chose; `None` for the reference path itself.
    pub reference: Option<&'a Trace>,
    /// Return logits, where the path has them.
    pub logits: bool,
    /// Set when the caller wants to stop.
    pub cancel: &'a AtomicBool,
}

impl Case<'_> {
    /// For `map_err`: the runtime's error, with the prompt.
    pub fn failed(&self, source: runtime::Error) -> Error {
        Error::Model { id: self.prompt.id.clone(), source: source.into() }
    }

    /// [`Error::Cancelled`] once the caller wants to stop. A path calls this before each forward pass.
    pub fn check_cancel(&self) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// What a path chose.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// Token of each position, `[tokens]`.
    pub token_ids: Vec<u32>,
    /// Logits that each was chosen from, `[tokens][kept]`; empty where they were not asked for or the path has none.
    pub logits: Vec<Vec<f32>>,
}

impl Trace {
    fn with_capacity(tokens: usize) -> Trace {
        Trace { token_ids: Vec::with_capacity(tokens), logits: Vec::new() }
    }

    fn push<R: Rows>(&mut self, rows: &R, row: usize, case: &Case<'_>) -> Result<u32> {
        let token = rows.argmax(row).map_err(|e| case.failed(e))?;
        self.token_ids.push(token);
        if case.logits {
            self.logits.push(rows.row(row).to_vec());
        }
        Ok(token)
    }
}

/// A way to arrive at tokens.
pub trait Path {
    /// Short name for reports, different for each path of a comparison.
    fn name(&self) -> &str;

    /// Chooses `case.tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Model`] of the runtime, [`Error::Cancelled`].
    fn run(&mut self, case: &Case<'_>) -> Result<Trace>;
}

/// Plain greedy decoding: the prompt in one call, then one row a step. The reference.
pub struct OneRow<F> {
    model: F,
}

impl<F: Forward> OneRow<F> {
    /// On a model of its own: paths must not see each other's cache.
    pub fn new(model: F) -> OneRow<F> {
        OneRow { model }
    }
}

impl<F: Forward> Path for OneRow<F> {
    fn name(&self) -> &str {
        "one-row"
    }

    fn run(&mut self, case: &Case<'_>) -> Result<Trace> {
        let prompt = &case.prompt.token_ids;
        if prompt.is_empty() {
            return Err(case.failed(runtime::Error::EmptyPrompt));
        }
        let mut trace = Trace::with_capacity(case.tokens);
        self.model.reset();
        case.check_cancel()?;
        let rows = self.model.extend(prompt, prompt.len() - 1..prompt.len()).map_err(|e| case.failed(e))?;
        let mut last = trace.push(&rows, 0, case)?;
        while trace.token_ids.len() < case.tokens {
            case.check_cancel()?;
            let rows = self.model.extend(&[last], 0..1).map_err(|e| case.failed(e))?;
            last = trace.push(&rows, 0, case)?;
        }
        Ok(trace)
    }
}

/// Judges the reference's tokens: prompt and tokens as one sequence, in chunks of a fixed number of rows from position 0 on.
/// The chunk borders differ from those of [`OneRow`] in the prompt as well as after it.
pub struct Rescore<F> {
    model: F,
    rows: usize,
    name: String,
}

/// Rows of the verifier of a speculative step: 7 drafted tokens and the one before them.
pub const VERIFIER_ROWS: usize = 8;

impl<F: Forward> Rescore<F> {
    /// On a model of its own, in chunks of `rows` rows ([`VERIFIER_ROWS`] is the usual number; 0 is taken as 1).
    pub fn new(model: F, rows: usize) -> Rescore<F> {
        let rows = rows.max(1);
        Rescore { model, rows, name: format!("rescore-{rows}") }
    }
}

impl<F: Forward> Path for Rescore<F> {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(&mut self, case: &Case<'_>) -> Result<Trace> {
        let wrong = |reason: &str| Error::Path {
            path: self.name.clone(),
            id: case.prompt.id.clone(),
            reason: reason.to_string(),
        };
        let reference =
            case.reference.ok_or_else(|| wrong("it judges the tokens of a reference, and there is none"))?;
        let prompt = &case.prompt.token_ids;
        let Some(first) = prompt.len().checked_sub(1) else {
            return Err(case.failed(runtime::Error::EmptyPrompt));
        };
        // The row of a token chooses the one after it: the last token of the reference is judged, never run.
        let Some(judged) = reference.token_ids.get(..case.tokens).and_then(|t| t.split_last()).map(|t| t.1) else {
            return Err(wrong("the reference has fewer tokens than are asked for"));
        };
        let sequence = [prompt, judged].concat();
        let mut trace = Trace::with_capacity(case.tokens);
        self.model.reset();
        for (index, chunk) in sequence.chunks(self.rows).enumerate() {
            case.check_cancel()?;
            let want = first.saturating_sub(index * self.rows).min(chunk.len())..chunk.len();
            let rows = self.model.extend(chunk, want.clone()).map_err(|e| case.failed(e))?;
            for row in 0..want.len() {
                trace.push(&rows, row, case)?;
            }
        }
        Ok(trace)
    }
}

/// Speculative decoding: drafts, one verify pass a step, the accepted rows' logits.
pub struct Drafted {
    engine: Engine,
    drafter: Box<dyn Drafter>,
    shape: Shape,
    name: String,
}

impl Drafted {
    /// On an engine of its own.
    pub fn new(engine: Engine, drafter: Box<dyn Drafter>, shape: Shape) -> Drafted {
        let name = match shape.is_chain() {
            true => format!("draft-{}-k{}", drafter.name(), shape.depth()),
            false => format!("draft-{}-tree-{shape}", drafter.name()),
        };
        Drafted { engine, drafter, shape, name }
    }
}

impl Path for Drafted {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(&mut self, case: &Case<'_>) -> Result<Trace> {
        let options = GenerateOptions { max_tokens: case.tokens, stop_ids: vec![], prefill_chunk: PREFILL_CHUNK };
        let go_on = |_| if case.check_cancel().is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
        let mut logits: Vec<Vec<f32>> = Vec::new();
        let mut observe = |index: usize, row: &[f32]| {
            if case.logits && index < case.tokens {
                logits.truncate(index);
                logits.push(row.to_vec());
            }
        };
        let prompt = &case.prompt.token_ids;
        let (engine, drafter) = (&mut self.engine, &mut *self.drafter);
        let made = speculative_observed(engine, drafter, prompt, &self.shape, &options, go_on, &mut observe);
        let (generation, _) = made.map_err(|e| case.failed(e))?;
        case.check_cancel()?;
        Ok(Trace { token_ids: generation.token_ids, logits })
    }
}

/// The generator that `generate` and `serve` use, as it is: what is measured is then what was verified. Has no logits.
pub struct Generator {
    engine: Engine,
    prefill_chunk: usize,
}

impl Generator {
    /// On an engine of its own, with prefill passes of `prefill_chunk` rows.
    pub fn new(engine: Engine, prefill_chunk: usize) -> Generator {
        Generator { engine, prefill_chunk }
    }
}

impl Path for Generator {
    fn name(&self) -> &str {
        "generator"
    }

    fn run(&mut self, case: &Case<'_>) -> Result<Trace> {
        let options = GenerateOptions { max_tokens: case.tokens, stop_ids: vec![], prefill_chunk: self.prefill_chunk };
        let go_on = |_| if case.check_cancel().is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
        let generation = greedy(&mut self.engine, &case.prompt.token_ids, &options, go_on);
        let generation = generation.map_err(|e| case.failed(e))?;
        // A full context shows as too few tokens, which the comparison reports.
        case.check_cancel()?;
        Ok(Trace { token_ids: generation.token_ids, logits: Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::toy::Bigram;

    fn case<'a>(prompt: &'a Prompt, reference: Option<&'a Trace>, cancel: &'a AtomicBool) -> Case<'a> {
        Case { prompt, tokens: 9, reference, logits: true, cancel }
    }

    fn prompt(token_ids: &[u32]) -> Prompt {
        Prompt { id: "p".into(), token_ids: token_ids.to_vec() }
    }

    #[test]
    fn one_row_decodes_greedily() {
        let (prompt, go) = (prompt(&[0, 4, 2]), AtomicBool::new(false));
        let mut model = Bigram::new(6);
        let trace = OneRow::new(&mut model).run(&case(&prompt, None, &go)).unwrap();
        let mut expected = vec![model.next(2)];
        while expected.len() < 9 {
            expected.push(model.next(expected[expected.len() - 1]));
        }
        assert_eq!(trace.token_ids, expected);
        assert_eq!(trace.logits.len(), 9);
        // The prompt once, then eight single rows: the ninth token is chosen and never run.
        assert_eq!(model.calls, [vec![(3, 1)], vec![(1, 1); 8]].concat());
    }

    #[test]
    fn rescoring_sees_the_same_positions_whatever_the_chunk() {
        for length in 1..6 {
            let (prompt, go) = (prompt(&[0, 4, 2, 5, 1][..length]), AtomicBool::new(false));
            let reference = OneRow::new(Bigram::new(6)).run(&case(&prompt, None, &go)).unwrap();
            for rows in [0, 1, 2, 3, 8, 64] {
                let mut model = Bigram::new(6);
                let trace = Rescore::new(&mut model, rows).run(&case(&prompt, Some(&reference), &go)).unwrap();
                assert_eq!(trace, reference, "{length} prompt tokens, {rows} rows");
                assert_eq!(model.calls.iter().map(|c| c.0).sum::<usize>(), length + 8);
                assert_eq!(model.calls.iter().map(|c| c.1).sum::<usize>(), 9);
            }
        }
    }

    #[test]
    fn rescoring_judges_the_reference_and_does_not_follow_itself() {
        let (prompt, go) = (prompt(&[0, 4]), AtomicBool::new(false));
        let forged = Trace { token_ids: vec![5; 9], logits: Vec::new() };
        let trace = Rescore::new(Bigram::new(6), 8).run(&case(&prompt, Some(&forged), &go)).unwrap();
        let model = Bigram::new(6);
        assert_eq!(trace.token_ids, [vec![model.next(4)], vec![model.next(5); 8]].concat());
    }

    #[test]
    fn what_cannot_be_run_is_an_error() {
        let (empty, go, stop) = (prompt(&[]), AtomicBool::new(false), AtomicBool::new(true));
        let short = Trace { token_ids: vec![1; 8], logits: Vec::new() };
        let error = |path: &mut dyn Path, c: Case<'_>| path.run(&c).unwrap_err();
        let (mut one, mut re) = (OneRow::new(Bigram::new(6)), Rescore::new(Bigram::new(6), 8));
        assert!(matches!(error(&mut one, case(&empty, None, &go)), Error::Model { .. }));
        assert!(matches!(error(&mut re, case(&empty, Some(&short), &go)), Error::Model { .. }));
        assert!(matches!(error(&mut re, case(&prompt(&[1]), None, &go)), Error::Path { .. }));
        assert!(error(&mut re, case(&prompt(&[1]), Some(&short), &go)).to_string().contains("fewer tokens"));
        assert!(matches!(error(&mut one, case(&prompt(&[1]), None, &stop)), Error::Cancelled));
    }
}
