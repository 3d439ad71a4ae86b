//! A variant made in memory computes what the checkpoint of the corresponding bake computes, bit for bit.

mod common;

use std::sync::Arc;

use bake::drop_layers::{self, DropLayersOptions};
use common::*;
use runtime::{Engine, EngineOptions, Model, Precision};

fn load(dir: &std::path::Path) -> Model {
    Model::load(open(dir)).unwrap()
}

/// Bits of the logits of a sequence longer than every window.
fn logits(model: &Model) -> Vec<u32> {
    let vocab = model.config().vocab_size as u32;
    let tokens: Vec<u32> = (0..72).map(|i| (i * 37 + 5) % vocab).collect();
    let options = EngineOptions { precision: Precision::Native, threads: 1, context: None };
    let mut engine = Engine::new(Arc::new(model.clone()), &options).unwrap();
    let logits = engine.extend(&tokens, 0..tokens.len()).unwrap();
    (0..tokens.len()).flat_map(|r| logits.row(r).iter().map(|v| v.to_bits()).collect::<Vec<_>>()).collect()
}

#[test]
fn a_model_without_layers_is_the_checkpoint_without_them() {
    let tmp = tempfile::tempdir().unwrap();
    let several: [&[usize]; 5] = [&[0, 3], &[1, 4], &[2, 3, 6], &[5, 6], &[3, 4, 5, 6]];
    for (target, dir) in ["02_kvshare", "04_global_head_dim", "08_int4", "11_e4b_like_sharded", "09_pruned_head"]
        .map(|t| (t, oracle(t)))
        .into_iter()
        .chain([("nano", nano())])
    {
        let model = load(&dir);
        let whole = logits(&model);
        let mut compared = 0;
        let singles: Vec<[usize; 1]> = (0..model.config().layers.len()).map(|l| [l]).collect();
        for layers in singles.iter().map(|l| &l[..]).chain(several) {
            let out = tmp.path().join(target);
            let options =
                DropLayersOptions { layers: layers.to_vec(), write: bake::WriteOptions::force(), ..Default::default() };
            let baked = drop_layers::run(model.checkpoint(), &out, &options, &quiet());
            let variant = match (model.without_layers(layers), baked) {
                (Ok(variant), Ok(_)) => variant,
                (Err(a), Err(b)) => {
                    assert_eq!(a.to_string(), b.to_string(), "{target} {layers:?}");
                    continue;
                }
                (a, b) => panic!("{target} {layers:?}: {a:?} in memory, {b:?} on disk"),
            };
            let baked = load(&out);
            assert_eq!(variant.config(), baked.config(), "{target} {layers:?}");
            assert_eq!(variant.step_weight_bytes(), baked.step_weight_bytes(), "{target} {layers:?}");
            let got = logits(&variant);
            assert!(got == logits(&baked), "{target} {layers:?}: other logits than the checkpoint's");
            assert!(got != whole, "{target} {layers:?}: the removal changes something");
            compared += 1;
        }
        assert!(compared > 3, "{target}: only {compared} removals were legal");
    }
}

#[test]
fn removals_add_up() {
    let model = load(&nano());
    let (once, twice) = ([2, 7, 8], model.without_layers(&[7]).unwrap().without_layers(&[2, 7]).unwrap());
    assert!(logits(&model.without_layers(&once).unwrap()) == logits(&twice));
}
