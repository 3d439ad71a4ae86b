//! Pruned heads: which rows, from where, and what the side file says.

mod common;

use std::path::Path;

use bake::prune_vocab::{self, PruneVocabOptions};
use bake::quantize::{self, QuantizeOptions};
use bake::{Error, inspect, keepset};
use common::*;
use runtime::checkpoint::Keepset;
use safetensors::Dtype;
use serde_json::json;

fn prune(from: &Path, out: &Path, ids: &[u32]) -> bake::Result<bake::Report> {
    let parent = open(from);
    let keep = Keepset { ids: ids.to_vec(), full_vocab: parent.config().vocab_size };
    prune_vocab::run(&parent, out, &keep, &PruneVocabOptions { origin: "test".into(), ..Default::default() }, &quiet())
}

fn rows(content: &Content, rows: &[usize]) -> Vec<u8> {
    let width = content.2.len() / content.1[0];
    rows.iter().flat_map(|r| content.2[r * width..(r + 1) * width].to_vec()).collect()
}

fn strict(dir: &Path) -> Vec<String> {
    let options = inspect::InspectOptions { strict: true, against: None };
    inspect::run(&open(dir), &options, &quiet()).unwrap().problems
}

#[test]
fn a_tied_head_becomes_rows_of_the_embedding() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    let ids = [0, 1, 2, 3, 4, 100, 101, 511, 7];
    prune(&oracle("02_kvshare"), &out, &ids).unwrap();
    let (before, after) = (tensors_of(&oracle("02_kvshare")), tensors_of(&out));
    let head = &after["lm_head.weight"];
    assert_eq!((head.0, &head.1), (Dtype::BF16, &vec![9, 48]));
    assert_eq!(head.2, rows(&before[&format!("{LM}embed_tokens.weight")], &ids.map(|i| i as usize)));
    let mut rest = after.clone();
    rest.remove("lm_head.weight");
    assert_same(&rest, &before);
    let config = json(&out.join("config.json"));
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!(config["text_config"]["tie_word_embeddings"], false);
    assert_eq!(config["text_config"]["vocab_size"], 512);
    assert_eq!(json(&out.join("pck04_keepset.json")), json!({"keep_ids": ids, "full_vocab": 512}));
    assert_eq!(open(&out).keepset().unwrap().ids, ids);
    assert_eq!(strict(&out), [""; 0]);
}

/// The oracle's packed head has one scale a row: pruning 08_int4 selects rows of all parts.
#[test]
fn a_packed_head_is_selected_in_all_its_parts() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    prune(&oracle("08_int4"), &out, &[0, 5, 6, 500]).unwrap();
    let (before, after) = (tensors_of(&oracle("08_int4")), tensors_of(&out));
    for part in ["weight_packed", "weight_scale"] {
        let name = format!("lm_head.{part}");
        assert_eq!(after[&name].1[0], 4);
        assert_eq!(after[&name].2, rows(&before[&name], &[0, 5, 6, 500]), "{part}");
    }
    let shape = [4i64, 64].map(i64::to_le_bytes).concat();
    assert_eq!(after["lm_head.weight_shape"].2, shape);
    assert_eq!(strict(&out), [""; 0]);
}

/// With one scale a row, which rows are left does not change what a row becomes.
#[test]
fn pruning_and_quantising_commute_for_one_scale_a_row() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let options = QuantizeOptions { strategy: bake::Strategy::Group(16), ..Default::default() };
    let keep = Keepset::read(&oracle("09_pruned_head").join("pck04_keepset.json")).unwrap();
    // Untied and whole first, so that both ways quantise a head.
    let all: Vec<u32> = (0..512).collect();
    prune(&oracle("02_kvshare"), &path("untied"), &all).unwrap();
    prune(&path("untied"), &path("p"), &keep.ids).unwrap();
    quantize::run(&open(&path("p")), &path("pq"), &options, &quiet()).unwrap();
    quantize::run(&open(&path("untied")), &path("q"), &options, &quiet()).unwrap();
    prune(&path("q"), &path("qp"), &keep.ids).unwrap();
    assert_same(&tensors_of(&path("pq")), &tensors_of(&path("qp")));
    assert_eq!(open(&path("pq")).config_json(), open(&path("qp")).config_json());
    assert_eq!(open(&path("pq")).keepset(), open(&path("qp")).keepset());
}

#[test]
fn a_pruned_head_is_pruned_again_by_token_not_by_row() {
    let tmp = tempfile::tempdir().unwrap();
    let (first, second) = (tmp.path().join("first"), tmp.path().join("second"));
    prune(&oracle("02_kvshare"), &first, &[9, 20, 30, 40]).unwrap();
    prune(&first, &second, &[30, 9]).unwrap();
    let embed = &tensors_of(&oracle("02_kvshare"))[&format!("{LM}embed_tokens.weight")];
    assert_eq!(tensors_of(&second)["lm_head.weight"].2, rows(embed, &[30, 9]));
    let error = prune(&first, &tmp.path().join("third"), &[9, 10]).unwrap_err().to_string();
    assert!(error.contains("token 10 is not among the 4"), "{error}");
}

#[test]
fn a_dense_head_under_a_packed_body_is_ignored_by_name() {
    let tmp = tempfile::tempdir().unwrap();
    let (q, out) = (tmp.path().join("q"), tmp.path().join("out"));
    quantize::run(&open(&nano()), &q, &QuantizeOptions::default(), &quiet()).unwrap();
    // Some programs leave a tied head out of the list, since there is no such tensor.
    let unlisted = damaged(&q, &tmp.path().join("unlisted"), |_, c| c["quantization_config"]["ignore"] = json!([]));
    for (parent, name) in [(q, "a"), (unlisted, "b")] {
        let out = out.with_file_name(name);
        prune(&parent, &out, &[0, 1, 2, 6]).unwrap();
        assert_eq!(json(&out.join("config.json"))["quantization_config"]["ignore"], json!(["lm_head"]));
        assert_eq!(strict(&out), [""; 0]);
    }
}

#[test]
fn keepsets_that_do_not_fit_are_refused() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = open(&oracle("02_kvshare"));
    for (ids, full_vocab, want) in [
        (vec![], 512, "no token"),
        (vec![512], 512, "not below"),
        (vec![3, 3], 512, "twice"),
        (vec![3], 2048, "made for 2048 tokens, the model has 512"),
    ] {
        let keep = Keepset { ids, full_vocab };
        let out = tmp.path().join("out");
        let error = prune_vocab::run(&parent, &out, &keep, &PruneVocabOptions::default(), &quiet()).unwrap_err();
        assert!(matches!(error, Error::Keepset { .. }));
        assert!(error.to_string().contains(want), "{error}");
    }
    assert!(names_in(tmp.path()).is_empty());
}

#[test]
fn a_keepset_from_generated_tokens_covers_them() {
    let generated = [5, 5, 6, 7, 7, 7, 1];
    let counts = keepset::count(generated, 512).unwrap();
    let keep = keepset::build(&counts, 2, &[0, 1, 2]).unwrap();
    assert_eq!(keep.ids, [0, 1, 2, 5, 7]);
    assert_eq!(keepset::coverage(&keep, generated).missing, [(6, 1)]);
}
