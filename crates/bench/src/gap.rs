//! Public against private prompts: how much slower, why, and what a one-shot gate makes of it.
//!
//! Both prompt sets are random effects: each is a sample of the prompts that there could be, so both are resampled, independently of
//! each other. Runs of a side are pooled prompt by prompt before that. What the machine does between runs is not in the interval.
//!
//! The gap is decomposed exactly, in logarithms: a rate is tokens a step, times steps a second of decoding, times the share of the time that
//! is decoding. The first is acceptance; the second is what a step costs, which on one machine is the length of the context; the rest is
//! prefill and whatever surrounds the steps.

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal};

use crate::error::{Error, Result};
use crate::protocol::PromptSample;
use crate::stats::bootstrap::bootstrap_samples;
use crate::stats::{BootstrapOptions, Estimate, Throughput, ratio_se};

pub mod pairs;

/// What is needed of one request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Request {
    /// Tokens and wall time.
    pub total: Throughput,
    /// Steps after prefill and their time in seconds; `None` where a run does not say.
    pub steps: Option<(f64, f64)>,
}

impl From<&PromptSample> for Request {
    fn from(s: &PromptSample) -> Request {
        let total = Throughput { tokens: s.completion_tokens as f64, seconds: s.wall_ms / 1e3 };
        Request { total, steps: Some((s.step_ms.len() as f64, s.decode_ms / 1e3)) }
    }
}

/// Parts of the gap in percent; they add up to it as logarithms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Decomposition {
    /// Fewer tokens a step.
    pub acceptance: Estimate,
    /// Slower steps.
    pub context_length: Estimate,
    /// Prefill and whatever surrounds the steps.
    pub residual: Estimate,
}

/// What a gate on one private run makes of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OneShotGate {
    /// Tolerated loss in percent.
    pub gate_pct: f64,
    /// Standard error of the loss in percent that comes from the choice of prompts alone.
    pub standard_error_pct: f64,
    /// Probability that another pair of such prompt sets stays within the gate, if the measured gap is the true one.
    pub p_valid: f64,
}

/// The gap of a configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gap {
    /// Public tokens/s.
    pub public_tps: f64,
    /// Private tokens/s.
    pub private_tps: f64,
    /// Public prompts.
    pub public_prompts: usize,
    /// Private prompts.
    pub private_prompts: usize,
    /// Loss from public to private in percent of public, with its interval over both prompt sets.
    pub delta_pct: Estimate,
    /// What it is made of; `None` where a run does not list its steps.
    pub parts: Option<Decomposition>,
    /// What the field's gate makes of it.
    pub gate: OneShotGate,
}

/// Loss in percent that a logarithm of public over private means.
fn loss(log_ratio: f64) -> f64 {
    (1.0 - (-log_ratio).exp()) * 100.0
}

#[derive(Clone, Copy, Default)]
struct Sums {
    tokens: f64,
    seconds: f64,
    steps: f64,
    decoding: f64,
}

impl Sums {
    fn of(requests: &[Request], drawn: &[usize]) -> Sums {
        drawn.iter().fold(Sums::default(), |s, &i| {
            let (r, (steps, decoding)) = (requests[i].total, requests[i].steps.unwrap_or_default());
            Sums {
                tokens: s.tokens + r.tokens,
                seconds: s.seconds + r.seconds,
                steps: s.steps + steps,
                decoding: s.decoding + decoding,
            }
        })
    }

    fn rate(&self) -> f64 {
        self.tokens / self.seconds
    }
}

impl Gap {
    /// Of the requests of a public and a private prompt set.
    ///
    /// # Errors
    /// Fewer than 2 prompts on a side, impossible times, a gate outside 0 to 100, options out of range.
    pub fn new(public: &[Request], private: &[Request], gate_pct: f64, options: &BootstrapOptions) -> Result<Gap> {
        let totals = |side: &[Request]| side.iter().map(|r| r.total).collect::<Vec<Throughput>>();
        for side in [public, private] {
            Throughput::checked(&totals(side))?;
        }
        if !(0.0..100.0).contains(&gate_pct) {
            let found = gate_pct.to_string();
            return Err(Error::Option { option: "gate", expected: "percent from 0 to below 100", found });
        }
        let sizes = [public.len(), private.len()];
        let of = |log_ratio: &dyn Fn(Sums, Sums) -> f64| {
            bootstrap_samples(&sizes, options, |drawn| {
                loss(log_ratio(Sums::of(public, &drawn[0]), Sums::of(private, &drawn[1])))
            })
        };
        let delta_pct = of(&|a, b| (a.rate() / b.rate()).ln())?;
        let listed = |r: &Request| r.steps.is_some_and(|(steps, decoding)| steps > 0.0 && decoding > 0.0);
        let parts = match public.iter().chain(private).all(listed) {
            false => None,
            true => Some(Decomposition {
                acceptance: of(&|a, b| (a.tokens / a.steps / (b.tokens / b.steps)).ln())?,
                context_length: of(&|a, b| (a.steps / a.decoding / (b.steps / b.decoding)).ln())?,
                residual: of(&|a, b| (a.decoding / a.seconds / (b.decoding / b.seconds)).ln())?,
            }),
        };
        let relative = |side: &[Request]| ratio_se(&totals(side)).unwrap_or(0.0);
        let standard_error_pct =
            (relative(public).powi(2) + relative(private).powi(2)).sqrt() * (100.0 - delta_pct.value);
        let margin = (gate_pct - delta_pct.value) / standard_error_pct;
        let p_valid = match standard_error_pct > 0.0 {
            true => Normal::standard().cdf(margin),
            false => f64::from(u8::from(delta_pct.value <= gate_pct)),
        };
        let all = |side: &[Request]| Sums::of(side, &(0..side.len()).collect::<Vec<usize>>()).rate();
        Ok(Gap {
            public_tps: all(public),
            private_tps: all(private),
            public_prompts: public.len(),
            private_prompts: private.len(),
            delta_pct,
            parts,
            gate: OneShotGate { gate_pct, standard_error_pct, p_valid },
        })
    }
}

/// What a change did on either side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChangeGap {
    /// Speedup on the public prompts in percent.
    pub public_pct: Estimate,
    /// On the private ones.
    pub private_pct: Estimate,
    /// How much more it gained in public, in percent.
    pub difference_pct: Estimate,
    /// It helps in public, does not help in private, and the difference is more than chance.
    pub public_only: bool,
}

impl ChangeGap {
    /// Of the requests before and after a change, on both sides; prompts of a side are the same before and after, in the same order.
    ///
    /// # Errors
    /// Those of [`Gap::new`], and sides of different sizes before and after.
    pub fn new(before: [&[Request]; 2], after: [&[Request]; 2], options: &BootstrapOptions) -> Result<ChangeGap> {
        for (b, a) in before.iter().zip(&after) {
            if b.len() != a.len() {
                let found = format!("{} before and {} after", b.len(), a.len());
                return Err(Error::Option { option: "prompts", expected: "the same before and after", found });
            }
            for side in [b, a] {
                Throughput::checked(&side.iter().map(|r| r.total).collect::<Vec<Throughput>>())?;
            }
        }
        let sizes = [before[0].len(), before[1].len()];
        let gain = |side: usize, drawn: &[Vec<usize>]| {
            let rate = |requests: &[Request]| Sums::of(requests, &drawn[side]).rate();
            rate(after[side]) / rate(before[side])
        };
        let percent = |ratio: f64| (ratio - 1.0) * 100.0;
        let public_pct = bootstrap_samples(&sizes, options, |d| percent(gain(0, d)))?;
        let private_pct = bootstrap_samples(&sizes, options, |d| percent(gain(1, d)))?;
        let difference_pct = bootstrap_samples(&sizes, options, |d| percent(gain(0, d) / gain(1, d)))?;
        let above = |e: &Estimate| e.interval.low > 0.0;
        let public_only = above(&public_pct) && !above(&private_pct) && above(&difference_pct);
        Ok(ChangeGap { public_pct, private_pct, difference_pct, public_only })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Draws;

    /// Requests of 100 tokens: `tokens_per_step` and ms of a step, with some spread between prompts, after 50 ms of prefill.
    fn side(draws: &mut Draws, n: usize, tokens_per_step: f64, step_ms: f64, spread: f64) -> Vec<Request> {
        let mut one = |_| {
            let steps = 100.0 / (tokens_per_step * (spread * draws.normal()).exp());
            let decoding = steps * step_ms / 1e3;
            Request { total: Throughput { tokens: 100.0, seconds: decoding + 0.05 }, steps: Some((steps, decoding)) }
        };
        (0..n).map(&mut one).collect()
    }

    fn options() -> BootstrapOptions {
        BootstrapOptions { resamples: 400, ..Default::default() }
    }

    #[test]
    fn the_parts_add_up_to_the_gap() {
        let mut draws = Draws::new(1);
        let (public, private) = (side(&mut draws, 128, 3.9, 8.0, 0.0), side(&mut draws, 128, 3.7, 8.1, 0.0));
        let g = Gap::new(&public, &private, 5.0, &options()).unwrap();
        let parts = g.parts.unwrap();
        let log = |e: Estimate| -(1.0 - e.value / 100.0).ln();
        let sum = log(parts.acceptance) + log(parts.context_length) + log(parts.residual);
        assert!((sum - log(g.delta_pct)).abs() < 1e-12);
        assert!((parts.acceptance.value - (1.0 - 3.7 / 3.9) * 100.0).abs() < 1e-9, "{parts:?}");
        assert!((parts.context_length.value - (1.0 - 8.0 / 8.1) * 100.0).abs() < 1e-9, "{parts:?}");
        assert!(parts.residual.value < 0.0);
        // Without spread nothing is left to chance.
        assert_eq!(g.gate.p_valid, f64::from(u8::from(g.delta_pct.value <= 5.0)));
    }

    #[test]
    fn intervals_cover_the_true_gap_and_the_gate_is_a_lottery() {
        // Rates of 1 / seconds with a lognormal spread of 25 %, as between prompts of the field; the true gap is 4 %.
        let mut draws = Draws::new(5);
        let mut sample = |n: usize, slow: f64| -> Vec<Request> {
            let mut one = |_| {
                let seconds = slow * (0.25 * draws.normal()).exp();
                Request { total: Throughput { tokens: 512.0, seconds }, steps: None }
            };
            (0..n).map(&mut one).collect()
        };
        let (mut covered, mut valid, mut promised) = (0, 0, 0.0);
        for seed in 0..2000 {
            let (public, private) = (sample(64, 0.96), sample(64, 1.0));
            let o = BootstrapOptions { resamples: 300, seed, ..Default::default() };
            let g = Gap::new(&public, &private, 5.0, &o).unwrap();
            covered += usize::from(g.delta_pct.interval.low <= 4.0 && 4.0 <= g.delta_pct.interval.high);
            valid += usize::from(g.delta_pct.value <= 5.0);
            promised += Normal::standard().cdf((5.0 - 4.0) / g.gate.standard_error_pct);
        }
        let share = covered as f64 / 2000.0;
        assert!((0.93..=0.97).contains(&share), "{share}");
        // With prompts alone to blame, a 4 % gap passes a 5 % gate in hardly more than half of all cases.
        assert!((valid as f64 / 2000.0 - promised / 2000.0).abs() < 0.03, "{valid} {promised}");
    }

    #[test]
    fn a_mirage_is_told_from_a_gain() {
        let mut draws = Draws::new(8);
        let (public, private) = (side(&mut draws, 64, 3.9, 8.0, 0.2), side(&mut draws, 64, 3.7, 8.0, 0.2));
        let mut faster = |requests: &[Request], by: f64| -> Vec<Request> {
            let one = |r: &Request| {
                let seconds = r.total.seconds / (by * (0.005 * draws.normal()).exp());
                Request { total: Throughput { seconds, ..r.total }, steps: r.steps }
            };
            requests.iter().map(one).collect()
        };
        let (public_gain, no_gain, real) = (faster(&public, 1.04), faster(&private, 0.999), faster(&private, 1.04));
        let mirage = ChangeGap::new([&public, &private], [&public_gain, &no_gain], &options()).unwrap();
        assert!(mirage.public_only && mirage.public_pct.interval.low > 3.0, "{mirage:?}");
        let gain = ChangeGap::new([&public, &private], [&public_gain, &real], &options()).unwrap();
        assert!(!gain.public_only && gain.private_pct.interval.low > 3.0, "{gain:?}");
    }

    #[test]
    fn impossible_gaps_are_refused() {
        let good = side(&mut Draws::new(1), 3, 3.0, 8.0, 0.1);
        let message = |a: &[Request], b: &[Request], gate| Gap::new(a, b, gate, &options()).unwrap_err().to_string();
        assert!(message(&good[..1], &good, 5.0).contains("needs at least 2 samples, and there are 1"));
        assert!(message(&good, &[], 5.0).contains("there are 0"));
        assert!(message(&good, &good, 100.0).starts_with("gate: "));
        let bad = Request { total: Throughput { tokens: 1.0, seconds: 0.0 }, steps: None };
        assert!(message(&good, &[bad, bad], 5.0).starts_with("sample 0: a time of 0 s"));
        assert!(ChangeGap::new([&good, &good], [&good[..2], &good], &options()).is_err());
    }
}
