//! Damaged and contradictory checkpoints: each gives one error that names the file and the tensor or field, and none panics.

mod common;

use std::path::{Path, PathBuf};

use runtime::checkpoint::{Checkpoint, INDEX_FILE, KEEPSET_FILE, SINGLE_FILE};
use runtime::{Engine, EngineOptions, Error, Model};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A copy of an oracle target that may be damaged.
struct Copy(TempDir);

impl Copy {
    fn of(target: &str) -> Copy {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(dir_of(target)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_file() && !name.starts_with("golden") {
                std::fs::copy(&path, dir.path().join(name)).unwrap();
            }
        }
        Copy(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn edit_json(self, name: &str, edit: impl FnOnce(&mut Value)) -> Copy {
        let mut json: Value = serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap();
        edit(&mut json);
        self.write(name, json.to_string().as_bytes())
    }

    fn write(self, name: &str, bytes: &[u8]) -> Copy {
        std::fs::write(self.path(name), bytes).unwrap();
        self
    }

    /// Rewrites the header of the single file; the data stays.
    fn edit_header(self, edit: impl FnOnce(&mut Value)) -> Copy {
        let bytes = std::fs::read(self.path(SINGLE_FILE)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        edit(&mut header);
        let text = header.to_string().into_bytes();
        let mut out = (text.len() as u64).to_le_bytes().to_vec();
        out.extend(text);
        out.extend(&bytes[8 + length..]);
        self.write(SINGLE_FILE, &out)
    }

    /// Overwrites bytes of one tensor of the single file.
    fn poke(self, tensor: &str, offset: usize, value: &[u8]) -> Copy {
        let mut bytes = std::fs::read(self.path(SINGLE_FILE)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let begin = header[tensor]["data_offsets"][0].as_u64().unwrap() as usize + 8 + length + offset;
        bytes[begin..begin + value.len()].copy_from_slice(value);
        self.write(SINGLE_FILE, &bytes)
    }

    fn load(&self) -> runtime::Result<Model> {
        Model::load(Checkpoint::open(self.0.path())?)
    }

    /// Asserts that loading fails with a message that holds all of `parts`.
    fn refused(&self, parts: &[&str]) {
        let message = self.load().expect_err("a damaged checkpoint was loaded").to_string();
        for part in parts {
            assert!(message.contains(part), "expected `{part}` in: {message}");
        }
    }
}

fn dir_of(target: &str) -> PathBuf {
    common::dir(target)
}

const PREFIX: &str = "model.language_model.";

fn full(name: &str) -> String {
    format!("{PREFIX}{name}")
}

#[test]
fn a_file_cut_short_is_refused_at_open_with_the_missing_count() {
    for cut in [1, 1000] {
        let copy = Copy::of("02_kvshare");
        let bytes = std::fs::read(copy.path(SINGLE_FILE)).unwrap();
        let copy = copy.write(SINGLE_FILE, &bytes[..bytes.len() - cut]);
        copy.refused(&[SINGLE_FILE, "truncated", &format!("({cut} bytes are missing)")]);
    }
    for length in [0, 5, 100] {
        let copy = Copy::of("02_kvshare");
        let bytes = std::fs::read(copy.path(SINGLE_FILE)).unwrap();
        copy.write(SINGLE_FILE, &bytes[..length]).refused(&[SINGLE_FILE, "truncated"]);
    }
}

#[test]
fn every_truncation_of_a_header_is_an_error() {
    let copy = Copy::of("02_kvshare");
    let bytes = std::fs::read(copy.path(SINGLE_FILE)).unwrap();
    let mut copy = copy;
    for length in (0..bytes.len()).step_by(bytes.len() / 97) {
        copy = copy.write(SINGLE_FILE, &bytes[..length]);
        assert!(matches!(copy.load(), Err(Error::Truncated { .. })), "{length} bytes");
    }
}

#[test]
fn missing_and_wrong_kinds_of_files_are_named() {
    for name in ["config.json", SINGLE_FILE] {
        let copy = Copy::of("02_kvshare");
        std::fs::remove_file(copy.path(name)).unwrap();
        copy.refused(&[name, "cannot open"]);
        std::fs::create_dir(copy.path(name)).unwrap();
        copy.refused(&[name, "not a regular file"]);
    }
    Copy::of("02_kvshare").write("config.json", b"").refused(&["config.json", "not valid JSON"]);
    Copy::of("02_kvshare").write("config.json", b"[]").refused(&["config.json", "an object"]);
    Copy::of("02_kvshare").write(SINGLE_FILE, &[0xFF; 64]).refused(&[SINGLE_FILE, "limit"]);
}

#[test]
fn a_symlink_loop_is_an_error() {
    let copy = Copy::of("02_kvshare");
    std::fs::remove_file(copy.path(SINGLE_FILE)).unwrap();
    std::os::unix::fs::symlink(copy.path(SINGLE_FILE), copy.path(SINGLE_FILE)).unwrap();
    copy.refused(&[SINGLE_FILE, "cannot open"]);
}

#[test]
fn shapes_and_types_are_checked_against_the_configuration() {
    let gate = full("layers.0.mlp.gate_proj.weight");
    let rename = |from: String, to: &'static str| {
        move |h: &mut Value| {
            let entry = h.as_object_mut().unwrap().shift_remove(&from).unwrap();
            h[to] = entry;
        }
    };
    Copy::of("02_kvshare").edit_header(rename(gate.clone(), "other")).refused(&[&gate, "missing", "[48, 48]"]);
    Copy::of("02_kvshare").edit_header(|h| h[&gate]["shape"] = json!([24, 96])).refused(&[
        SINGLE_FILE,
        &gate,
        "expected shape [48, 48]",
        "[24, 96]",
    ]);
    Copy::of("02_kvshare").edit_header(|h| h[&gate]["dtype"] = json!("F16")).refused(&[&gate, "BF16 or F32", "F16"]);
    Copy::of("02_kvshare").edit_header(|h| h[&gate]["dtype"] = json!("F64")).refused(&[SINGLE_FILE, &gate, "needs"]);
    Copy::of("02_kvshare")
        .edit_header(rename(full("embed_tokens.weight"), "other"))
        .refused(&["embed_tokens.weight", "missing"]);
    Copy::of("02_kvshare").edit_json("config.json", |c| c["text_config"]["hidden_size"] = json!(64)).refused(&[
        "embed_tokens.weight",
        "[512, 64]",
        "[512, 48]",
    ]);
    Copy::of("02_kvshare")
        .edit_json("config.json", |c| c["text_config"]["vocab_size"] = json!(16_777_216))
        .refused(&["config.json", "vocab_size_per_layer_input"]);
}

#[test]
fn offsets_out_of_range_or_overlapping_are_refused() {
    let gate = full("layers.0.mlp.gate_proj.weight");
    for offsets in [json!([0, 4608]), json!([u64::MAX - 1, u64::MAX]), json!([119_394, 1u64 << 40]), json!([-1, 4])] {
        Copy::of("02_kvshare").edit_header(|h| h[&gate]["data_offsets"] = offsets).refused(&[SINGLE_FILE, "header"]);
    }
}

#[test]
fn indices_that_lie_are_refused() {
    let sharded = || Copy::of("11_e4b_like_sharded");
    let norm = full("norm.weight");
    sharded()
        .edit_json(INDEX_FILE, |i| i["weight_map"]["ghost"] = json!("model-00001-of-00003.safetensors"))
        .refused(&[INDEX_FILE, "ghost", "does not hold it"]);
    sharded()
        .edit_json(INDEX_FILE, |i| i["weight_map"][&norm] = json!("../../etc/hosts"))
        .refused(&[INDEX_FILE, "not a file name"]);
    sharded()
        .edit_json(INDEX_FILE, |i| i["weight_map"][&norm] = json!("model-00009-of-00003.safetensors"))
        .refused(&["model-00009-of-00003.safetensors", "cannot open"]);
    sharded().edit_json(INDEX_FILE, |i| i["weight_map"] = json!([])).refused(&[INDEX_FILE, "weight_map"]);
    sharded().write(INDEX_FILE, b"{").refused(&[INDEX_FILE, "JSON"]);
}

#[test]
fn packed_weights_that_contradict_the_file_are_refused() {
    let gate = |suffix: &str| full(&format!("layers.0.mlp.gate_proj.{suffix}"));
    let int4 = || Copy::of("08_int4");
    int4()
        .edit_json("config.json", |c| {
            c.as_object_mut().unwrap().shift_remove("quantization_config");
        })
        .refused(&["weight_packed", "quantization_config"]);
    int4()
        .edit_json("config.json", |c| {
            c["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = json!(5)
        })
        .refused(&["num_bits", "5"]);
    int4()
        .edit_json("config.json", |c| {
            c["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = json!(false)
        })
        .refused(&["zero point"]);
    int4().edit_header(|h| h[gate("weight_packed")]["dtype"] = json!("U32")).refused(&[&gate("weight_packed"), "I32"]);
    int4().edit_header(|h| h[gate("weight_scale")]["dtype"] = json!("F16")).refused(&[&gate("weight_scale"), "BF16"]);
    int4().edit_header(|h| h[gate("weight_scale")]["shape"] = json!([64, 3])).refused(&[
        &gate("weight_scale"),
        "[96, 2]",
        "[64, 3]",
    ]);
    int4().poke(&gate("weight_shape"), 0, &97i64.to_le_bytes()).refused(&[
        &gate("weight_shape"),
        "[97, 64]",
        "[96, 64]",
    ]);
}

#[test]
fn keepsets_that_do_not_fit_are_refused() {
    let pruned = || Copy::of("09_pruned_head");
    pruned().edit_json(KEEPSET_FILE, |k| k["full_vocab"] = json!(513)).refused(&[KEEPSET_FILE, "513"]);
    pruned()
        .edit_json(KEEPSET_FILE, |k| {
            k["keep_ids"].as_array_mut().unwrap().pop();
        })
        .refused(&["lm_head.weight", "[199, 48]", "[200, 48]"]);
    let copy = pruned();
    std::fs::remove_file(copy.path(KEEPSET_FILE)).unwrap();
    copy.refused(&["lm_head.weight", "[512, 48]", "[200, 48]"]);
    Copy::of("02_kvshare")
        .write(KEEPSET_FILE, br#"{"keep_ids":[1],"full_vocab":512}"#)
        .refused(&["tie_word_embeddings"]);
}

fn engine_of(dir: &Path) -> Engine {
    let model = Model::load(Checkpoint::open(dir).unwrap()).unwrap();
    Engine::new(std::sync::Arc::new(model), &EngineOptions::default()).unwrap()
}

#[test]
fn nan_is_reported_and_never_decoded() {
    let nan = half::bf16::NAN.to_le_bytes();
    Copy::of("02_kvshare").poke(&full("norm.weight"), 6, &nan).refused(&[&full("norm.weight"), "element 3", "NaN"]);
    Copy::of("02_kvshare").poke(&full("layers.2.layer_scalar"), 0, &nan).refused(&["layer_scalar", "NaN"]);
    let copy = Copy::of("02_kvshare").poke(&full("layers.2.mlp.up_proj.weight"), 0, &nan);
    let logits = engine_of(copy.0.path()).extend(&[1, 2, 3], 0..3).unwrap();
    let error = logits.argmax(0).unwrap_err();
    assert!(matches!(error, Error::NanLogits { position: 0, .. }), "{error}");
}

/// The softcap would turn an infinity into a plausible logit.
#[test]
fn infinite_logits_are_an_error_not_a_choice() {
    let infinite = half::bf16::NEG_INFINITY.to_le_bytes();
    for target in ["05_softcap", "02_kvshare"] {
        let copy = Copy::of(target).poke(&full("embed_tokens.weight"), 2 * (300 * 48 + 3), &infinite);
        let logits = engine_of(copy.0.path()).extend(&[1, 2], 0..2).unwrap();
        assert!(matches!(logits.argmax(1), Err(Error::NanLogits { token: 300, .. })), "{target}");
    }
}

#[test]
fn quantization_that_contradicts_the_shapes_is_refused() {
    let edit = |pointer: &str, value: Value| {
        Copy::of("08_int4").edit_json("config.json", |c| {
            *c.pointer_mut(&format!("/quantization_config/{pointer}")).unwrap() = value;
        })
    };
    edit("config_groups/group_0/weights/group_size", json!(64)).refused(&["weight_scale", "group 64", "`group_0`"]);
    edit("config_groups/group_0/weights/group_size", json!(48)).refused(&["weight_packed", "does not divide"]);
    edit("config_groups/group_0/weights/strategy", json!("channel")).refused(&["weight_scale", "channel", "`group_0`"]);
    for bits in [2, 3, 8] {
        let said = format!("int{bits}, group 32 in config group `group_0`");
        edit("config_groups/group_0/weights/num_bits", json!(bits)).refused(&["weight_packed", &said]);
    }
    edit("config_groups", json!({})).refused(&["no config group"]);
    edit("config_groups/group_0/targets", json!(["re:.*nothing"])).refused(&["no config group", "weight_packed"]);
    edit("config_groups/group_0/targets", json!(["re:("])).refused(&["config.json", "targets", "re:("]);
    edit("ignore", json!(["re:.*k_proj$"])).refused(&["k_proj.weight_packed", "ignore list"]);
    edit("config_groups/group_0/weights/actorder", json!("group")).refused(&["actorder"]);
}

#[test]
fn side_files_of_the_wrong_type_are_refused_not_skipped() {
    Copy::of("02_kvshare").write("generation_config.json", b"[]").refused(&["generation_config.json", "an object"]);
    let copy = Copy::of("02_kvshare");
    std::fs::remove_file(copy.path("generation_config.json")).unwrap();
    std::os::unix::fs::symlink("nowhere", copy.path("generation_config.json")).unwrap();
    copy.refused(&["generation_config.json", "cannot open"]);
    let copy = Copy::of("09_pruned_head");
    std::fs::remove_file(copy.path(KEEPSET_FILE)).unwrap();
    std::os::unix::fs::symlink(copy.path(KEEPSET_FILE), copy.path(KEEPSET_FILE)).unwrap();
    copy.refused(&[KEEPSET_FILE, "cannot open"]);
}

#[test]
fn requests_outside_the_model_are_refused_before_they_change_anything() {
    let mut engine = engine_of(&dir_of("02_kvshare"));
    engine.extend(&[1, 2], 0..2).unwrap();
    assert!(matches!(engine.extend(&[3, 512], 0..2), Err(Error::TokenId { id: 512, index: 1, vocab: 512 })));
    assert_eq!(engine.len(), 2);
    let model = engine.model().clone();
    let options = EngineOptions { context: Some(4), ..Default::default() };
    let mut small = Engine::new(model.clone(), &options).unwrap();
    assert!(matches!(small.extend(&[1; 5], 0..1), Err(Error::ContextFull { wanted: 5, limit: 4, .. })));
    for context in [0, 1 << 30] {
        assert!(Engine::new(model.clone(), &EngineOptions { context: Some(context), ..Default::default() }).is_err());
    }
}

/// Layers that share keys and values load with and without tensors of their own, and what those hold does not matter.
#[test]
fn inert_keys_and_values_are_never_read() {
    let copy =
        Copy::of("02_kvshare").poke(&full("layers.6.self_attn.k_proj.weight"), 0, &half::bf16::NAN.to_le_bytes());
    let mut damaged = engine_of(copy.0.path());
    let mut intact = engine_of(&dir_of("02_kvshare"));
    let (a, b) = (damaged.extend(&[5, 6], 0..2).unwrap(), intact.extend(&[5, 6], 0..2).unwrap());
    assert_eq!(a.row(1), b.row(1));
}
