//! Which shape is worth its rows: a dynamic programme over measured acceptance.

use super::{MAX_BRANCHES, MAX_DEPTH, MAX_ROWS, Shape};

/// Acceptance by depth, counted over steps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Acceptance {
    /// Steps whose main drafts up to depth d - 1 were all accepted and that drafted depth d; index d - 1.
    pub reached: Vec<u64>,
    /// Of these, steps whose main draft at depth d was accepted.
    pub main: Vec<u64>,
    /// Of these, steps whose main draft at depth d was rejected and whose choice was the drafter's candidate of rank 2, 3, ...
    pub salvaged: Vec<[u64; MAX_BRANCHES]>,
}

impl Acceptance {
    /// Counts one step. `ranked[d - 1]` are the drafter's candidates at depth d, the main draft first; `choices` the target's.
    pub fn count(&mut self, ranked: &[Vec<u32>], choices: &[u32]) {
        for (d, (candidates, choice)) in ranked.iter().zip(choices).enumerate() {
            if self.reached.len() == d {
                self.reached.push(0);
                self.main.push(0);
                self.salvaged.push([0; MAX_BRANCHES]);
            }
            self.reached[d] += 1;
            match candidates.iter().position(|c| c == choice) {
                Some(0) => self.main[d] += 1,
                Some(rank) if rank <= MAX_BRANCHES => {
                    self.salvaged[d][rank - 1] += 1;
                    return;
                }
                _ => return,
            }
        }
    }

    /// Adds the counts of another run.
    pub fn merge(&mut self, other: &Acceptance) {
        let depths = self.reached.len().max(other.reached.len());
        self.reached.resize(depths, 0);
        self.main.resize(depths, 0);
        self.salvaged.resize(depths, [0; MAX_BRANCHES]);
        for d in 0..other.reached.len() {
            self.reached[d] += other.reached[d];
            self.main[d] += other.main[d];
            self.salvaged[d].iter_mut().zip(other.salvaged[d]).for_each(|(a, b)| *a += b);
        }
    }

    /// Share of all steps whose main draft at each depth was accepted.
    pub fn by_depth(&self) -> Vec<f64> {
        let steps = self.reached.first().copied().unwrap_or(0);
        self.main.iter().map(|&m| ratio(m, steps)).collect()
    }
}

/// A shape and what it is expected to yield.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The shape.
    pub shape: Shape,
    /// Tokens a step, the target's own included.
    pub tokens_per_step: f64,
}

/// The shape of at most `rows` rows with the most expected tokens a step; ties go to fewer rows. Only depths that were measured
/// are planned. A star yields more tokens than a chain of the same rows or as many; whether they pay for its wider pass is
/// for a measurement of time to say.
pub fn best_plan(acceptance: &Acceptance, rows: usize, branches: bool) -> Plan {
    let budget = rows.clamp(1, MAX_ROWS) - 1;
    let depths = acceptance.reached.len().min(MAX_DEPTH);
    let steps = acceptance.reached.first().copied().unwrap_or(0);
    let most = if branches { MAX_BRANCHES } else { 0 };
    // What depth d adds to a step: the main draft if it is accepted, one more token if a branch is.
    let gain = |d: usize, b: usize| {
        let salvaged: u64 = acceptance.salvaged[d][..b].iter().sum();
        ratio(acceptance.main[d] + salvaged, steps)
    };
    // best[used] = expected gain and branch counts of the depths so far, using that many rows.
    let mut best: Vec<Option<(f64, Vec<usize>)>> = vec![None; budget + 1];
    best[0] = Some((0.0, vec![]));
    let mut winner = (0.0, vec![]);
    for d in 0..depths {
        let mut next: Vec<Option<(f64, Vec<usize>)>> = vec![None; budget + 1];
        for (used, (value, counts)) in best.iter().enumerate().filter_map(|(u, b)| Some((u, b.as_ref()?))) {
            for b in 0..=most {
                let cost = used + 1 + b;
                if cost > budget {
                    break;
                }
                let value = value + gain(d, b);
                if next[cost].as_ref().is_none_or(|(v, _)| value > *v) {
                    next[cost] = Some((value, [&counts[..], &[b]].concat()));
                }
            }
        }
        for (value, counts) in next.iter().flatten() {
            if *value > winner.0 + 1e-12 {
                winner = (*value, counts.clone());
            }
        }
        best = next;
    }
    Plan { shape: Shape { branches: winner.1 }, tokens_per_step: 1.0 + winner.0 }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
