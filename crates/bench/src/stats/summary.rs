//! Means, medians and what lies far from them.

use statrs::distribution::{ContinuousCDF, StudentsT};

use super::bootstrap::{Estimate, Interval, Method};
use crate::error::{Error, Result};

/// Mean; `None` of nothing.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Standard deviation of a sample (divisor n - 1); `None` of fewer than 2 values.
pub fn sd(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|_| values.len() >= 2)?;
    Some((values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64).sqrt())
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

/// Quantile of Student's t for a two-sided interval of probability `level`.
pub(crate) fn t_quantile(level: f64, df: f64) -> f64 {
    StudentsT::new(0.0, 1.0, df).map_or(f64::NAN, |t| t.inverse_cdf(0.5 + level / 2.0))
}

/// The mean with its t interval.
///
/// # Errors
/// Fewer than 2 values, one that is not finite, a level outside (0, 1).
pub fn t_interval(values: &[f64], level: f64) -> Result<Estimate> {
    finite(values)?;
    let (Some(value), Some(sd)) = (mean(values), sd(values)) else {
        return Err(Error::TooFew { what: "a t interval", needed: 2, found: values.len() });
    };
    if !(level > 0.0 && level < 1.0) {
        let found = level.to_string();
        return Err(Error::Option { option: "level", expected: "a probability between 0 and 1", found });
    }
    let n = values.len() as f64;
    let half = t_quantile(level, n - 1.0) * sd / n.sqrt();
    Ok(around(value, half, level))
}

/// A t interval of a half width.
pub(crate) fn around(value: f64, half: f64, level: f64) -> Estimate {
    let interval = Interval { low: value - half, high: value + half, level, method: Method::T, resamples: 0, seed: 0 };
    Estimate { value, interval }
}

/// Refuses values that no measurement gives.
pub(crate) fn finite(values: &[f64]) -> Result<()> {
    match values.iter().position(|v| !v.is_finite()) {
        Some(index) => Err(Error::Sample { index, reason: format!("a value of {}", values[index]) }),
        None => Ok(()),
    }
}

/// Indices of the values whose modified z-score `0.6745 |x - median| / MAD` exceeds `cutoff` (3.5 by convention). Where more than half of
/// the values are equal, MAD is 0, and every other value is an outlier.
///
/// Source: Iglewicz and Hoaglin, *How to Detect and Handle Outliers*, ASQC Quality Press, 1993.
///
/// # Errors
/// No value, or one that is not finite; a cutoff that is not positive.
pub fn mad_outliers(values: &[f64], cutoff: f64) -> Result<Vec<usize>> {
    finite(values)?;
    if !(cutoff > 0.0 && cutoff.is_finite()) {
        let found = cutoff.to_string();
        return Err(Error::Option { option: "cutoff", expected: "a positive number", found });
    }
    let Some(center) = median(values) else {
        return Err(Error::TooFew { what: "a search for outliers", needed: 1, found: 0 });
    };
    let distances: Vec<f64> = values.iter().map(|v| (v - center).abs()).collect();
    let mad = median(&distances).unwrap_or(0.0);
    // 0.6745 is the 75 % quantile of the normal: MAD / 0.6745 estimates its standard deviation.
    Ok((0..values.len()).filter(|&i| 0.6745 * distances[i] > cutoff * mad).collect())
}
