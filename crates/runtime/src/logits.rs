//! Logits of some rows, and what is read off them: the greedy token and log-probabilities.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::model::HeadRows;

/// Logits after the softcap: for every wanted row one value a head row, plus the hidden states they came from.
#[derive(Debug)]
pub struct Logits {
    pub(crate) values: Vec<f32>,
    pub(crate) hidden: Vec<f32>,
    pub(crate) head: Arc<HeadRows>,
    pub(crate) positions: Vec<usize>,
    pub(crate) hidden_size: usize,
}

impl Logits {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.values.len() / self.head.len()
    }

    /// Which tokens the columns stand for.
    pub fn head(&self) -> &HeadRows {
        &self.head
    }

    /// Absolute position of a row: its logits are about the token at the next position.
    pub fn position(&self, row: usize) -> usize {
        self.positions[row]
    }

    /// Logits of one row, `[head rows]`; pruned tokens (minus infinity) have no entry.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.head.len()..][..self.head.len()]
    }

    /// Hidden state of one row after the final norm, `[hidden]`: what a drafter continues from.
    pub fn hidden(&self, row: usize) -> &[f32] {
        &self.hidden[row * self.hidden_size..][..self.hidden_size]
    }

    /// The token with the largest logit; among equals the lowest id. NaN and infinities are errors.
    pub fn argmax(&self, row: usize) -> Result<u32> {
        let mut best: Option<(f32, u32)> = None;
        for (r, &value) in self.row(row).iter().enumerate() {
            let token = self.head.token(r);
            if !value.is_finite() {
                return Err(Error::NanLogits { position: self.position(row), token });
            }
            // A keepset need not be sorted, so equal values compare their ids.
            if best.is_none_or(|(v, t)| value > v || (value == v && token < t)) {
                best = Some((value, token));
            }
        }
        Ok(best.map_or(0, |(_, token)| token))
    }

    /// Natural logarithm of `token`'s probability under the softmax over the full vocabulary; `None` where the token was
    /// pruned away (probability 0). Sums are in f64, in row order.
    pub fn log_prob(&self, row: usize, token: u32) -> Result<Option<f64>> {
        let values = self.row(row);
        let max = f64::from(values[self.argmax_row(row)?]);
        let Some(own) = self.head.row(token) else {
            return Ok(None);
        };
        let sum: f64 = values.iter().map(|&v| (f64::from(v) - max).exp()).sum();
        Ok(Some(f64::from(values[own]) - max - sum.ln()))
    }

    fn argmax_row(&self, row: usize) -> Result<usize> {
        let token = self.argmax(row)?;
        Ok(self.head.row(token).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(values: &[f32], head: HeadRows) -> Logits {
        Logits { values: values.to_vec(), hidden: vec![], head: Arc::new(head), positions: vec![7], hidden_size: 0 }
    }

    #[test]
    fn ties_go_to_the_lowest_id() {
        assert_eq!(logits(&[1.0, 3.0, 3.0], HeadRows::full(3)).argmax(0).unwrap(), 1);
        assert_eq!(logits(&[3.0, 1.0, 3.0], HeadRows::pruned(9, vec![8, 4, 5])).argmax(0).unwrap(), 5);
        assert_eq!(logits(&[-0.0, 0.0], HeadRows::full(2)).argmax(0).unwrap(), 0);
    }

    #[test]
    fn nan_is_an_error_wherever_it_stands() {
        for values in [[f32::NAN, 1.0, 2.0], [1.0, f32::NAN, 2.0], [1.0, 2.0, f32::NAN]] {
            let l = logits(&values, HeadRows::full(3));
            assert!(matches!(l.argmax(0), Err(Error::NanLogits { position: 7, .. })));
            assert!(l.log_prob(0, 1).is_err());
        }
    }

    #[test]
    fn probabilities_sum_to_one_and_pruned_tokens_have_none() {
        let l = logits(&[1.0, -2.0, 0.5], HeadRows::pruned(9, vec![8, 4, 5]));
        let sum: f64 = [8, 4, 5].map(|t| l.log_prob(0, t).unwrap().unwrap().exp()).iter().sum();
        assert!((sum - 1.0).abs() < 1e-12);
        assert_eq!(l.log_prob(0, 0).unwrap(), None);
    }
}
