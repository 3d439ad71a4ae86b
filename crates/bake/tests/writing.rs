//! What every bake promises about its output directory, whatever it bakes.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bake::drop_layers::{self, DropLayersOptions};
use bake::lineage::Lineage;
use bake::quantize::{self, QuantizeOptions};
use bake::synth::{self, Shape, SynthOptions};
use bake::{Context, Error, Silent};
use common::*;

fn drop_one(from: &Path, out: &Path, force: bool) -> bake::Result<bake::Report> {
    drop_layers::run(&open(from), out, &DropLayersOptions { layers: vec![1], force, ..Default::default() }, &quiet())
}

#[test]
fn a_cancelled_bake_leaves_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    let cancel = AtomicBool::new(false);
    // Set from inside, after the first tile: the flag must be seen between tiles.
    let progress = |done: u64, _: u64| cancel.store(done > 0, Ordering::Relaxed);
    let context = Context { cancel: &cancel, progress: &progress };
    let error = quantize::run(&open(&nano()), &out, &QuantizeOptions::default(), &context).unwrap_err();
    assert!(matches!(error, Error::Cancelled { .. }), "{error}");
    assert!(names_in(tmp.path()).is_empty());
    let error = synth::run(&out, &SynthOptions::new(Shape::Nano), &Context { cancel: &cancel, progress: &Silent });
    assert!(matches!(error, Err(Error::Cancelled { .. })));
    assert!(names_in(tmp.path()).is_empty());
}

#[test]
fn an_existing_target_is_kept_unless_forced() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    drop_one(&oracle("02_kvshare"), &out, false).unwrap();
    fs::write(out.join("USE_POLICY.md"), "").unwrap();
    assert!(matches!(drop_one(&oracle("02_kvshare"), &out, false), Err(Error::TargetExists { .. })));
    assert!(out.join("USE_POLICY.md").exists());
    // A failing forced bake keeps it, too.
    let packed = quantize::run(
        &open(&oracle("08_int4")),
        &out,
        &QuantizeOptions { force: true, ..Default::default() },
        &quiet(),
    );
    assert!(packed.is_err() && out.join("USE_POLICY.md").exists());
    drop_one(&oracle("02_kvshare"), &out, true).unwrap();
    assert!(!out.join("USE_POLICY.md").exists());
    assert_eq!(names_in(tmp.path()), ["out"]);
    // Something that no bake wrote is not deleted with the rest.
    fs::write(out.join("notes.txt"), "").unwrap();
    assert!(matches!(drop_one(&oracle("02_kvshare"), &out, true), Err(Error::Target { .. })));
    fs::remove_file(out.join("notes.txt")).unwrap();
    // The parent itself is never a target, under any spelling.
    let copy = tmp.path().join("out/../out");
    assert!(matches!(drop_one(&out, &copy, true), Err(Error::Target { .. })));
}

#[test]
fn progress_ends_at_the_total() {
    let tmp = tempfile::tempdir().unwrap();
    let (most, total) = (AtomicU64::new(0), AtomicU64::new(0));
    let progress = |done: u64, all: u64| {
        assert!(done <= all);
        most.fetch_max(done, Ordering::Relaxed);
        total.store(all, Ordering::Relaxed);
    };
    let cancel = AtomicBool::new(false);
    let context = Context { cancel: &cancel, progress: &progress };
    let report = quantize::run(&open(&nano()), &tmp.path().join("out"), &QuantizeOptions::default(), &context).unwrap();
    assert_eq!(most.into_inner(), report.tensor_bytes);
    assert_eq!(total.into_inner(), report.tensor_bytes);
}

#[test]
fn side_files_are_copied_and_others_are_not() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    let report = quantize::run(&open(&nano()), &out, &QuantizeOptions::default(), &quiet()).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"] {
        assert_eq!(fs::read(out.join(name)).unwrap(), fs::read(nano().join(name)).unwrap(), "{name}");
        assert!(report.copied.iter().any(|c| c == name));
    }
    assert!(!out.join("golden.safetensors").exists());
    assert!(!out.join("MODEL_CARD.md").exists(), "what the parent's card says is not true of the child");
    // A pruned head's keepset travels with it.
    let pruned = tmp.path().join("pruned");
    quantize::run(&open(&oracle("09_pruned_head")), &pruned, &QuantizeOptions::default(), &quiet()).unwrap();
    assert_eq!(open(&pruned).keepset(), open(&oracle("09_pruned_head")).keepset());
}

#[test]
fn lineage_names_parents_by_content_and_no_path() {
    let tmp = tempfile::tempdir().unwrap();
    let (first, second) = (tmp.path().join("first"), tmp.path().join("second"));
    drop_one(&oracle("02_kvshare"), &first, false).unwrap();
    let options = QuantizeOptions { strategy: bake::Strategy::Group(16), ..Default::default() };
    quantize::run(&open(&first), &second, &options, &quiet()).unwrap();
    let lineage = Lineage::read(&second).unwrap().unwrap();
    assert_eq!(lineage.command, "quantize");
    assert_eq!(lineage.knobs["strategy"], "group 16");
    assert!(lineage.time.parse::<jiff::Timestamp>().is_ok());
    let parent = lineage.parent.unwrap();
    assert_eq!(parent.name, "first");
    let hash = |p: PathBuf| blake3::hash(&fs::read(p).unwrap()).to_hex().to_string();
    for name in ["model.safetensors", "config.json", "lineage.json", "generation_config.json"] {
        assert_eq!(parent.files[name].blake3, hash(first.join(name)), "{name}");
    }
    let grandparent: Lineage = serde_json::from_value(parent.lineage.unwrap()).unwrap();
    assert_eq!(grandparent.command, "drop-layers");
    assert_eq!(grandparent.knobs["layers"], serde_json::json!([1]));
    let root = grandparent.parent.unwrap();
    assert_eq!((root.name.as_str(), root.lineage), ("02_kvshare", None));
    let text = fs::read_to_string(second.join("lineage.json")).unwrap();
    assert!(!text.contains(&tmp.path().display().to_string()), "{text}");
    // Shards and index are listed one by one.
    let sharded = tmp.path().join("sharded");
    drop_one(&oracle("07d_drop_many_sharded"), &sharded, false).unwrap();
    assert_eq!(Lineage::read(&sharded).unwrap().unwrap().parent.unwrap().files.len(), 6);
}

/// The file is one that the safetensors library reads, with aligned tensors in the parent's order.
#[test]
fn the_weights_file_is_aligned_and_in_order() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    let offsets_of = |layers: &[usize], quantised: bool| {
        let options = DropLayersOptions { layers: layers.to_vec(), force: true, ..Default::default() };
        match quantised {
            false => drop_layers::run(&open(&oracle("02_kvshare")), &out, &options, &quiet()).unwrap(),
            true => {
                quantize::run(&open(&nano()), &out, &QuantizeOptions { force: true, ..Default::default() }, &quiet())
                    .unwrap()
            }
        };
        let bytes = fs::read(out.join("model.safetensors")).unwrap();
        let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert!((header + 8).is_multiple_of(8));
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        assert_eq!(metadata.metadata().as_ref().unwrap()["chiku_bake"], bake::lineage::TOOL_VERSION);
        for (name, info) in metadata.tensors() {
            assert!(info.data_offsets.0.is_multiple_of(info.dtype.bitsize() / 8), "{name} at {}", info.data_offsets.0);
        }
        metadata.offset_keys()
    };
    let order = offsets_of(&[7 - 2, 6], false);
    let parent: Vec<String> = open(&oracle("02_kvshare")).tensors().map(|t| t.name).collect();
    let kept: Vec<String> = parent
        .into_iter()
        .filter(|n| !n.contains("layers.5.") && !n.contains("layers.6."))
        .map(|n| n.replace("layers.7.", "layers.5."))
        .collect();
    assert_eq!(order, kept);
    offsets_of(&[], true);
}

/// Tensors without rows or elements are legal in a file and pass through.
#[test]
fn empty_tensors_are_copied() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = damaged(&oracle("02_kvshare"), &tmp.path().join("parent"), |tensors, _| {
        tensors.insert("model.audio_tower.none".into(), (safetensors::Dtype::F32, vec![0, 4], vec![]));
        tensors.insert("model.audio_tower.scalar".into(), (safetensors::Dtype::F32, vec![], vec![0; 4]));
    });
    let out = tmp.path().join("out");
    drop_one(&parent, &out, false).unwrap();
    let got = tensors_of(&out);
    assert_eq!(got["model.audio_tower.none"].1, [0, 4]);
    assert_eq!(got["model.audio_tower.scalar"], tensors_of(&parent)["model.audio_tower.scalar"]);
}

/// A parent that shrinks while it is read is an error, not a crash, and leaves nothing.
#[test]
fn a_parent_truncated_under_the_bake_is_an_error() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = damaged(&oracle("02_kvshare"), &tmp.path().join("parent"), |_, _| {});
    let checkpoint = open(&parent);
    let weights = parent.join("model.safetensors");
    fs::OpenOptions::new().write(true).open(&weights).unwrap().set_len(40_000).unwrap();
    let options = DropLayersOptions { layers: vec![1], ..Default::default() };
    let error = drop_layers::run(&checkpoint, &tmp.path().join("out"), &options, &quiet()).unwrap_err();
    assert!(error.to_string().contains("model.safetensors: cannot read"), "{error}");
    assert_eq!(names_in(tmp.path()), ["parent"]);
}

#[test]
fn concurrent_bakes_into_one_directory_do_not_mix() {
    let tmp = tempfile::tempdir().unwrap();
    let results = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for n in 0..4 {
            let (results, dir) = (&results, tmp.path());
            scope.spawn(move || {
                let result = drop_one(&oracle("02_kvshare"), &dir.join(format!("out{n}")), false);
                results.lock().unwrap().push(result.is_ok());
            });
        }
    });
    assert_eq!(results.into_inner().unwrap(), [true; 4]);
    for n in 1..4 {
        assert_same(&tensors_of(&tmp.path().join(format!("out{n}"))), &tensors_of(&tmp.path().join("out0")));
    }
}
