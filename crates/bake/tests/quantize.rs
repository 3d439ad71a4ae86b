//! Quantisation against the compressed-tensors library and the oracle.

mod common;

use std::path::Path;

use bake::quant::{self, Arithmetic, Bits};
use bake::quantize::{self, QuantizeOptions};
use bake::{Error, Strategy};
use common::*;
use half::bf16;
use safetensors::Dtype;
use serde_json::json;

fn run(from: &Path, out: &Path, strategy: Strategy) -> bake::Result<bake::Report> {
    quantize::run(&open(from), out, &QuantizeOptions { strategy, ..Default::default() }, &quiet())
}

fn floats((dtype, _, bytes): &Content) -> Vec<f32> {
    match dtype {
        Dtype::BF16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    }
}

/// Ties, clamping, zero groups, tiny and huge values: the library's words and scales, bit for bit.
#[test]
fn edge_rows_equal_the_library() {
    let all = fixture("edge_rows.safetensors");
    for (kind, arithmetic) in [("bf16", Arithmetic::Bf16), ("f32", Arithmetic::F32)] {
        let weights = floats(&all[&format!("{kind}.weight")]);
        let inputs = 128;
        for (strategy, group) in [("group32", 32), ("channel", inputs)] {
            let packed = &all[&format!("{kind}.{strategy}.packed")].2;
            let scales = &all[&format!("{kind}.{strategy}.scale")].2;
            let (mut nibbles, mut words) = (vec![0; inputs], vec![0; inputs / 8]);
            let mut row_scales = vec![bf16::ZERO; inputs / group];
            for (r, row) in weights.chunks(inputs).enumerate() {
                quant::quantise_row(row, group, Bits::Four, arithmetic, &mut nibbles, &mut row_scales).unwrap();
                quant::pack_row(&nibbles, Bits::Four, &mut words);
                let got: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                let got_scales: Vec<u8> = row_scales.iter().flat_map(|s| s.to_le_bytes()).collect();
                let (w, s) = (got.len(), got_scales.len());
                assert_eq!(got_scales, scales[r * s..(r + 1) * s], "{kind} {strategy} row {r}: scales");
                assert_eq!(got, packed[r * w..(r + 1) * w], "{kind} {strategy} row {r}: words");
            }
        }
    }
}

/// The oracle's 08_int4 comes out of the bf16 weights that it was made from, byte for byte, configuration included.
#[test]
fn the_oracles_int4_variant_comes_out() {
    let tmp = tempfile::tempdir().unwrap();
    let want = open(&oracle("08_int4"));
    let parent = damaged(&oracle("08_int4"), &tmp.path().join("parent"), |tensors, config| {
        tensors.retain(|name, _| !name.contains(".weight_"));
        tensors.extend(fixture("08_linears_bf16.safetensors"));
        config.as_object_mut().unwrap().remove("quantization_config");
    });
    let out = tmp.path().join("out");
    let report = run(&parent, &out, Strategy::Group(32)).unwrap();
    assert!(report.lineage.notes.is_empty(), "{:?}", report.lineage.notes);
    let got = open(&out);
    assert_same(&tensors(&got), &tensors(&want));
    let mut config = got.config_json().clone();
    config["quantization_config"]["version"] = want.config_json()["quantization_config"]["version"].clone();
    assert_eq!(&config, want.config_json());
}

/// Nano's MLP is 192 wide, its per-layer projection 16: groups of 128 do not divide them.
#[test]
fn widths_that_the_group_does_not_divide_get_a_channel() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    let report = run(&nano(), &out, Strategy::Group(128)).unwrap();
    let got = open(&out);
    let tensors = tensors(&got);
    for (module, groups) in
        [("mlp.down_proj", 1), ("per_layer_projection", 1), ("mlp.up_proj", 1), ("self_attn.o_proj", 2)]
    {
        assert_eq!(tensors[&format!("{LM}layers.5.{module}.weight_scale")].1[1], groups, "{module}");
    }
    let channel = &got.config_json()["quantization_config"]["config_groups"]["group_0_channel"];
    let targets = ["re:.*layers\\.\\d+\\.mlp\\.down_proj$", "re:.*layers\\.\\d+\\.per_layer_projection$"];
    assert_eq!(channel["targets"], json!(targets));
    assert_eq!(channel["weights"]["strategy"], "channel");
    assert_eq!(report.lineage.notes.len(), 24, "down_proj and per_layer_projection of twelve layers");
    assert!(report.lineage.notes[0].contains("model.language_model.layers.0.mlp.down_proj: "));
    let schemes = &got.config().quantization.as_ref().unwrap().schemes;
    assert_eq!(schemes.len(), 2);
    assert_eq!(got.config_json()["quantization_config"]["ignore"], json!(["lm_head"]));
    for table in ["embed_tokens.weight", "embed_tokens_per_layer.weight"] {
        assert_eq!(tensors[&format!("{LM}{table}")].0, Dtype::BF16);
    }
}

#[test]
fn towers_are_ignored_by_name_and_copied() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    run(&oracle("11_e4b_like_sharded"), &out, Strategy::Group(16)).unwrap();
    let ignore = json(&out.join("config.json"))["quantization_config"]["ignore"].clone();
    let ignore: Vec<&str> = ignore.as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
    assert_eq!(ignore.len(), 6, "{ignore:?}");
    assert!(
        ignore.contains(&"model.vision_tower.encoder.layers.0.self_attn.q_proj.linear") && ignore.contains(&"lm_head")
    );
    let (before, after) = (tensors_of(&oracle("11_e4b_like_sharded")), tensors_of(&out));
    for (name, content) in before.iter().filter(|(n, _)| n.contains("tower") || n.contains("norm")) {
        assert_eq!(&after[name], content, "{name}");
    }
    assert_eq!(names_in(&out).iter().filter(|n| n.contains("safetensors")).count(), 1, "one file for three shards");
}

#[test]
fn f32_parents_are_quantised_in_f32() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    run(&oracle("11_e4b_like_fp32"), &out, Strategy::Channel).unwrap();
    let (before, after) = (tensors_of(&oracle("11_e4b_like_fp32")), tensors_of(&out));
    let name = format!("{LM}layers.0.self_attn.q_proj.weight");
    let row = &floats(&before[&name])[..48];
    let (mut n, mut s) = (vec![0; 48], [bf16::ZERO]);
    quant::quantise_row(row, 48, Bits::Four, Arithmetic::F32, &mut n, &mut s).unwrap();
    assert_eq!(after[&format!("{name}_scale")].2[..2], s[0].to_le_bytes());
    assert!(open(&out).config_json()["quantization_config"]["config_groups"].get("group_0_channel").is_none());
}

#[test]
fn packed_input_is_refused() {
    let tmp = tempfile::tempdir().unwrap();
    let error = run(&oracle("08_int4"), &tmp.path().join("out"), Strategy::Channel).unwrap_err();
    assert!(matches!(&error, Error::AlreadyQuantised { tensor, .. } if tensor.contains(".weight_")), "{error}");
    assert!(names_in(tmp.path()).is_empty());
}

#[test]
fn damaged_weights_are_refused_with_their_place() {
    let tmp = tempfile::tempdir().unwrap();
    let name = format!("{LM}layers.2.mlp.gate_proj.weight");
    for bad in [f32::NAN, f32::NEG_INFINITY] {
        let parent = damaged(&oracle("02_kvshare"), &tmp.path().join("parent"), |tensors, _| {
            tensors.get_mut(&name).unwrap().2[2 * 77..2 * 78].copy_from_slice(&bf16(&[bad]));
        });
        let error = run(&parent, &tmp.path().join("out"), Strategy::Channel).unwrap_err();
        let Error::NonFinite { path, tensor, index, value } = &error else { panic!("{error}") };
        assert_eq!((tensor, *index), (&name, 77));
        assert_eq!(path.file_name().unwrap(), "model.safetensors");
        assert_eq!(value.to_bits() & 0x7f80_0000, 0x7f80_0000);
        assert_eq!(names_in(tmp.path()), ["parent"], "nothing is left");
    }
}

#[test]
fn odd_options_are_refused() {
    let tmp = tempfile::tempdir().unwrap();
    for size in [0, 12, 8192] {
        let error = run(&nano(), &tmp.path().join("out"), Strategy::Group(size)).unwrap_err();
        assert!(matches!(error, Error::Option { option: "group", .. }), "{error}");
    }
}
