//! The engine against an independent implementation: every variant of the oracle, and nano against transformers.

mod common;

use std::collections::HashMap;
use std::ops::ControlFlow;

use common::*;
use runtime::config::LayerKind;
use runtime::generate::{GenerateOptions, greedy};
use runtime::{Precision, Stage};

const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Native];

#[test]
fn logits_and_nll_match_the_golden_of_every_target() {
    for target in TARGETS {
        let (model, golden) = (model(target), Golden::open(target));
        for precision in PRECISIONS {
            for s in 0..2 {
                let tokens = golden.ids(&format!("seq{s}.tokens"));
                let logits = engine(&model, precision).extend(&tokens, 0..tokens.len()).unwrap();
                let name = if model.head_rows().is_pruned() { "logits_kept" } else { "logits" };
                let want = golden.floats(&format!("seq{s}.{name}"));
                let got: Vec<f32> = (0..tokens.len()).flat_map(|r| logits.row(r).to_vec()).collect();
                let off = distance(&got, &want);
                assert!(off <= LOGIT_TOLERANCE, "{target} {precision:?} seq{s}: logits are {off} apart");
                println!("{target} {} seq{s}: logits within {off:.1e}", precision.as_str());

                if !golden.has(&format!("seq{s}.nll")) {
                    continue;
                }
                for (t, want) in golden.floats(&format!("seq{s}.nll")).into_iter().enumerate() {
                    match logits.log_prob(t, tokens[t + 1]).unwrap() {
                        Some(log_prob) => assert!((-log_prob - f64::from(want)).abs() <= 5e-4, "{target} nll {t}"),
                        None => assert_eq!(want, f32::INFINITY, "{target} nll {t}"),
                    }
                }
            }
        }
    }
}

#[test]
fn intermediate_values_match() {
    for target in TARGETS {
        let (model, golden) = (model(target), Golden::open(target));
        let tokens = golden.ids("seq0.tokens");
        for precision in PRECISIONS {
            let mut engine = engine(&model, precision);
            let mut seen: HashMap<Stage, Vec<f32>> = HashMap::new();
            let mut record = |stage: Stage, values: &[f32]| {
                seen.insert(stage, values.to_vec());
            };
            engine.extend_observed(&tokens, 0..tokens.len(), &mut record).unwrap();
            let check = |name: &str, got: &[f32], tolerance: f32| {
                if golden.has(name) {
                    let off = distance(got, &golden.floats(name));
                    assert!(off <= tolerance, "{target} {precision:?} {name}: {off} apart");
                }
            };
            check("seq0.embed", &seen[&Stage::Embed], 2e-6);
            check("seq0.ple", &seen[&Stage::Ple], 4e-6);
            check("seq0.final_norm", &seen[&Stage::FinalNorm], 5e-4);
            let config = model.config();
            for (l, layer) in config.layers.iter().enumerate() {
                check(&format!("seq0.layer.{l}"), &seen[&Stage::Layer(l)], 5e-4);
                // The golden keeps K and V of the last unshared layer of each kind, as [kv_heads, positions, head_dim].
                let last = config.layers[..config.first_kv_shared()].iter().rposition(|o| o.kind == layer.kind);
                if last == Some(l) {
                    let (keys, values) = engine.cache(l);
                    let by_head = |data: &[f32]| -> Vec<f32> {
                        let dim = layer.head_dim;
                        let heads = (0..layer.kv_heads).flat_map(|h| {
                            data.chunks(layer.kv_heads * dim).flat_map(move |row| row[h * dim..][..dim].to_vec())
                        });
                        heads.collect()
                    };
                    check(&format!("seq0.k.{}", layer.kind.as_str()), &by_head(keys), 5e-4);
                    check(&format!("seq0.v.{}", layer.kind.as_str()), &by_head(values), 5e-4);
                }
            }
        }
        for kind in [LayerKind::Sliding, LayerKind::Full] {
            let name = format!("inv_freq.{}", kind.as_str());
            if golden.has(&name) {
                let l = model.config().layers.iter().position(|l| l.kind == kind).unwrap();
                for (got, want) in model.inverse_frequencies(l).iter().zip(golden.floats(&name)) {
                    assert!((got - want).abs() <= 1e-6 * want.abs(), "{target} {name}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn greedy_paths_are_identical() {
    for target in TARGETS {
        let (model, golden) = (model(target), Golden::open(target));
        for precision in PRECISIONS {
            let mut engine = engine(&model, precision);
            let mut paths = 0;
            while golden.has(&format!("gen{paths}.prompt")) {
                let prompt = golden.ids(&format!("gen{paths}.prompt"));
                let want = golden.ids(&format!("gen{paths}.tokens"));
                let options = GenerateOptions { max_tokens: want.len(), ..Default::default() };
                let got = greedy(&mut engine, &prompt, &options, |_| ControlFlow::Continue(())).unwrap();
                assert_eq!(got.token_ids, want, "{target} {precision:?} gen{paths}");
                paths += 1;
            }
            assert!(paths >= 2, "{target} has {paths} greedy paths");
        }
    }
}

#[test]
fn packed_weights_expand_to_the_golden_bit_for_bit() {
    let mut compared = 0;
    for target in TARGETS {
        let (model, golden) = (model(target), Golden::open(target));
        for (module, name) in
            [("lm_head", "dequant.lm_head"), ("layers.0.mlp.gate_proj", "dequant.layers.0.mlp.gate_proj")]
        {
            if golden.has(name) {
                let weights = model.weights(module).unwrap();
                let got: Vec<u32> = (0..weights.rows()).flat_map(|r| weights.row(r)).map(f32::to_bits).collect();
                let want: Vec<u32> = golden.floats(name).into_iter().map(f32::to_bits).collect();
                assert_eq!(got, want, "{target} {name}");
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 4);
}
