//! Two programs, or two configurations, run in turn as processes of their own: is the second faster, slower, or the same?
//!
//! The records of the two sides are paired in their order, as an interleaved run makes them: whatever the machine did meanwhile hit
//! both of a pair. The effect of a pair is the logarithm of a ratio; over the pairs its centre and interval are those of Hodges
//! and Lehmann, which a few disturbed pairs do not move.
//!
//! [`compare`](crate::compare) pairs the prompts of one process. A process has luck of its own (where its memory lies, which neighbours it
//! met), which no number of prompts takes out; here the unit is the process.
//!
//! What always holds: `faster` and `slower` need an interval wholly on one side *and* an effect of at least the smallest that
//! matters; `same` needs two one-sided tests against that smallest effect; anything else is `not enough data`, with how many more
//! pairs it would take. Where the two sides wrote different text, tokens a second depend on which text it was: then the verdict is
//! on the time of a step, and says so.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::compare::{LEVEL, Verdict, verdict};
use crate::error::{Error, Result};
use crate::record::{Record, RunResult};
use crate::stats::paired::{Shift, hodges_lehmann, log_ratios};

/// What a pair is compared by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// Tokens a second: both sides wrote the same text.
    TokensPerSecond,
    /// Time of a step: they did not.
    StepTime,
}

/// The verdict on the second side with all that it rests on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InTurn {
    /// What the pairs say.
    pub verdict: Verdict,
    /// Of which number.
    pub basis: Basis,
    /// Speed of the second side over that of the first, with its interval.
    pub ratio: Shift,
    /// The smallest effect that matters, as a fraction.
    pub min_effect: f64,
    /// Pairs.
    pub pairs: usize,
    /// Records of either side that have no counterpart or were cut short.
    pub left_out: usize,
}

impl InTurn {
    /// Compares the complete records of two sides, pair by pair in their order.
    ///
    /// # Errors
    /// Records of different prompts or protocols, or on different machines; fewer than 2 pairs; an effect that is not positive.
    pub fn new(base: &[Record], head: &[Record], min_effect: f64) -> Result<InTurn> {
        let all: Vec<&Record> = base.iter().chain(head).collect();
        if let Some((index, r)) = all.iter().enumerate().find(|(_, r)| setting(r) != setting(all[0])) {
            let (a, b) = (setting(all[0]), setting(r));
            let reason = format!("it was measured under other conditions: {b}, where the first has {a}");
            return Err(Error::Sample { index, reason });
        }
        // A record that was cut short takes its counterpart with it: the others stay beside those that they ran with.
        let whole = |r: &Record| r.result.clone().filter(|_| r.complete);
        let (a, b): (Vec<RunResult>, Vec<RunResult>) =
            base.iter().zip(head).filter_map(|(a, b)| whole(a).zip(whole(b))).unzip();
        let pairs = a.len();
        let texts: BTreeSet<&str> = a.iter().chain(&b).map(|r| r.trajectory.as_str()).collect();
        let basis = if texts.len() == 1 { Basis::TokensPerSecond } else { Basis::StepTime };
        let speed = |r: &RunResult| match basis {
            Basis::TokensPerSecond => Some(r.tokens_per_s),
            Basis::StepTime => r.step_ms.map(|ms| 1e3 / ms),
        };
        let speeds = |side: &[RunResult]| -> Result<Vec<f64>> {
            let missing = |index| Error::Sample { index, reason: "it has no step after the first token".into() };
            side.iter().enumerate().map(|(i, r)| speed(r).ok_or_else(|| missing(i))).collect()
        };
        let effects = log_ratios(&speeds(&a)?, &speeds(&b)?)?;
        let shift = hodges_lehmann(&effects, LEVEL)?;
        Ok(InTurn {
            verdict: verdict(&effects, &shift, min_effect)?,
            basis,
            ratio: shift.exp(),
            min_effect,
            pairs,
            left_out: base.len() + head.len() - 2 * pairs,
        })
    }
}

/// What two records must share for a comparison to mean anything.
fn setting(r: &Record) -> String {
    let p = &r.protocol;
    format!(
        "{} requests of {} tokens from `{}` ({}), {} warm-ups, end-of-text {}, backend {}, {} threads, {}",
        r.planned,
        p.max_tokens,
        r.prompts.name,
        r.prompts.blake3.get(..12).unwrap_or(&r.prompts.blake3),
        p.warmup_prompts,
        if p.ignore_eos { "ignored" } else { "kept" },
        r.target.backend,
        r.target.threads,
        r.environment.machine()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::run;
    use crate::record::tests::setup;
    use crate::stats::{BootstrapOptions, Draws};

    fn record(wall_ms: f64) -> Record {
        Record::measured(run("plain", &[wall_ms, wall_ms]), setup(), &BootstrapOptions::default()).unwrap()
    }

    /// Records of two sides whose pairs share a disturbance of the machine; the second takes `factor` times as long.
    fn sides(seed: u64, pairs: usize, noise: f64, factor: f64) -> (Vec<Record>, Vec<Record>) {
        let mut draws = Draws::new(seed);
        let pair = |_| {
            let machine = 200.0 * (0.3 * draws.normal()).exp();
            let mut side = |factor: f64| record(machine * factor * (noise * draws.normal()).exp());
            (side(1.0), side(factor))
        };
        (0..pairs).map(pair).unzip()
    }

    fn outcome(seed: u64, pairs: usize, noise: f64, factor: f64) -> Verdict {
        let (a, b) = sides(seed, pairs, noise, factor);
        InTurn::new(&a, &b, 0.05).unwrap().verdict
    }

    #[test]
    fn a_slower_a_faster_and_an_equal_side_are_told_apart() {
        assert_eq!(outcome(1, 8, 0.02, 1.5), Verdict::Slower);
        assert_eq!(outcome(2, 8, 0.02, 1.0 / 1.5), Verdict::Faster);
        assert_eq!(outcome(3, 8, 0.02, 1.0), Verdict::Same);
        // A real difference that is too small to matter.
        assert_eq!(outcome(4, 30, 0.01, 1.02), Verdict::Same);
        assert!(matches!(outcome(5, 8, 0.5, 1.0), Verdict::NotEnoughData { more } if more > 100));
    }

    #[test]
    fn equal_sides_are_seldom_called_different_and_a_planted_step_never_missed() {
        let count = |factor: f64, wanted: fn(&Verdict) -> bool| {
            (0..200).filter(|&seed| wanted(&outcome(seed, 8, 0.03, factor))).count()
        };
        let alarms = count(1.0, |o| matches!(o, Verdict::Slower | Verdict::Faster));
        assert!(alarms <= 4, "{alarms} false alarms in 200");
        assert_eq!(count(1.5, |o| *o == Verdict::Slower), 200);
    }

    #[test]
    fn few_pairs_ask_for_more() {
        let (a, b) = sides(1, 4, 0.005, 1.5);
        let v = InTurn::new(&a, &b, 0.05).unwrap();
        assert_eq!((v.verdict, v.pairs), (Verdict::NotEnoughData { more: 2 }, 4), "6 pairs are the fewest");
    }

    #[test]
    fn runs_that_were_cut_short_and_runs_without_a_counterpart_are_left_out() {
        let (mut a, b) = sides(1, 8, 0.02, 1.5);
        a[3].complete = false;
        let v = InTurn::new(&a, &b, 0.05).unwrap();
        assert_eq!((v.pairs, v.left_out), (7, 2));
    }

    #[test]
    fn other_text_moves_the_verdict_to_the_step_time() {
        let (a, mut b) = sides(1, 8, 0.02, 1.0);
        for r in &mut b {
            let result = r.result.as_mut().unwrap();
            (result.trajectory, result.tokens_per_s) = ("other".into(), result.tokens_per_s * 3.0);
        }
        let v = InTurn::new(&a, &b, 0.05).unwrap();
        assert_eq!((v.basis, v.verdict), (Basis::StepTime, Verdict::Same));
    }

    #[test]
    fn different_conditions_and_senseless_margins_are_refused() {
        let (a, mut b) = sides(1, 8, 0.02, 1.0);
        b[2].prompts.blake3 = "another".into();
        let message = InTurn::new(&a, &b, 0.05).unwrap_err().to_string();
        assert!(message.starts_with("sample 10: ") && message.contains("another"), "{message}");
        for margin in [0.0, -0.1, f64::NAN] {
            assert!(InTurn::new(&a, &a, margin).unwrap_err().to_string().starts_with("min-effect"));
        }
        assert!(matches!(InTurn::new(&a[..1], &a[..1], 0.05), Err(Error::TooFew { .. })));
    }
}
