//! Two interleaved runs held against each other, prompt by prompt.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::protocol::{PromptSample, Run};
use crate::stats::{BootstrapOptions, Estimate, Throughput, speedup};

/// How fast B is relative to A.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Label of A.
    pub a: String,
    /// Label of B.
    pub b: String,
    /// Tokens a second of B over that of A, over the pairs, with the interval over prompts.
    pub speedup: Estimate,
    /// Prompts that both finished.
    pub pairs: usize,
    /// Pairs whose outputs differ. Where this is not 0, a speculative target's speed also depends on which text it happened to
    /// write, and the speedup alone is no verdict.
    pub different_outputs: usize,
}

impl Comparison {
    /// Compares the prompts that both runs finished; after a cancel these are the first ones of each.
    ///
    /// # Errors
    /// Fewer than 2 pairs, runs of different prompts, and those of [`speedup`].
    pub fn new(a: &Run, b: &Run, options: &BootstrapOptions) -> Result<Comparison> {
        let pairs: Vec<(&PromptSample, &PromptSample)> = a.samples.iter().zip(&b.samples).collect();
        if let Some((index, (x, y))) = pairs.iter().enumerate().find(|(_, (x, y))| x.id != y.id) {
            let reason = format!("prompt `{}` in one run, `{}` in the other", x.id, y.id);
            return Err(Error::Sample { index, reason });
        }
        let side_a: Vec<Throughput> = pairs.iter().map(|p| Throughput::from(p.0)).collect();
        let side_b: Vec<Throughput> = pairs.iter().map(|p| Throughput::from(p.1)).collect();
        Ok(Comparison {
            a: a.label.clone(),
            b: b.label.clone(),
            speedup: speedup(&side_a, &side_b, options)?,
            pairs: pairs.len(),
            different_outputs: pairs.iter().filter(|(x, y)| x.token_sha256 != y.token_sha256).count(),
        })
    }
}

impl From<&PromptSample> for Throughput {
    fn from(s: &PromptSample) -> Throughput {
        Throughput { tokens: s.completion_tokens as f64, seconds: s.wall_ms / 1e3 }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A run of prompts `p0`, `p1`, ... of 100 tokens each, with the given wall times in ms.
    pub(crate) fn run(label: &str, wall_ms: &[f64]) -> Run {
        let sample = |(i, &wall_ms): (usize, &f64)| PromptSample {
            id: format!("p{i}"),
            prompt_tokens: 20 + i,
            completion_tokens: 100,
            wall_ms,
            prefill_ms: 1.0,
            decode_ms: wall_ms - 1.0,
            step_ms: vec![(wall_ms - 1.0) / 99.0; 99],
            token_sha256: ppl::identity::token_sha256(&[i as u32]),
        };
        let samples: Vec<PromptSample> = wall_ms.iter().enumerate().map(sample).collect();
        Run { label: label.into(), planned: samples.len(), samples, complete: true, failure: None }
    }

    #[test]
    fn only_pairs_count_and_the_ratio_is_of_the_second_to_the_first() {
        // Twice as fast on each prompt; the third was cut short for B.
        let (a, b) = (run("a", &[200.0, 400.0, 600.0]), run("b", &[100.0, 200.0]));
        let c = Comparison::new(&a, &b, &BootstrapOptions::default()).unwrap();
        assert_eq!((c.pairs, c.different_outputs, c.a.as_str(), c.b.as_str()), (2, 0, "a", "b"));
        assert_eq!((c.speedup.value, c.speedup.interval.low, c.speedup.interval.high), (2.0, 2.0, 2.0));
    }

    #[test]
    fn other_outputs_are_counted_and_other_prompts_refused() {
        let (a, mut b) = (run("a", &[1.5, 2.5]), run("b", &[1.5, 2.5]));
        b.samples[1].token_sha256 = "other".into();
        assert_eq!(Comparison::new(&a, &b, &BootstrapOptions::default()).unwrap().different_outputs, 1);
        b.samples[1].id = "q".into();
        let error = Comparison::new(&a, &b, &BootstrapOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), "sample 1: prompt `p1` in one run, `q` in the other");
        let one = Comparison::new(&run("a", &[1.0]), &run("b", &[1.0]), &BootstrapOptions::default());
        assert!(matches!(one, Err(Error::TooFew { found: 1, .. })));
    }
}
