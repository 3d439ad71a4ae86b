//! Variants of a loaded model: weights replaced in memory, also while a pass runs.

mod common;

use common::*;
use kernels::cpu::{Data, Matrix};
use runtime::model::{Model, Weights};
use runtime::staged::StagedPass;
use runtime::{Engine, EngineOptions, LayerInput, Precision, Stage};
use std::sync::Arc;

/// The matrix in memory as f32, its values changed by `change`.
fn in_memory(w: &Weights, change: impl Fn(f32) -> f32) -> Weights {
    let bytes: Vec<u8> = (0..w.rows()).flat_map(|r| w.row(r)).flat_map(|v| change(v).to_le_bytes()).collect();
    Matrix::new(w.rows(), w.cols(), Data::F32(bytes.into())).unwrap()
}

fn logits(model: &Model, tokens: &[u32]) -> Vec<u32> {
    let options = EngineOptions { precision: Precision::F32, threads: 1, context: None };
    let mut engine = Engine::new(Arc::new(model.clone()), &options).unwrap();
    let logits = engine.extend(tokens, 0..tokens.len()).unwrap();
    (0..tokens.len()).flat_map(|r| logits.row(r).to_vec()).map(f32::to_bits).collect()
}

const MODULES: [&str; 9] = [
    "layers.0.self_attn.q_proj",
    "layers.0.self_attn.k_proj",
    "layers.0.self_attn.v_proj",
    "layers.1.self_attn.o_proj",
    "layers.2.mlp.gate_proj",
    "layers.3.mlp.down_proj",
    "layers.4.per_layer_input_gate",
    "layers.5.per_layer_projection",
    "lm_head",
];

#[test]
fn a_replaced_linear_is_the_one_that_computes() {
    for target in ["nano", "11_e4b_like_sharded"] {
        let original = model(target);
        let tokens: Vec<u32> = (2..40).collect();
        let before = logits(&original, &tokens);
        for module in MODULES.into_iter().chain(["per_layer_model_projection"]) {
            let weights = original.weights(module).unwrap_or_else(|| panic!("{target} has {module}"));
            let mut variant = Model::clone(&original);
            variant.set_weights(module, in_memory(weights, |v| v)).unwrap();
            assert!(logits(&variant, &tokens) == before, "{target} {module}: the same values");
            variant.set_weights(module, in_memory(weights, |v| v * 1.5)).unwrap();
            assert!(logits(&variant, &tokens) != before, "{target} {module}: other values");
        }
        assert!(logits(&original, &tokens) == before, "variants leave the original alone");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut variant = Model::clone(&model("nano"));
    let q = in_memory(variant.weights("layers.0.self_attn.q_proj").unwrap(), |v| v);
    for (module, part) in [("layers.0.mlp.down_proj", "replacement"), ("layers.99.mlp.down_proj", "no linear")] {
        let message = variant.set_weights(module, q.clone()).unwrap_err().to_string();
        assert!(message.contains(module) && message.contains(part), "{message}");
    }
}

/// A pass in stages is the engine's pass, bit for bit, at every stage: also with linears replaced when their input is there.
#[test]
fn a_staged_pass_is_the_engines_pass() {
    for target in ["nano", "02_kvshare", "11_e4b_like_sharded"] {
        let mut variant = Model::clone(&model(target));
        let tokens: Vec<u32> = (2..90).collect();
        let mut staged = StagedPass::new(&variant, &tokens).unwrap();
        let mut seen: Vec<(Stage, Vec<f32>)> = Vec::new();
        let mut replaced = 0;
        loop {
            seen.push((staged.stage(), staged.values().to_vec()));
            for module in staged.stage().modules().iter().filter(|m| *m != "lm_head") {
                let Some(weights) = variant.weights(module) else { continue };
                assert_eq!(
                    staged.values().len(),
                    tokens.len() * weights.cols(),
                    "{target} {module}: rows of its input"
                );
                variant.set_weights(module, in_memory(weights, |v| v * 1.25)).unwrap();
                replaced += 1;
            }
            if staged.stage() == Stage::FinalNorm {
                break;
            }
            staged.advance(&variant);
        }
        let config = variant.config();
        let shared = config.layers.iter().filter(|l| l.kv_source.is_some()).count();
        let (each, once) = if config.ple_size > 0 { (9, 1) } else { (7, 0) };
        assert_eq!(replaced, config.layers.len() * each + once - 2 * shared, "{target}: every linear is somewhere");

        let mut engine = Engine::new(Arc::new(variant.clone()), &EngineOptions::default()).unwrap();
        let mut want = Vec::new();
        let wanted = 0..tokens.len();
        engine.extend_observed(&tokens, wanted, &mut |stage, values| want.push((stage, values.to_vec()))).unwrap();
        assert_eq!(seen.len(), want.len(), "{target}");
        for ((stage, got), (want_stage, want)) in seen.iter().zip(&want) {
            assert_eq!(stage, want_stage);
            assert!(got.iter().map(|v| v.to_bits()).eq(want.iter().map(|v| v.to_bits())), "{target} {stage:?}");
        }
    }
}

/// What a linear is said to read times its weights is what the next stage is made of.
#[test]
fn the_input_of_a_linear_is_the_one_that_it_multiplies() {
    let model = model("nano");
    let tokens: Vec<u32> = (300..340).collect();
    let mut staged = StagedPass::new(&model, &tokens).unwrap();
    while staged.stage() != Stage::Input(3, LayerInput::Mlp) {
        staged.advance(&model);
    }
    let y = staged.values().to_vec();
    staged.advance(&model);
    assert_eq!(staged.stage(), Stage::Input(3, LayerInput::MlpProduct));
    let product = |module: &str, row: usize, out: usize| -> f32 {
        let weights = model.weights(module).unwrap();
        weights.row(out).iter().zip(&y[row * weights.cols()..]).map(|(w, y)| w * y).sum()
    };
    let wide = model.config().layers[3].intermediate_size;
    for (row, out) in [(0, 0), (7, 3), (39, wide - 1)] {
        let (g, up) = (product("layers.3.mlp.gate_proj", row, out), product("layers.3.mlp.up_proj", row, out));
        let gelu = 0.5 * g * (1.0 + (0.797_884_6 * (g + 0.044_715 * g * g * g)).tanh());
        let got = staged.values()[row * wide + out];
        assert!((got - gelu * up).abs() <= 1e-4 * got.abs().max(1.0), "row {row} output {out}: {got} {}", gelu * up);
    }
}

#[test]
fn a_staged_pass_refuses_what_the_engine_refuses() {
    let model = model("nano");
    let message = StagedPass::new(&model, &[2, 5000]).err().unwrap().to_string();
    assert!(message.contains("5000"), "{message}");
    assert!(StagedPass::new(&model, &[2; 2049]).is_err());
}
