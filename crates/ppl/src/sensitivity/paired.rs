//! How much worse a variant is, with the uncertainty that comes from the choice of records.
//!
//! A variant and the baseline score the same records, so what varies from record to record is their *difference*: errors are
//! those of a ratio estimator (sum over records of a difference, over the sum of tokens) with records as the sampled units,
//! linearised where a perplexity is an exponential. Records of one text are not independent; the error is then too small.

use serde::Serialize;

/// Negative log-likelihoods of one model on a list of records, in nats.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// One sum a record.
    pub nll: Vec<f64>,
}

/// A variant against the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Change {
    /// Perplexity of the variant.
    pub ppl: f64,
    /// Perplexity less the baseline's.
    pub delta: f64,
    /// Standard error of `delta`.
    pub delta_error: Option<f64>,
    /// Perplexity over the baseline's.
    pub ratio: f64,
    /// Standard error of `ratio`. `None` for fewer than two records.
    pub ratio_error: Option<f64>,
}

impl Scores {
    fn mean(&self, tokens: &[usize]) -> f64 {
        self.nll.iter().sum::<f64>() / tokens.iter().sum::<usize>() as f64
    }

    /// Perplexity over records of these numbers of tokens.
    pub fn ppl(&self, tokens: &[usize]) -> f64 {
        self.mean(tokens).exp()
    }

    /// Natural logarithm of the perplexity over the baseline's.
    pub fn log_ratio(&self, baseline: &Scores, tokens: &[usize]) -> f64 {
        self.mean(tokens) - baseline.mean(tokens)
    }

    /// The comparison.
    pub fn against(&self, baseline: &Scores, tokens: &[usize]) -> Change {
        let (mean, base_mean) = (self.mean(tokens), baseline.mean(tokens));
        let (ppl, base) = (mean.exp(), base_mean.exp());
        let ratio = (mean - base_mean).exp();
        // Residuals of a record: its sum less what the mean expects of its tokens. They add up to zero.
        let residuals = |scores: &Scores, mean: f64| -> Vec<f64> {
            scores.nll.iter().zip(tokens).map(|(nll, &n)| nll - mean * n as f64).collect()
        };
        let (own, theirs) = (residuals(self, mean), residuals(baseline, base_mean));
        let error = |weight: f64, base_weight: f64| {
            let sum: f64 = own.iter().zip(&theirs).map(|(a, b)| (weight * a - base_weight * b).powi(2)).sum();
            let (records, total) = (tokens.len() as f64, tokens.iter().sum::<usize>() as f64);
            (tokens.len() > 1).then(|| (sum * records / (records - 1.0)).sqrt() / total)
        };
        Change { ppl, delta: ppl - base, delta_error: error(ppl, base), ratio, ratio_error: error(ratio, ratio) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_changed_has_no_error() {
        let scores = Scores { nll: vec![3.0, 5.0, 9.0] };
        let change = scores.against(&scores, &[1, 2, 3]);
        assert_eq!((change.delta, change.ratio), (0.0, 1.0));
        assert_eq!((change.delta_error, change.ratio_error), (Some(0.0), Some(0.0)));
    }

    #[test]
    fn a_shift_of_every_token_is_certain_and_noise_is_not() {
        let tokens = [10, 20, 40];
        let base = Scores { nll: vec![20.0, 50.0, 90.0] };
        let shifted = Scores { nll: base.nll.iter().zip(tokens).map(|(v, n)| v + 0.1 * f64::from(n)).collect() };
        let tokens = tokens.map(|n| n as usize);
        let change = shifted.against(&base, &tokens);
        assert!((change.ratio - 0.1f64.exp()).abs() < 1e-12);
        assert!(change.ratio_error.unwrap() < 1e-12, "the pairs agree, though the records differ");
        assert!(change.delta_error.unwrap() > 1e-3, "the perplexities that are subtracted do not");
        // By hand: differences 0, 3, 0; mean 3/70; residuals -3/7, 3 - 6/7, -12/7.
        let noisy = Scores { nll: vec![20.0, 53.0, 90.0] };
        let change = noisy.against(&base, &tokens);
        let sum = (3.0f64 / 7.0).powi(2) + (15.0f64 / 7.0).powi(2) + (12.0f64 / 7.0).powi(2);
        let want = (3.0f64 / 70.0).exp() * (sum * 1.5).sqrt() / 70.0;
        assert!((change.ratio_error.unwrap() - want).abs() < 1e-12);
    }

    #[test]
    fn one_record_has_no_error() {
        let change = Scores { nll: vec![3.0] }.against(&Scores { nll: vec![2.0] }, &[4]);
        assert_eq!((change.ratio_error, change.delta_error), (None, None));
        assert!((change.ratio - 0.25f64.exp()).abs() < 1e-12);
    }
}
