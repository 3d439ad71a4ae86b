//! What differs between two checkpoints, and by how much.

mod common;

use std::path::Path;

use bake::Strategy;
use bake::diff::{self, Change, Difference, TensorDifference};
use bake::drop_layers::{self, DropLayersOptions};
use bake::prune_vocab::{self, PruneVocabOptions};
use bake::quantize::{self, QuantizeOptions};
use common::*;
use runtime::checkpoint::Keepset;
use serde_json::json;

fn compare(a: &Path, b: &Path) -> Difference {
    diff::run(&open(a), &open(b), &quiet()).unwrap()
}

#[track_caller]
fn find<'a>(d: &'a Difference, name: &str) -> &'a TensorDifference {
    d.tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name} in {d}"))
}

#[test]
fn a_checkpoint_does_not_differ_from_itself() {
    for variant in ["02_kvshare", "09b_int4_pruned_head", "11_e4b_like_sharded"] {
        let d = compare(&oracle(variant), &oracle(variant));
        assert!(d.is_empty() && d.equal > 0, "{d}");
    }
}

#[test]
fn every_kind_of_difference_is_named_and_measured() {
    let tmp = tempfile::tempdir().unwrap();
    let up = format!("{LM}layers.1.mlp.up_proj");
    let changed = damaged(&oracle("02_kvshare"), &tmp.path().join("b"), |t, c| {
        let bytes = &mut t.get_mut(&format!("{up}.weight")).unwrap().2;
        let old = half::bf16::from_le_bytes([bytes[4], bytes[5]]).to_f32();
        bytes[4..6].copy_from_slice(&bf16(&[old + 2.0]));
        t.remove(&format!("{LM}layers.2.layer_scalar"));
        t.insert("extra.weight".into(), (safetensors::Dtype::I64, vec![1], vec![0; 8]));
        let norm = t.get_mut(&format!("{LM}norm.weight")).unwrap();
        norm.1 = vec![norm.1[0] / 2, 2];
        c["text_config"]["rms_norm_eps"] = json!(1e-5);
        c["note"] = json!("x");
    });
    let d = compare(&oracle("02_kvshare"), &changed);
    let all = tensors_of(&changed);
    assert_eq!(d.equal, all.len() - 3);
    assert_eq!(d.tensors.len(), 4);
    let e = find(&d, &up).error.unwrap();
    assert_eq!((find(&d, &up).change, e.differing, e.elements), (Change::Values, 1, 48 * 48));
    assert!((e.max_abs - 2.0).abs() < 0.02 && e.relative_rms > 0.0, "{e:?}");
    let sum: f64 = {
        let before = tensors_of(&oracle("02_kvshare"));
        let bytes = &before[&format!("{up}.weight")].2;
        bytes.as_chunks::<2>().0.iter().map(|b| f64::from(half::bf16::from_le_bytes(*b).to_f32()).powi(2)).sum()
    };
    assert!((e.relative_rms - e.max_abs / sum.sqrt()).abs() < 1e-12);
    assert_eq!(find(&d, &format!("{LM}layers.2.layer_scalar")).change, Change::Removed);
    assert_eq!(find(&d, "extra.weight").change, Change::Added);
    assert_eq!(find(&d, &format!("{LM}norm.weight")).change, Change::Shape);
    let fields: Vec<&str> = d.config.iter().map(|c| c.field.as_str()).collect();
    assert_eq!(fields, ["text_config.rms_norm_eps", "note"]);
    let text = d.to_string();
    for want in
        ["1 with other values", "1 of another shape", "1 only in a", "config.json text_config.rms_norm_eps: 1e-6 -> "]
    {
        assert!(text.contains(want), "{want} in\n{text}");
    }
}

/// Rounding to nearest moves a weight by at most half a scale, and a packed linear is one entry.
#[test]
fn a_packed_checkpoint_is_compared_by_its_weights() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("q");
    let options = QuantizeOptions { strategy: Strategy::Group(32), ..Default::default() };
    quantize::run(&open(&nano()), &out, &options, &quiet()).unwrap();
    let d = compare(&nano(), &out);
    assert!(d.tensors.iter().all(|t| t.change == Change::Type), "{d}");
    let linears = tensors_of(&out).keys().filter(|n| n.ends_with("weight_packed")).count();
    assert_eq!(d.tensors.len(), linears);
    for t in &d.tensors {
        let e = t.error.unwrap();
        assert!(e.relative_rms > 0.02 && e.relative_rms < 0.2, "{}: {e:?}", t.name);
    }
    let fields: Vec<&str> = d.config.iter().map(|c| c.field.as_str()).collect();
    assert_eq!(fields, ["quantization_config"]);
    // And the other way round.
    assert_eq!(compare(&out, &nano()).tensors.len(), linears);
}

#[test]
fn layers_are_compared_with_what_they_were() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let drop = |from: &Path, to: &Path, layers: &[usize], strip_inert_kv| {
        let options = DropLayersOptions { layers: layers.to_vec(), strip_inert_kv, ..Default::default() };
        drop_layers::run(&open(from), to, &options, &quiet()).unwrap();
    };
    drop(&oracle("02_kvshare"), &path("one"), &[0], false);
    // Layer 2 of that is layer 3 of the first.
    drop(&path("one"), &path("two"), &[2], true);
    let d = compare(&oracle("02_kvshare"), &path("two"));
    assert_eq!(d.seen_through, ["without layers [0]", "without layers [2]"]);
    assert!(d.config.is_empty(), "{d}");
    assert!(d.tensors.iter().all(|t| t.change == Change::Removed && t.name.contains("self_attn.")), "{d}");
    assert_eq!(d.tensors.len(), 9, "inert keys and values of three layers");
    // Without a lineage, names are all there is.
    std::fs::remove_file(path("two").join("lineage.json")).unwrap();
    assert!(!compare(&oracle("02_kvshare"), &path("two")).config.is_empty());
}

#[test]
fn pruned_rows_are_compared_with_the_same_tokens() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("p");
    let keep = Keepset { ids: vec![5, 1, 300], full_vocab: 512 };
    prune_vocab::run(&open(&oracle("02_kvshare")), &out, &keep, &PruneVocabOptions::default(), &quiet()).unwrap();
    let d = compare(&oracle("02_kvshare"), &out);
    assert_eq!(d.seen_through, ["with the 3 head rows of the second"]);
    assert!(d.tensors.is_empty() && d.config.is_empty() && !d.is_empty(), "{d}");
}
