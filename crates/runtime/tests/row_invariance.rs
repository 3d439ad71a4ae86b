//! Row invariance of the whole forward pass: the logits of a position have the same bits whatever was computed beside it.

mod common;

use std::sync::Arc;

use bake::quantize::QuantizeOptions;
use common::*;
use kernels::cpu::Isa;
use runtime::checkpoint::Checkpoint;
use runtime::config::{Bits, Strategy};
use runtime::{Engine, EngineOptions, Model, Precision};

/// Rows of one pass, as in the specification of the property.
const WIDTHS: [usize; 7] = [1, 2, 7, 8, 16, 64, 512];

/// Token ids without structure, all inside the vocabulary.
fn tokens(count: usize, vocab: usize) -> Vec<u32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % vocab as u32
    };
    (0..count).map(|_| next()).collect()
}

/// Bits of the logits and hidden states of every position, computed in passes of the given widths (the last one repeats).
fn bits(engine: &mut Engine, tokens: &[u32], widths: &[usize]) -> Vec<Vec<u32>> {
    engine.reset();
    let mut out = Vec::with_capacity(tokens.len());
    let (mut at, mut pass) = (0, 0);
    while at < tokens.len() {
        let width = widths[pass.min(widths.len() - 1)].min(tokens.len() - at);
        let logits = engine.extend(&tokens[at..at + width], 0..width).unwrap();
        out.extend((0..width).map(|r| logits.row(r).iter().chain(logits.hidden(r)).map(|v| v.to_bits()).collect()));
        (at, pass) = (at + width, pass + 1);
    }
    out
}

fn on_threads(target: &str, precision: Precision, threads: usize) -> Engine {
    Engine::new(model(target), &EngineOptions { precision, threads, context: None }).unwrap()
}

#[test]
fn any_number_of_rows_gives_the_same_bits() {
    for (target, count) in [("nano", 520), ("11_e4b_like_sharded", 150), ("09b_int4_pruned_head", 150)] {
        for precision in Precision::ALL {
            let mut engine = on_threads(target, precision, 2);
            let tokens = tokens(count, engine.model().config().vocab_size);
            let alone = bits(&mut engine, &tokens, &[1]);
            for width in WIDTHS {
                assert!(bits(&mut engine, &tokens, &[width]) == alone, "{target} {precision:?}: {width} rows");
            }
            // Chunks that begin and end anywhere.
            assert!(bits(&mut engine, &tokens, &[3, 61, 1, 5, 130, 9]) == alone, "{target} {precision:?}: ragged");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for precision in Precision::ALL {
        let mut engine = on_threads("nano", precision, 1);
        let tokens = tokens(200, engine.model().config().vocab_size);
        let one = bits(&mut engine, &tokens, &[64]);
        for threads in [2, 3, 8] {
            assert!(bits(&mut on_threads("nano", precision, threads), &tokens, &[64]) == one, "{threads} threads");
        }
    }
}

/// Packed weights of every width, on grouped and on whole rows.
#[test]
fn any_number_of_rows_gives_the_same_bits_at_every_width() {
    let tmp = tempfile::tempdir().unwrap();
    let nano = Checkpoint::open(&dir("nano")).unwrap();
    for width in Bits::ALL {
        for strategy in [Strategy::Group(32), Strategy::Channel] {
            let out = tmp.path().join(format!("{width} {strategy}"));
            let options = QuantizeOptions { bits: width, strategy, head: strategy, ..Default::default() };
            bake::quantize::run(&nano, &out, &options, &bake::Context::quiet()).unwrap();
            let model = Arc::new(Model::load(Checkpoint::open(&out).unwrap()).unwrap());
            for precision in Precision::ALL {
                let engine = |threads| Engine::new(model.clone(), &EngineOptions { precision, threads, context: None });
                let tokens = tokens(40, model.config().vocab_size);
                let alone = bits(&mut engine(1).unwrap(), &tokens, &[1]);
                for rows in [2, 5, 8, 16, 40] {
                    let got = bits(&mut engine(2).unwrap(), &tokens, &[rows]);
                    assert!(got == alone, "{width} {strategy} {precision:?}: {rows} rows");
                }
            }
        }
    }
}

/// What a row is computed beside can also be other rows that are thrown away, or rows whose logits nobody wants.
#[test]
fn rejected_and_unwanted_rows_leave_no_trace() {
    let mut engine = on_threads("nano", Precision::Native, 2);
    let vocab = engine.model().config().vocab_size;
    let tokens = tokens(100, vocab);
    let alone = bits(&mut engine, &tokens, &[1]);
    engine.reset();
    engine.extend(&tokens[..70], 0..0).unwrap();
    // Other tokens at positions 70.., rejected.
    let others: Vec<u32> = tokens[70..86].iter().map(|t| (t + 1) % vocab as u32).collect();
    engine.extend(&others, 0..16).unwrap();
    engine.truncate(70);
    let logits = engine.extend(&tokens[70..], 10..30).unwrap();
    for r in 0..20 {
        let got: Vec<u32> = logits.row(r).iter().chain(logits.hidden(r)).map(|v| v.to_bits()).collect();
        assert!(got == alone[80 + r], "row {r}");
    }
}

/// The test of the test: a reduction that depends on M must make the comparison above fail.
#[test]
fn a_planted_dependence_on_m_is_caught() {
    let model = model("nano");
    let options = EngineOptions { threads: 2, ..Default::default() };
    let mut engine = Engine::with_isa(model, &options, Isa::planted_m_dependence()).unwrap();
    let tokens = tokens(64, 2048);
    let alone = bits(&mut engine, &tokens, &[1]);
    assert!(bits(&mut engine, &tokens, &[8]) != alone);
}
