//! How many draws an effect needs, and which effect so many draws can see. Two-sided t tests; effect and sd in the same unit.
//!
//! The noncentral t is replaced by a shift of the central one, which gives the published sample sizes to the unit from 8 draws on.
//!
//! Source: Cohen, *Statistical Power Analysis for the Behavioral Sciences*, 2nd edition, 1988, chapter 2.

use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

use crate::error::{Error, Result};

/// Degrees of freedom from which t is taken for normal: quantiles then agree to 1e-5, and those of t take ever longer to find.
const NORMAL_FROM: f64 = 1e5;

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Design {
    /// Differences of pairs; sd is that of a difference.
    Paired,
    /// Two independent groups of equal size; sd is that within a group.
    Independent,
}

/// The test that is planned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// What is compared.
    pub design: Design,
    /// Probability of a false alarm.
    pub alpha: f64,
    /// Probability of seeing an effect that is there.
    pub power: f64,
}

impl Plan {
    /// The usual plan: 5 % false alarms, 80 % power.
    pub fn usual(design: Design) -> Plan {
        Plan { design, alpha: 0.05, power: 0.8 }
    }

    fn check(&self) -> Result<()> {
        let between = |option, value: f64| match value > 0.0 && value < 1.0 {
            true => Ok(()),
            false => {
                let (expected, found) = ("a probability between 0 and 1", value.to_string());
                Err(Error::Option { option, expected, found })
            }
        };
        between("alpha", self.alpha)?;
        between("power", self.power)
    }

    /// Standard errors that an effect must measure with `n` draws a group.
    fn ratio(&self, n: usize) -> Option<f64> {
        let df = match self.design {
            Design::Paired => n as f64 - 1.0,
            Design::Independent => 2.0 * n as f64 - 2.0,
        };
        let tails = [1.0 - self.alpha / 2.0, self.power];
        if df > NORMAL_FROM {
            return Some(tails.map(|p| Normal::standard().inverse_cdf(p)).iter().sum());
        }
        let t = StudentsT::new(0.0, 1.0, df).ok()?;
        Some(tails.map(|p| t.inverse_cdf(p)).iter().sum())
    }

    fn standard_error(&self, n: usize, sd: f64) -> f64 {
        match self.design {
            Design::Paired => sd / (n as f64).sqrt(),
            Design::Independent => sd * (2.0 / n as f64).sqrt(),
        }
    }

    /// Smallest effect that `n` draws (a group, or pairs) see with the plan's power.
    ///
    /// # Errors
    /// Fewer than 2 draws, a probability outside (0, 1), an sd that is negative or not finite.
    pub fn detectable(&self, n: usize, sd: f64) -> Result<f64> {
        self.check()?;
        if !(sd >= 0.0 && sd.is_finite()) {
            return Err(Error::Option { option: "sd", expected: "0 or more", found: sd.to_string() });
        }
        let too_few = Error::TooFew { what: "a power analysis", needed: 2, found: n };
        match self.ratio(n).filter(|_| n >= 2) {
            Some(ratio) => Ok(ratio * self.standard_error(n, sd)),
            None => Err(too_few),
        }
    }

    /// Draws (a group, or pairs) that an effect needs, at least 2.
    ///
    /// # Errors
    /// An effect of 0, and those of [`Plan::detectable`]; an effect so small that more than 2^40 draws would be needed.
    pub fn draws_needed(&self, effect: f64, sd: f64) -> Result<usize> {
        let enough = |n: usize| Ok::<bool, Error>(self.detectable(n, sd)? <= effect.abs());
        let refuse =
            || Error::Option { option: "effect", expected: "large enough to be seen", found: effect.to_string() };
        if !(effect.abs() > 0.0 && effect.is_finite()) {
            return Err(refuse());
        }
        let mut high = 2;
        while !enough(high)? {
            high *= 2;
            if high > 1 << 40 {
                return Err(refuse());
            }
        }
        let mut low = high / 2;
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if enough(middle)? { high = middle } else { low = middle }
        }
        Ok(high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{Draws, t_interval};

    #[test]
    fn the_published_sample_sizes_are_reproduced() {
        // Cohen, table 2.4.1 (a2 = 0.05, power 0.80): d = 0.5 needs 64 a group, 0.8 needs 26, 0.2 needs 393
        // (393.41, so 394).
        let two = Plan::usual(Design::Independent);
        for (d, n) in [(0.5, 64), (0.8, 26), (0.2, 394)] {
            assert_eq!(two.draws_needed(d, 1.0).unwrap(), n, "d = {d}");
        }
        // Paired, by the same formulas: 34, 15 and 199.
        let paired = Plan::usual(Design::Paired);
        for (d, n) in [(0.5, 34), (0.8, 15), (-0.2, 199)] {
            assert_eq!(paired.draws_needed(d, 1.0).unwrap(), n, "d = {d}");
        }
        assert_eq!(paired.draws_needed(1.0, 0.0).unwrap(), 2);
    }

    #[test]
    fn simulated_experiments_see_what_was_promised() {
        let plan = Plan::usual(Design::Paired);
        let effect = plan.detectable(12, 1.0).unwrap();
        let mut draws = Draws::new(31);
        let seen = |_: &u32| {
            let values: Vec<f64> = (0..12).map(|_| effect + draws.normal()).collect();
            let i = t_interval(&values, 0.95).unwrap().interval;
            i.low > 0.0 || i.high < 0.0
        };
        let power = (0..2000).filter(seen).count() as f64 / 2000.0;
        assert!((power - 0.8).abs() < 0.03, "{power}");
    }

    #[test]
    fn impossible_plans_are_refused() {
        let plan = Plan::usual(Design::Paired);
        assert!(plan.detectable(1, 1.0).is_err() && plan.detectable(0, 1.0).is_err());
        assert!(plan.draws_needed(0.0, 1.0).is_err() && plan.draws_needed(f64::NAN, 1.0).is_err());
        assert!(plan.draws_needed(1e-9, 1.0).is_err());
        assert!(plan.detectable(5, f64::NAN).is_err() && plan.detectable(5, -1.0).is_err());
        for bad in [0.0, 1.0, f64::NAN] {
            assert!(Plan { alpha: bad, ..plan }.detectable(5, 1.0).is_err());
            assert!(Plan { power: bad, ..plan }.detectable(5, 1.0).is_err());
        }
    }
}
