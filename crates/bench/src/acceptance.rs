//! What drafts yield over a prompt set: tokens a step and acceptance by depth, with intervals over prompts.
//!
//! Text that repeats itself is easy to draft, and small or damaged models repeat themselves a lot, so every figure stands beside the
//! same one for steps *outside repetition loops*: a step is in a loop if its first drafted position completes a trigram that the
//! output already holds.

use std::collections::HashSet;

use runtime::speculate::Acceptance;
use runtime::speculative::{Speculation, Step};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::stats::{BootstrapOptions, Estimate, bootstrap};

/// What one prompt's generation yielded.
pub struct PromptDrafts {
    /// Tokens of the output.
    pub token_ids: Vec<u32>,
    /// Its steps.
    pub speculation: Speculation,
}

/// Figures over some of the steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Yield {
    /// Steps counted.
    pub steps: usize,
    /// Mean tokens a step, the target's own included, with the interval over prompts; `None` with fewer than 2 prompts.
    pub tokens_per_step: Option<Estimate>,
    /// Share of the steps whose main drafts down to each depth were accepted.
    pub accept_by_depth: Vec<f64>,
}

/// What drafts yield over a prompt set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceReport {
    /// Prompts with at least one step.
    pub prompts: usize,
    /// All steps.
    pub all: Yield,
    /// Steps outside repetition loops.
    pub off_loop: Yield,
    /// Share of the steps that are in a loop.
    pub loop_share: f64,
    /// Hardly anything was accepted: the drafter most likely belongs to another target.
    pub mismatch: bool,
}

impl AcceptanceReport {
    /// Summarises generations.
    ///
    /// # Errors
    /// No step at all; bootstrap options out of range.
    pub fn new(prompts: &[PromptDrafts], options: &BootstrapOptions) -> Result<AcceptanceReport> {
        let marked: Vec<Vec<(&Step, bool)>> = prompts.iter().map(mark_loops).filter(|m| !m.is_empty()).collect();
        let steps: usize = marked.iter().map(Vec::len).sum();
        if steps == 0 {
            return Err(Error::TooFew { what: "drafted steps", needed: 1, found: 0 });
        }
        let in_loop: usize = marked.iter().flatten().filter(|(_, looped)| *looped).count();
        let all: Vec<Vec<&Step>> = marked.iter().map(|m| m.iter().map(|s| s.0).collect()).collect();
        let off: Vec<Vec<&Step>> = marked.iter().map(|m| m.iter().filter(|s| !s.1).map(|s| s.0).collect()).collect();
        let mut counted = Acceptance::default();
        prompts.iter().for_each(|p| counted.merge(&p.speculation.acceptance));
        let whole = Speculation { steps: vec![], acceptance: counted };
        Ok(AcceptanceReport {
            prompts: marked.len(),
            all: Yield::new(all, options)?,
            off_loop: Yield::new(off, options)?,
            loop_share: in_loop as f64 / steps as f64,
            mismatch: whole.looks_mismatched(),
        })
    }
}

impl Yield {
    fn new(prompts: Vec<Vec<&Step>>, options: &BootstrapOptions) -> Result<Yield> {
        let prompts: Vec<Vec<&Step>> = prompts.into_iter().filter(|p| !p.is_empty()).collect();
        let steps: Vec<&Step> = prompts.iter().flatten().copied().collect();
        let depths = steps.iter().map(|s| s.main.len()).max().unwrap_or(0);
        // An accepted branch is no main draft.
        let main = |s: &Step| s.accepted - usize::from(s.salvaged);
        let share = |d: usize| steps.iter().filter(|s| main(s) >= d).count() as f64 / steps.len() as f64;
        let sums: Vec<(f64, f64)> =
            prompts.iter().map(|p| (p.iter().map(|s| s.accepted + 1).sum::<usize>() as f64, p.len() as f64)).collect();
        let ratio = |drawn: &[usize]| {
            let (tokens, steps) = drawn.iter().fold((0.0, 0.0), |(t, s), &i| (t + sums[i].0, s + sums[i].1));
            tokens / steps
        };
        let tokens_per_step = match sums.len() {
            0 | 1 => None,
            n => Some(bootstrap(n, options, ratio)?),
        };
        Ok(Yield { steps: steps.len(), tokens_per_step, accept_by_depth: (1..=depths).map(share).collect() })
    }
}

/// Each step, and whether it is in a loop.
fn mark_loops(p: &PromptDrafts) -> Vec<(&Step, bool)> {
    let mut seen = HashSet::new();
    let repeated: Vec<bool> = (0..p.token_ids.len())
        .map(|i| i >= 2 && !seen.insert([p.token_ids[i - 2], p.token_ids[i - 1], p.token_ids[i]]))
        .collect();
    // A step that was cut off whole has no token in the output.
    let known = p.speculation.steps.iter().filter(|s| s.at < p.token_ids.len());
    known.map(|s| (s, repeated[s.at])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(at: usize, accepted: usize) -> Step {
        let (main, branches) = (vec![0; 3], vec![vec![]; 3]);
        Step {
            main,
            branches,
            accepted,
            salvaged: false,
            at,
            draft_ms: 0.0,
            verify_ms: 0.0,
            accept_ms: 0.0,
            total_ms: 0.0,
        }
    }

    fn drafts(token_ids: &[u32], steps: &[(usize, usize)]) -> PromptDrafts {
        let steps = steps.iter().map(|&(at, accepted)| step(at, accepted)).collect();
        PromptDrafts {
            token_ids: token_ids.to_vec(),
            speculation: Speculation { steps, acceptance: Acceptance::default() },
        }
    }

    #[test]
    fn loops_are_told_apart() {
        // 7 8 9 comes back at index 5; the steps at 1 and 3 are outside a loop, that at 5 is inside.
        let a = drafts(&[7, 8, 9, 7, 8, 9, 7], &[(1, 1), (3, 1), (5, 3)]);
        let b = drafts(&[1, 2, 3], &[(1, 1)]);
        let report = AcceptanceReport::new(&[a, b], &BootstrapOptions::default()).unwrap();
        assert_eq!((report.prompts, report.all.steps, report.off_loop.steps), (2, 4, 3));
        assert_eq!(report.loop_share, 0.25);
        assert_eq!(report.all.tokens_per_step.unwrap().value, 2.5);
        assert_eq!(report.off_loop.tokens_per_step.unwrap().value, 2.0);
        assert_eq!(report.all.accept_by_depth, [1.0, 0.25, 0.25]);
        assert_eq!(report.off_loop.accept_by_depth, [1.0, 0.0, 0.0]);
    }

    #[test]
    fn nothing_drafted_is_an_error() {
        assert!(AcceptanceReport::new(&[drafts(&[1], &[])], &BootstrapOptions::default()).is_err());
    }
}
