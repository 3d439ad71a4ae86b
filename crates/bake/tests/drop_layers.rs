//! Layer removal against the oracle's variants 07a to 07d, which a different program cut from the same parent.

mod common;

use std::path::Path;

use bake::drop_layers::{self, DropLayersOptions};
use bake::quantize::{self, QuantizeOptions};
use bake::{Error, Strategy, check, inspect};
use common::*;
use runtime::config::{LayerKind, Rule};
use serde_json::json;

fn options(layers: &[usize], strip_inert_kv: bool) -> DropLayersOptions {
    DropLayersOptions { layers: layers.to_vec(), strip_inert_kv, ..Default::default() }
}

fn drop(from: &Path, out: &Path, layers: &[usize], strip: bool) -> bake::Result<bake::Report> {
    drop_layers::run(&open(from), out, &options(layers, strip), &quiet())
}

#[test]
fn the_oracles_variants_come_out() {
    let tmp = tempfile::tempdir().unwrap();
    for (variant, layers, strip) in [
        ("07a_drop_early", &[1][..], true),
        ("07b_drop_kv_source", &[3], false),
        ("07c_drop_shared", &[5], false),
        ("07d_drop_many_sharded", &[6, 0, 3], false),
    ] {
        let out = tmp.path().join(variant);
        drop(&oracle("02_kvshare"), &out, layers, strip).unwrap();
        let (got, want) = (open(&out), open(&oracle(variant)));
        assert_same(&tensors(&got), &tensors(&want));
        assert_eq!(got.config_json(), want.config_json(), "{variant}");
    }
}

#[test]
fn inert_keys_and_values_are_kept_unless_stripped() {
    let tmp = tempfile::tempdir().unwrap();
    let with = tmp.path().join("with");
    drop(&oracle("02_kvshare"), &with, &[1], false).unwrap();
    let without = tensors_of(&oracle("07a_drop_early"));
    let mut extra = tensors_of(&with);
    extra.retain(|name, _| !without.contains_key(name));
    assert_eq!(extra.len(), 9, "k_proj, v_proj and k_norm of three shared layers");
}

/// Cutting and quantising commute: nothing in a packed tensor depends on its neighbours.
#[test]
fn packed_checkpoints_are_sliced_like_dense_ones() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let quantise = |from: &Path, to: &Path| {
        let options = QuantizeOptions { strategy: Strategy::Group(16), ..Default::default() };
        quantize::run(&open(from), to, &options, &quiet()).unwrap();
    };
    quantise(&oracle("02_kvshare"), &path("q"));
    drop(&path("q"), &path("qd"), &[0, 3, 6], false).unwrap();
    drop(&oracle("02_kvshare"), &path("d"), &[0, 3, 6], false).unwrap();
    quantise(&path("d"), &path("dq"));
    assert_same(&tensors_of(&path("qd")), &tensors_of(&path("dq")));
    assert_eq!(open(&path("qd")).config_json(), open(&path("dq")).config_json());
    let shape = &tensors_of(&path("qd"))[&format!("{LM}per_layer_model_projection.weight_shape")].2;
    assert_eq!(shape[..8], (5i64 * 8).to_le_bytes());
}

#[test]
fn lists_by_layer_are_renumbered_and_towers_are_not() {
    let tmp = tempfile::tempdir().unwrap();
    let tower = "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear";
    let parent = damaged(&oracle("11_e4b_like_fp32"), &tmp.path().join("parent"), |_, config| {
        let text = config["text_config"].as_object_mut().unwrap();
        text.remove("global_head_dim");
        text.insert(
            "per_layer_config".into(),
            json!({"2": {"head_dim": 32}, "4": {"head_dim": 32}, "6": {"head_dim": 32}}),
        );
    });
    let out = tmp.path().join("out");
    drop(&parent, &out, &[0, 4], false).unwrap();
    let config = json(&out.join("config.json"));
    assert_eq!(config["text_config"]["per_layer_config"], json!({"1": {"head_dim": 32}, "4": {"head_dim": 32}}));
    let (before, after) = (tensors_of(&parent), tensors_of(&out));
    let name = format!("{tower}.weight");
    assert_eq!(before[&name], after[&name]);
}

#[test]
fn illegal_removals_say_why() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    // ssfsf|ssf: sliding 0 1 3, full 2 4, shared 5 6 7.
    for (layers, want) in [
        (&[8][..], "there is no layer 8; the model has layers 0 to 7"),
        (&[0, 1, 2, 3, 4, 5, 6, 7], "all 8"),
        (&[7], "layer 6 would be the last one, and it has sliding attention"),
        (&[2, 4], "layer 7 shares the keys and values of a full_attention layer below 5"),
        (&[0, 1, 3], "layer 5 shares the keys and values of a sliding_attention layer below 5"),
        (&[0, 1, 2, 3, 4], "none would be left"),
    ] {
        let error = drop(&oracle("02_kvshare"), &out, layers, false).unwrap_err();
        assert!(matches!(error, Error::Runtime(runtime::Error::Layers { .. })), "{error}");
        assert!(error.to_string().contains(want), "{layers:?}: {error}");
    }
    let none = drop(&oracle("02_kvshare"), &out, &[], false).unwrap_err();
    assert!(none.to_string().contains("expected at least one layer"), "{none}");
    // Legal although a whole kind loses its readers: nothing reads sliding keys any more.
    drop(&oracle("02_kvshare"), &out, &[0, 1, 3, 5, 6], false).unwrap();
    assert!(names_in(tmp.path()) == ["out"]);
}

/// The real model's configuration with these kinds of layers.
fn e4b(kinds: &[&str], shared: usize) -> runtime::config::ModelConfig {
    let config = json!({
        "model_type": "gemma4",
        "tie_word_embeddings": true,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 256,
            "vocab_size": 262_144, "sliding_window": 512, "num_hidden_layers": kinds.len(),
            "num_kv_shared_layers": shared, "layer_types": kinds,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    });
    runtime::config::ModelConfig::from_json(&config, Path::new("config.json")).unwrap()
}

/// The shape of the real model: osoi5's layers, sources and bytes follow from dropping three layers below and two in the
/// shared region.
#[test]
fn osoi5_follows_from_e4b() {
    let kinds: Vec<&str> = (0..42).map(|l| if l % 6 == 5 { "full_attention" } else { "sliding_attention" }).collect();
    let config = e4b(&kinds, 18);
    let keep = config.survivors(&[2, 3, 4, 36, 37]).unwrap();
    let shared = keep.iter().filter(|&&l| l >= config.first_kv_shared()).count();
    assert_eq!(shared, 16);
    assert!(config.survivors(&[41]).is_err());

    let osoi5 = e4b(&keep.iter().map(|&l| kinds[l]).collect::<Vec<_>>(), shared);
    let full: Vec<usize> = (0..37).filter(|&l| osoi5.layers[l].kind == LayerKind::Full).collect();
    assert_eq!(full, [2, 8, 14, 20, 26, 32, 36]);
    assert_eq!((osoi5.layers[22].kv_source, osoi5.layers[36].kv_source), (Some(19), Some(20)));
    let body = check::linears(&osoi5, None).into_iter().filter(|(l, _)| !l.is_ple());
    let bytes: usize = body.map(|(_, [out, inputs])| out * inputs / 2 + out * inputs / 128 * 2).sum();
    assert_eq!(format!("{:.2}", bytes as f64 / 1e6), "1772.05", "as measured from the served file");
}

#[test]
fn a_broken_parent_is_not_passed_on() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = damaged(&oracle("02_kvshare"), &tmp.path().join("parent"), |tensors, _| {
        tensors.remove(&format!("{LM}layers.4.mlp.up_proj.weight"));
    });
    let error = drop(&parent, &tmp.path().join("out"), &[1], false).unwrap_err().to_string();
    assert!(error.contains("layers.3.mlp.up_proj` is missing"), "{error}");
    assert_eq!(names_in(tmp.path()), ["parent"]);
    let strict = inspect::InspectOptions { strict: true, against: None };
    assert_eq!(inspect::run(&open(&parent), &strict, &quiet()).unwrap().problems.len(), 1);
}

#[test]
fn rules_can_be_lifted_by_name() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let run = |layers: &[usize], allow: &[Rule], out: &Path| {
        let options = DropLayersOptions { layers: layers.to_vec(), allow: allow.to_vec(), ..Default::default() };
        drop_layers::run(&open(&oracle("02_kvshare")), out, &options, &quiet())
    };
    // ssfsf|ssf without the last layer.
    assert!(run(&[7], &[Rule::KvSource], &path("no")).unwrap_err().to_string().contains("--allow last-layer"));
    let report = run(&[7], &[Rule::LastLayer], &path("sliding")).unwrap();
    assert!(
        report.lineage.notes.iter().any(|n| n.contains("only this program runs that")),
        "{:?}",
        report.lineage.notes
    );
    let checkpoint = open(&path("sliding"));
    assert_eq!(checkpoint.config_json()["text_config"]["chiku_allow"], json!(["last-layer"]));
    assert_eq!(checkpoint.config().layers.last().unwrap().kind, LayerKind::Sliding);
    let strict = inspect::InspectOptions { strict: true, against: None };
    let r = inspect::run(&checkpoint, &strict, &quiet()).unwrap();
    assert_eq!(r.problems, [""; 0]);
    assert!(r.chiku_only[0].contains("the last layer has sliding attention"), "{:?}", r.chiku_only);
    runtime::Model::load(checkpoint).unwrap();
    // The next removal that ends in a full layer takes the word back.
    let options = DropLayersOptions { layers: vec![5, 6], ..Default::default() };
    drop_layers::run(&open(&path("sliding")), &path("full"), &options, &quiet()).unwrap();
    assert!(open(&path("full")).config_json()["text_config"].get("chiku_allow").is_none());

    // Without layers 2 and 4 nothing is left for layer 7 to read: it has its own keys and values again, and so has all below.
    assert!(run(&[2, 4], &[Rule::LastLayer], &path("no")).unwrap_err().to_string().contains("--allow kv-source"));
    let report = run(&[2, 4], &[Rule::KvSource], &path("revived")).unwrap();
    assert!(
        report.lineage.notes.iter().any(|n| n.contains("layers [5, 6, 7] of the parent now")),
        "{:?}",
        report.lineage.notes
    );
    let revived = open(&path("revived"));
    assert!(revived.config().layers.iter().all(|l| l.kv_source.is_none()));
    assert_eq!(inspect::run(&revived, &strict, &quiet()).unwrap().problems, [""; 0]);
    // Stored keys and values are needed for that.
    let options = DropLayersOptions { layers: vec![1], strip_inert_kv: true, ..Default::default() };
    drop_layers::run(&open(&oracle("02_kvshare")), &path("stripped"), &options, &quiet()).unwrap();
    let options = DropLayersOptions { layers: vec![1, 3], allow: vec![Rule::KvSource], ..Default::default() };
    let error = drop_layers::run(&open(&path("stripped")), &path("no"), &options, &quiet()).unwrap_err().to_string();
    assert!(error.contains("self_attn.k_proj` is missing"), "{error}");
}

/// Whatever an expression over layer numbers says, it means the same modules afterwards.
#[test]
fn expressions_over_layers_keep_their_meaning() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let up = |l: usize| format!("{LM}layers.{l}.mlp.up_proj");
    // Layers 1, 2 and 6 have a dense up_proj, named by expressions of several kinds.
    let parent = |name: &str, ignore: serde_json::Value| {
        let q = path(&format!("{name}-q"));
        let options = QuantizeOptions { strategy: Strategy::Group(16), ..Default::default() };
        quantize::run(&open(&oracle("02_kvshare")), &q, &options, &quiet()).unwrap();
        let dense = tensors_of(&oracle("02_kvshare"));
        damaged(&q, &path(name), |tensors, config| {
            for l in [1, 2, 6] {
                tensors.retain(|n, _| !n.starts_with(&format!("{}.", up(l))));
                let weight = format!("{}.weight", up(l));
                tensors.insert(weight.clone(), dense[&weight].clone());
            }
            config["quantization_config"]["ignore"] = ignore;
        })
    };
    for (n, (ignore, want)) in [
        (json!(["lm_head", "re:.*layers\\.(1|2|6)\\.mlp\\.up"]), json!(["lm_head", up(0), up(4)])),
        (json!(["re:.*layers\\.[126]\\.mlp\\.up_proj$"]), json!([up(0), up(4)])),
        (
            json!(["re:.*layers\\.2\\.mlp\\.up_proj", up(1), "re:.*layers\\.6\\.mlp\\.up_proj$"]),
            json!([up(0), "re:.*layers\\.4\\.mlp\\.up_proj$"]),
        ),
        // Towers and what matches nothing stay.
        (
            json!(["re:.*vision_tower.*", "Embedding", "re:.*layers\\.[126]\\.mlp\\.up_proj$"]),
            json!(["re:.*vision_tower.*", "Embedding", up(0), up(4)]),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let from = parent(&n.to_string(), ignore);
        let strict = inspect::InspectOptions { strict: true, against: None };
        assert_eq!(inspect::run(&open(&from), &strict, &quiet()).unwrap().problems, [""; 0], "case {n}");
        let out = path(&format!("{n}-out"));
        drop(&from, &out, &[0, 2], false).unwrap();
        assert_eq!(open(&out).config_json()["quantization_config"]["ignore"], want, "case {n}");
        assert_eq!(inspect::run(&open(&out), &strict, &quiet()).unwrap().problems, [""; 0], "case {n}");
    }
}

#[test]
fn lists_with_an_entry_a_layer_lose_the_same_entries() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = damaged(&oracle("02_kvshare"), &tmp.path().join("parent"), |_, config| {
        config["text_config"]["sparsity_pattern"] = json!([0, 1, 2, 3, 4, 5, 6, 7]);
        config["text_config"]["other_list"] = json!([0, 1, 2]);
        config["text_config"]["eos_token_ids"] = json!([0, 1, 2, 3, 4, 5, 6, 7]);
    });
    let report = drop(&parent, &tmp.path().join("out"), &[0, 6], false).unwrap();
    let text = json(&tmp.path().join("out/config.json"))["text_config"].clone();
    assert_eq!(text["sparsity_pattern"], json!([1, 2, 3, 4, 5, 7]));
    assert_eq!((&text["other_list"], text["eos_token_ids"].as_array().unwrap().len()), (&json!([0, 1, 2]), 8));
    assert!(report.lineage.notes.iter().any(|n| n.contains("`sparsity_pattern`")), "{:?}", report.lineage.notes);
}
