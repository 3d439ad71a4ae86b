//! The gate on a real model: the repository's trained nano model and its own prompts.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ppl::identity::Status;
use ppl::paths::{Generator, OneRow, Prompt, Rescore, VERIFIER_ROWS};
use ppl::records::{self, Record};
use ppl::score::{PplReport, ScoreOptions, score};
use ppl::verify::{PathOptions, PplCap, VerifyReport, compare_paths};
use runtime::checkpoint::Checkpoint;
use runtime::tokenizer::Tokenizer;
use runtime::{Engine, EngineOptions, Model, Precision};

/// Perplexity on `prompts/ppl.jsonl` that the model's card states, from its training framework.
const CARD_PPL: f64 = 33.066;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn model() -> Arc<Model> {
    Arc::new(Model::load(Checkpoint::open(&root().join("models/nano")).unwrap()).unwrap())
}

fn engine(model: &Arc<Model>, precision: Precision) -> Engine {
    Engine::new(model.clone(), &EngineOptions { precision, ..EngineOptions::default() }).unwrap()
}

fn records(model: &Model) -> Vec<Record> {
    records::read(&root().join("prompts/ppl.jsonl"), model.config().vocab_size).unwrap()
}

fn run(engine: &mut Engine, records: &[Record], chunk_rows: usize) -> PplReport {
    score(engine, records, &ScoreOptions { chunk_rows }, &AtomicBool::new(false), |_| {}).unwrap()
}

#[test]
fn perplexity_is_that_of_the_model_card() {
    let model = model();
    let records = records(&model);
    let report = run(&mut engine(&model, Precision::Native), &records, 64);
    assert!((report.ppl.unwrap() - CARD_PPL).abs() < 0.0006, "{:?}", report.ppl);
    assert_eq!((report.num_records, report.num_tokens, report.complete), (160, 23492, true));
    assert!(report.pruned_targets.is_empty());
    // The plain path is slower; some records suffice to see that the fast one computes the same thing.
    let plain = run(&mut engine(&model, Precision::F32), &records[..8], 64);
    for (a, b) in plain.records.iter().zip(&report.records) {
        assert!((a.ppl.unwrap() / b.ppl.unwrap() - 1.0).abs() < 1e-5, "{}: {:?} and {:?}", a.id, a.ppl, b.ppl);
    }
}

#[test]
fn chunk_size_and_threads_change_no_bit_of_a_perplexity() {
    let model = model();
    let records = &records(&model)[..6];
    let expected = run(&mut engine(&model, Precision::Native), records, 64).neg_log_likelihood.unwrap();
    for (chunk, threads) in [(1, 1), (8, 2), (13, 3), (256, 1)] {
        let options = EngineOptions { threads, ..EngineOptions::default() };
        let found = run(&mut Engine::new(model.clone(), &options).unwrap(), records, chunk).neg_log_likelihood.unwrap();
        assert_eq!(found.to_bits(), expected.to_bits(), "{chunk} rows, {threads} threads");
    }
}

#[test]
fn decoding_rescoring_and_generating_agree_to_the_bit() {
    let model = model();
    let tokenizer = Tokenizer::open(&root().join("models/nano")).unwrap();
    let texts = ["It must be won in the field, in every private home,", "Call me", "The"];
    let prompt = |(i, text): (usize, &&str)| Prompt { id: i.to_string(), token_ids: tokenizer.encode(text).unwrap() };
    let prompts: Vec<Prompt> = texts.iter().enumerate().map(prompt).collect();
    let mut one = OneRow::new(engine(&model, Precision::Native));
    let mut rescore = Rescore::new(engine(&model, Precision::Native), VERIFIER_ROWS);
    let mut generator = Generator::new(engine(&model, Precision::Native), 5);
    let go = AtomicBool::new(false);
    let options = PathOptions { tokens: 48, logits: true };
    let identity =
        compare_paths(&mut one, &mut [&mut rescore, &mut generator], &prompts, &options, &go, |_| {}).unwrap();
    assert_eq!((identity.status, identity.tokens), (Status::GreedyIdentical, 3 * 48));
    assert_eq!((identity.max_logit_delta, identity.paths[0].differing_rows), (Some(0.0), 0));
    assert_eq!((identity.paths[1].path.as_str(), identity.paths[1].max_logit_delta), ("generator", None));

    let ppl = run(&mut engine(&model, Precision::Native), &records(&model)[..4], 64);
    let verdict = VerifyReport::new(identity, &ppl, PplCap::new(None, ppl.ppl).unwrap());
    assert!(verdict.passed, "{:?}", verdict.failures);
}

#[test]
fn another_precision_is_another_path_and_its_difference_is_seen() {
    let model = model();
    let prompts = [Prompt { id: "a".into(), token_ids: vec![2, 313, 635, 668, 2002] }];
    let (native, plain) = (engine(&model, Precision::Native), engine(&model, Precision::F32));
    let same_code = native.isa() == plain.isa();
    let (mut one, mut plain) = (OneRow::new(native), Rescore::new(plain, VERIFIER_ROWS));
    let go = AtomicBool::new(false);
    let options = PathOptions { tokens: 8, logits: true };
    let report = compare_paths(&mut one, &mut [&mut plain], &prompts, &options, &go, |_| {}).unwrap();
    // Two summation orders agree closely and not to the bit; a delta of zero would mean that nothing was compared.
    let delta = report.max_logit_delta.unwrap();
    assert!(delta < 1e-2 && (delta > 0.0 || same_code), "{delta}");
}
