//! Four bugs of real bakes, each of which gave a checkpoint that loaded and talked nonsense. Ours do not have them, and
//! `inspect --strict` finds them in others' without knowing the parent.
//!
//! The parent is E4B's: 42 layers, every sixth with full attention, the last 18 shared, keys and values stored in all of them.

mod common;

use std::path::{Path, PathBuf};

use bake::drop_layers::{self, DropLayersOptions};
use bake::inspect::{self, InspectOptions, Inspection};
use bake::synth::{self, Shape, SynthOptions};
use common::*;
use runtime::checkpoint::Checkpoint;
use serde_json::json;

/// E4B's layers at nano's widths.
fn parent(dir: &Path) -> PathBuf {
    let options = SynthOptions { layers: 42, vocab: 64, ..SynthOptions::new(Shape::Nano) };
    synth::run(&dir.join("synth"), &options, &quiet()).unwrap();
    damaged(&dir.join("synth"), &dir.join("e4b"), |_, config| {
        config["text_config"]["num_kv_shared_layers"] = json!(18);
    })
}

fn strict(dir: &Path) -> Inspection {
    inspect::run(&open(dir), &InspectOptions { strict: true, against: None }, &quiet()).unwrap()
}

/// Our own bake: no problems, and these numbers of layers, shared ones and sources.
fn baked(parent: &Path, out: &Path, layers: &[usize], want: (usize, usize, usize, usize)) {
    let options = DropLayersOptions { layers: layers.to_vec(), ..Default::default() };
    drop_layers::run(&open(parent), out, &options, &quiet()).unwrap();
    let r = strict(out);
    assert_eq!(r.problems, [""; 0]);
    assert_eq!((r.layers, r.kv_shared, r.sources["sliding_attention"], r.sources["full_attention"]), want);
}

#[track_caller]
fn finds(dir: &Path, want: &str) {
    let problems = strict(dir).problems;
    assert!(problems.iter().any(|p| p.contains(want)), "no `{want}` in {problems:#?}");
}

#[test]
fn a_shared_count_that_stayed() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = parent(tmp.path());
    let good = tmp.path().join("good");
    baked(&parent, &good, &[27, 31, 35], (39, 15, 22, 23));
    // 18 shared layers of 39 begin at 21: layers 21, 22 and 23, two of them the sources, became sharers.
    let bad = damaged(&good, &tmp.path().join("bad"), |_, c| c["text_config"]["num_kv_shared_layers"] = json!(18));
    assert_eq!(open(&bad).config().first_kv_shared(), 21);
    finds(&bad, "layer 20, the last one with keys and values of its own, has sliding attention");
    finds(&bad, "num_kv_shared_layers (18) not adjusted");
}

#[test]
fn a_projection_that_was_not_sliced() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = parent(tmp.path());
    let good = tmp.path().join("good");
    baked(&parent, &good, &[2, 3, 4], (39, 18, 19, 20));
    let name = format!("{LM}per_layer_model_projection.weight");
    let whole = tensors_of(&parent)[&name].clone();
    let bad = damaged(&good, &tmp.path().join("bad"), |tensors, _| drop(tensors.insert(name, whole)));
    finds(
        &bad,
        "per_layer_model_projection.weight` is BF16 [672, 128], expected [624, 128]; it has one block a layer: was it left unsliced",
    );
}

#[test]
fn sources_that_became_sharers() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = parent(tmp.path());
    let good = tmp.path().join("good");
    baked(&parent, &good, &[2, 3, 4, 36, 37, 38], (36, 15, 19, 20));
    // 16 left from the version with one layer more: the full source moves from 20 to 14.
    let bad = damaged(&good, &tmp.path().join("bad"), |_, c| c["text_config"]["num_kv_shared_layers"] = json!(16));
    assert_eq!(open(&bad).config().layers[35].kv_source, Some(14));
    finds(&bad, "layer 19, the last one with keys and values of its own, has sliding attention");
    finds(&bad, "source layers have become sharers");
}

#[test]
fn a_last_layer_that_slides() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = parent(tmp.path());
    baked(&parent, &tmp.path().join("good"), &[37, 38], (40, 16, 22, 23));
    let options = DropLayersOptions { layers: vec![41], ..Default::default() };
    let refused = drop_layers::run(&open(&parent), &tmp.path().join("out"), &options, &quiet()).unwrap_err();
    assert!(refused.to_string().contains("layer 40 would be the last one, and it has sliding attention"), "{refused}");
    // Cut by hand, it does not open: `inspect` ends with this error.
    let bad = damaged(&parent, &tmp.path().join("bad"), |tensors, c| {
        tensors.retain(|name, _| !name.contains("layers.41."));
        let text = c["text_config"].as_object_mut().unwrap();
        text["layer_types"].as_array_mut().unwrap().pop();
        text["num_hidden_layers"] = json!(41);
        text["num_kv_shared_layers"] = json!(17);
    });
    let error = Checkpoint::open(&bad).err().unwrap().to_string();
    assert!(error.contains("layer_types[40]") && error.contains("for the last layer"), "{error}");
}
