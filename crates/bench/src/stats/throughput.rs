//! Tokens a second is a *ratio of sums*: all tokens over all time. It is never a mean of rates, which would weigh a short prompt
//! like a long one. Resampling draws whole prompts with replacement and forms the ratio of each draw. What the interval covers is
//! the choice of prompts; the machine's own drift within one run is not in it.

use serde::{Deserialize, Serialize};

use super::bootstrap::{BootstrapOptions, Estimate, bootstrap};
use crate::error::{Error, Result};

/// Tokens and time of one prompt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    /// Completion tokens.
    pub tokens: f64,
    /// Wall time in seconds, prefill included.
    pub seconds: f64,
}

impl Throughput {
    /// Checks that a measurement can have given it.
    pub(crate) fn checked(samples: &[Throughput]) -> Result<()> {
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

/// Standard error of the rate over the choice of prompts, relative to the rate; `None` with fewer than 2 prompts. By linearisation of
/// the ratio (Cochran, *Sampling Techniques*, 3rd edition, 1977, section 6.4).
pub fn ratio_se(samples: &[Throughput]) -> Option<f64> {
    if samples.len() < 2 {
        return None;
    }
    let n = samples.len() as f64;
    let (tokens, seconds) = samples.iter().fold((0.0, 0.0), |(t, s), x| (t + x.tokens, s + x.seconds));
    let squares: f64 = samples.iter().map(|x| (x.tokens / tokens - x.seconds / seconds).powi(2)).sum();
    Some((squares * n / (n - 1.0)).sqrt())
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
