//! Perplexities of variants, each measured once: the journal remembers.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use runtime::{Engine, EngineOptions};
use sha2::{Digest, Sha256};

use super::journal::Journal;
use super::paired::Scores;
use super::subject::Subject;
use super::variant::Variant;
use crate::error::{Error, Result};
use crate::records::Record;
use crate::score::{ScoreOptions, score};

/// Records under a name.
#[derive(Debug, Clone)]
pub struct Slice {
    /// Name in the journal.
    pub name: String,
    /// What is scored.
    pub records: Vec<Record>,
}

impl Slice {
    /// Scored tokens of each record.
    pub fn tokens(&self) -> Vec<usize> {
        self.records.iter().map(Record::num_tokens).collect()
    }
}

/// Records in two halves, by a hash of their ids: which half a record is in depends on nothing else.
pub fn halves(records: Vec<Record>) -> [Vec<Record>; 2] {
    let (a, b) = records.into_iter().partition(|r| Sha256::digest(r.id.as_bytes())[0] % 2 == 0);
    [a, b]
}

/// The first records, until they hold this many scored tokens.
pub fn first_tokens(mut records: Vec<Record>, tokens: usize) -> Vec<Record> {
    let mut sum = 0;
    let enough = records.iter().position(|r| {
        sum += r.num_tokens();
        sum >= tokens
    });
    records.truncate(enough.map_or(records.len(), |last| last + 1));
    records
}

/// State for a progress display.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress<'a> {
    /// Variants done in this run, those that the journal knew included.
    pub variants: usize,
    /// Variants in all, at most.
    pub variants_total: usize,
    /// The one under way.
    pub variant: &'a str,
    /// Scored tokens of it done.
    pub tokens: usize,
    /// Its scored tokens.
    pub tokens_total: usize,
}

/// How trials are run.
pub struct TrialOptions<'a> {
    /// Arithmetic and threads.
    pub engine: EngineOptions,
    /// Rows a pass.
    pub score: ScoreOptions,
    /// Ends the work; what is done is in the journal.
    pub cancel: &'a AtomicBool,
    /// Told of every record.
    pub progress: &'a mut dyn FnMut(Progress),
}

/// A sum of log-likelihoods as the journal keeps it: to the millionth of a nat. Decimal numbers of so few digits are read back
/// to the bit, so that continued work takes the decisions that uninterrupted work would.
fn kept(nll: f64) -> f64 {
    (nll * 1e6).round() / 1e6
}

/// Scores variants of a model.
pub struct Trials<'a> {
    subject: Subject,
    journal: Journal,
    options: TrialOptions<'a>,
    done: usize,
    /// Variants that the work takes at most, for the display.
    pub planned: usize,
}

impl<'a> Trials<'a> {
    /// Of this model, remembered in this journal.
    pub fn new(subject: Subject, journal: Journal, options: TrialOptions<'a>) -> Trials<'a> {
        Trials { subject, journal, options, done: 0, planned: 0 }
    }

    /// The model.
    pub fn subject(&self) -> &Subject {
        &self.subject
    }

    /// Likelihoods of a slice under a variant.
    ///
    /// # Errors
    /// [`Error::Cancelled`]; [`Error::Pruned`] for a target that the head lacks; errors of the model and the journal.
    pub fn scores(&mut self, slice: &Slice, variant: &Variant) -> Result<Scores> {
        let key = self.subject.name(variant);
        if let Some(scores) = self.journal.get(&slice.name, &key) {
            self.done += 1;
            return Ok(scores.clone());
        }
        let model = Arc::new(self.subject.build(variant)?);
        let failed = |source: runtime::Error| Error::Model { id: key.clone(), source: source.into() };
        let mut engine = Engine::new(model, &self.options.engine).map_err(failed)?;
        let (done, planned) = (self.done, self.planned);
        let show = &mut self.options.progress;
        let report = score(&mut engine, &slice.records, &self.options.score, self.options.cancel, |p| {
            show(Progress {
                variants: done,
                variants_total: planned,
                variant: &key,
                tokens: p.tokens,
                tokens_total: p.tokens_total,
            })
        })?;
        if !report.complete {
            return Err(Error::Cancelled);
        }
        let nll: Option<Vec<f64>> = report.records.iter().map(|r| r.neg_log_likelihood).collect();
        let (Some(nll), Some(ppl)) = (nll, report.ppl) else {
            let first = report.pruned_targets.first();
            let (token_id, record) =
                first.map_or((0, String::new()), |t| (t.token_id, t.records.first().cloned().unwrap_or_default()));
            return Err(Error::Pruned { record, token_id, tokens: report.pruned_targets.len() });
        };
        let scores = Scores { nll: nll.into_iter().map(kept).collect() };
        self.journal.put(&slice.name, &key, &scores, ppl)?;
        self.done += 1;
        Ok(scores)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: usize, tokens: u32) -> Record {
        Record { id: id.to_string(), token_ids: (0..=tokens).collect(), scored: 1..tokens as usize + 1 }
    }

    #[test]
    fn halves_depend_on_nothing_but_the_id() {
        let [a, b] = halves((0..200).map(|i| record(i, 3)).collect());
        assert_eq!(a.len() + b.len(), 200);
        assert!(a.len() > 70 && b.len() > 70, "{} and {}", a.len(), b.len());
        let [c, d] = halves((100..150).rev().map(|i| record(i, 9)).collect());
        assert!(c.iter().all(|r| a.iter().any(|s| s.id == r.id)) && d.iter().all(|r| b.iter().any(|s| s.id == r.id)));
    }

    #[test]
    fn what_is_kept_is_read_back_to_the_bit() {
        for i in 0..10_000 {
            let nll = kept(f64::from(i).powi(2) * 0.123_456_789_123 + 1.0 / f64::from(i + 1));
            let text = serde_json::to_string(&nll).unwrap();
            assert_eq!(serde_json::from_str::<f64>(&text).unwrap().to_bits(), nll.to_bits(), "{text}");
        }
    }

    #[test]
    fn a_limit_takes_whole_records() {
        let records: Vec<Record> = (0..4).map(|i| record(i, 10)).collect();
        for (limit, want) in [(1, 1), (10, 1), (11, 2), (40, 4), (99, 4)] {
            assert_eq!(first_tokens(records.clone(), limit).len(), want, "{limit}");
        }
    }
}
