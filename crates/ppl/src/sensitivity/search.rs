//! Beam search for the removal set and bit plan with the fewest bytes a step under a perplexity cap, as logic over
//! [`Evaluate`]: no model is in here.
//!
//! What a move (remove a layer, change the width of a group) costs is not the sum of what its parts cost alone: two layers
//! that can each replace the other are both cheap, and dear together. So every plan that is kept was evaluated as a whole. What
//! single moves cost only decides what is evaluated next:
//!
//! 1. every move alone, from the unchanged model: the first estimates, and the first starting points;
//! 2. more of them: everything at one width, with the least sensitive layers removed one by one while the cap holds (the
//!    plan that a search must beat), and what the estimates would choose if they could be added;
//! 3. rounds: of all moves from the plans in the beam, in both directions, those with the highest *prospect* are evaluated.
//!    What a move really cost beside what a plan holds already replaces the estimate for that plan's successors. The plans
//!    with the highest prospect make the next beam.
//!
//! The prospect of a plan is the bytes it saves and those that the rest of the budget would buy at the estimated prices
//! (fractions allowed). A search ends after rounds without gain, or at its number of evaluations. It is deterministic: ties
//! go to the first in the order of [`Variant`].

use std::collections::{BTreeMap, BTreeSet};

use super::variant::{Group, Variant};
use crate::error::{Error, Result};

/// What the search asks of a model.
pub trait Evaluate {
    /// Whether these layers can be removed together.
    fn removable(&self, layers: &BTreeSet<usize>) -> bool;
    /// Bytes that a decode step of the variant reads.
    fn bytes(&self, variant: &Variant) -> u64;
    /// Natural logarithm of the variant's perplexity over the unchanged model's. Asked once for a variant.
    ///
    /// # Errors
    /// Whatever ends the search.
    fn log_ratio(&mut self, variant: &Variant) -> Result<f64>;
}

/// What may be changed.
#[derive(Debug, Clone)]
pub struct Space {
    /// Layers that may be removed.
    pub layers: Vec<usize>,
    /// Groups that may be quantised, disjoint.
    pub groups: Vec<Group>,
    /// Bits they may get.
    pub widths: Vec<u8>,
}

/// How far to search.
#[derive(Debug, Clone)]
pub struct SearchOptions {
    /// Largest perplexity over the unchanged model's.
    pub cap: f64,
    /// Plans kept from round to round.
    pub beam: usize,
    /// Plans evaluated a round, for each plan in the beam.
    pub branch: usize,
    /// Rounds without gain after which to stop.
    pub patience: usize,
    /// Variants evaluated at most, single moves included.
    pub evaluations: usize,
}

impl Default for SearchOptions {
    fn default() -> SearchOptions {
        SearchOptions { cap: 1.05, beam: 4, branch: 8, patience: 4, evaluations: 400 }
    }
}

/// An evaluated variant.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// What is changed.
    pub variant: Variant,
    /// Bytes that a step reads.
    pub bytes: u64,
    /// Logarithm of the ratio of perplexities.
    pub log_ratio: f64,
}

/// What a search found.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Every evaluated variant under the cap, the unchanged model included: fewest bytes first.
    pub plans: Vec<Plan>,
    /// The best of the plans "all groups at one width, then the N least sensitive layers removed".
    pub least_sensitive: Plan,
    /// Variants evaluated.
    pub evaluations: usize,
    /// Whether the search ended at its number of evaluations and not by itself.
    pub exhausted: bool,
}

/// One thing that a variant may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Removed(usize),
    Width(Group, u8),
}

/// What parts are estimated to cost beside what a plan holds, in nats a token.
type Prices = BTreeMap<Part, f64>;

#[derive(Clone)]
struct Node {
    plan: Plan,
    prices: Prices,
}

/// A change of one part: what goes and what comes.
#[derive(Clone, Copy)]
struct Move {
    old: Option<Part>,
    new: Option<Part>,
}

impl Move {
    fn price(&self, prices: &Prices) -> f64 {
        let price = |part: Option<Part>| part.and_then(|p| prices.get(&p)).copied().unwrap_or(0.0);
        price(self.new) - price(self.old)
    }

    /// Corrects the price of what came, or else of what went, by what the move cost.
    fn learn(&self, cost: f64, prices: &mut Prices) {
        let old = self.old.and_then(|p| prices.get(&p)).copied().unwrap_or(0.0);
        match (self.new, self.old) {
            (Some(new), _) => prices.insert(new, old + cost),
            (None, Some(old)) => prices.insert(old, -cost),
            (None, None) => None,
        };
    }
}

/// Prices below this are taken for this: nothing is free for certain, and a quotient needs a divisor.
const LEAST_PRICE: f64 = 1e-7;
/// Shares of the budget that are spent on starting points by estimated prices.
const SHARES: [f64; 5] = [1.0, 0.85, 0.7, 0.5, 0.3];

/// Searches.
///
/// # Errors
/// [`Error::Option`] for options that leave nothing to search; errors of `evaluate`.
pub fn search<E: Evaluate>(evaluate: &mut E, space: &Space, options: &SearchOptions) -> Result<Outcome> {
    let singles = single_moves(evaluate, space).len();
    check(options, singles)?;
    let root = Variant::unchanged();
    let root_bytes = evaluate.bytes(&root);
    let savings = single_moves(evaluate, space)
        .into_iter()
        .map(|(part, variant)| (part, root_bytes as f64 - evaluate.bytes(&variant) as f64))
        .collect();
    let mut search = Search { evaluate, space, options, root_bytes, savings, known: BTreeMap::new() };
    search.run()
}

fn check(options: &SearchOptions, singles: usize) -> Result<()> {
    let refuse = |option, expected: String, found: String| Err(Error::Search { option, expected, found });
    if !(options.cap.is_finite() && options.cap > 1.0) {
        return refuse("cap", "a number above 1".into(), options.cap.to_string());
    }
    for (option, value) in [("beam", options.beam), ("branch", options.branch), ("patience", options.patience)] {
        if value == 0 {
            return refuse(option, "at least 1".into(), "0".into());
        }
    }
    if singles == 0 {
        return refuse("widths", "a width, a group or a layer that may change".into(), "none".into());
    }
    if options.evaluations <= singles + 1 {
        let expected = format!("more than {} (each single move is tried first)", singles + 1);
        return refuse("evaluations", expected, options.evaluations.to_string());
    }
    Ok(())
}

/// Every part by itself.
fn single_moves<E: Evaluate>(evaluate: &E, space: &Space) -> Vec<(Part, Variant)> {
    let root = Variant::unchanged();
    let layers = space.layers.iter().filter(|&&l| evaluate.removable(&BTreeSet::from([l])));
    let mut out: Vec<(Part, Variant)> = layers.map(|&l| (Part::Removed(l), root.without(l))).collect();
    for &g in &space.groups {
        out.extend(space.widths.iter().map(|&w| (Part::Width(g, w), root.with(g, Some(w)))));
    }
    out
}

struct Search<'a, E> {
    evaluate: &'a mut E,
    space: &'a Space,
    options: &'a SearchOptions,
    root_bytes: u64,
    /// Bytes that a part alone saves.
    savings: BTreeMap<Part, f64>,
    known: BTreeMap<Variant, Plan>,
}

impl<E: Evaluate> Search<'_, E> {
    fn budget(&self) -> f64 {
        self.options.cap.ln()
    }

    fn run(&mut self) -> Result<Outcome> {
        let mut prices = Prices::new();
        let mut singles = vec![Variant::unchanged()];
        self.plan(&singles[0])?;
        for (part, variant) in single_moves(self.evaluate, self.space) {
            if let Some(plan) = self.plan(&variant)? {
                prices.insert(part, plan.log_ratio);
                singles.push(variant);
            }
        }
        let (mut starts, least_sensitive) = self.uniform(&prices)?;
        starts.extend(singles);
        starts.extend(SHARES.map(|share| self.additive(&prices, share)));
        let mut beam = Vec::new();
        for variant in starts.into_iter().collect::<BTreeSet<_>>() {
            if let Some(plan) = self.plan(&variant)?.filter(|p| p.log_ratio <= self.budget()) {
                beam.push(Node { plan, prices: prices.clone() });
            }
        }
        self.best(&mut beam);
        let mut idle = 0;
        let mut fewest = self.fewest_bytes();
        while idle < self.options.patience && self.round(&mut beam)? {
            let now = self.fewest_bytes();
            idle = if now < fewest { 0 } else { idle + 1 };
            fewest = now;
        }
        let budget = self.budget();
        let mut plans: Vec<Plan> = self.known.values().filter(|p| p.log_ratio <= budget).cloned().collect();
        plans.sort_by(|a, b| {
            a.bytes.cmp(&b.bytes).then(a.log_ratio.total_cmp(&b.log_ratio)).then_with(|| a.variant.cmp(&b.variant))
        });
        let exhausted = idle < self.options.patience && self.known.len() >= self.options.evaluations;
        Ok(Outcome { plans, least_sensitive, evaluations: self.known.len(), exhausted })
    }

    /// The variant, evaluated; `None` where that would be one too many.
    fn plan(&mut self, variant: &Variant) -> Result<Option<Plan>> {
        if let Some(plan) = self.known.get(variant) {
            return Ok(Some(plan.clone()));
        }
        if self.known.len() >= self.options.evaluations {
            return Ok(None);
        }
        let log_ratio = self.evaluate.log_ratio(variant)?;
        let plan = Plan { variant: variant.clone(), bytes: self.evaluate.bytes(variant), log_ratio };
        self.known.insert(variant.clone(), plan.clone());
        Ok(Some(plan))
    }

    fn fewest_bytes(&self) -> u64 {
        let under = self.known.values().filter(|p| p.log_ratio <= self.budget());
        under.map(|p| p.bytes).min().unwrap_or(self.root_bytes)
    }

    /// All groups at one width, or as they are, and from there the least sensitive layers removed while the cap holds. Also
    /// the one of them with the fewest bytes.
    fn uniform(&mut self, prices: &Prices) -> Result<(Vec<Variant>, Plan)> {
        let mut layers: Vec<usize> =
            self.space.layers.iter().copied().filter(|&l| prices.contains_key(&Part::Removed(l))).collect();
        layers.sort_by(|&a, &b| prices[&Part::Removed(a)].total_cmp(&prices[&Part::Removed(b)]));
        let mut starts = Vec::new();
        let root = Plan { variant: Variant::unchanged(), bytes: self.root_bytes, log_ratio: 0.0 };
        let mut fewest = root;
        let widths = [None].into_iter().chain(self.space.widths.iter().copied().map(Some));
        for width in widths.collect::<Vec<_>>() {
            let mut variant = Variant::unchanged();
            if let Some(bits) = width {
                variant.widths = self.space.groups.iter().map(|&g| (g, bits)).collect();
            }
            let mut next = Some(variant);
            let mut rest = layers.iter();
            while let Some(variant) = next.take() {
                let Some(plan) = self.plan(&variant)?.filter(|p| p.log_ratio <= self.budget()) else { break };
                if plan.bytes < fewest.bytes {
                    fewest = plan;
                }
                next = rest.find_map(|&l| {
                    let without = variant.without(l);
                    self.evaluate.removable(&without.removed).then_some(without)
                });
                starts.push(variant);
            }
        }
        Ok((starts, fewest))
    }

    /// What estimated prices would choose for a share of the budget if they could be added.
    fn additive(&self, prices: &Prices, share: f64) -> Variant {
        let mut variant = Variant::unchanged();
        let mut left = self.budget() * share;
        for step in self.steps(&variant, self.root_bytes, prices) {
            let gone = |g: Group| g.layer().is_some_and(|l| variant.removed.contains(&l));
            let next = match step.part {
                Part::Removed(l) => variant.without(l),
                // A step of a group is priced from the one before it, which may have been too dear.
                Part::Width(g, _) if gone(g) || variant.width(g) != step.from => continue,
                Part::Width(g, bits) => variant.with(g, Some(bits)),
            };
            if step.price <= left && self.evaluate.removable(&next.removed) {
                left -= step.price;
                variant = next;
            }
        }
        variant
    }

    /// Steps towards fewer bytes from a variant of these bytes, most bytes for the price first.
    fn steps(&self, variant: &Variant, bytes: u64, prices: &Prices) -> Vec<Step> {
        let price = |part: Part| prices.get(&part).copied();
        // A layer of narrow weights saves less than it would alone.
        let narrowed = bytes as f64 / self.root_bytes.max(1) as f64;
        let saving = |part: Part| self.savings.get(&part).copied().unwrap_or(0.0);
        let mut steps = Vec::new();
        for &l in self.space.layers.iter().filter(|l| !variant.removed.contains(l)) {
            let part = Part::Removed(l);
            if let Some(price) = price(part) {
                steps.push(Step { part, from: None, saving: saving(part) * narrowed, price: price.max(LEAST_PRICE) });
            }
        }
        for &g in &self.space.groups {
            if g.layer().is_some_and(|l| variant.removed.contains(&l)) {
                continue;
            }
            // The steps of a group along the convex hull of its widths.
            let at = |width: Option<u8>| match width {
                None => (0.0, 0.0),
                Some(bits) => (saving(Part::Width(g, bits)), price(Part::Width(g, bits)).unwrap_or(f64::INFINITY)),
            };
            let mut from = variant.width(g);
            loop {
                let (saved, paid) = at(from);
                let next = self
                    .space
                    .widths
                    .iter()
                    .map(|&bits| {
                        let (saving, price) = at(Some(bits));
                        let part = Part::Width(g, bits);
                        Step { part, from, saving: saving - saved, price: (price - paid).max(LEAST_PRICE) }
                    })
                    .filter(|s| s.saving > 0.0 && s.price.is_finite())
                    .max_by(|a, b| a.rate().total_cmp(&b.rate()));
                let Some(step) = next else { break };
                from = match step.part {
                    Part::Width(_, bits) => Some(bits),
                    Part::Removed(_) => None,
                };
                steps.push(step);
            }
        }
        steps.sort_by(|a, b| b.rate().total_cmp(&a.rate()).then(a.part.cmp(&b.part)));
        steps
    }

    /// Bytes saved, and those that the rest of the budget is estimated to buy. Over the budget, what it would take to get
    /// back under it is subtracted.
    fn prospect(&self, variant: &Variant, bytes: u64, cost: f64, prices: &Prices) -> f64 {
        let mut left = self.budget() - cost;
        let mut saved = self.root_bytes as f64 - bytes as f64;
        for step in self.steps(variant, bytes, prices) {
            if left <= 0.0 {
                return saved + left * step.rate();
            }
            saved += step.saving * (left / step.price).min(1.0);
            left -= step.price;
        }
        saved
    }

    /// Keeps nodes that have moves left: half of the beam for the fewest bytes, the rest for the highest prospect. Prospects
    /// are hopes, and highest where least is known; without the first half nothing would ever be brought to an end.
    fn best(&self, beam: &mut Vec<Node>) {
        let mut open: Vec<(f64, Node)> = std::mem::take(beam)
            .into_iter()
            .filter(|n| self.moves(&n.plan.variant).iter().any(|(_, variant)| !self.known.contains_key(variant)))
            .map(|n| (self.prospect(&n.plan.variant, n.plan.bytes, n.plan.log_ratio, &n.prices), n))
            .collect();
        let order = |x: &Node, y: &Node| x.plan.variant.cmp(&y.plan.variant);
        open.sort_by(|(_, x), (_, y)| {
            let cost = x.plan.log_ratio.total_cmp(&y.plan.log_ratio);
            x.plan.bytes.cmp(&y.plan.bytes).then(cost).then_with(|| order(x, y))
        });
        open.dedup_by(|(_, x), (_, y)| x.plan.variant == y.plan.variant);
        let smallest = self.options.beam.div_ceil(2).min(open.len());
        open[smallest..].sort_by(|(a, x), (b, y)| b.total_cmp(a).then_with(|| order(x, y)));
        beam.extend(open.into_iter().map(|(_, node)| node).take(self.options.beam));
    }

    /// Evaluates the most promising moves from each node of the beam and makes the next beam. `false` where nothing is left to
    /// evaluate.
    fn round(&mut self, beam: &mut Vec<Node>) -> Result<bool> {
        let mut evaluated = false;
        let mut children = Vec::new();
        for node in beam.iter_mut() {
            let mut candidates: Vec<(f64, Move, Variant)> = Vec::new();
            for (step, variant) in self.moves(&node.plan.variant) {
                if !self.known.contains_key(&variant) {
                    let cost = node.plan.log_ratio + step.price(&node.prices);
                    let prospect = self.prospect(&variant, self.evaluate.bytes(&variant), cost, &node.prices);
                    candidates.push((prospect, step, variant));
                }
            }
            candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.2.cmp(&b.2)));
            let mut plans = Vec::new();
            for (_, step, variant) in candidates.into_iter().take(self.options.branch) {
                let Some(plan) = self.plan(&variant)? else { break };
                step.learn(plan.log_ratio - node.plan.log_ratio, &mut node.prices);
                plans.push(plan);
                evaluated = true;
            }
            let under = plans.into_iter().filter(|plan| plan.log_ratio <= self.options.cap.ln());
            children.extend(under.map(|plan| Node { plan, prices: node.prices.clone() }));
        }
        beam.extend(children);
        self.best(beam);
        Ok(evaluated)
    }

    /// All variants one change away.
    fn moves(&self, variant: &Variant) -> Vec<(Move, Variant)> {
        let mut out = Vec::new();
        let mut push = |step: Move, next: Variant| {
            if next.removed.is_empty() || self.evaluate.removable(&next.removed) {
                out.push((step, next));
            }
        };
        let part = |l: usize| Some(Part::Removed(l));
        for &l in self.space.layers.iter().filter(|l| !variant.removed.contains(l)) {
            push(Move { old: None, new: part(l) }, variant.without(l));
            // One for another, since the way there is through a plan of more bytes, or one over the cap.
            for &back in &variant.removed {
                push(Move { old: part(back), new: part(l) }, variant.with_layer(back).without(l));
            }
        }
        for &back in &variant.removed {
            push(Move { old: part(back), new: None }, variant.with_layer(back));
        }
        for &g in self.space.groups.iter().filter(|g| g.layer().is_none_or(|l| !variant.removed.contains(&l))) {
            let old = variant.width(g);
            for new in [None].into_iter().chain(self.space.widths.iter().copied().map(Some)).filter(|w| *w != old) {
                let part = |width: Option<u8>| width.map(|bits| Part::Width(g, bits));
                out.push((Move { old: part(old), new: part(new) }, variant.with(g, new)));
            }
        }
        out
    }
}

/// A step towards fewer bytes.
struct Step {
    part: Part,
    /// Width of the group before it.
    from: Option<u8>,
    saving: f64,
    price: f64,
}

impl Step {
    /// Bytes for a nat.
    fn rate(&self) -> f64 {
        self.saving / self.price
    }
}

#[cfg(test)]
mod tests;
