//! Perplexity of a set of records: `exp(sum of negative log-likelihoods / number of scored tokens)`.
//!
//! Log-probabilities are natural, over the whole vocabulary, after the softcap; sums are f64, token by token, in the order of
//! the records, so that a result does not depend on the chunk size (the runtime is row invariant). The mean of the records'
//! own perplexities is reported beside it and gates nothing: it is another, larger number.
//!
//! A target that the head was pruned of has probability zero. There is no perplexity then (`null`, not infinity, which JSON
//! lacks); the report lists the tokens, so that they can be put back into the keepset.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::forward::{Forward, Rows};
use crate::records::Record;

/// How to score.
#[derive(Debug, Clone)]
pub struct ScoreOptions {
    /// Rows a forward pass, at least 1. Changes memory (`chunk_rows * vocab * 4` bytes of logits) and time, not the result.
    pub chunk_rows: usize,
}

impl Default for ScoreOptions {
    /// 64 rows: 64 MiB of logits for a vocabulary of 262144, and past the point where more rows save weight traffic.
    fn default() -> Self {
        ScoreOptions { chunk_rows: 64 }
    }
}

/// Score of one record. Field names are those of the field's `ppl_results.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordScore {
    /// The record.
    pub id: String,
    /// Scored tokens.
    pub num_tokens: usize,
    /// Sum over the scored tokens, in nats; `None` where one of them is pruned.
    pub neg_log_likelihood: Option<f64>,
    /// `exp(neg_log_likelihood / num_tokens)`.
    pub ppl: Option<f64>,
    /// First scored index.
    pub score_start: usize,
    /// One past the last scored index.
    pub score_end: usize,
    /// Wall time of this record.
    pub duration_s: f64,
}

/// A token that is a target but not in the head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PrunedTarget {
    /// The token.
    pub token_id: u32,
    /// How often it is a target.
    pub count: usize,
    /// Records that hold it, in order, each once.
    pub records: Vec<String>,
}

/// Score of a set. Field names are those of the field's `ppl_summary.json`, where it has them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PplReport {
    /// The perplexity; `None` where a target is pruned or nothing was scored.
    pub ppl: Option<f64>,
    /// Mean of the records' perplexities.
    pub mean_record_ppl: Option<f64>,
    /// Records scored.
    pub num_records: usize,
    /// Tokens scored.
    pub num_tokens: usize,
    /// Sum over all scored tokens, in nats.
    pub neg_log_likelihood: Option<f64>,
    /// All records were scored; `false` after a cancel, when the numbers cover the records that were done.
    pub complete: bool,
    /// Targets that the head lacks, by id.
    pub pruned_targets: Vec<PrunedTarget>,
    /// Wall time of the whole.
    pub duration_s: f64,
    /// Each record, in order.
    pub records: Vec<RecordScore>,
}

impl PplReport {
    /// Whether there is a perplexity of the whole set that can be held against a cap.
    pub fn usable(&self) -> bool {
        self.complete && self.ppl.is_some_and(f64::is_finite)
    }
}

/// State for a progress display.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Records done.
    pub records: usize,
    /// Records in all.
    pub records_total: usize,
    /// Scored tokens done.
    pub tokens: usize,
    /// Scored tokens in all.
    pub tokens_total: usize,
    /// Perplexity so far.
    pub ppl: Option<f64>,
}

/// Scores records in order. `progress` is called after each; `cancel` is looked at before each chunk.
///
/// # Errors
/// [`Error::Model`] with the record's id; [`Error::Nothing`] without records; [`Error::Option`] for a chunk of no rows. Pruned
/// targets and a cancel are no errors: see [`PplReport`].
pub fn score<F: Forward>(
    model: &mut F,
    records: &[Record],
    options: &ScoreOptions,
    cancel: &AtomicBool,
    mut progress: impl FnMut(Progress),
) -> Result<PplReport> {
    if records.is_empty() {
        return Err(Error::Nothing { what: "no perplexity records" });
    }
    if options.chunk_rows == 0 {
        return Err(Error::Option { option: "chunk_rows", expected: "at least 1", found: "0".into() });
    }
    let start = Instant::now();
    let tokens_total = records.iter().map(Record::num_tokens).sum();
    let mut totals = Totals::default();
    let mut pruned: BTreeMap<u32, PrunedTarget> = BTreeMap::new();
    for record in records {
        let Some(score) = score_record(model, record, options.chunk_rows, cancel, &mut pruned)? else { break };
        totals.add(score);
        let (tokens, ppl) = (totals.tokens, totals.ppl());
        progress(Progress { records: totals.scores.len(), records_total: records.len(), tokens, tokens_total, ppl });
    }
    let complete = totals.scores.len() == records.len();
    Ok(PplReport {
        ppl: totals.ppl(),
        mean_record_ppl: totals.mean_record_ppl(),
        num_records: totals.scores.len(),
        num_tokens: totals.tokens,
        neg_log_likelihood: totals.nll,
        complete,
        pruned_targets: pruned.into_values().collect(),
        duration_s: start.elapsed().as_secs_f64(),
        records: totals.scores,
    })
}

/// Running sums. `nll` is `None` from the first record with a pruned target on.
struct Totals {
    nll: Option<f64>,
    tokens: usize,
    scores: Vec<RecordScore>,
}

impl Default for Totals {
    fn default() -> Self {
        Totals { nll: Some(0.0), tokens: 0, scores: Vec::new() }
    }
}

impl Totals {
    fn add(&mut self, score: RecordScore) {
        self.nll = self.nll.zip(score.neg_log_likelihood).map(|(a, b)| a + b);
        self.tokens += score.num_tokens;
        self.scores.push(score);
    }

    fn ppl(&self) -> Option<f64> {
        self.nll.filter(|_| self.tokens > 0).map(|nll| (nll / self.tokens as f64).exp())
    }

    fn mean_record_ppl(&self) -> Option<f64> {
        let ppls: Option<Vec<f64>> = self.scores.iter().map(|s| s.ppl).collect();
        ppls.filter(|p| !p.is_empty()).map(|p| p.iter().sum::<f64>() / p.len() as f64)
    }
}

/// `None` after a cancel: half a record is no result. Pruned targets of such a record are not reported either.
fn score_record<F: Forward>(
    model: &mut F,
    record: &Record,
    chunk_rows: usize,
    cancel: &AtomicBool,
    pruned: &mut BTreeMap<u32, PrunedTarget>,
) -> Result<Option<RecordScore>> {
    let start = Instant::now();
    let failed = |source: runtime::Error| Error::Model { id: record.id.clone(), source: source.into() };
    // The row of token i predicts token i + 1, so the last scored token itself is never run.
    let rows = record.scored.end - 1;
    let first_row = record.scored.start - 1;
    let mut nll = 0.0;
    let mut missing = Vec::new();
    model.reset();
    for begin in (0..rows).step_by(chunk_rows) {
        if cancel.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let end = (begin + chunk_rows).min(rows);
        let want = first_row.clamp(begin, end);
        let logits = model.extend(&record.token_ids[begin..end], want - begin..end - begin).map_err(failed)?;
        for row in want..end {
            let token = record.token_ids[row + 1];
            match logits.log_prob(row - want, token).map_err(failed)? {
                Some(log_prob) => nll -= log_prob,
                None => missing.push(token),
            }
        }
    }
    let nll = Some(nll).filter(|_| missing.is_empty());
    for token_id in missing {
        let entry = pruned.entry(token_id).or_insert_with(|| PrunedTarget { token_id, count: 0, records: Vec::new() });
        entry.count += 1;
        if entry.records.last() != Some(&record.id) {
            entry.records.push(record.id.clone());
        }
    }
    let num_tokens = record.num_tokens();
    Ok(Some(RecordScore {
        id: record.id.clone(),
        num_tokens,
        neg_log_likelihood: nll,
        ppl: nll.map(|n| (n / num_tokens as f64).exp()),
        score_start: record.scored.start,
        score_end: record.scored.end,
        duration_s: start.elapsed().as_secs_f64(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::toy::Bigram;

    fn record(id: &str, token_ids: &[u32], scored: std::ops::Range<usize>) -> Record {
        Record { id: id.into(), token_ids: token_ids.to_vec(), scored }
    }

    fn run(model: &mut Bigram, records: &[Record], chunk_rows: usize) -> PplReport {
        score(model, records, &ScoreOptions { chunk_rows }, &AtomicBool::new(false), |_| {}).unwrap()
    }

    fn two() -> Vec<Record> {
        vec![record("a", &[0, 1, 2, 3, 1, 0], 2..6), record("b", &[0, 3, 3], 1..3)]
    }

    /// By hand, from the model's own definition, without any of the code under test.
    fn expected(model: &Bigram, records: &[Record]) -> Vec<f64> {
        records
            .iter()
            .map(|r| r.scored.clone().map(|i| -model.ln_p(r.token_ids[i - 1], r.token_ids[i])).sum())
            .collect()
    }

    #[test]
    fn perplexity_is_micro_averaged_over_the_scored_tokens() {
        let mut model = Bigram::new(4);
        let want = expected(&model, &two());
        let report = run(&mut model, &two(), 64);
        assert_eq!((report.num_records, report.num_tokens, report.complete), (2, 6, true));
        for (score, want) in report.records.iter().zip(&want) {
            assert!((score.neg_log_likelihood.unwrap() - want).abs() < 1e-12);
        }
        let ppl = ((want[0] + want[1]) / 6.0).exp();
        let mean = ((want[0] / 4.0).exp() + (want[1] / 2.0).exp()) / 2.0;
        assert!((report.ppl.unwrap() - ppl).abs() < 1e-12);
        assert!((report.mean_record_ppl.unwrap() - mean).abs() < 1e-12);
        assert!((ppl - mean).abs() > 1e-3, "the two averages must differ for this test to tell them apart");
        assert_eq!((report.records[0].score_start, report.records[0].score_end), (2, 6));
        assert!(report.usable());
    }

    #[test]
    fn a_uniform_model_has_the_perplexity_of_its_vocabulary() {
        let mut model = Bigram::uniform(7);
        let report = run(&mut model, &[record("a", &[0, 6, 3, 3, 1], 1..5)], 2);
        assert!((report.ppl.unwrap() - 7.0).abs() < 1e-12);
    }

    #[test]
    fn chunks_change_no_bit_and_ask_only_for_scored_rows() {
        let mut model = Bigram::new(4);
        let whole = run(&mut model, &two(), 64);
        for chunk in 1..7 {
            model.calls.clear();
            let report = run(&mut model, &two(), chunk);
            assert_eq!(report.ppl.unwrap().to_bits(), whole.ppl.unwrap().to_bits(), "chunk {chunk}");
            let (fed, wanted) = model.calls.iter().fold((0, 0), |(f, w), c| (f + c.0, w + c.1));
            // The last scored token of a record is never fed, and context rows want no logits.
            assert_eq!((fed, wanted), (5 + 2, 4 + 2), "chunk {chunk}");
            assert!(model.calls.iter().all(|c| c.0 <= chunk));
        }
    }

    #[test]
    fn a_pruned_target_leaves_no_perplexity_and_is_listed() {
        let mut model = Bigram::new(4);
        model.pruned = vec![3];
        let records = [two(), vec![record("c", &[0, 1], 1..2)]].concat();
        let report = run(&mut model, &records, 2);
        assert_eq!((report.ppl, report.mean_record_ppl, report.neg_log_likelihood), (None, None, None));
        assert!(!report.usable());
        let pruned = PrunedTarget { token_id: 3, count: 3, records: vec!["a".into(), "b".into()] };
        assert_eq!(report.pruned_targets, [pruned]);
        assert_eq!(report.records.iter().map(|r| r.ppl.is_some()).collect::<Vec<_>>(), [false, false, true]);
        assert!(serde_json::to_string(&report).unwrap().starts_with(r#"{"ppl":null"#));
    }

    #[test]
    fn a_cancel_keeps_the_records_that_are_done() {
        let mut model = Bigram::new(4);
        let cancel = AtomicBool::new(false);
        let mut seen = Vec::new();
        let report = score(&mut model, &two(), &ScoreOptions::default(), &cancel, |p| {
            seen.push((p.records, p.records_total, p.tokens, p.tokens_total));
            cancel.store(true, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(seen, [(1, 2, 4, 6)]);
        assert_eq!((report.complete, report.num_records, report.records.len()), (false, 1, 1));
        assert!(!report.usable());
        let none = score(&mut model, &two(), &ScoreOptions::default(), &cancel, |_| {}).unwrap();
        assert_eq!((none.ppl, none.num_tokens, none.complete), (None, 0, false));
    }

    #[test]
    fn errors_name_the_record_or_the_option() {
        let mut model = Bigram::new(4);
        model.nan_at = Some(1);
        let err = score(&mut model, &two(), &ScoreOptions::default(), &AtomicBool::new(false), |_| {}).unwrap_err();
        assert!(err.to_string().starts_with("`a`: the logits at position 1 are not finite"), "{err}");
        let none = score(&mut model, &[], &ScoreOptions::default(), &AtomicBool::new(false), |_| {});
        assert!(matches!(none, Err(Error::Nothing { .. })));
        let zero = score(&mut model, &two(), &ScoreOptions { chunk_rows: 0 }, &AtomicBool::new(false), |_| {});
        assert!(matches!(zero, Err(Error::Option { option: "chunk_rows", .. })));
    }
}
