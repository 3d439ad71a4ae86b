//! The report, and that it finds what went wrong in real bakes.

mod common;

use std::path::Path;

use bake::drop_layers::{self, DropLayersOptions};
use bake::inspect::{self, InspectOptions, Inspection};
use bake::quantize::{self, QuantizeOptions};
use common::*;
use runtime::checkpoint::Checkpoint;
use serde_json::json;

#[test]
fn layers_of_one_kind_share_a_line_of_the_table() {
    let text = report(&oracle("02_kvshare"), false).to_string();
    let line = |what: &str| text.lines().find(|l| l.contains(what)).unwrap_or_else(|| panic!("{what} in\n{text}"));
    assert!(line("layers.*.mlp.up_proj.weight").ends_with("8 x: 0-7"), "{text}");
    assert!(line("embed_tokens.weight").contains("[512, 48]"), "{text}");
    // Two head sizes make two kinds.
    let text = report(&oracle("04_global_head_dim"), false).to_string();
    assert_eq!(text.lines().filter(|l| l.contains("layers.*.self_attn.q_proj.weight")).count(), 2, "{text}");
}

fn report(dir: &Path, strict: bool) -> Inspection {
    inspect::run(&open(dir), &InspectOptions { strict, against: None }, &quiet()).unwrap()
}

fn against(dir: &Path, parent: &Path) -> Vec<String> {
    let parent = open(parent);
    let options = InspectOptions { strict: true, against: Some(&parent) };
    inspect::run(&open(dir), &options, &quiet()).unwrap().problems
}

#[track_caller]
fn has(problems: &[String], want: &str) {
    assert!(problems.iter().any(|p| p.contains(want)), "no `{want}` in {problems:#?}");
}

#[test]
fn every_good_checkpoint_is_without_problems() {
    for variant in [
        "01_plain_bf16",
        "01_plain_fp32",
        "02_kvshare",
        "04_global_head_dim",
        "06_layer_scalar_double_wide",
        "07a_drop_early",
        "07b_drop_kv_source",
        "07d_drop_many_sharded",
        "08_int4",
        "09_pruned_head",
        "09b_int4_pruned_head",
        "10_drafter/target",
        "11_e4b_like_fp32",
        "11_e4b_like_sharded",
    ] {
        let r = report(&oracle(variant), true);
        assert_eq!(r.problems, [""; 0], "{variant}");
        assert_eq!(r.components.total(), r.tensors.iter().map(|t| t.bytes).sum::<u64>(), "{variant}");
    }
    assert_eq!(report(&nano(), true).problems, [""; 0]);
}

#[test]
fn json_keys_are_stable() {
    let value = serde_json::to_value(report(&oracle("09b_int4_pruned_head"), false)).unwrap();
    let keys = |v: &serde_json::Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(
        keys(&value),
        [
            "name",
            "layers",
            "kv_shared",
            "sources",
            "head_rows",
            "components",
            "bytes_per_step",
            "quantization",
            "baked_by",
            "chiku_only",
            "strict",
            "problems",
            "tensors"
        ]
    );
    assert_eq!(
        keys(&value["components"]),
        ["embed", "ple_embed", "body", "ple_linears", "head", "norms", "towers", "inert_kv", "shapes"]
    );
    assert_eq!(value["layers"], 5);
    assert_eq!(value["sources"], json!({"full_attention": 2, "sliding_attention": 1}));
    assert_eq!(value["head_rows"], 136);
    assert_eq!(keys(&value["tensors"][0]), ["name", "dtype", "shape", "bytes", "file"]);
}

/// By hand: 02_kvshare is ssfsf|ssf, hidden 48, 4 heads of 16 over 2, MLP 48, PLE 8, vocabulary 512, bf16.
#[test]
fn bytes_are_those_of_the_shapes() {
    let r = report(&oracle("02_kvshare"), false);
    let (h, q, kv, inner, p, v) = (48, 64, 32, 48, 8, 512);
    let (own, shared) = (2 * h * (2 * q + 2 * kv + 3 * inner), 2 * h * (2 * q + 3 * inner));
    assert_eq!(r.components.body, 5 * own + 3 * shared);
    assert_eq!(r.components.inert_kv, 3 * (2 * h * 2 * kv + 2 * 16));
    assert_eq!(r.components.ple_linears, 8 * 2 * (2 * p * h) + 2 * 8 * p * h);
    assert_eq!((r.components.embed, r.components.ple_embed), (2 * v * h, 2 * v * 8 * p));
    assert_eq!((r.components.head, r.components.towers), (0, 0));
    let s = r.bytes_per_step;
    assert_eq!((s.body, s.head, s.embed_row, s.ple_row), (r.components.body, 2 * v * h, 2 * h, 2 * 8 * p));
    assert_eq!(s.total, s.body + s.ple_linears + s.head + s.norms + s.embed_row + s.ple_row);
    assert_eq!(r.sources, [("full_attention".to_string(), 4), ("sliding_attention".to_string(), 3)].into());
}

#[test]
fn the_text_names_what_matters() {
    let r = report(&oracle("09b_int4_pruned_head"), true);
    let text = r.to_string();
    for want in ["head rows     136", "int4 group 32: Linear", "int4 channel: re:.*lm_head$", "no problems found"] {
        assert!(text.contains(want), "{want} in\n{text}");
    }
    assert_eq!(r.table().lines().count(), r.tensors.len());
    assert!(r.table().contains("lm_head.weight_packed"));
}

fn dropped(from: &Path, out: &Path, layers: &[usize], strip_inert_kv: bool) {
    let options = DropLayersOptions { layers: layers.to_vec(), strip_inert_kv, ..Default::default() };
    drop_layers::run(&open(from), out, &options, &quiet()).unwrap();
}

/// A bake removed shared layers and kept `num_kv_shared_layers`: sources became sharers.
#[test]
fn a_shared_count_that_was_not_adjusted_is_found() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    for (strip, name) in [(false, "kept"), (true, "stripped")] {
        let good = path(&format!("{name}-good"));
        dropped(&oracle("02_kvshare"), &good, &[5], strip);
        assert_eq!(against(&good, &oracle("02_kvshare")), [""; 0]);
        let bad = damaged(&good, &path(name), |_, config| config["text_config"]["num_kv_shared_layers"] = json!(3));
        let problems = against(&bad, &oracle("02_kvshare"));
        has(&problems, "num_kv_shared_layers is 3, but 2 layers of the shared region survived");
        has(&problems, "layers [4] had keys and values of their own");
        // Without the parent: the one layer that still has keys gives it away, or where the shared region begins.
        let alone = report(&bad, true).problems;
        match strip {
            true => has(&alone, "KV-shared layers [4] hold keys and values"),
            false => has(&alone, "layer 3, the last one with keys and values of its own, has sliding attention"),
        }
    }
}

/// The same through a lower layer: the count must stay, and did not.
#[test]
fn a_shared_count_that_was_lowered_is_found() {
    let tmp = tempfile::tempdir().unwrap();
    let bad = damaged(&oracle("07a_drop_early"), &tmp.path().join("bad"), |_, config| {
        config["text_config"]["num_kv_shared_layers"] = json!(2);
    });
    has(&report(&bad, true).problems, "layers.4.self_attn.k_proj` is missing");
    has(&against(&bad, &oracle("02_kvshare")), "num_kv_shared_layers is 2, but 3");
}

/// The lineage says what the bake wrote, so an edit is found without the parent, also where shapes allow it.
#[test]
fn an_edited_configuration_is_found() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    // Without its full source layer the region begins after a sliding one, which is right here.
    dropped(&oracle("02_kvshare"), &out, &[4], false);
    assert_eq!(report(&out, true).problems, [""; 0]);
    let mut config = json(&out.join("config.json"));
    config["text_config"]["num_kv_shared_layers"] = json!(2);
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    has(&report(&out, true).problems, "num_kv_shared_layers is 2, but the bake wrote 3: config.json was edited");
}

#[test]
fn an_unsliced_projection_is_found() {
    let tmp = tempfile::tempdir().unwrap();
    let name = format!("{LM}per_layer_model_projection.weight");
    let whole = tensors_of(&oracle("02_kvshare"))[&name].clone();
    let bad = damaged(&oracle("07b_drop_kv_source"), &tmp.path().join("bad"), |tensors, _| {
        tensors.insert(name.clone(), whole);
    });
    has(
        &report(&bad, true).problems,
        "per_layer_model_projection.weight` is BF16 [64, 48], expected [56, 48]; it has one block",
    );
}

#[test]
fn a_sliding_last_layer_does_not_open() {
    let tmp = tempfile::tempdir().unwrap();
    let bad = damaged(&oracle("02_kvshare"), &tmp.path().join("bad"), |_, config| {
        config["text_config"]["layer_types"][7] = json!("sliding_attention");
    });
    let error = Checkpoint::open(&bad).err().unwrap().to_string();
    assert!(error.contains("layer_types[7]") && error.contains("full_attention"), "{error}");
}

#[test]
fn damage_is_named() {
    let tmp = tempfile::tempdir().unwrap();
    let mut n = 0;
    let mut problems = |from: &str, change: &dyn Fn(&mut Tensors, &mut serde_json::Value)| {
        n += 1;
        report(&damaged(&oracle(from), &tmp.path().join(n.to_string()), change), true).problems
    };
    let up = format!("{LM}layers.1.mlp.up_proj");
    let nan = problems("02_kvshare", &|t, _| {
        t.get_mut(&format!("{up}.weight")).unwrap().2[6..8].copy_from_slice(&bf16(&[f32::NAN]));
    });
    assert_eq!(nan, [format!("model.safetensors: `{up}.weight`: element 3 is NaN")]);
    has(&problems("08_int4", &|t, _| drop(t.remove(&format!("{up}.weight_scale")))), "missing or incomplete");
    has(
        &problems("08_int4", &|t, _| t.get_mut(&format!("{up}.weight_shape")).unwrap().2[0] = 95),
        "weight_shape` says [95, 64], expected [96, 64]",
    );
    has(
        &problems("08_int4", &|_, c| c["quantization_config"]["ignore"] = json!([up])),
        "is packed, but the ignore list of quantization_config names the module",
    );
    has(
        &problems("08_int4", &|t, _| {
            let dense = (safetensors::Dtype::BF16, vec![96, 64], vec![0; 96 * 64 * 2]);
            t.retain(|name, _| !name.starts_with(&up));
            t.insert(format!("{up}.weight"), dense);
        }),
        "is dense, but not in the ignore list",
    );
    has(
        &problems("09_pruned_head", &|t, _| {
            let head = t.get_mut("lm_head.weight").unwrap();
            head.1[0] -= 1;
            head.2.truncate(head.1[0] * head.1[1] * 2);
        }),
        "`lm_head.weight` is BF16 [199, 48], expected [200, 48]",
    );
    has(
        &problems("02_kvshare", &|t, _| {
            let extra = t[&format!("{up}.weight")].clone();
            t.insert(format!("{LM}layers.8.mlp.up_proj.weight"), extra);
        }),
        "1 tensors of layer 8, but num_hidden_layers is 8",
    );
    has(
        &problems("08_int4", &|_, c| drop(c.as_object_mut().unwrap().remove("quantization_config"))),
        "are packed, but config.json has no quantization_config",
    );
}

#[test]
fn a_bake_is_named_and_its_bits_counted() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    quantize::run(&open(&nano()), &out, &QuantizeOptions::default(), &quiet()).unwrap();
    let r = report(&out, true);
    assert_eq!(r.problems, [""; 0]);
    assert_eq!(r.baked_by.as_deref(), Some(concat!("chiku ", env!("CARGO_PKG_VERSION"), " quantize")));
    let q = r.quantization.unwrap();
    assert!((4.0..4.2).contains(&q.bits_per_weight), "{}", q.bits_per_weight);
    assert_eq!(q.dense, 0);
}
