//! What a claim is worth: the best of N public draws, re-run once on private prompts.
//!
//! A claim stands if it beats the best so far (SOTA) and the re-run is at most a gate g below it: `q >= (1 - g) p`. Drawing more
//! often raises p and leaves q where it is, so beating becomes likelier and verifying rarer: P(both) has a maximum over N. With p the
//! maximum of N normal draws and q an independent normal draw, every probability here is an integral over the density of p.
//!
//! The ceiling is the public result that an average private one still verifies: `private / (1 - g)`. Everything that comes out is
//! projected from its inputs; where it is known from how many draws these come, their uncertainty is carried through.

use serde::{Deserialize, Serialize};
use statrs::distribution::{Continuous, ContinuousCDF, Normal};

use crate::error::{Error, Result};
use crate::record::Kind;
use crate::stats::Draws;
use crate::stats::bootstrap::quantile;
use crate::stats::maximum::{expected_max, simpson};

mod evidence;

pub use evidence::{Evidence, Luck};

/// Points of the integrals; the result is good to 1e-9.
const POINTS: usize = 4_000;
/// The same where a thousand inputs are tried.
const COARSE: usize = 200;
/// Largest N that is looked at for the optimum.
const MOST: usize = 1 << 16;

/// What decides a claim.
#[derive(Debug, Clone, PartialEq)]
pub struct Rules {
    /// Rate to beat.
    pub sota: f64,
    /// Tolerated drop of the private re-run, as a fraction of the public result.
    pub gate: f64,
}

/// Mean and standard deviation of a side's draws.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Mean in tokens/s.
    pub mean: f64,
    /// Standard deviation between draws.
    pub sd: f64,
}

/// Probabilities for a number of draws.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Public draws, of which the best is claimed.
    pub n: usize,
    /// Expected best.
    pub expected_best: f64,
    /// P(the best beats the SOTA).
    pub p_beat: f64,
    /// P(the private re-run is within the gate of the best).
    pub p_verify: f64,
    /// P(both).
    pub p_both: f64,
    /// P(verify, given that it beats).
    pub p_verify_given_beat: Option<f64>,
    /// 95 % interval of `p_both` over what the inputs may really be; `None` where it is not known how many draws they come from.
    pub p_both_interval: Option<[f64; 2]>,
    /// Mean of `p_both` over what the inputs may really be.
    pub p_both_integrated: Option<f64>,
}

/// The best number of draws.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Optimum {
    /// Public draws.
    pub n: usize,
    /// P(beat and verify) with so many.
    pub p_both: f64,
}

/// The whole answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimReport {
    /// Always `projected`.
    pub kind: Kind,
    /// Public side, as far as luck is taken off.
    pub public: Spread,
    /// Private side.
    pub private: Spread,
    /// Luck in the best public draw, where there is one.
    pub luck: Option<Luck>,
    /// Rate to beat.
    pub sota: f64,
    /// Tolerated drop.
    pub gate: f64,
    /// Public result that an average private one still verifies.
    pub ceiling: f64,
    /// 95 % interval of it over what the private mean may really be.
    pub ceiling_interval: Option<[f64; 2]>,
    /// Private result that the best public draw, or else the SOTA, needs.
    pub private_needed: f64,
    /// For each number of draws asked for.
    pub curve: Vec<Point>,
    /// The one of these with the highest `p_both`.
    pub best_n: usize,
    /// The optimum over all numbers of draws.
    pub optimum: Optimum,
    /// P(both) that `draws_needed` reaches.
    pub target: f64,
    /// Fewest draws with that probability; `None` where no number has it.
    pub draws_needed: Option<usize>,
    /// Why no uncertainty of the inputs is carried; `None` where it is.
    pub uncertainty_missing: Option<String>,
}

impl ClaimReport {
    /// Answers for the numbers of draws in `ns`.
    ///
    /// # Errors
    /// [`Error::Refused`] for a best draw without the number that it is the best of; inputs that no measurement gives; no number of draws.
    pub fn new(
        public: &Evidence,
        private: &Evidence,
        rules: &Rules,
        ns: &[usize],
        target: f64,
        seed: u64,
    ) -> Result<ClaimReport> {
        check(rules, ns, target)?;
        let (p, q) = (public.spread()?, private.spread()?);
        let model = Model { public: p, private: q, rules };
        let mut curve = ns.iter().map(|&n| model.point(n)).collect::<Result<Vec<Point>>>()?;
        let best = curve.iter().max_by(|a, b| a.p_both.total_cmp(&b.p_both).then(b.n.cmp(&a.n)));
        let best_n = best.map_or(1, |point| point.n);
        let optimum = model.optimum();
        let uncertainty_missing = [("public", public), ("private", private)]
            .into_iter()
            .find_map(|(side, e)| e.unknown().map(|why| format!("{side}: {why}")));
        let mut ceiling_interval = None;
        if uncertainty_missing.is_none() {
            let mut draws = Draws::new(seed);
            let tried: Vec<(Spread, Spread)> =
                (0..1000).map(|_| (public.redrawn(&mut draws), private.redrawn(&mut draws))).collect();
            for point in &mut curve {
                let of = |(p, q): &(Spread, Spread)| Model { public: *p, private: *q, rules }.both(point.n, COARSE);
                let values: Vec<f64> = tried.iter().map(of).collect();
                point.p_both_integrated = crate::stats::mean(&values);
                point.p_both_interval = Some(middle(values));
            }
            ceiling_interval = Some(middle(tried.iter().map(|(_, q)| q.mean / (1.0 - rules.gate)).collect()));
        }
        let luck = public.luck()?;
        let claimed = luck.as_ref().map_or(rules.sota, |l| l.best);
        Ok(ClaimReport {
            kind: Kind::Projected,
            public: p,
            private: q,
            sota: rules.sota,
            gate: rules.gate,
            ceiling: q.mean / (1.0 - rules.gate),
            ceiling_interval,
            private_needed: (1.0 - rules.gate) * claimed,
            curve,
            best_n,
            optimum,
            target,
            draws_needed: model.needed(target, &optimum),
            luck,
            uncertainty_missing,
        })
    }
}

fn check(rules: &Rules, ns: &[usize], target: f64) -> Result<()> {
    let bad = |option, expected, found: String| Err(Error::Option { option, expected, found });
    if !(rules.sota > 0.0 && rules.sota.is_finite()) {
        return bad("sota", "a positive rate", rules.sota.to_string());
    }
    if !(0.0..1.0).contains(&rules.gate) {
        return bad("gate", "a fraction from 0 to below 1 (0.05 is 5 %)", rules.gate.to_string());
    }
    if !(target > 0.0 && target < 1.0) {
        return bad("target", "a probability between 0 and 1", target.to_string());
    }
    match ns.iter().find(|n| !(1..=MOST).contains(*n)) {
        Some(n) => bad("n", "numbers of draws from 1 to 65536", n.to_string()),
        None if ns.is_empty() => bad("n", "at least one number of draws", "none".into()),
        None => Ok(()),
    }
}

/// The middle 95 % of values.
fn middle(mut values: Vec<f64>) -> [f64; 2] {
    values.sort_by(f64::total_cmp);
    [quantile(&values, 0.025), quantile(&values, 0.975)]
}

struct Model<'a> {
    public: Spread,
    private: Spread,
    rules: &'a Rules,
}

impl Model<'_> {
    /// P(the private draw is within the gate of a public result).
    fn verifies(&self, public: f64) -> f64 {
        let margin = self.private.mean - (1.0 - self.rules.gate) * public;
        match self.private.sd > 0.0 {
            true => Normal::standard().cdf(margin / self.private.sd),
            false => f64::from(u8::from(margin >= 0.0)),
        }
    }

    fn beats(&self, n: usize) -> f64 {
        let z = (self.rules.sota - self.public.mean) / self.public.sd;
        match self.public.sd > 0.0 {
            // 1 - (1 - sf)^n without losing a small sf.
            true => -(n as f64 * (-Normal::standard().sf(z)).ln_1p()).exp_m1(),
            false => f64::from(u8::from(self.public.mean > self.rules.sota)),
        }
    }

    /// The integral of P(verify | p) over the density of the best of `n` above `from`.
    fn over_the_best(&self, n: usize, from: f64, points: usize) -> f64 {
        if self.public.sd == 0.0 {
            return if self.public.mean > from { self.verifies(self.public.mean) } else { 0.0 };
        }
        let normal = Normal::standard();
        let count = n as f64;
        // Outside of this range the best of n has less than 1e-15 of its mass.
        let (lowest, highest) =
            (normal.inverse_cdf(1e-16f64.powf(1.0 / count)), normal.inverse_cdf(1.0 - 1e-15 / count.min(8.0)));
        let highest = if highest.is_finite() { highest.max(8.0) + (2.0 * count.ln()).sqrt() } else { 12.0 };
        let z = ((from - self.public.mean) / self.public.sd).clamp(lowest.max(-8.5), highest);
        simpson(z, highest, points, |z| {
            let density = count * normal.pdf(z) * normal.cdf(z).powf(count - 1.0);
            density * self.verifies(self.public.mean + self.public.sd * z)
        })
    }

    fn both(&self, n: usize, points: usize) -> f64 {
        self.over_the_best(n, self.rules.sota, points).clamp(0.0, 1.0)
    }

    fn point(&self, n: usize) -> Result<Point> {
        let (p_beat, p_both) = (self.beats(n), self.both(n, POINTS));
        Ok(Point {
            n,
            expected_best: self.public.mean + self.public.sd * expected_max(n)?,
            p_beat,
            p_verify: self.over_the_best(n, f64::NEG_INFINITY, POINTS).clamp(0.0, 1.0),
            p_both,
            p_verify_given_beat: Some(p_both / p_beat).filter(|p| p.is_finite()).map(|p| p.min(1.0)),
            p_both_interval: None,
            p_both_integrated: None,
        })
    }

    /// P(both) rises to one maximum over N and falls after it: doubled until it falls, then searched between.
    fn optimum(&self) -> Optimum {
        let value = |n: usize| self.both(n, POINTS);
        let mut top = 1;
        while top < MOST && value(2 * top) >= value(top) {
            top *= 2;
        }
        let (mut low, mut high) = ((top / 2).max(1), (2 * top).min(MOST));
        while high - low > 2 {
            let (a, b) = (low + (high - low) / 3, high - (high - low) / 3);
            if value(a) < value(b) { low = a } else { high = b }
        }
        let best = (low..=high).map(|n| (n, value(n))).max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
        let (n, p_both) = best.unwrap_or((1, value(1)));
        Optimum { n, p_both }
    }

    /// Fewest draws that reach a probability: below the optimum it rises.
    fn needed(&self, target: f64, optimum: &Optimum) -> Option<usize> {
        if optimum.p_both < target {
            return None;
        }
        let (mut low, mut high) = (0, optimum.n);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.both(middle, POINTS) >= target { high = middle } else { low = middle }
        }
        Some(high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(mean: f64, sd: f64, n: Option<usize>) -> Evidence {
        Evidence::Summary { mean, sd, n }
    }

    fn report(public: Evidence, private: Evidence, sota: f64, ns: &[usize]) -> Result<ClaimReport> {
        ClaimReport::new(&public, &private, &Rules { sota, gate: 0.05 }, ns, 0.5, 1)
    }

    #[test]
    fn the_illustrative_curve_is_reproduced() {
        let ns = [1, 4, 8, 16, 32, 64, 128];
        let r = report(summary(481.5, 6.0, None), summary(470.0, 3.0, None), 489.66, &ns).unwrap();
        let both: Vec<f64> = r.curve.iter().map(|p| p.p_both).collect();
        for (found, expected) in both.iter().zip([0.0639, 0.2193, 0.3603, 0.4997, 0.5339, 0.4280, 0.2858]) {
            assert!((found - expected).abs() < 5.1e-5, "{both:?}");
        }
        assert!((r.curve[0].p_verify_given_beat.unwrap() - 0.735).abs() < 5e-4);
        assert!((r.curve[6].p_verify_given_beat.unwrap() - 0.286).abs() < 5e-4);
        assert_eq!((r.best_n, r.optimum.n), (32, 26));
        assert!((r.optimum.p_both - 0.5402).abs() < 1e-4);
        assert_eq!(r.draws_needed, Some(17));
        assert!((r.ceiling - 494.7).abs() < 0.05 && r.ceiling == 470.0 / 0.95);
        assert!(r.ceiling_interval.is_none() && r.uncertainty_missing.unwrap().starts_with("public: "));
    }

    #[test]
    fn a_claim_of_509_needs_483_6() {
        let best = Evidence::Best { best: 509.0, sd: 5.0, n: Some(34) };
        let r = report(best, summary(469.0, 3.0, None), 489.66, &[1]).unwrap();
        assert!((r.private_needed - 483.55).abs() < 1e-9);
        assert!(((509.0f64 - 469.0) / 509.0 - 0.0786).abs() < 1e-4);
        let luck = r.luck.unwrap();
        assert!((r.public.mean - (509.0 - 5.0 * expected_max(34).unwrap())).abs() < 1e-9);
        assert!((luck.luck - (509.0 - r.public.mean)).abs() < 1e-9);
    }

    #[test]
    fn probabilities_agree_with_simulated_claims() {
        let (n, rules) = (12, Rules { sota: 490.0, gate: 0.04 });
        let r = ClaimReport::new(&summary(482.0, 6.0, None), &summary(472.0, 4.0, None), &rules, &[n], 0.5, 1).unwrap();
        let mut draws = Draws::new(44);
        let (mut beat, mut verify, mut both) = (0, 0, 0);
        for _ in 0..20_000 {
            let best = (0..n).map(|_| 482.0 + 6.0 * draws.normal()).fold(f64::MIN, f64::max);
            let v = 472.0 + 4.0 * draws.normal() >= 0.96 * best;
            (beat, verify) = (beat + usize::from(best > 490.0), verify + usize::from(v));
            both += usize::from(v && best > 490.0);
        }
        for (count, p) in [(beat, r.curve[0].p_beat), (verify, r.curve[0].p_verify), (both, r.curve[0].p_both)] {
            // Four standard errors.
            assert!((count as f64 / 20_000.0 - p).abs() < 0.015, "{count} {p}");
        }
    }

    #[test]
    fn uncertain_inputs_give_an_interval_that_narrows() {
        let of = |n| {
            let r = report(summary(481.5, 6.0, Some(n)), summary(470.0, 3.0, Some(n)), 489.66, &[16]).unwrap();
            let [low, high] = r.curve[0].p_both_interval.unwrap();
            let [l, h] = r.ceiling_interval.unwrap();
            assert!(low < r.curve[0].p_both && r.curve[0].p_both < high && l < r.ceiling && r.ceiling < h);
            high - low
        };
        assert!(of(5) > of(20) && of(20) > of(200));
    }

    #[test]
    fn no_spread_and_hopeless_claims() {
        let r = report(summary(495.0, 0.0, None), summary(471.0, 0.0, None), 490.0, &[1, 100]).unwrap();
        assert_eq!((r.curve[0].p_beat, r.curve[0].p_verify, r.curve[1].p_both), (1.0, 1.0, 1.0));
        let none = report(summary(400.0, 1.0, None), summary(390.0, 1.0, None), 490.0, &[1, 1000]).unwrap();
        assert_eq!((none.draws_needed, none.curve[1].p_both), (None, 0.0));
        let sure = report(summary(495.0, 1.0, None), summary(600.0, 1.0, None), 490.0, &[1, 60_000]).unwrap();
        assert!((sure.curve[1].p_both - 1.0).abs() < 1e-6, "{:?}", sure.curve);
    }

    #[test]
    fn what_cannot_be_answered_is_refused() {
        let private = || summary(470.0, 3.0, None);
        let refused = report(Evidence::Best { best: 509.0, sd: 5.0, n: None }, private(), 490.0, &[1]).unwrap_err();
        assert!(matches!(refused, Error::Refused { .. }), "{refused}");
        assert!(refused.to_string().contains("how many draws"), "{refused}");
        for (mean, sd) in [(0.0, 1.0), (f64::NAN, 1.0), (480.0, -1.0), (480.0, f64::INFINITY)] {
            assert!(report(summary(mean, sd, None), private(), 490.0, &[1]).is_err(), "{mean} {sd}");
        }
        assert!(report(summary(480.0, 1.0, None), private(), 490.0, &[]).is_err());
        assert!(report(summary(480.0, 1.0, None), private(), 490.0, &[0]).is_err());
        assert!(report(summary(480.0, 1.0, None), private(), -1.0, &[1]).is_err());
        assert!(
            report(Evidence::Draws(vec![480.0]), private(), 490.0, &[1]).unwrap_err().to_string().contains("2 samples")
        );
        let gate = Rules { sota: 490.0, gate: 1.0 };
        assert!(ClaimReport::new(&private(), &private(), &gate, &[1], 0.5, 1).is_err());
    }
}
