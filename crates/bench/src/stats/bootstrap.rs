//! The bootstrap over exchangeable units, and the draws that it and every simulation here come from.
//!
//! A seed gives the same interval everywhere: draws come from ChaCha8 through [`Draws`], whose mapping to indices is fixed here and not
//! by a version of a library.
//!
//! Source: Efron and Tibshirani, *An Introduction to the Bootstrap*, 1993: percentile intervals in chapter 13, BCa in 14.3.

use rand::Rng;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal};

use crate::error::{Error, Result};

/// How an interval is read off the resamples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Quantiles of the resamples.
    Percentile,
    /// Quantiles corrected for bias and for a variance that changes with the value.
    Bca,
    /// Student's t around the mean of few units: no resamples (0) and no seed (0).
    T,
}

/// How to resample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BootstrapOptions {
    /// Number of resamples, at least 100.
    pub resamples: usize,
    /// Probability that the interval should cover, in (0, 1).
    pub level: f64,
    /// How the interval is read off.
    pub method: Method,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for BootstrapOptions {
    /// 10 000 resamples: the Monte Carlo error of a 2.5 % quantile is then about 3 % of the interval's half width.
    fn default() -> Self {
        BootstrapOptions { resamples: 10_000, level: 0.95, method: Method::Bca, seed: 1 }
    }
}

/// An interval, with all that is needed to compute it again.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Probability that it should cover.
    pub level: f64,
    /// How it was read off.
    pub method: Method,
    /// Number of resamples.
    pub resamples: usize,
    /// Seed of the draws.
    pub seed: u64,
}

/// An estimate with its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Estimate {
    /// The statistic of the samples as they are.
    pub value: f64,
    /// Its interval.
    pub interval: Interval,
}

/// Uniform draws of indices.
pub struct Draws(ChaCha8Rng);

impl Draws {
    /// From a seed.
    pub fn new(seed: u64) -> Draws {
        Draws(ChaCha8Rng::seed_from_u64(seed))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number in (0, 1), never an end of it.
    pub fn uniform(&mut self) -> f64 {
        ((self.0.next_u64() >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    /// A standard normal number, by inversion: one draw each, so that streams stay in step.
    pub fn normal(&mut self) -> f64 {
        Normal::standard().inverse_cdf(self.uniform())
    }

    /// An index below `n`. The bias of the multiplication is below `n / 2^64`.
    pub fn index(&mut self, n: usize) -> usize {
        ((u128::from(self.0.next_u64()) * n as u128) >> 64) as usize
    }
}

/// Bootstrap interval of a statistic of `n` exchangeable units. `statistic` gets the indices of a resample, `[n]`, with repeats
/// (or `[n - 1]` for the jackknife) and must be finite.
///
/// # Errors
/// Fewer than 2 units, options out of range, a statistic that is not finite.
pub fn bootstrap(n: usize, options: &BootstrapOptions, statistic: impl Fn(&[usize]) -> f64) -> Result<Estimate> {
    bootstrap_samples(&[n], options, |drawn| statistic(&drawn[0]))
}

/// [`bootstrap`] of a statistic of several independent samples: each is resampled by itself, and `statistic` gets the indices of each.
/// BCa's acceleration sums over the samples (Davison and Hinkley, *Bootstrap Methods and their Application*, 1997, equation 5.25).
///
/// # Errors
/// Fewer than 2 units in a sample, options out of range, a statistic that is not finite.
pub fn bootstrap_samples(
    sizes: &[usize],
    options: &BootstrapOptions,
    statistic: impl Fn(&[Vec<usize>]) -> f64,
) -> Result<Estimate> {
    sizes.iter().try_for_each(|&n| check(n, options))?;
    let finite = |value: f64| {
        let reason = || format!("the statistic of a resample is {value}");
        if value.is_finite() { Ok(value) } else { Err(Error::Sample { index: 0, reason: reason() }) }
    };
    let all: Vec<Vec<usize>> = sizes.iter().map(|&n| (0..n).collect()).collect();
    let value = finite(statistic(&all))?;
    let mut draws = Draws::new(options.seed);
    let mut drawn = all.clone();
    let mut values = Vec::with_capacity(options.resamples);
    for _ in 0..options.resamples {
        for sample in &mut drawn {
            let n = sample.len();
            sample.iter_mut().for_each(|d| *d = draws.index(n));
        }
        values.push(finite(statistic(&drawn))?);
    }
    let tail = (1.0 - options.level) / 2.0;
    Ok(read_off(value, values, tail, options, || jackknife(&all, &statistic)))
}

/// The interval of an estimate from its resamples. `tail` is the nominal probability of each side; `jackknife` gives the statistic with each
/// unit left out, and is only asked for BCa.
pub(super) fn read_off(
    value: f64,
    mut values: Vec<f64>,
    tail: f64,
    options: &BootstrapOptions,
    jackknife: impl FnOnce() -> Vec<f64>,
) -> Estimate {
    values.sort_by(f64::total_cmp);
    let (low, high) = match options.method {
        Method::Percentile | Method::T => (tail, 1.0 - tail),
        Method::Bca => {
            let z0 = bias_correction(&values, value);
            let a = acceleration(&jackknife());
            (bca_level(tail, z0, a), bca_level(1.0 - tail, z0, a))
        }
    };
    let BootstrapOptions { resamples, level, method, seed } = *options;
    let (low, high) = (quantile(&values, low), quantile(&values, high));
    Estimate { value, interval: Interval { low, high, level, method, resamples, seed } }
}

pub(super) fn check(n: usize, options: &BootstrapOptions) -> Result<()> {
    if n < 2 {
        return Err(Error::TooFew { what: "a bootstrap interval", needed: 2, found: n });
    }
    if !(100..=10_000_000).contains(&options.resamples) {
        let found = options.resamples.to_string();
        return Err(Error::Option { option: "resamples", expected: "from 100 to 10000000", found });
    }
    if options.method == Method::T {
        let found = "t, which draws nothing".to_string();
        return Err(Error::Option { option: "method", expected: "percentile or bca", found });
    }
    if !(options.level > 0.0 && options.level < 1.0) {
        let found = options.level.to_string();
        return Err(Error::Option { option: "level", expected: "a probability between 0 and 1", found });
    }
    Ok(())
}

/// z0 of BCa: how far the median of the resamples is from the estimate, in standard deviations (14.14). Ties count half. Clamped
/// to what the number of resamples can resolve, where all lie on one side.
pub(super) fn bias_correction(sorted: &[f64], value: f64) -> f64 {
    let below = sorted.partition_point(|&v| v < value);
    let equal = sorted[below..].partition_point(|&v| v <= value);
    let n = sorted.len() as f64;
    let share = (below as f64 + equal as f64 / 2.0) / n;
    Normal::standard().inverse_cdf(share.clamp(0.5 / n, 1.0 - 0.5 / n))
}

/// Deviations of the statistic with each unit left out, sample by sample.
pub(super) fn jackknife(all: &[Vec<usize>], statistic: impl Fn(&[Vec<usize>]) -> f64) -> Vec<f64> {
    let mut deviations = Vec::new();
    for (s, sample) in all.iter().enumerate() {
        let without = |i: usize| {
            let mut kept = all.to_vec();
            kept[s].remove(i);
            statistic(&kept)
        };
        deviations.extend(centred((0..sample.len()).map(without).collect()));
    }
    deviations
}

/// Values less their mean.
pub(super) fn centred(values: Vec<f64>) -> impl Iterator<Item = f64> {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    values.into_iter().map(move |v| v - mean)
}

/// a of BCa, from the deviations of the jackknife (14.15); 0 where leaving a unit out changes nothing.
pub(super) fn acceleration(deviations: &[f64]) -> f64 {
    let (squares, cubes) = deviations.iter().fold((0.0, 0.0), |(s, c), d| (s + d * d, c - d * d * d));
    let a = cubes / (6.0 * f64::powf(squares, 1.5));
    if a.is_finite() { a } else { 0.0 }
}

/// The quantile level that BCa reads instead of `level` (14.10).
pub(super) fn bca_level(level: f64, z0: f64, a: f64) -> f64 {
    let normal = Normal::standard();
    let z = z0 + normal.inverse_cdf(level);
    let denominator = 1.0 - a * z;
    // Past the pole of the correction only the outermost resample is left.
    if denominator <= 0.0 {
        return if z < 0.0 { 0.0 } else { 1.0 };
    }
    normal.cdf(z0 + z / denominator)
}

/// Quantile of sorted values, interpolated between the order statistics k/(n + 1), as Efron's percentile interval defines them.
pub(crate) fn quantile(sorted: &[f64], level: f64) -> f64 {
    let last = sorted.len() - 1;
    let position = (level * (sorted.len() + 1) as f64 - 1.0).clamp(0.0, last as f64);
    let (lower, part) = (position.floor() as usize, position.fract());
    let upper = (lower + 1).min(last);
    sorted[lower] + part * (sorted[upper] - sorted[lower])
}
