//! Many comparisons at once: the false discovery rate.
//!
//! Source: Benjamini and Hochberg, *Controlling the False Discovery Rate*, J. R. Statist. Soc. B 57, 1995.

use crate::error::{Error, Result};

/// Adjusted p-values in the order given: comparisons with one of at most q are discoveries, of which a share of q is false on average.
///
/// # Errors
/// A p that is no probability.
pub fn benjamini_hochberg(p: &[f64]) -> Result<Vec<f64>> {
    if let Some(index) = p.iter().position(|p| !(0.0..=1.0).contains(p)) {
        return Err(Error::Sample { index, reason: format!("{} is no probability", p[index]) });
    }
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[b].total_cmp(&p[a]));
    let mut adjusted = vec![0.0; p.len()];
    let mut least = 1.0f64;
    for (from_top, &i) in order.iter().enumerate() {
        let rank = p.len() - from_top;
        least = least.min(p[i] * p.len() as f64 / rank as f64);
        adjusted[i] = least;
    }
    Ok(adjusted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Draws;

    #[test]
    fn the_published_example_is_reproduced() {
        // Their section 3.2: 15 p-values, of which the first four are rejected at q = 0.05 (Bonferroni rejects three).
        let p = [
            0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528,
            0.7590, 1.0,
        ];
        let q = benjamini_hochberg(&p).unwrap();
        assert_eq!(q.iter().filter(|&&q| q <= 0.05).count(), 4);
        assert!((q[3] - 0.0095 * 15.0 / 4.0).abs() < 1e-12);
        let mut reversed = p;
        reversed.reverse();
        let back: Vec<f64> = benjamini_hochberg(&reversed).unwrap().into_iter().rev().collect();
        assert_eq!(back, q);
    }

    #[test]
    fn the_false_discovery_rate_is_kept() {
        // 2000 suites of 10 comparisons, 4 of them with a real effect: the share of false discoveries stays below 5 %.
        let mut draws = Draws::new(4);
        let rate = |_| {
            let p: Vec<f64> = (0..10).map(|i| if i < 4 { draws.uniform() * 1e-3 } else { draws.uniform() }).collect();
            let q = benjamini_hochberg(&p).unwrap();
            let found: Vec<usize> = (0..10).filter(|&i| q[i] <= 0.05).collect();
            found.iter().filter(|&&i| i >= 4).count() as f64 / found.len().max(1) as f64
        };
        let mean = (0..2000).map(rate).sum::<f64>() / 2000.0;
        assert!(mean < 0.05 && mean > 0.01, "{mean}");
    }

    #[test]
    fn what_is_no_probability_is_refused() {
        assert_eq!(benjamini_hochberg(&[]).unwrap(), Vec::<f64>::new());
        for bad in [-0.1, 1.1, f64::NAN] {
            assert!(benjamini_hochberg(&[0.5, bad]).unwrap_err().to_string().starts_with("sample 1"));
        }
    }
}
