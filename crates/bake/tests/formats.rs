//! Every width through the whole crate: baked, loaded, inspected, cut.

mod common;

use std::path::Path;

use bake::drop_layers::{self, DropLayersOptions};
use bake::inspect::{self, InspectOptions};
use bake::method::Method;
use bake::precision::PrecisionPlan;
use bake::prune_vocab::{self, PruneVocabOptions};
use bake::quant::{self, Arithmetic, Bits};
use bake::quantize::{self, QuantizeOptions};
use bake::{Error, Strategy};
use common::*;
use half::bf16;
use runtime::Model;
use runtime::checkpoint::Keepset;
use safetensors::Dtype;
use serde_json::json;

/// int8 in the attention, int3 in gate and up, the first layer dense, the rest as the options say.
const PLAN: &str = r#"
[[rule]]
modules = "layers.0.*"
keep = true
[[rule]]
modules = "*.self_attn.*"
bits = 8
channel = true
[[rule]]
modules = "*.mlp.{gate,up}_proj"
bits = 3
method = "mse"
"#;

fn options(bits: Bits, strategy: Strategy) -> QuantizeOptions {
    QuantizeOptions { bits, strategy, head: strategy, ..Default::default() }
}

fn mixed() -> QuantizeOptions {
    let precision = PrecisionPlan::parse(PLAN, Path::new("plan.toml")).unwrap();
    QuantizeOptions { precision, ..options(Bits::Four, Strategy::Group(16)) }
}

fn bake(from: &Path, out: &Path, options: &QuantizeOptions) -> bake::Report {
    quantize::run(&open(from), out, options, &quiet()).unwrap()
}

fn problems(dir: &Path) -> Vec<String> {
    inspect::run(&open(dir), &InspectOptions { strict: true, against: None }, &quiet()).unwrap().problems
}

fn floats((dtype, _, bytes): &Content) -> Vec<f32> {
    match dtype {
        Dtype::BF16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    }
}

/// The library's integers and scales at the other widths, bit for bit.
#[test]
fn edge_rows_of_every_width_equal_the_library() {
    let (rows, widths) = (fixture("edge_rows.safetensors"), fixture("edge_rows_widths.safetensors"));
    let inputs = 128;
    for (kind, arithmetic) in [("bf16", Arithmetic::Bf16), ("f32", Arithmetic::F32)] {
        let weights = floats(&rows[&format!("{kind}.weight")]);
        for (strategy, group) in [("group32", 32), ("channel", inputs)] {
            for bits in [Bits::Eight, Bits::Three, Bits::Two] {
                let key = format!("{kind}.{strategy}.{bits}");
                let (q, want_scales) = (&widths[&format!("{key}.q")], floats(&widths[&format!("{key}.scale")]));
                for (r, want) in q.2.chunks(inputs).enumerate() {
                    let (mut fields, mut scales) = (vec![0; inputs], vec![bf16::ZERO; inputs / group]);
                    let row = &weights[r * inputs..(r + 1) * inputs];
                    quant::quantise_row(row, group, bits, arithmetic, &mut fields, &mut scales).unwrap();
                    let got: Vec<i8> = fields.iter().map(|f| (i32::from(*f) + bits.q_min()) as i8).collect();
                    let want: Vec<i8> = want.iter().map(|b| *b as i8).collect();
                    let scales: Vec<f32> = scales.iter().map(|s| s.to_f32()).collect();
                    assert_eq!(scales, want_scales[r * scales.len()..][..scales.len()], "{key} row {r}: scales");
                    assert_eq!(got, want, "{key} row {r}");
                }
            }
        }
    }
}

/// What the runtime loads is what the quantiser's arithmetic says, weight by weight.
#[test]
fn every_width_loads_as_it_was_quantised() {
    let tmp = tempfile::tempdir().unwrap();
    let module = "layers.3.mlp.down_proj";
    let dense = floats(&tensors_of(&nano())[&format!("{LM}{module}.weight")]);
    for bits in Bits::ALL {
        for strategy in [Strategy::Group(32), Strategy::Channel] {
            let out = tmp.path().join(format!("{bits} {strategy}"));
            bake(&nano(), &out, &options(bits, strategy));
            assert_eq!(problems(&out), [""; 0]);
            let model = Model::load(open(&out)).unwrap();
            let weights = model.weights(module).unwrap();
            let inputs = weights.cols();
            let group = if strategy == Strategy::Channel { inputs } else { 32 };
            for n in [0, 1, weights.rows() - 1] {
                let (mut fields, mut scales) = (vec![0; inputs], vec![bf16::ZERO; inputs / group]);
                let row = &dense[n * inputs..(n + 1) * inputs];
                quant::quantise_row(row, group, bits, Arithmetic::Bf16, &mut fields, &mut scales).unwrap();
                let mut want = vec![0.0; inputs];
                quant::dequantise_row(&fields, &scales, group, bits, &mut want);
                assert_eq!(weights.row(n), want, "{bits} {strategy}, row {n}");
            }
        }
    }
}

#[test]
fn a_plan_is_written_as_config_groups() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    let report = bake(&nano(), &out, &mixed());
    assert_eq!(report.lineage.knobs["plan"][0], json!({"modules": "layers.0.*", "keep": true}));
    assert_eq!(problems(&out), [""; 0]);
    let checkpoint = open(&out);
    let q = checkpoint.config().quantization.as_ref().unwrap();
    for (module, want) in [
        ("layers.1.self_attn.q_proj", Some((8, Strategy::Channel))),
        ("layers.11.mlp.up_proj", Some((3, Strategy::Group(16)))),
        ("layers.11.mlp.down_proj", Some((4, Strategy::Group(16)))),
        ("per_layer_model_projection", Some((4, Strategy::Group(16)))),
        ("layers.0.mlp.up_proj", None),
    ] {
        let full = format!("{LM}{module}");
        let found = q.packing(&full, 128).ok().map(|p| (p.scheme.bits.get(), p.scheme.strategy));
        assert_eq!(found, want, "{module}");
        let dense = checkpoint.get(&format!("{full}.weight"));
        assert_eq!(dense.is_some(), want.is_none(), "{module}");
        assert!(dense.is_none_or(|t| t.dtype == Dtype::BF16));
    }
    Model::load(checkpoint).unwrap();
    let report = inspect::run(&open(&out), &InspectOptions::default(), &quiet()).unwrap();
    assert!(report.to_string().contains("int3 group 16: re:"), "{report}");
    assert_eq!(report.chiku_only.len(), 1, "{:?}", report.chiku_only);
}

#[test]
fn a_pattern_without_a_linear_writes_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let precision = PrecisionPlan::parse("[[rule]]\nmodules = 'lm_head'\nbits = 8\n", Path::new("p.toml")).unwrap();
    let options = QuantizeOptions { precision, ..Default::default() };
    // Nano's head is tied: there is no such linear.
    let error = quantize::run(&open(&nano()), &tmp.path().join("out"), &options, &quiet()).unwrap_err();
    assert!(matches!(&error, Error::PrecisionPlan { reason, .. } if reason.contains("lm_head")), "{error}");
    assert!(names_in(tmp.path()).is_empty());
}

/// Rows are independent, so cutting first or quantising first is the same.
#[test]
fn cuts_and_widths_commute() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let drop = |from: &Path, out: &Path| {
        let options = DropLayersOptions { layers: vec![2, 8], ..Default::default() };
        drop_layers::run(&open(from), out, &options, &quiet()).unwrap();
    };
    drop(&nano(), &path("cut"));
    let every = Bits::ALL.map(|bits| (bits.to_string(), options(bits, Strategy::Group(32))));
    for (name, options) in every.into_iter().chain([("mixed".to_string(), mixed())]) {
        let (q, cut_q, q_cut) = (path(&name), path(&format!("{name}-1")), path(&format!("{name}-2")));
        bake(&nano(), &q, &options);
        drop(&q, &q_cut);
        bake(&path("cut"), &cut_q, &options);
        assert_same(&tensors_of(&q_cut), &tensors_of(&cut_q));
        assert_eq!(problems(&q_cut), [""; 0], "{name}");
    }
}

#[test]
fn heads_of_every_width_are_pruned_by_rows() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = oracle("09_pruned_head");
    let keep = Keepset { ids: open(&parent).keepset().unwrap().ids[..50].to_vec(), full_vocab: 512 };
    let prune = |from: &Path, out: &Path| {
        let options = PruneVocabOptions { origin: "test".into(), ..Default::default() };
        prune_vocab::run(&open(from), out, &keep, &options, &quiet()).unwrap();
    };
    prune(&parent, &tmp.path().join("cut"));
    for bits in Bits::ALL {
        let path = |n: &str| tmp.path().join(format!("{bits}-{n}"));
        let options = options(bits, Strategy::Group(16));
        bake(&parent, &path("q"), &options);
        prune(&path("q"), &path("q-cut"));
        bake(&tmp.path().join("cut"), &path("cut-q"), &options);
        assert_same(&tensors_of(&path("q-cut")), &tensors_of(&path("cut-q")));
        Model::load(open(&path("q-cut"))).unwrap();
    }
}

/// A width that the configuration does not say is found by inspection and refused by the loader.
#[test]
fn a_width_that_the_configuration_contradicts_is_found() {
    let tmp = tempfile::tempdir().unwrap();
    bake(&nano(), &tmp.path().join("q"), &options(Bits::Three, Strategy::Group(32)));
    let bad = damaged(&tmp.path().join("q"), &tmp.path().join("bad"), |_, config| {
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = json!(4);
    });
    let found = problems(&bad);
    assert!(
        found.iter().any(|p| p.contains("up_proj.weight_packed` is I32 [192, 13], expected [192, 16] (int4, group 32")),
        "{found:#?}"
    );
    let error = Model::load(open(&bad)).unwrap_err().to_string();
    assert!(error.contains("weight_packed") && error.contains("int4, group 32"), "{error}");
}

#[test]
fn the_search_lowers_the_error_of_a_checkpoint() {
    let tmp = tempfile::tempdir().unwrap();
    let module = "layers.3.mlp.up_proj";
    let dense = floats(&tensors_of(&nano())[&format!("{LM}{module}.weight")]);
    let error = |method, name: &str| {
        let out = tmp.path().join(name);
        bake(&nano(), &out, &QuantizeOptions { method, ..options(Bits::Three, Strategy::Group(32)) });
        let model = Model::load(open(&out)).unwrap();
        let w = model.weights(module).unwrap();
        let rows = (0..w.rows()).flat_map(|n| w.row(n));
        rows.zip(&dense).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
    };
    let (rtn, mse) = (error(Method::Rtn, "rtn"), error(Method::Mse, "mse"));
    assert!(mse < 0.9 * rtn, "mse {mse}, rtn {rtn}");
}
