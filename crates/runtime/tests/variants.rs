//! Variants of a loaded model: weights replaced in memory.

mod common;

use common::*;
use kernels::cpu::{Data, Matrix};
use runtime::model::{Model, Weights};
use runtime::{Engine, EngineOptions, Precision};
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
