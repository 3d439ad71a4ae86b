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
use bake::{Context, Error, Silent, WriteOptions};
use common::*;

fn drop_one(from: &Path, out: &Path, force: bool) -> bake::Result<bake::Report> {
    let write = WriteOptions { force, ..Default::default() };
    drop_layers::run(&open(from), out, &DropLayersOptions { layers: vec![1], write, ..Default::default() }, &quiet())
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
        &QuantizeOptions { write: bake::WriteOptions::force(), ..Default::default() },
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
        let options =
            DropLayersOptions { layers: layers.to_vec(), write: bake::WriteOptions::force(), ..Default::default() };
        match quantised {
            false => drop_layers::run(&open(&oracle("02_kvshare")), &out, &options, &quiet()).unwrap(),
            true => quantize::run(
                &open(&nano()),
                &out,
                &QuantizeOptions { write: bake::WriteOptions::force(), ..Default::default() },
                &quiet(),
            )
            .unwrap(),
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

/// A nano-sized parent with towers.
fn with_towers(dir: &Path) -> PathBuf {
    let options = SynthOptions { layers: 7, vocab: 96, towers: true, ..SynthOptions::new(Shape::Nano) };
    synth::run(dir, &options, &quiet()).unwrap();
    dir.to_path_buf()
}

#[test]
fn towers_are_copied_by_every_bake_and_left_out_when_asked() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = with_towers(&tmp.path().join("parent"));
    let towers = |t: Tensors| -> Tensors { t.into_iter().filter(|(n, _)| bake::roles::is_tower(n)).collect() };
    let want = towers(tensors_of(&parent));
    assert!(want.len() > 100);
    let bakes = |out: &Path, drop_towers: bool| {
        let write = WriteOptions { drop_towers, ..WriteOptions::force() };
        let strategy = bake::Strategy::Group(32);
        let quantised =
            quantize::run(&open(&parent), out, &QuantizeOptions { strategy, write, ..Default::default() }, &quiet());
        let outputs = tensors_of(out);
        let dropped = drop_layers::run(
            &open(&parent),
            out,
            &DropLayersOptions { layers: vec![1], write, ..Default::default() },
            &quiet(),
        );
        [(quantised.unwrap(), outputs), (dropped.unwrap(), tensors_of(out))]
    };
    let out = tmp.path().join("out");
    for (report, outputs) in bakes(&out, false) {
        assert_same(&towers(outputs), &want);
        assert_eq!(report.lineage.knobs["drop_towers"], false);
    }
    assert!(open(&out).config_json()["vision_config"].is_object());
    for (report, outputs) in bakes(&out, true) {
        assert_same(&towers(outputs), &Tensors::new());
        assert_eq!(report.lineage.knobs["drop_towers"], true);
        assert!(report.lineage.notes.iter().any(|n| n.contains("vision and audio towers")));
    }
    let config = open(&out).config_json().clone();
    assert!(config["vision_config"].is_null() && config["audio_config"].is_null());
    // The ignore list of a quantised child names no module that is not there.
    let write = WriteOptions { drop_towers: true, ..WriteOptions::force() };
    let options = QuantizeOptions { strategy: bake::Strategy::Group(32), write, ..Default::default() };
    quantize::run(&open(&parent), &out, &options, &quiet()).unwrap();
    assert_eq!(open(&out).config_json()["quantization_config"]["ignore"], serde_json::json!(["lm_head"]));
}

#[test]
fn sums_are_recorded_as_stated_and_computed_on_request() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = damaged(&oracle("02_kvshare"), &tmp.path().join("parent"), |_, _| {});
    let weights = "model.safetensors";
    let digest = |sha256: bool| {
        let write = WriteOptions { sha256, ..WriteOptions::force() };
        let options = DropLayersOptions { layers: vec![1], write, ..Default::default() };
        let report = drop_layers::run(&open(&parent), &tmp.path().join("out"), &options, &quiet())?;
        let files = report.lineage.parent.unwrap().files;
        Ok::<_, Error>((files[weights].sha256.clone(), files[weights].sha256_from.clone()))
    };
    assert_eq!(digest(false).unwrap(), (None, None));
    let (computed, from) = digest(true).unwrap();
    assert_eq!(from.as_deref(), Some("computed"));
    let computed = computed.unwrap();
    // By another program, where there is one.
    if let Ok(out) = std::process::Command::new("sha256sum").arg(parent.join(weights)).output() {
        assert!(String::from_utf8(out.stdout).unwrap().starts_with(&computed));
    }
    fs::write(parent.join("SHA256SUMS"), format!("{computed}  {weights}\n")).unwrap();
    assert_eq!(digest(false).unwrap(), (Some(computed.clone()), Some("SHA256SUMS".into())));
    assert_eq!(digest(true).unwrap().1.as_deref(), Some("computed, as SHA256SUMS states"));
    let wrong = "0".repeat(64);
    fs::write(parent.join("SHA256SUMS"), format!("{wrong}  {weights}\n")).unwrap();
    assert_eq!(digest(false).unwrap().0, Some(wrong));
    assert!(matches!(digest(true), Err(Error::Sum { found, .. }) if found == computed));
    assert_eq!(names_in(tmp.path()), ["out", "parent"]);
}

/// Holes of the parent are holes of the child, and read as the zeros that they are.
#[test]
fn a_sparse_parent_has_sparse_children() {
    use std::os::unix::fs::MetadataExt;
    let tmp = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let parent = tmp.path().join("parent");
    let options = SynthOptions { layers: 3, vocab: 4096, sparse: true, ..SynthOptions::new(Shape::E2b) };
    let made = synth::run(&parent, &options, &quiet()).unwrap();
    let on_disk = |dir: &Path| dir.join("model.safetensors").metadata().unwrap().blocks() * 512;
    assert!(made.tensor_bytes > 100_000_000 && on_disk(&parent) < 1_000_000, "{}", on_disk(&parent));
    // Something between the holes is not lost.
    let norm = format!("{LM}norm.weight");
    let checkpoint = open(&parent);
    let shard = &checkpoint.shards()[0];
    let info = shard.header.tensors.iter().find(|t| t.name == norm).unwrap();
    let at = (shard.header.data_start + info.begin) as u64;
    let file = fs::OpenOptions::new().write(true).open(parent.join("model.safetensors")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bf16(&[1.5, 2.5]), at + 10).unwrap();
    drop(file);
    let out = tmp.path().join("out");
    drop_one(&parent, &out, false).unwrap();
    assert!(on_disk(&out) < 1_000_000, "{}", on_disk(&out));
    let norm = open(&out).get(&norm).unwrap();
    assert_eq!(norm.bytes[10..14], bf16(&[1.5, 2.5])[..]);
    assert_eq!(norm.bytes.iter().filter(|b| **b != 0).count(), 4);
}
