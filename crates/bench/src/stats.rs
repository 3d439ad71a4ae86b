//! Intervals for ratios of sums, by the bootstrap over prompts.
//!
//! Tokens a second is a *ratio of sums*: all tokens over all time. It is never a mean of rates, which would weigh a short prompt
//! like a long one. Resampling draws whole prompts with replacement and forms the ratio of each draw. What the interval covers is
//! the choice of prompts; the machine's own drift within one run is not in it.
//!
//! A seed gives the same interval everywhere: draws come from ChaCha8 through [`Draws`], whose mapping to indices is fixed
//! here and not by a version of a library.
//!
//! Source: Efron and Tibshirani, *An Introduction to the Bootstrap*, 1993: percentile intervals in chapter 13, BCa in 14.3.

use rand::Rng;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal};

use crate::error::{Error, Result};

/// How an interval is read off the resamples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Quantiles of the resamples.
    Percentile,
    /// Quantiles corrected for bias and for a variance that changes with the value.
    Bca,
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
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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
    check(n, options)?;
    let finite = |value: f64| {
        let reason = || format!("the statistic of a resample is {value}");
        if value.is_finite() { Ok(value) } else { Err(Error::Sample { index: 0, reason: reason() }) }
    };
    let all: Vec<usize> = (0..n).collect();
    let value = finite(statistic(&all))?;
    let mut draws = Draws::new(options.seed);
    let mut drawn = vec![0; n];
    let mut values = Vec::with_capacity(options.resamples);
    for _ in 0..options.resamples {
        drawn.iter_mut().for_each(|d| *d = draws.index(n));
        values.push(finite(statistic(&drawn))?);
    }
    values.sort_by(f64::total_cmp);
    let tail = (1.0 - options.level) / 2.0;
    let (low, high) = match options.method {
        Method::Percentile => (tail, 1.0 - tail),
        Method::Bca => {
            let z0 = bias_correction(&values, value);
            let a = acceleration(n, &statistic);
            (bca_level(tail, z0, a), bca_level(1.0 - tail, z0, a))
        }
    };
    let BootstrapOptions { resamples, level, method, seed } = *options;
    let (low, high) = (quantile(&values, low), quantile(&values, high));
    Ok(Estimate { value, interval: Interval { low, high, level, method, resamples, seed } })
}

fn check(n: usize, options: &BootstrapOptions) -> Result<()> {
    if n < 2 {
        return Err(Error::TooFew { what: "a bootstrap interval", needed: 2, found: n });
    }
    if options.resamples < 100 {
        let found = options.resamples.to_string();
        return Err(Error::Option { option: "resamples", expected: "at least 100", found });
    }
    if !(options.level > 0.0 && options.level < 1.0) {
        let found = options.level.to_string();
        return Err(Error::Option { option: "level", expected: "a probability between 0 and 1", found });
    }
    Ok(())
}

/// z0 of BCa: how far the median of the resamples is from the estimate, in standard deviations (14.14). Ties count half. Clamped
/// to what the number of resamples can resolve, where all lie on one side.
fn bias_correction(sorted: &[f64], value: f64) -> f64 {
    let below = sorted.partition_point(|&v| v < value);
    let equal = sorted[below..].partition_point(|&v| v <= value);
    let n = sorted.len() as f64;
    let share = (below as f64 + equal as f64 / 2.0) / n;
    Normal::standard().inverse_cdf(share.clamp(0.5 / n, 1.0 - 0.5 / n))
}

/// a of BCa, from the jackknife (14.15); 0 where leaving a unit out changes nothing.
fn acceleration(n: usize, statistic: impl Fn(&[usize]) -> f64) -> f64 {
    let without = |i: usize| -> Vec<usize> { (0..n).filter(|&j| j != i).collect() };
    let values: Vec<f64> = (0..n).map(|i| statistic(&without(i))).collect();
    let mean = values.iter().sum::<f64>() / n as f64;
    let (squares, cubes) = values.iter().fold((0.0, 0.0), |(s, c), v| {
        let d = mean - v;
        (s + d * d, c + d * d * d)
    });
    let a = cubes / (6.0 * f64::powf(squares, 1.5));
    if a.is_finite() { a } else { 0.0 }
}

/// The quantile level that BCa reads instead of `level` (14.10).
fn bca_level(level: f64, z0: f64, a: f64) -> f64 {
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
fn quantile(sorted: &[f64], level: f64) -> f64 {
    let last = sorted.len() - 1;
    let position = (level * (sorted.len() + 1) as f64 - 1.0).clamp(0.0, last as f64);
    let (lower, part) = (position.floor() as usize, position.fract());
    let upper = (lower + 1).min(last);
    sorted[lower] + part * (sorted[upper] - sorted[lower])
}

/// Tokens and time of one prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Throughput {
    /// Completion tokens.
    pub tokens: f64,
    /// Wall time in seconds, prefill included.
    pub seconds: f64,
}

impl Throughput {
    /// Checks that a measurement can have given it.
    fn checked(samples: &[Throughput]) -> Result<()> {
        for (index, s) in samples.iter().enumerate() {
            let reason = if !(s.seconds.is_finite() && s.seconds > 0.0) {
                format!("a time of {} s", s.seconds)
            } else if !(s.tokens.is_finite() && s.tokens >= 0.0) {
                format!("{} tokens", s.tokens)
            } else {
                continue;
            };
            return Err(Error::Sample { index, reason });
        }
        Ok(())
    }
}

/// Tokens a second over some prompts: sum over sum.
fn rate(samples: &[Throughput], indices: &[usize]) -> f64 {
    let (tokens, seconds) =
        indices.iter().fold((0.0, 0.0), |(t, s), &i| (t + samples[i].tokens, s + samples[i].seconds));
    tokens / seconds
}

/// Tokens a second of a run, with its interval over prompts.
///
/// # Errors
/// Fewer than 2 prompts, a time that is not positive, negative tokens, options out of range.
pub fn tokens_per_s(samples: &[Throughput], options: &BootstrapOptions) -> Result<Estimate> {
    Throughput::checked(samples)?;
    bootstrap(samples.len(), options, |indices| rate(samples, indices))
}

/// Tokens a second of `b` over that of `a`, sample `i` of both being the same prompt. A resample draws prompts, not samples, so
/// that what makes a prompt slow for both cancels.
///
/// # Errors
/// Those of [`tokens_per_s`], sets of different sizes, and an `a` in which some resample has no tokens.
pub fn speedup(a: &[Throughput], b: &[Throughput], options: &BootstrapOptions) -> Result<Estimate> {
    if a.len() != b.len() {
        let found = format!("{} and {}", a.len(), b.len());
        return Err(Error::Option { option: "paired samples", expected: "as many of one as of the other", found });
    }
    Throughput::checked(a)?;
    Throughput::checked(b)?;
    bootstrap(a.len(), options, |indices| rate(b, indices) / rate(a, indices))
}

/// Median, the mean of the middle two for an even number; `None` of nothing or with a NaN.
pub fn median(values: &[f64]) -> Option<f64> {
    if values.is_empty() || values.iter().any(|v| v.is_nan()) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    Some(if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 })
}

#[cfg(test)]
mod tests;
