//! The MTP drafter against the oracle: drafted tokens, logits and states at every depth, in both conventions, and whole episodes.

mod common;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use common::*;
use runtime::config::LayerKind;
use runtime::drafter::{Convention, MtpDrafter, MtpOptions, NgramDrafter};
use runtime::generate::{GenerateOptions, greedy};
use runtime::speculate::Shape;
use runtime::speculative::speculative;
use runtime::{Engine, Model, Precision};

const CONVENTIONS: [(&str, Convention); 2] = [("hf", Convention::Hf), ("vllm", Convention::Vllm)];
const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Native];

fn assistant(target: &str) -> PathBuf {
    match target {
        "nano" => dir("nano").join("assistant"),
        _ => dir("10_drafter").join("assistant"),
    }
}

fn golden(target: &str) -> Golden {
    Golden::open(if target == "nano" { "nano" } else { "10_drafter" })
}

fn drafter(target: &str, model: &Model, convention: Convention, centroids: Option<usize>) -> MtpDrafter {
    MtpDrafter::load(&assistant(target), model, MtpOptions { convention, centroids }).unwrap()
}

/// The golden's row: tokens outside the scored clusters hold the smallest score minus one.
fn with_filler(logits: &runtime::drafter::HeadLogits, vocab: usize) -> Vec<f32> {
    let least = logits.values.iter().copied().fold(f32::INFINITY, f32::min);
    let mut row = vec![least - 1.0; vocab];
    logits.tokens.iter().zip(&logits.values).for_each(|(&t, v)| row[t as usize] = *v);
    row
}

/// An engine that has run the golden path up to position `p`, and the target's state there.
fn at_anchor(model: &Arc<Model>, precision: Precision, golden: &Golden, p: usize) -> (Engine, Vec<f32>) {
    let path = golden.ids("path.tokens");
    let mut engine = engine(model, precision);
    let logits = engine.extend(&path[..p + 1], p..p + 1).unwrap();
    let hidden = logits.hidden(0).to_vec();
    let width = hidden.len();
    assert!(distance(&hidden, &golden.floats("path.final_norm")[p * width..][..width]) <= 5e-4);
    (engine, hidden)
}

#[test]
fn every_depth_matches_in_both_conventions() {
    let (model, golden) = (model("10_drafter/target"), golden("10_drafter"));
    let path = golden.ids("path.tokens");
    for precision in PRECISIONS {
        for (name, convention) in CONVENTIONS {
            let drafter = drafter("10_drafter", &model, convention, None);
            for p in golden.ids("anchors") {
                let p = p as usize;
                let (engine, hidden) = at_anchor(&model, precision, &golden, p);
                let proposals = drafter.round(&engine, path[p + 1], &hidden, 7);
                let key = |what: &str| golden.floats(&format!("draft.{name}.{p}.{what}"));
                let tokens: Vec<u32> = proposals.iter().map(|d| d.logits.best(1)[0]).collect();
                assert_eq!(tokens, golden.ids(&format!("draft.{name}.{p}.tokens")), "{precision:?} {name} {p}");
                let logits: Vec<f32> = proposals.iter().flat_map(|d| with_filler(&d.logits, 512)).collect();
                let states: Vec<f32> = proposals.iter().flat_map(|d| d.state.clone()).collect();
                assert!(distance(&logits, &key("logits")) <= 5e-4, "{precision:?} {name} {p} logits");
                assert!(distance(&states, &key("backbone_hidden")) <= 5e-4, "{precision:?} {name} {p} states");
            }
        }
    }
}

#[test]
fn the_full_head_matches() {
    let (model, golden) = (model("10_drafter/target"), golden("10_drafter"));
    let drafter = drafter("10_drafter", &model, Convention::Hf, Some(0));
    assert_eq!(drafter.centroids(), None);
    let (p, path) = (golden.ids("anchors")[1] as usize, golden.ids("path.tokens"));
    let (engine, hidden) = at_anchor(&model, Precision::F32, &golden, p);
    let proposals = drafter.round(&engine, path[p + 1], &hidden, 7);
    let logits: Vec<f32> = proposals.iter().flat_map(|d| d.logits.values.clone()).collect();
    assert!(distance(&logits, &golden.floats("draft_fullhead.hf.logits")) <= 5e-4);
    let tokens: Vec<u32> = proposals.iter().map(|d| d.logits.best(1)[0]).collect();
    assert_eq!(tokens, golden.ids("draft_fullhead.hf.tokens"));
}

#[test]
fn episodes_match_round_by_round() {
    let mut compared = 0;
    for target in ["10_drafter/target", "nano"] {
        let (model, golden) = (model(target), golden(target));
        for precision in PRECISIONS {
            let mut engine = engine(&model, precision);
            for (name, convention) in CONVENTIONS {
                let mut drafter = drafter(target, &model, convention, None);
                for e in (0..).take_while(|e| golden.has(&format!("episode{e}.{name}.drafts"))) {
                    let prompt = golden.ids(&format!("episode{e}.prompt"));
                    let want = golden.ids(&format!("episode{e}.tokens"));
                    let options = GenerateOptions { max_tokens: want.len(), ..Default::default() };
                    let shape = Shape::chain(7).unwrap();
                    let go = |_| ControlFlow::Continue(());
                    let (out, speculation) =
                        speculative(&mut engine, &mut drafter, &prompt, &shape, &options, go).unwrap();
                    assert_eq!(out.token_ids, want, "{target} {name} {e}");
                    let accepted: Vec<u32> = speculation.steps.iter().map(|s| s.accepted as u32).collect();
                    assert_eq!(accepted, golden.ids(&format!("episode{e}.{name}.accepted")), "{target} {name} {e}");
                    let drafts: Vec<u32> = speculation.steps.iter().flat_map(|s| s.main.clone()).collect();
                    assert_eq!(drafts, golden.ids(&format!("episode{e}.{name}.drafts")), "{target} {name} {e}");
                    compared += 1;
                }
            }
        }
    }
    assert_eq!(compared, 2 * (3 * 2 + 4));
}

#[test]
fn the_binding_follows_the_targets_layers() {
    // 02_kvshare's relatives have other sizes than the drafter; the message holds both.
    let model = model("02_kvshare");
    let message = MtpDrafter::load(&assistant("nano"), &model, MtpOptions::default()).err().unwrap().to_string();
    assert!(message.contains("128") && message.contains("48"), "{message}");
    let nano = common::model("nano");
    let message = MtpDrafter::load(&assistant("10_drafter"), &nano, MtpOptions::default()).err().unwrap().to_string();
    assert!(message.contains("48 here, 128 in the target"), "{message}");
    // Removing a layer moves the sources; drafting goes on, and the output stays that of plain decoding.
    let work = tempfile::tempdir().unwrap();
    let out = work.path().join("smaller");
    let options = bake::drop_layers::DropLayersOptions { layers: vec![2, 3], ..Default::default() };
    bake::drop_layers::run(nano.checkpoint(), &out, &options, &bake::Context::quiet()).unwrap();
    let smaller = Arc::new(Model::load(runtime::checkpoint::Checkpoint::open(&out).unwrap()).unwrap());
    let last = |kind| smaller.config().layers[..4].iter().rposition(|l| l.kind == kind).unwrap();
    assert_eq!((last(LayerKind::Sliding), last(LayerKind::Full)), (2, 3));
    let mut drafter = drafter("nano", &smaller, Convention::Hf, None);
    let mut engine = engine(&smaller, Precision::Native);
    let prompt = golden("nano").ids("gen0.prompt");
    let options = GenerateOptions { max_tokens: 64, ..Default::default() };
    let go = |_| ControlFlow::Continue(());
    let plain = greedy(&mut engine, &prompt, &options, go).unwrap();
    let shape = Shape::chain(7).unwrap();
    let (out, speculation) = speculative(&mut engine, &mut drafter, &prompt, &shape, &options, go).unwrap();
    assert_eq!(out.token_ids, plain.token_ids);
    assert!(speculation.tokens_per_step().unwrap() > 1.5);
    assert!(!speculation.looks_mismatched());
}

#[test]
fn wrong_numbers_of_centroids_are_refused() {
    let nano = model("nano");
    let load = |centroids| MtpDrafter::load(&assistant("nano"), &nano, MtpOptions { centroids, ..Default::default() });
    assert_eq!(load(None).unwrap().centroids(), Some(8));
    assert_eq!(load(Some(64)).unwrap().centroids(), Some(64));
    assert!(load(Some(65)).err().unwrap().to_string().contains("at most 64"));
}

/// Prompt look-up: no weights, the same output.
#[test]
fn ngram_drafts_are_exact_too() {
    let model = model("nano");
    let mut engine = engine(&model, Precision::Native);
    let golden = golden("nano");
    let mut accepted = 0;
    for g in 0..8 {
        let (prompt, want) = (golden.ids(&format!("gen{g}.prompt")), golden.ids(&format!("gen{g}.tokens")));
        let options = GenerateOptions { max_tokens: want.len(), ..Default::default() };
        let go = |_| ControlFlow::Continue(());
        let shape = Shape::chain(4).unwrap();
        let (out, speculation) = speculative(&mut engine, &mut NgramDrafter, &prompt, &shape, &options, go).unwrap();
        assert_eq!(out.token_ids, want, "gen{g}");
        accepted += speculation.steps.iter().map(|s| s.accepted).sum::<usize>();
    }
    assert!(accepted > 50, "{accepted}");
}
