//! The family of a checkpoint, and the card and licence files beside it.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use bake::drop_layers::{self, DropLayersOptions};
use bake::lineage::{self, Lineage};
use bake::prune_vocab::{self, PruneVocabOptions};
use bake::quantize::{self, QuantizeOptions};
use bake::recipe::{self, Recipe};
use bake::synth::{self, Shape, SynthOptions};
use bake::{Error, inspect, keepset};
use common::*;
use serde_json::json;

fn quantise(from: &Path, out: &Path) -> bake::Report {
    quantize::run(&open(from), out, &QuantizeOptions::default(), &quiet()).unwrap()
}

fn drop_one(from: &Path, out: &Path) -> bake::Report {
    let options = DropLayersOptions { layers: vec![1], ..Default::default() };
    drop_layers::run(&open(from), out, &options, &quiet()).unwrap()
}

/// A copy of nano under another name, with these files beside it.
fn parent(dir: &Path, files: &[(&str, &str)]) -> PathBuf {
    fs::create_dir(dir).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"] {
        fs::copy(nano().join(name), dir.join(name)).unwrap();
    }
    files.iter().for_each(|(name, text)| fs::write(dir.join(name), text).unwrap());
    dir.to_path_buf()
}

fn text(path: PathBuf) -> String {
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[track_caller]
fn has(text: &str, want: &str) {
    assert!(text.contains(want), "no `{want}` in\n{text}");
}

#[test]
fn a_family_is_followed_to_its_root() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    drop_one(&nano(), &path("short"));
    quantise(&path("short"), &path("packed"));
    let family = lineage::family(&path("packed")).unwrap();
    let names: Vec<&str> = family.generations.iter().map(|g| g.name.as_str()).collect();
    assert_eq!(names, ["packed", "short", "nano"]);
    let made: Vec<_> = family.generations.iter().map(|g| g.made.as_ref().map(|m| m.changed.join(" "))).collect();
    assert_eq!(made, [Some("quantisation".into()), Some("layers".into()), None]);
    assert!(family.flags.is_empty());
    let weights = fs::read(nano().join("model.safetensors")).unwrap();
    assert_eq!(family.generations[2].files["model.safetensors"], blake3::hash(&weights).to_hex().as_str());
    let tree = family.to_string();
    for want in ["packed\n   quantize by chiku", "   from short", "      from nano  blake3 "] {
        has(&tree, want);
    }
    assert!(matches!(lineage::family(&nano()), Err(Error::Lineage { .. })));
}

#[test]
fn a_family_too_long_to_be_read_again_has_no_children() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    drop_one(&nano(), &path("short"));
    let one: serde_json::Value = serde_json::from_str(&text(path("short").join("lineage.json"))).unwrap();
    let of = |generations: usize| {
        let mut all = one.clone();
        for _ in 1..generations {
            let mut child = one.clone();
            child["parent"]["lineage"] = all;
            all = child;
        }
        all.to_string()
    };
    let child = |generations: usize, name: &str| {
        fs::write(path("short").join("lineage.json"), of(generations)).unwrap();
        assert_eq!(lineage::family(&path("short")).unwrap().generations.len(), generations + 1, "and nano");
        quantize::run(&open(&path("short")), &path(name), &QuantizeOptions::default(), &quiet())
    };
    child(59, "last").unwrap();
    assert_eq!(lineage::family(&path("last")).unwrap().generations.len(), 61);
    let refused = child(60, "none").unwrap_err().to_string();
    assert!(refused.contains("60 generations") && !path("none").exists(), "{refused}");
}

#[test]
fn more_than_one_knob_is_flagged() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let steps = "name = \"two\"\ndescription = \"d\"\n[[step]]\nbake = \"drop-layers\"\nlayers = [1]\n[[step]]\nbake = \"quantize\"\n";
    fs::write(path("recipe.toml"), steps).unwrap();
    let recipe = Recipe::read(&path("recipe.toml"), &Default::default()).unwrap();
    recipe::run(&open(&nano()), &path("both"), &recipe, Default::default(), &quiet()).unwrap();
    let family = lineage::family(&path("both")).unwrap();
    assert_eq!(family.flags.len(), 1);
    has(&family.flags[0], "both differs from nano in 2 knobs at once (layers, quantisation)");
    // Two removals are one knob.
    let same = steps.replace("\"quantize\"", "\"drop-layers\"\nlayers = [1]");
    fs::write(path("recipe.toml"), same).unwrap();
    let recipe = Recipe::read(&path("recipe.toml"), &Default::default()).unwrap();
    recipe::run(&open(&nano()), &path("one"), &recipe, Default::default(), &quiet()).unwrap();
    assert!(lineage::family(&path("one")).unwrap().flags.is_empty());
}

#[test]
fn a_parent_is_recognised_by_its_bytes() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let copy = parent(&path("copy"), &[]);
    let out = path("out");
    drop_one(&copy, &out);
    let states = |dir: &Path| -> Vec<(String, &str)> {
        lineage::verify(&out, dir, || Ok(())).unwrap().into_iter().map(|c| (c.name, c.state)).collect()
    };
    assert!(states(&copy).iter().all(|(_, s)| *s == "same"));
    let read = Lineage::read(&out).unwrap().unwrap().parent.unwrap();
    assert!(read.is(&open(&copy)).unwrap() && !read.is(&open(&out)).unwrap());
    let mut weights = fs::read(copy.join("model.safetensors")).unwrap();
    *weights.last_mut().unwrap() ^= 1;
    fs::write(copy.join("model.safetensors"), weights).unwrap();
    fs::remove_file(copy.join("tokenizer.json")).unwrap();
    let found = states(&copy);
    assert!(found.contains(&("model.safetensors".into(), "other")), "{found:?}");
    assert!(found.contains(&("tokenizer.json".into(), "missing")), "{found:?}");
    assert!(found.contains(&("config.json".into(), "same")), "{found:?}");
}

#[test]
fn a_card_states_what_was_done_and_measured_and_inherits_no_figure() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let card = "---\nlicense: apache-2.0\nbase_model: someone/else\n---\n# Parent\nPerplexity 7.77, 4.2 GB\n";
    let from = parent(&path("models--lab--gem"), &[("README.md", card)]);
    fs::create_dir_all(path("cache/models--lab--gem/snapshots")).unwrap();
    let snapshot = path("cache/models--lab--gem/snapshots/0f1e");
    fs::rename(from, &snapshot).unwrap();
    quantise(&snapshot, &path("packed"));
    let card = text(path("packed").join("README.md"));
    has(
        &card,
        "---\nbase_model: lab/gem\nbase_model_relation: quantized\nlicense: apache-2.0\nlibrary_name: transformers\n",
    );
    has(&card, "1. quantize (");
    has(&card, "A modified version of `0f1e`");
    // What nobody tried is not claimed.
    has(&card, "which transformers and vLLM read.\nNeither of them was run on this checkpoint.");
    assert!(!card.contains("is the name of a directory"), "{card}");
    assert!(!card.contains("7.77") && !card.contains("4.2 GB") && !card.contains("someone"), "{card}");
    // Bytes are those that inspect counts.
    let report = inspect::run(&open(&path("packed")), &Default::default(), &quiet()).unwrap();
    let mb = |bytes: u64| format!("{:.2}", bytes as f64 / 1e6);
    has(&card, &format!("| body | {} | {} |", mb(report.components.body), mb(report.bytes_per_step.body)));
    has(&card, &format!("| total | {} | {} |", mb(report.components.total()), mb(report.bytes_per_step.total)));

    // The next generation names the root, and that a pruned head is no standard.
    let keep = keepset::from_ids((0..64).collect(), 2048).unwrap();
    let coverage = [("held".to_string(), keepset::coverage_by_record(&keep, &[vec![1, 2, 3], vec![1, 99]]))];
    let options = PruneVocabOptions { coverage: coverage.into(), ..Default::default() };
    prune_vocab::run(&open(&path("packed")), &path("pruned"), &keep, &options, &quiet()).unwrap();
    let card = text(path("pruned").join("README.md"));
    has(&card, "base_model: lab/gem\n");
    has(&card, "library_name: chiku");
    has(&card, "the head has rows for 64 of 2048 tokens");
    has(&card, "- held: 80.000 % of 5 tokens have a row; 1 of 2 texts hold one that has none");
    let written = Lineage::read(&path("pruned")).unwrap().unwrap();
    assert_eq!(written.measured["coverage"]["held"]["share"], json!(0.8));
    assert_eq!(written.measured["coverage"]["held"]["most_missed"], json!([[99, 1]]));
}

#[test]
fn licence_and_notices_are_passed_on_with_the_changes() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let with = parent(
        &path("with"),
        &[
            ("LICENSE", "the licence\n"),
            ("NOTICE", "Copyright of the makers\n"),
            ("README.md", "---\nlicense: gemma\n---\n"),
        ],
    );
    drop_one(&with, &path("a"));
    quantise(&path("a"), &path("b"));
    assert_eq!(text(path("b").join("LICENSE")), "the licence\n");
    let notice = text(path("b").join("NOTICE"));
    assert!(notice.starts_with("Copyright of the makers\n\na is a modified version of with."), "{notice}");
    has(&notice, "b is a modified version of a. The weights (*.safetensors) and config.json were");
    has(&notice, "drop-layers (layers [1], ");
    let card = text(path("b").join("README.md"));
    has(&card, "license: gemma\n");
    has(&card, "Copied from the parent: LICENSE.");
    // What a bake wrote can be replaced by the next.
    let options = QuantizeOptions { write: bake::WriteOptions::force(), ..Default::default() };
    quantize::run(&open(&path("a")), &path("b"), &options, &quiet()).unwrap();

    let without = parent(&path("without"), &[]);
    drop_one(&without, &path("c"));
    assert!(!path("c").join("LICENSE").exists());
    has(&text(path("c").join("README.md")), "The parent states no licence in its card");
    has(&text(path("c").join("README.md")), "The parent brought no licence file, so none is here");

    let named = parent(&path("named"), &[("README.md", "---\nlicense: apache-2.0\n---\n")]);
    drop_one(&named, &path("d"));
    has(&text(path("d").join("LICENSE")), "Apache License");
    has(&text(path("d").join("README.md")), "`LICENSE` is the text of Apache-2.0");
    // nano's card has another name.
    drop_one(&nano(), &path("e"));
    has(&text(path("e").join("README.md")), "license: cc0-1.0\n");
    has(&text(path("e").join("README.md")), "`nano` is the name of a directory: put the id of the model there");
}

#[test]
fn random_weights_have_a_card_and_no_parent() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    synth::run(&out, &SynthOptions { layers: 2, vocab: 64, ..SynthOptions::new(Shape::Nano) }, &quiet()).unwrap();
    let card = text(out.join("README.md"));
    has(&card, "from no other model");
    assert!(!card.contains("base_model") && !out.join("NOTICE").exists(), "{card}");
}
