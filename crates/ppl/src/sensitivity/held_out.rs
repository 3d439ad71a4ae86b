//! The search on one slice of records, the verdict on another.
//!
//! A search that looks at hundreds of variants finds some whose perplexity on its own records is low by luck. So the plans it
//! proposes are scored once more, on records that it never saw, and the plan that is chosen is the smallest that holds the cap
//! on both. Looking at few finalists keeps that verdict honest; how many were looked at is in the report.
//!
//! Measured on nano (`chiku sensitivity search --model nano --group 32 --limit 40`: linears by kind, rtn, cap 1.05, two slices of
//! 40 records, 332 variants; perplexity as a multiple of the unchanged model's, +- standard error;
//! `results/2026/bench/nano-sensitivity-search-12.txt`):
//!
//! | plan | a step | search slice | held-out slice |
//! |---|---|---|---|
//! | unchanged | 3.588 MB | 1 | 1 |
//! | the 4 least sensitive layers removed, the rest int4 | 1.115 MB | 1.0389 +- 0.0029 | 1.0430 +- 0.0044 |
//! | chosen: the same layers; q and the model projection at int3, the rest int4 | 1.093 MB | 1.0418 +- 0.0030 | 1.0465 +- 0.0044 |
//! | refused: the smallest on the search slice | 1.083 MB | 1.0493 +- 0.0041 | 1.0588 +- 0.0049 |
//!
//! The last row is what the second slice is for. On slices of 8 records no plan holds the cap on both, the least sensitive layers
//! included. With removals alone, a short search found nothing better than the least sensitive layers: on nano it is the widths that
//! greed gets wrong.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::measure::{Baseline, baseline};
use super::paired::{Change, Scores};
use super::search::{Evaluate, Outcome, Plan, SearchOptions, Space, search};
use super::trials::{Slice, Trials};
use super::variant::Variant;
use crate::error::{Error, Result};

/// A plan with both verdicts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finalist {
    /// Layers removed.
    pub layers: Vec<usize>,
    /// Bits of the groups that are quantised.
    pub widths: BTreeMap<String, u8>,
    /// Bytes of weights that a decode step reads.
    pub step_bytes: u64,
    /// On the slice of the search.
    pub search: Change,
    /// On the slice that the search did not see.
    pub held_out: Change,
    /// Whether the cap holds on both.
    pub holds: bool,
    #[serde(skip)]
    variant: Variant,
}

impl Finalist {
    /// What is changed.
    pub fn variant(&self) -> &Variant {
        &self.variant
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SearchReport {
    /// Largest ratio of perplexities.
    pub cap: f64,
    /// The unchanged model on the slice of the search.
    pub baseline_search: Baseline,
    /// The same on the other one.
    pub baseline_held_out: Baseline,
    /// Plans scored on both slices, fewest bytes first, up to the first that holds.
    pub finalists: Vec<Finalist>,
    /// The first finalist that holds the cap on both slices.
    pub chosen: Option<usize>,
    /// For comparison, the best plan of the kind "everything at one width, then the N least sensitive layers removed".
    pub least_sensitive: Finalist,
    /// Variants evaluated on the slice of the search.
    pub evaluations: usize,
    /// Whether the search ended at its number of evaluations: more may find more.
    pub exhausted: bool,
}

/// Variants on the slice of the search.
struct OnSlice<'a, 'b> {
    trials: &'a mut Trials<'b>,
    slice: &'a Slice,
    tokens: Vec<usize>,
    baseline: Scores,
}

impl Evaluate for OnSlice<'_, '_> {
    fn removable(&self, layers: &BTreeSet<usize>) -> bool {
        self.trials.subject().removable(layers.iter().copied())
    }

    fn bytes(&self, variant: &Variant) -> u64 {
        self.trials.subject().step_bytes(variant)
    }

    fn log_ratio(&mut self, variant: &Variant) -> Result<f64> {
        Ok(self.trials.scores(self.slice, variant)?.log_ratio(&self.baseline, &self.tokens))
    }
}

/// Searches on one slice and scores what it finds on the other. `finalists` is the number of plans that may be looked at
/// there, at least 1.
///
/// # Errors
/// [`Error::Option`] for slices that share a record; as [`search`] and [`Trials::scores`].
pub fn run(
    trials: &mut Trials,
    slices: [&Slice; 2],
    space: &Space,
    options: &SearchOptions,
    finalists: usize,
) -> Result<SearchReport> {
    let [seen, unseen] = slices;
    apart(slices)?;
    // A search finds no more plans than it looks at.
    let finalists = finalists.min(options.evaluations.saturating_add(1));
    trials.planned = options.evaluations.saturating_add(finalists).saturating_add(3);
    let (baseline_search, seen_scores) = baseline(trials, seen)?;
    let tokens = seen.tokens();
    let mut on_slice = OnSlice { trials, slice: seen, tokens, baseline: seen_scores.clone() };
    let Outcome { plans, least_sensitive, evaluations, exhausted } = search(&mut on_slice, space, options)?;

    let (baseline_held_out, unseen_scores) = baseline(trials, unseen)?;
    let mut finalist = |variant: &Variant| -> Result<Finalist> {
        let mut change = |slice: &Slice, baseline: &Scores| {
            trials.scores(slice, variant).map(|scores| scores.against(baseline, &slice.tokens()))
        };
        let (search, held_out) = (change(seen, &seen_scores)?, change(unseen, &unseen_scores)?);
        Ok(Finalist {
            layers: variant.removed.iter().copied().collect(),
            widths: variant.widths.iter().map(|(g, &bits)| (g.to_string(), bits)).collect(),
            step_bytes: trials.subject().step_bytes(variant),
            search,
            held_out,
            holds: search.ratio <= options.cap && held_out.ratio <= options.cap,
            variant: variant.clone(),
        })
    };
    let least_sensitive = finalist(&least_sensitive.variant)?;
    let mut looked_at: Vec<Finalist> = Vec::new();
    for plan in front(&plans, finalists) {
        looked_at.push(finalist(&plan.variant)?);
        if looked_at.last().is_some_and(|f| f.holds) {
            break;
        }
    }
    let chosen = looked_at.iter().position(|f| f.holds);
    Ok(SearchReport {
        cap: options.cap,
        baseline_search,
        baseline_held_out,
        finalists: looked_at,
        chosen,
        least_sensitive,
        evaluations,
        exhausted,
    })
}

/// Plans for the verdict: of each perplexity the one with the fewest bytes, `count` of them at most, the smallest first, in steps
/// of even width from its perplexity to the lowest. The plans next to the smallest would be its twins, and
/// fall with it.
fn front(plans: &[Plan], count: usize) -> Vec<&Plan> {
    let worst = plans.first().map_or(0.0, |p| p.log_ratio);
    let best = plans.iter().map(|p| p.log_ratio).fold(worst, f64::min);
    let steps = count.max(2) - 1;
    let mut out: Vec<&Plan> = plans.first().into_iter().collect();
    for step in 1..count {
        let most = best + (worst - best) * (steps - step) as f64 / steps as f64;
        if let Some(plan) = plans.iter().find(|p| p.log_ratio <= most)
            && out.last() != Some(&plan)
        {
            out.push(plan);
        }
    }
    out
}

/// Refuses slices that are empty or share a sequence: the second would be no second opinion.
fn apart([a, b]: [&Slice; 2]) -> Result<()> {
    if a.records.is_empty() || b.records.is_empty() {
        return Err(Error::Nothing { what: "a slice has no records; give more of them, or two files" });
    }
    let seen: BTreeSet<&[u32]> = a.records.iter().map(|r| &r.token_ids[..]).collect();
    match b.records.iter().find(|r| seen.contains(&r.token_ids[..])) {
        None => Ok(()),
        Some(r) => Err(Error::Option {
            option: "slice-b",
            expected: "records that are not in slice a",
            found: format!("`{}` in both", r.id),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finalists_are_spread_over_the_budget() {
        let plan = |bytes, log_ratio| Plan { variant: Variant::unchanged(), bytes, log_ratio };
        let costs = [0.040, 0.039, 0.041, 0.038, 0.030, 0.021, 0.020, 0.019, 0.002, 0.0];
        let plans: Vec<Plan> = costs.iter().zip(100..).map(|(&c, bytes)| plan(bytes, c)).collect();
        let bytes = |count| front(&plans, count).iter().map(|p| p.bytes).collect::<Vec<_>>();
        assert_eq!(bytes(1), [100]);
        assert_eq!(bytes(2), [100, 109]);
        assert_eq!(bytes(3), [100, 106, 109]);
        assert_eq!(bytes(5), [100, 104, 106, 108, 109]);
        assert_eq!(bytes(0), [100], "at least one");
        // Quantising may lower a perplexity by luck.
        let lucky = [plan(1, -0.01), plan(2, -0.02), plan(3, 0.0)];
        assert_eq!(front(&lucky, 8).iter().map(|p| p.bytes).collect::<Vec<_>>(), [1, 2]);
        // One plan may be the answer to several steps.
        assert_eq!(front(&plans[9..], 4).len(), 1);
        assert!(front(&[], 4).is_empty());
    }
}
