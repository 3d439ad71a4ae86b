//! What this crate asks of a model: append tokens, get logits. The runtime's engine is one; tests bring small exact ones.

use std::ops::Range;

/// Logits of some rows of a forward pass, after the softcap.
pub trait Rows {
    /// Number of rows.
    fn rows(&self) -> usize;
    /// Kept logits of a row, in vocabulary order, `[kept]`.
    fn row(&self, row: usize) -> &[f32];
    /// Token of the largest logit, the lowest id on ties.
    ///
    /// # Errors
    /// [`runtime::Error::NanLogits`].
    fn argmax(&self, row: usize) -> runtime::Result<u32>;
    /// Natural logarithm of the softmax over the whole vocabulary; `None` for a token that the head does not have.
    ///
    /// # Errors
    /// [`runtime::Error::NanLogits`].
    fn log_prob(&self, row: usize, token: u32) -> runtime::Result<Option<f64>>;
}

/// A model with a cache at batch 1.
pub trait Forward {
    /// Logits of a call.
    type Logits: Rows;
    /// Forgets the sequence.
    fn reset(&mut self);
    /// Appends tokens to the sequence; logits of the given tokens whose index is in `want`.
    ///
    /// # Errors
    /// Of the runtime: a token outside the vocabulary, a full context, NaN.
    fn extend(&mut self, tokens: &[u32], want: Range<usize>) -> runtime::Result<Self::Logits>;
}

impl<F: Forward + ?Sized> Forward for &mut F {
    type Logits = F::Logits;

    fn reset(&mut self) {
        (**self).reset();
    }

    fn extend(&mut self, tokens: &[u32], want: Range<usize>) -> runtime::Result<Self::Logits> {
        (**self).extend(tokens, want)
    }
}

impl Rows for runtime::Logits {
    fn rows(&self) -> usize {
        runtime::Logits::rows(self)
    }

    fn row(&self, row: usize) -> &[f32] {
        runtime::Logits::row(self, row)
    }

    fn argmax(&self, row: usize) -> runtime::Result<u32> {
        runtime::Logits::argmax(self, row)
    }

    fn log_prob(&self, row: usize, token: u32) -> runtime::Result<Option<f64>> {
        runtime::Logits::log_prob(self, row, token)
    }
}

impl Forward for runtime::Engine {
    type Logits = runtime::Logits;

    fn reset(&mut self) {
        runtime::Engine::reset(self);
    }

    fn extend(&mut self, tokens: &[u32], want: Range<usize>) -> runtime::Result<runtime::Logits> {
        runtime::Engine::extend(self, tokens, want)
    }
}

/// A model small enough to check by hand: the next token depends on the last one alone, by a fixed table of logits.
#[cfg(test)]
pub(crate) mod toy {
    use super::*;

    pub(crate) struct Bigram {
        pub(crate) vocab: usize,
        scale: f32,
        /// Tokens that the head lacks.
        pub(crate) pruned: Vec<u32>,
        /// Position whose logits are NaN.
        pub(crate) nan_at: Option<usize>,
        /// Added to one logit of every row of a pass of more than one row, as a row-variant kernel would.
        pub(crate) wide_error: f32,
        /// `(tokens fed, rows wanted)` of each call.
        pub(crate) calls: Vec<(usize, usize)>,
        len: usize,
    }

    impl Bigram {
        pub(crate) fn new(vocab: usize) -> Bigram {
            let calls = Vec::new();
            Bigram { vocab, scale: 1.0, pruned: Vec::new(), nan_at: None, wide_error: 0.0, calls, len: 0 }
        }

        pub(crate) fn uniform(vocab: usize) -> Bigram {
            Bigram { scale: 0.0, ..Bigram::new(vocab) }
        }

        fn logit(&self, last: u32, next: u32) -> f32 {
            self.scale * ((last * 7 + next * 5) % 11) as f32 / 3.0
        }

        /// The definition, in f64.
        pub(crate) fn ln_p(&self, last: u32, next: u32) -> f64 {
            let sum: f64 = (0..self.vocab as u32).map(|t| f64::from(self.logit(last, t)).exp()).sum();
            f64::from(self.logit(last, next)) - sum.ln()
        }

        /// The kept token with the largest logit, the first on ties.
        pub(crate) fn next(&self, last: u32) -> u32 {
            let kept = (0..self.vocab as u32).filter(|t| !self.pruned.contains(t));
            kept.reduce(|a, b| if self.logit(last, b) > self.logit(last, a) { b } else { a }).unwrap()
        }
    }

    pub(crate) struct ToyLogits {
        rows: Vec<Vec<f32>>,
        kept: Vec<u32>,
        first_position: usize,
    }

    impl ToyLogits {
        fn check(&self, row: usize) -> runtime::Result<()> {
            match self.rows[row].iter().position(|v| v.is_nan()) {
                None => Ok(()),
                Some(i) => Err(runtime::Error::NanLogits { position: self.first_position + row, token: self.kept[i] }),
            }
        }
    }

    impl Rows for ToyLogits {
        fn rows(&self) -> usize {
            self.rows.len()
        }

        fn row(&self, row: usize) -> &[f32] {
            &self.rows[row]
        }

        fn argmax(&self, row: usize) -> runtime::Result<u32> {
            self.check(row)?;
            let row = &self.rows[row];
            let best = (0..row.len()).reduce(|a, b| if row[b] > row[a] { b } else { a }).unwrap();
            Ok(self.kept[best])
        }

        fn log_prob(&self, row: usize, token: u32) -> runtime::Result<Option<f64>> {
            self.check(row)?;
            let row = &self.rows[row];
            let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
            Ok(self.kept.iter().position(|&t| t == token).map(|i| f64::from(row[i]) - sum.ln()))
        }
    }

    impl Forward for Bigram {
        type Logits = ToyLogits;

        fn reset(&mut self) {
            self.len = 0;
        }

        fn extend(&mut self, tokens: &[u32], want: Range<usize>) -> runtime::Result<ToyLogits> {
            self.calls.push((tokens.len(), want.len()));
            let kept: Vec<u32> = (0..self.vocab as u32).filter(|t| !self.pruned.contains(t)).collect();
            let first_position = self.len + want.start;
            let mut rows = Vec::new();
            for i in want {
                let mut row: Vec<f32> = kept.iter().map(|&t| self.logit(tokens[i], t)).collect();
                if tokens.len() > 1 {
                    row[0] += self.wide_error;
                }
                if self.nan_at == Some(self.len + i) {
                    row[0] = f32::NAN;
                }
                rows.push(row);
            }
            self.len += tokens.len();
            Ok(ToyLogits { rows, kept, first_position })
        }
    }
}
