//! What is known of a side's draws, and the luck in the best of them.

use serde::{Deserialize, Serialize};
use statrs::distribution::{ChiSquared, ContinuousCDF};

use super::Spread;
use crate::error::{Error, Result};
use crate::luck::MOST_RATE;
use crate::stats::maximum::expected_max;
use crate::stats::{Draws, mean, sd};

/// What is known of a side.
#[derive(Debug, Clone, PartialEq)]
pub enum Evidence {
    /// Every draw.
    Draws(Vec<f64>),
    /// Mean and standard deviation, and of how many draws.
    Summary {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        sd: f64,
        /// Draws; `None` where that is not known.
        n: Option<usize>,
    },
    /// Only the best, with a standard deviation known from elsewhere.
    Best {
        /// The best draw.
        best: f64,
        /// Standard deviation between draws.
        sd: f64,
        /// The number that it is the best of.
        n: Option<usize>,
    },
}

/// The best draw against what the configuration does on average.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Luck {
    /// Draws.
    pub n: usize,
    /// The best of them.
    pub best: f64,
    /// Mean without selection: of all draws, or the best less what so many draws are expected to add.
    pub honest_mean: f64,
    /// Best less honest mean.
    pub luck: f64,
    /// What the best of so many normal draws is expected to add.
    pub expected_luck: f64,
}

/// Degrees of freedom from which chi square is a cubed normal variable (Wilson and Hilferty, 1931): its quantiles take a time that grows with them.
const WIDE: f64 = 10_000.0;

impl Evidence {
    /// Mean and standard deviation, with luck taken off.
    ///
    /// # Errors
    /// See [`super::ClaimReport::new`].
    pub fn spread(&self) -> Result<Spread> {
        let positive = |option, v: f64| match v > 0.0 && v < MOST_RATE {
            true => Ok(v),
            false => Err(Error::Option { option, expected: "a positive rate below 1e15", found: v.to_string() }),
        };
        let not_negative = |v: f64| match (0.0..MOST_RATE).contains(&v) {
            true => Ok(v),
            false => Err(Error::Option { option: "sd", expected: "0 or more", found: v.to_string() }),
        };
        match self {
            Evidence::Draws(draws) => {
                for (index, v) in draws.iter().enumerate() {
                    let reason = |_| Error::Sample { index, reason: format!("a rate of {v} tokens/s") };
                    positive("draws", *v).map_err(reason)?;
                }
                match (mean(draws), sd(draws)) {
                    (Some(mean), Some(sd)) => Ok(Spread { mean, sd }),
                    _ => Err(Error::TooFew { what: "the spread of draws", needed: 2, found: draws.len() }),
                }
            }
            Evidence::Summary { mean, sd, n } => {
                if let Some(n) = n.filter(|n| *n < 2) {
                    return Err(Error::TooFew { what: "a standard deviation", needed: 2, found: n });
                }
                Ok(Spread { mean: positive("mean", *mean)?, sd: not_negative(*sd)? })
            }
            Evidence::Best { n: None, .. } => {
                let reason = "a best result says nothing without how many draws it is the best of; give that number, or the \
                              mean of all draws";
                Err(Error::Refused { reason: reason.into() })
            }
            Evidence::Best { best, sd, n: Some(n) } => {
                let sd = not_negative(*sd)?;
                let mean = positive("best", *best)? - sd * expected_max(*n)?;
                Ok(Spread { mean: positive("the best less its luck", mean)?, sd })
            }
        }
    }

    /// The luck in the best draw, where there is one.
    ///
    /// # Errors
    /// Those of [`Evidence::spread`].
    pub fn luck(&self) -> Result<Option<Luck>> {
        let spread = self.spread()?;
        let (best, n) = match self {
            Evidence::Draws(draws) => (draws.iter().copied().fold(f64::MIN, f64::max), draws.len()),
            Evidence::Best { best, n: Some(n), .. } => (*best, *n),
            _ => return Ok(None),
        };
        let expected_luck = spread.sd * expected_max(n)?;
        Ok(Some(Luck { n, best, honest_mean: spread.mean, luck: best - spread.mean, expected_luck }))
    }

    /// Why the uncertainty of this evidence is not known; `None` where it is.
    pub(super) fn unknown(&self) -> Option<&'static str> {
        match self {
            Evidence::Summary { n: None, .. } => Some("it is not said from how many draws mean and sd come"),
            Evidence::Best { .. } => Some("a best result alone does not say how uncertain its mean is"),
            _ => None,
        }
    }

    /// What mean and standard deviation may as well be: a resample of draws, or, from a summary, a draw from the distribution that normal
    /// data leave open (Gelman et al., *Bayesian Data Analysis*, 3rd edition, 2013, section 3.2).
    pub(super) fn redrawn(&self, draws: &mut Draws) -> Spread {
        match self {
            Evidence::Draws(values) => {
                let drawn: Vec<f64> = values.iter().map(|_| values[draws.index(values.len())]).collect();
                // The resample's divisor n - 1 still lacks the factor that the bootstrap loses.
                let factor = (values.len() as f64 / (values.len() as f64 - 1.0)).sqrt();
                Spread { mean: mean(&drawn).unwrap_or(0.0), sd: factor * sd(&drawn).unwrap_or(0.0) }
            }
            Evidence::Summary { mean, sd, n } => {
                let n = n.unwrap_or(2) as f64;
                let free = n - 1.0;
                let chi = if free > WIDE {
                    let spread = 2.0 / (9.0 * free);
                    free * (1.0 - spread + draws.normal() * spread.sqrt()).powi(3)
                } else {
                    ChiSquared::new(free).map_or(free, |c| c.inverse_cdf(draws.uniform()))
                };
                let sd = sd * (free / chi).sqrt();
                Spread { mean: mean + draws.normal() * sd / n.sqrt(), sd }
            }
            Evidence::Best { best, sd, .. } => Spread { mean: *best, sd: *sd },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn luck_is_the_best_less_the_honest_mean() {
        let draws = Evidence::Draws(vec![500.0, 490.0, 510.0]);
        let luck = draws.luck().unwrap().unwrap();
        assert_eq!((luck.n, luck.best, luck.honest_mean, luck.luck), (3, 510.0, 500.0, 10.0));
        assert!((luck.expected_luck - 10.0 * 0.8463).abs() < 1e-3);
        assert_eq!(Evidence::Summary { mean: 500.0, sd: 1.0, n: None }.luck().unwrap(), None);
    }

    #[test]
    fn the_honest_mean_of_a_best_is_without_bias() {
        let mut draws = Draws::new(9);
        let honest = |_| {
            let best = (0..30).map(|_| 480.0 + 6.0 * draws.normal()).fold(f64::MIN, f64::max);
            Evidence::Best { best, sd: 6.0, n: Some(30) }.spread().unwrap().mean
        };
        let mean = (0..2000).map(honest).sum::<f64>() / 2000.0;
        assert!((mean - 480.0).abs() < 0.25, "{mean}");
    }

    #[test]
    fn redrawn_summaries_spread_as_the_mean_does() {
        let e = Evidence::Summary { mean: 500.0, sd: 10.0, n: Some(25) };
        let mut draws = Draws::new(3);
        let means: Vec<f64> = (0..4000).map(|_| e.redrawn(&mut draws).mean).collect();
        // t with 24 degrees of freedom: sd 2 * sqrt(24 / 22).
        assert!((sd(&means).unwrap() - 2.089).abs() < 0.1 && (mean(&means).unwrap() - 500.0).abs() < 0.15);
    }
}
