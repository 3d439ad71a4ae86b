//! The best of n draws: how high luck alone carries it.
//!
//! Source: David and Nagaraja, *Order Statistics*, 3rd edition, 2003, sections 3.1 and 4.2.

use statrs::distribution::{ContinuousCDF, Normal};

use super::summary::finite;
use crate::error::{Error, Result};

/// Points of the integration; the error is below 1e-9 up to a million draws.
const POINTS: usize = 20_000;
/// Where the integrand has vanished on either side.
const END: f64 = 12.0;

/// Expected maximum of `n` independent standard normal draws: the integral of `1 - F^n` above 0 less that of `F^n` below.
///
/// # Errors
/// No draw.
pub fn expected_max(n: usize) -> Result<f64> {
    if n == 0 {
        return Err(Error::TooFew { what: "the maximum of draws", needed: 1, found: 0 });
    }
    let normal = Normal::standard();
    let power = |x: f64| normal.cdf(x).powf(n as f64);
    Ok(simpson(0.0, END, POINTS, |x| 1.0 - power(x)) - simpson(-END, 0.0, POINTS, power))
}

/// Expected best of `n` draws with replacement from what was drawn: `sum x_(i) [(i/m)^n - ((i-1)/m)^n]`. Free of any distribution, and
/// never above the best that was seen.
///
/// # Errors
/// No value, or one that is not finite; no draw.
pub fn expected_best(values: &[f64], n: usize) -> Result<f64> {
    finite(values)?;
    let found = values.len().min(n);
    if found == 0 {
        return Err(Error::TooFew { what: "the expected best of draws", needed: 1, found });
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let below = |i: usize| (i as f64 / sorted.len() as f64).powf(n as f64);
    Ok(sorted.iter().enumerate().map(|(i, x)| x * (below(i + 1) - below(i))).sum())
}

/// Simpson's rule over an even number of intervals.
pub(crate) fn simpson(low: f64, high: f64, intervals: usize, f: impl Fn(f64) -> f64) -> f64 {
    let h = (high - low) / intervals as f64;
    let weight = |i: usize| if i == 0 || i == intervals { 1.0 } else { 2.0 + 2.0 * (i % 2) as f64 };
    (0..=intervals).map(|i| weight(i) * f(low + i as f64 * h)).sum::<f64>() * h / 3.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Draws;

    #[test]
    fn the_published_table_is_reproduced() {
        // Harter, Biometrika 48, 1961, table 1: expected values of the largest of n.
        let table =
            [(1, 0.0), (2, 0.5642), (3, 0.8463), (4, 1.0294), (5, 1.1630), (6, 1.2672), (8, 1.4236), (10, 1.5388)];
        for (n, expected) in table.into_iter().chain([(16, 1.7660), (20, 1.8675), (32, 2.0697), (100, 2.5076)]) {
            let found = expected_max(n).unwrap();
            assert!((found - expected).abs() < 5.1e-5, "{n}: {found}");
        }
        assert!(expected_max(0).is_err());
    }

    #[test]
    fn simulated_maxima_agree() {
        let mut draws = Draws::new(21);
        for n in [2, 12, 60] {
            let best = |_| (0..n).map(|_| draws.normal()).fold(f64::MIN, f64::max);
            let mean = (0..2000).map(best).sum::<f64>() / 2000.0;
            // The standard deviation of a maximum is at most 0.83 here: 4.5 standard errors.
            assert!((mean - expected_max(n).unwrap()).abs() < 0.083, "{n}: {mean}");
        }
    }

    #[test]
    fn the_empirical_best_is_between_mean_and_maximum() {
        let values = [3.0, 1.0, 2.0];
        assert!((expected_best(&values, 1).unwrap() - 2.0).abs() < 1e-12);
        // Of two draws with replacement: 1 with 1/9, 2 with 3/9, 3 with 5/9.
        assert!((expected_best(&values, 2).unwrap() - (1.0 + 6.0 + 15.0) / 9.0).abs() < 1e-12);
        assert!((expected_best(&values, 1000).unwrap() - 3.0).abs() < 1e-9);
        assert!(expected_best(&[], 1).is_err() && expected_best(&values, 0).is_err());
        assert!(expected_best(&[1.0, f64::NAN], 1).is_err());
    }
}
