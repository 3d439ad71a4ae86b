//! The gap between public and private results of the same runs, from pairs of totals.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::stats::components::{Component, Factor, variance_components};
use crate::stats::{Estimate, mean, sd, t_interval};

/// What the re-run decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Within the gate.
    Valid,
    /// Outside.
    Invalid,
}

/// A run with both results.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// Its configuration.
    pub config: String,
    /// Tokens a second on the public prompts.
    pub public: f64,
    /// On the private ones.
    pub private: f64,
    /// What was decided, where something was.
    pub verdict: Option<Verdict>,
}

impl Pair {
    /// Loss from public to private in percent of public.
    pub fn delta_pct(&self) -> f64 {
        (self.public - self.private) / self.public * 100.0
    }
}

/// The pairs of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Pairs {
    /// Pairs of which both numbers have decimals.
    pub exact: Vec<Pair>,
    /// Pairs left out because a number was rounded.
    pub rounded: usize,
    /// Rows with one number only.
    pub one_sided: usize,
}

/// The gap of one configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConfigGap {
    /// Name.
    pub config: String,
    /// Pairs.
    pub pairs: usize,
    /// Mean loss in percent.
    pub mean_delta_pct: f64,
    /// t interval of it; `None` of one pair.
    pub interval: Option<Estimate>,
    /// Fewer than 5 pairs: an interval of that few is wide and leans on normality.
    pub few: bool,
}

/// What pairs say about the gap. Losses in percent of the public result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairsReport {
    /// Pairs used.
    pub pairs: usize,
    /// Pairs left out because a number was rounded.
    pub rounded: usize,
    /// Rows with one number only.
    pub one_sided: usize,
    /// Mean loss.
    pub mean_delta_pct: f64,
    /// Standard deviation of it between pairs.
    pub sd: f64,
    /// Smallest loss.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// t interval of the mean.
    pub interval: Estimate,
    /// Valid pairs.
    pub valid: usize,
    /// Largest loss that was valid.
    pub valid_max: Option<f64>,
    /// Invalid pairs.
    pub invalid: usize,
    /// Smallest loss that was invalid.
    pub invalid_min: Option<f64>,
    /// Variance of the loss between configurations and between the pairs of one; empty where the pairs do not tell them apart.
    pub components: Vec<Component>,
    /// Each configuration.
    pub configs: Vec<ConfigGap>,
}

impl Pairs {
    /// Summarises.
    ///
    /// # Errors
    /// Fewer than 2 exact pairs.
    pub fn report(&self, level: f64) -> Result<PairsReport> {
        let deltas: Vec<f64> = self.exact.iter().map(Pair::delta_pct).collect();
        let found = deltas.len();
        let (Some(mean_delta_pct), Some(sd)) = (mean(&deltas), sd(&deltas)) else {
            return Err(Error::TooFew { what: "the gap (exact pairs of public and private)", needed: 2, found });
        };
        let of = |verdict: Verdict| -> Vec<f64> {
            self.exact.iter().filter(|p| p.verdict == Some(verdict)).map(Pair::delta_pct).collect()
        };
        let (valid, invalid) = (of(Verdict::Valid), of(Verdict::Invalid));
        let least = |v: &[f64]| v.iter().copied().min_by(f64::total_cmp);
        let most = |v: &[f64]| v.iter().copied().max_by(f64::total_cmp);
        let mut configs: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for pair in &self.exact {
            configs.entry(&pair.config).or_default().push(pair.delta_pct());
        }
        let names: Vec<&str> = configs.keys().copied().collect();
        let levels = self.exact.iter().filter_map(|p| names.iter().position(|n| *n == p.config)).collect();
        // Few pairs, or a configuration each: there is nothing to tell apart, and the table says so by its absence.
        let components = variance_components(&deltas, &[Factor { name: "config", levels }]).unwrap_or_default();
        let describe = |(config, deltas): (&str, &Vec<f64>)| ConfigGap {
            config: config.to_string(),
            pairs: deltas.len(),
            mean_delta_pct: mean(deltas).unwrap_or(0.0),
            interval: t_interval(deltas, level).ok(),
            few: deltas.len() < 5,
        };
        Ok(PairsReport {
            pairs: found,
            rounded: self.rounded,
            one_sided: self.one_sided,
            mean_delta_pct,
            sd,
            min: least(&deltas).unwrap_or(mean_delta_pct),
            max: most(&deltas).unwrap_or(mean_delta_pct),
            interval: t_interval(&deltas, level)?,
            valid: valid.len(),
            valid_max: most(&valid),
            invalid: invalid.len(),
            invalid_min: least(&invalid),
            components,
            configs: configs.iter().map(|(c, d)| describe((c, d))).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(config: &str, public: f64, private: f64, verdict: Verdict) -> Pair {
        Pair { config: config.into(), public, private, verdict: Some(verdict) }
    }

    #[test]
    fn losses_are_in_percent_of_public() {
        let exact = vec![
            pair("a", 400.0, 384.0, Verdict::Valid),
            pair("a", 500.0, 470.0, Verdict::Invalid),
            pair("b", 200.0, 184.0, Verdict::Invalid),
        ];
        let r = Pairs { exact, rounded: 2, one_sided: 1 }.report(0.95).unwrap();
        assert_eq!((r.pairs, r.rounded, r.one_sided, r.mean_delta_pct, r.sd), (3, 2, 1, 6.0, 2.0));
        assert_eq!((r.valid_max, r.invalid_min, r.min, r.max), (Some(4.0), Some(6.0), 4.0, 8.0));
        assert_eq!((r.configs[0].pairs, r.configs[0].few, r.configs[1].interval), (2, true, None));
        let names: Vec<&str> = r.components.iter().map(|c| c.name.as_str()).collect();
        assert_eq!(names, ["config", "repeat"]);
    }

    #[test]
    fn one_pair_is_no_gap() {
        let one = Pairs { exact: vec![pair("a", 4.0, 3.0, Verdict::Valid)], rounded: 0, one_sided: 0 };
        assert!(one.report(0.95).unwrap_err().to_string().contains("needs at least 2 samples, and there are 1"));
    }
}
