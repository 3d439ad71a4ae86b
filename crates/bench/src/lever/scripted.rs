//! A drafter that knows what the target will write and is wrong on purpose, as often as another drafter is by nature.

use runtime::drafter::{Draft, DraftContext, Drafter};
use runtime::speculate::{Acceptance, MAX_BRANCHES, Shape};

use crate::stats::Draws;

/// The drafter.
pub(super) struct Scripted {
    /// Prompts, and what follows each.
    text: Vec<(Vec<u32>, Vec<u32>)>,
    /// Probability that the candidate of each rank is right at each depth, all before it being right.
    hits: Vec<[f64; 1 + MAX_BRANCHES]>,
    vocab: u32,
    draws: Draws,
}

impl Scripted {
    /// Hits as often as was counted.
    pub fn new(text: Vec<(Vec<u32>, Vec<u32>)>, counted: &Acceptance, vocab: u32, seed: u64) -> Scripted {
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let depth = |d: usize| {
            let mut hits = [0.0; 1 + MAX_BRANCHES];
            hits[0] = share(counted.main[d], counted.reached[d]);
            hits[1..].iter_mut().zip(counted.salvaged[d]).for_each(|(h, n)| *h = share(n, counted.reached[d]));
            hits
        };
        let hits = (0..counted.reached.len()).map(depth).collect();
        Scripted { text, hits, vocab, draws: Draws::new(seed) }
    }

    /// Candidates of a depth, the truth at a rank that is drawn, or nowhere.
    fn candidates(&mut self, d: usize, truth: u32) -> Vec<u32> {
        let mut left = self.draws.uniform();
        let rank = self.hits[d].iter().position(|hit| {
            left -= hit;
            left < 0.0
        });
        let wrong = |i: usize| (truth + 1 + i as u32) % self.vocab;
        (0..=MAX_BRANCHES).map(|i| if rank == Some(i) { truth } else { wrong(i) }).collect()
    }
}

impl Drafter for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn draft(&mut self, context: &DraftContext, shape: &Shape) -> runtime::Result<Draft> {
        let tokens = context.tokens;
        let known = self.text.iter().find(|(prompt, _)| tokens.starts_with(prompt));
        let Some((at, rest)) = known.map(|(prompt, after)| (tokens.len() - prompt.len(), after)) else {
            return Ok(Draft::default());
        };
        let coming: Vec<u32> = rest.iter().skip(at).take(shape.depth().min(self.hits.len())).copied().collect();
        Ok(Draft { ranked: coming.into_iter().enumerate().map(|(d, truth)| self.candidates(d, truth)).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_hits_as_often_as_was_counted() {
        let counted =
            Acceptance { reached: vec![10, 10], main: vec![7, 0], salvaged: vec![[2, 0, 0, 0], [0, 0, 0, 0]] };
        let mut drafter = Scripted::new(vec![], &counted, 100, 1);
        let mut ranks = [0usize; 3];
        for _ in 0..4000 {
            let drawn = drafter.candidates(0, 99);
            assert_eq!(drawn.len(), 1 + MAX_BRANCHES);
            ranks[drawn.iter().position(|&t| t == 99).map_or(2, |rank| rank.min(2))] += 1;
            assert!(!drafter.candidates(1, 5).contains(&5), "depth 2 never hits");
        }
        for (found, expected) in ranks.into_iter().zip([0.7, 0.2, 0.1]) {
            assert!((found as f64 / 4000.0 - expected).abs() < 0.03, "{ranks:?}");
        }
    }
}
