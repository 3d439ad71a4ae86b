//! Two interleaved runs held against each other, prompt by prompt.
//!
//! Tokens a second is steps a second times tokens a step. Where both wrote the same text, tokens a second decide. Where they did not, tokens
//! a step depend on which text each happened to write, so the ratio of tokens a second is no verdict on either, and none is given; both
//! factors stand beside it.
//!
//! A verdict rests on the typical prompt: the centre of the prompts' ratios after Hodges and Lehmann, with the interval of the signed-rank test.
//! Times have heavy tails, and the bootstrap's interval of a ratio of totals is too narrow on a dozen prompts: of 160 comparisons of a program
//! with itself, on one set of threads, it left out 1 in 17 % instead of 5 %, that of ranks in 7 % (`cargo bench -p bench --bench alike`,
//! `results/2026/bench/amd-epyc-2t-alike-12.txt`). Neither says what another process would give: see [`crate::in_turn`].

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::protocol::{PromptSample, Run};
use crate::stats::paired::{Shift, hodges_lehmann, log_ratios, tost};
use crate::stats::power::{Design, Plan};
use crate::stats::{BootstrapOptions, Estimate, Throughput, sd, speedup};

/// Smallest effect that is of interest, where nothing else is asked for: 1 %.
pub const MIN_EFFECT: f64 = 0.01;

/// What a comparison comes to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub enum Verdict {
    /// B is faster: the interval is wholly above 1 and the effect at least the smallest of interest.
    Faster,
    /// B is slower, likewise.
    Slower,
    /// The difference is smaller than the smallest of interest (two one-sided tests at 5 %).
    Same,
    /// Neither can be said.
    NotEnoughData {
        /// Pairs that would see the smallest effect of interest in 80 % of all cases, beyond those that there are.
        more: usize,
    },
    /// Tokens a second cannot decide.
    Refused {
        /// Why, and what to look at.
        reason: String,
    },
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Verdict::Faster => f.write_str("faster"),
            Verdict::Slower => f.write_str("slower"),
            Verdict::Same => f.write_str("same"),
            Verdict::NotEnoughData { more } => write!(f, "not enough data ({more} more)"),
            Verdict::Refused { reason } => write!(f, "no verdict: {reason}"),
        }
    }
}

/// How fast B is relative to A.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
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
    /// Steps a second of B over those of A; `None` where a request has no step.
    #[serde(default)]
    pub step_rate: Option<Estimate>,
    /// Tokens a step of B over those of A.
    #[serde(default)]
    pub tokens_per_step: Option<Estimate>,
    /// The same as `speedup`, of the typical prompt instead of all time together: the centre of the prompts' ratios after Hodges and
    /// Lehmann, which one request that the machine held up does not move. `None` in records from before there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub typical: Option<Shift>,
    /// What it comes to; `None` in records from before there was one.
    #[serde(default)]
    pub verdict: Option<Verdict>,
}

impl Comparison {
    /// Compares the prompts that both runs finished; after a cancel these are the first ones of each.
    ///
    /// # Errors
    /// Fewer than 2 pairs, runs of different prompts, and those of [`speedup`].
    pub fn new(a: &Run, b: &Run, options: &BootstrapOptions) -> Result<Comparison> {
        Comparison::with_min_effect(a, b, options, MIN_EFFECT)
    }

    /// [`Comparison::new`] with another smallest effect of interest, as a fraction.
    ///
    /// # Errors
    /// Those of [`Comparison::new`]; an effect that is not positive.
    pub fn with_min_effect(a: &Run, b: &Run, options: &BootstrapOptions, min_effect: f64) -> Result<Comparison> {
        let pairs: Vec<(&PromptSample, &PromptSample)> = a.samples.iter().zip(&b.samples).collect();
        if let Some((index, (x, y))) = pairs.iter().enumerate().find(|(_, (x, y))| x.id != y.id) {
            let reason = format!("prompt `{}` in one run, `{}` in the other", x.id, y.id);
            return Err(Error::Sample { index, reason });
        }
        let side_a: Vec<Throughput> = pairs.iter().map(|p| Throughput::from(p.0)).collect();
        let side_b: Vec<Throughput> = pairs.iter().map(|p| Throughput::from(p.1)).collect();
        let different_outputs = pairs.iter().filter(|(x, y)| x.token_sha256 != y.token_sha256).count();
        let total = speedup(&side_a, &side_b, options)?;
        let effects = effects(&side_a, &side_b)?;
        let shift = hodges_lehmann(&effects, LEVEL)?;
        let verdict = match different_outputs {
            0 => verdict(&effects, &shift, min_effect)?,
            n => Verdict::Refused {
                reason: format!(
                    "on {n} of {} prompts the two wrote different text, on which tokens a step depend; compare steps a second and tokens \
                     a step, or the outputs",
                    pairs.len()
                ),
            },
        };
        let side = |of: fn(&PromptSample) -> Throughput| -> [Vec<Throughput>; 2] {
            [pairs.iter().map(|p| of(p.0)).collect(), pairs.iter().map(|p| of(p.1)).collect()]
        };
        let ratio = |of| -> Result<Option<Estimate>> {
            let [a, b] = side(of);
            let listed = a.iter().chain(&b).all(|t| t.tokens > 0.0 && t.seconds > 0.0);
            listed.then(|| speedup(&a, &b, options)).transpose()
        };
        let step_rate = ratio(|s| Throughput { tokens: s.step_ms.len() as f64, seconds: s.decode_ms / 1e3 })?;
        let tokens_per_step = ratio(|s| Throughput {
            tokens: s.completion_tokens.saturating_sub(1) as f64,
            seconds: s.step_ms.len() as f64,
        })?;
        Ok(Comparison {
            a: a.label.clone(),
            b: b.label.clone(),
            speedup: total,
            pairs: pairs.len(),
            different_outputs,
            step_rate,
            tokens_per_step,
            typical: Some(shift.exp()),
            verdict: Some(verdict),
        })
    }
}

/// How much faster B is on each prompt: logarithms of ratios of tokens a second.
fn effects(a: &[Throughput], b: &[Throughput]) -> Result<Vec<f64>> {
    let rates = |side: &[Throughput]| side.iter().map(|t| t.tokens / t.seconds).collect::<Vec<f64>>();
    log_ratios(&rates(a), &rates(b))
}

/// Probability that an interval covers, and one minus the level of the tests.
pub(crate) const LEVEL: f64 = 0.95;
/// Pairs below which no interval of signed ranks reaches [`LEVEL`].
pub(crate) const FEWEST: usize = 6;

/// What the logarithms of pairs' ratios, and their centre, come to.
///
/// # Errors
/// An effect that is not positive.
pub(crate) fn verdict(effects: &[f64], shift: &Shift, min_effect: f64) -> Result<Verdict> {
    if !(min_effect > 0.0 && min_effect.is_finite()) {
        let found = min_effect.to_string();
        return Err(Error::Option { option: "min-effect", expected: "a positive fraction", found });
    }
    // The same factor either way.
    let margin = min_effect.ln_1p();
    if effects.len() >= FEWEST {
        if shift.high < 0.0 && shift.value <= -margin {
            return Ok(Verdict::Slower);
        }
        if shift.low > 0.0 && shift.value >= margin {
            return Ok(Verdict::Faster);
        }
        if tost(effects, margin)?.p < 1.0 - LEVEL {
            return Ok(Verdict::Same);
        }
    }
    let needed = Plan::usual(Design::Paired).draws_needed(margin, sd(effects).unwrap_or(0.0))?;
    Ok(Verdict::NotEnoughData { more: needed.max(FEWEST).saturating_sub(effects.len()).max(1) })
}

impl From<&PromptSample> for Throughput {
    fn from(s: &PromptSample) -> Throughput {
        Throughput { tokens: s.completion_tokens as f64, seconds: s.wall_ms / 1e3 }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::protocol::{Output, Warmup};

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
        let outputs = (0..samples.len()).map(|i| Output::Ids(vec![i as u32])).collect();
        let (label, planned, warmup) = (label.into(), samples.len(), Warmup::default());
        Run { label, planned, warmup, samples, outputs, complete: true, failure: None }
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
    fn one_request_that_was_held_up_does_not_move_the_typical_prompt() {
        let base = [200.0, 300.0, 400.0, 250.0, 350.0, 280.0, 310.0, 290.0];
        let mut held_up = base;
        held_up[3] *= 20.0;
        let c = Comparison::new(&run("a", &held_up), &run("b", &base), &BootstrapOptions::default()).unwrap();
        assert!(c.speedup.value > 2.0, "{c:?}");
        let typical = c.typical.unwrap();
        assert!((typical.value - 1.0).abs() < 1e-9 && typical.low <= 1.0, "{typical:?}");
    }

    fn verdict_of(a: &[f64], b: &[f64], min_effect: f64) -> Verdict {
        let (a, b) = (run("a", a), run("b", b));
        Comparison::with_min_effect(&a, &b, &BootstrapOptions::default(), min_effect).unwrap().verdict.unwrap()
    }

    #[test]
    fn a_verdict_needs_an_interval_on_one_side_and_an_effect_of_interest() {
        let base = [200.0, 300.0, 400.0, 250.0, 350.0, 280.0];
        let times = |factors: [f64; 6]| -> Vec<f64> { base.iter().zip(factors).map(|(t, f)| t * f).collect() };
        let steady = |f: f64| times([f, f * 1.001, f * 0.999, f * 1.002, f * 0.998, f]);
        assert_eq!(verdict_of(&base, &steady(0.9), 0.01), Verdict::Faster);
        assert_eq!(verdict_of(&base, &steady(1.1), 0.01), Verdict::Slower);
        assert_eq!(verdict_of(&base, &steady(1.0), 0.01), Verdict::Same);
        // However clear it looks, an interval of ranks needs six.
        assert!(matches!(verdict_of(&base[..5], &steady(0.5)[..5], 0.01), Verdict::NotEnoughData { .. }));
        // Surely slower, and by less than anybody cares for.
        assert_eq!(verdict_of(&base, &steady(1.01), 0.05), Verdict::Same);
        let noisy = times([0.9, 1.1, 1.05, 0.95, 1.08, 0.93]);
        let Verdict::NotEnoughData { more } = verdict_of(&base, &noisy, 0.01) else { panic!("a verdict from noise") };
        // sd of the log-ratios 0.084: (2.8 * 0.084 / 0.00995)^2 pairs.
        assert!((500..620).contains(&more), "{more}");
        let (a, b) = (run("a", &base), run("b", &noisy));
        assert!(Comparison::with_min_effect(&a, &b, &BootstrapOptions::default(), 0.0).is_err());
    }

    #[test]
    fn different_trajectories_get_no_verdict_but_both_factors() {
        let (a, mut b) = (run("a", &[101.0, 201.0]), run("b", &[101.0, 201.0]));
        for s in &mut b.samples {
            // Half the steps, each as long: twice the tokens a step, and a decode of half the time.
            s.step_ms.truncate(33);
            s.decode_ms = s.step_ms.iter().sum();
            s.wall_ms = s.decode_ms + 1.0;
            s.token_sha256 = "other".into();
        }
        let c = Comparison::new(&a, &b, &BootstrapOptions::default()).unwrap();
        assert!(c.speedup.interval.low > 2.0, "{c:?}");
        let said = c.verdict.unwrap().to_string();
        assert!(said.starts_with("no verdict: on 2 of 2 prompts the two wrote different text"), "{said}");
        assert!((c.step_rate.unwrap().value - 1.0).abs() < 1e-9);
        assert!((c.tokens_per_step.unwrap().value - 3.0).abs() < 1e-9);
    }

    #[test]
    fn records_from_before_there_was_a_verdict_still_parse() {
        let times = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        let c = Comparison::new(&run("a", &times), &run("b", &times), &BootstrapOptions::default()).unwrap();
        let mut json = serde_json::to_value(&c).unwrap();
        assert_eq!(json["verdict"]["is"], "same");
        for field in ["verdict", "step_rate", "tokens_per_step"] {
            json.as_object_mut().unwrap().remove(field);
        }
        assert_eq!(serde_json::from_value::<Comparison>(json).unwrap().verdict, None);
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
