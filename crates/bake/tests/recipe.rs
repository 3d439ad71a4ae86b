//! Recipes: the same bytes as their steps one by one, and osoi5 at the size of the real model.
#![recursion_limit = "256"]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use bake::drop_layers::{self, DropLayersOptions};
use bake::prune_vocab::{self, PruneVocabOptions};
use bake::quantize::{self, QuantizeOptions};
use bake::recipe::{self, Recipe};
use bake::synth::{self, Shape, SynthOptions};
use bake::{Error, Strategy};
use common::*;
use runtime::checkpoint::Keepset;
use serde_json::{Value, json};

fn values(pairs: &[(&str, &Path)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| (k.to_string(), v.to_string_lossy().into_owned())).collect()
}

fn recipe(dir: &Path, text: &str) -> bake::Result<Recipe> {
    let path = dir.join("recipe.toml");
    fs::write(&path, text).unwrap();
    Recipe::read(&path, &BTreeMap::new())
}

fn repository(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

const HEAD: &str = "name = \"x\"\ndescription = \"y\"\n";
const DROP: &str = "[[step]]\nbake = \"drop-layers\"\nlayers = [0, 3, 6]\n";
const PRUNE: &str = "[[step]]\nbake = \"prune-vocab\"\nkeepset = \"keep.json\"\n";
const QUANTIZE: &str = "[[step]]\nbake = \"quantize\"\ngroup = 16\n";

/// Any order, so that every kind of step reads from every other: copies, slices and rows of what was not written.
#[test]
fn a_recipe_is_its_steps_one_by_one() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let keep = Keepset { ids: vec![0, 1, 2, 3, 100, 101, 511, 7], full_vocab: 512 };
    fs::write(path("keep.json"), json!({"keep_ids": keep.ids, "full_vocab": 512}).to_string()).unwrap();
    for (n, order) in ["dpq", "qdp", "pqd", "qpd", "dqp", "q"].into_iter().enumerate() {
        let (mut from, mut text) = (oracle("02_kvshare"), HEAD.to_string());
        for (i, step) in order.chars().enumerate() {
            let to = path(&format!("{n}-{i}"));
            match step {
                'd' => {
                    let options = DropLayersOptions { layers: vec![0, 3, 6], ..Default::default() };
                    drop_layers::run(&open(&from), &to, &options, &quiet()).unwrap();
                    text += DROP;
                }
                'p' => {
                    let options = PruneVocabOptions::default();
                    prune_vocab::run(&open(&from), &to, &keep, &options, &quiet()).unwrap();
                    text += PRUNE;
                }
                _ => {
                    let options = QuantizeOptions { strategy: Strategy::Group(16), ..Default::default() };
                    quantize::run(&open(&from), &to, &options, &quiet()).unwrap();
                    text += QUANTIZE;
                }
            }
            from = to;
        }
        let out = path(&format!("{n}-recipe"));
        let report = recipe::run(
            &open(&oracle("02_kvshare")),
            &out,
            &recipe(tmp.path(), &text).unwrap(),
            Default::default(),
            &quiet(),
        )
        .unwrap();
        assert_same(&tensors_of(&out), &tensors_of(&from));
        assert_eq!(open(&out).config_json(), open(&from).config_json(), "{order}");
        assert_eq!(open(&out).keepset(), open(&from).keepset(), "{order}");
        assert_eq!(report.lineage.command, "recipe");
        assert_eq!(report.lineage.knobs["steps"].as_array().unwrap().len(), order.len());
        // The parent is what was read, not an intermediate.
        let parent = report.lineage.parent.unwrap();
        assert_eq!(parent.name, "02_kvshare");
    }
}

#[test]
fn recipes_that_cannot_be_followed_say_why() {
    let tmp = tempfile::tempdir().unwrap();
    for (text, want) in [
        ("name = \"x\"", "missing field `description`"),
        (&format!("{HEAD}step = []"), "no [[step]]"),
        (&format!("{HEAD}[[step]]\nbake = \"melt\""), "step 1: unknown variant `melt`"),
        (&format!("{HEAD}{DROP}strip = true"), "step 1: unknown field `strip`"),
        (
            &format!("{HEAD}{DROP}{PRUNE}[[step]]\nbake = \"prune-vocab\"\nkeepset = \"$k\""),
            "step 3: `keepset` asks for `$k`",
        ),
        (
            &format!("{HEAD}[parameters]\nkeepset = \"which tokens\"\n{PRUNE}"),
            "needs --set keepset=VALUE: which tokens",
        ),
    ] {
        let error = recipe(tmp.path(), text).unwrap_err();
        assert!(matches!(error, Error::Recipe { .. }), "{error}");
        assert!(error.to_string().contains(want), "{want}: {error}");
    }
    let path = tmp.path().join("recipe.toml");
    fs::write(&path, format!("{HEAD}{DROP}")).unwrap();
    let error = Recipe::read(&path, &values(&[("keepset", Path::new("k"))])).unwrap_err().to_string();
    assert!(error.contains("no parameter `keepset`"), "{error}");
}

#[test]
fn a_step_that_fails_is_named_and_nothing_is_left() {
    let tmp = tempfile::tempdir().unwrap();
    let inner = tempfile::tempdir().unwrap();
    for (text, want) in [
        (format!("{HEAD}{QUANTIZE}{DROP}{QUANTIZE}"), "step 3 (quantize)"),
        (
            format!("{HEAD}{DROP}[[step]]\nbake = \"drop-layers\"\nlayers = [7]"),
            "step 2 (drop-layers): cannot drop layers [7]: there is no layer 7",
        ),
        (format!("{HEAD}{PRUNE}"), "step 1 (prune-vocab)"),
        (
            format!("{HEAD}[[step]]\nbake = \"quantize\"\ngroup = 32\nper-channel = true"),
            "either `group` or `per-channel`",
        ),
    ] {
        let recipe = recipe(inner.path(), &text).unwrap();
        let out = tmp.path().join("out");
        let error = recipe::run(&open(&oracle("02_kvshare")), &out, &recipe, Default::default(), &quiet())
            .unwrap_err()
            .to_string();
        assert!(error.contains(want), "{want}: {error}");
        assert!(names_in(tmp.path()).is_empty());
    }
}

/// E4B in its real shape, in holes that take no room.
fn sparse_e4b(dir: &Path) {
    let options = SynthOptions { sparse: true, ..SynthOptions::new(Shape::E4b) };
    synth::run(dir, &options, &quiet()).unwrap();
}

/// `text_config` of the published osoi5 checkpoint (its `config.json`, field by field).
fn osoi5_text_config() -> Value {
    let full = [2, 8, 14, 20, 26, 32, 36];
    let kinds: Vec<&str> =
        (0..37).map(|l| if full.contains(&l) { "full_attention" } else { "sliding_attention" }).collect();
    json!({
        "attention_bias": false,
        "attention_dropout": 0.0,
        "attention_k_eq_v": false,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": false,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2560,
        "hidden_size_per_layer_input": 256,
        "initializer_range": 0.02,
        "intermediate_size": 10240,
        "layer_types": kinds,
        "max_position_embeddings": 131_072,
        "model_type": "gemma4_text",
        "moe_intermediate_size": null,
        "num_attention_heads": 8,
        "num_experts": null,
        "num_global_key_value_heads": null,
        "num_hidden_layers": 37,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 16,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "tie_word_embeddings": false,
        "top_k_experts": null,
        "use_bidirectional_attention": null,
        "use_cache": true,
        "use_double_wide_mlp": false,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
    })
}

/// A keepset as large as the field's: what it holds does not change a shape.
fn keepset_12k(dir: &Path) -> PathBuf {
    let ids: Vec<u32> = (0..12_284).chain(258_881..=258_884).collect();
    let path = dir.join("keepset.json");
    fs::write(&path, json!({"keep_ids": ids, "full_vocab": 262_144}).to_string()).unwrap();
    path
}

#[test]
fn osoi5_comes_out_at_the_size_of_the_real_model() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = tmp.path().join("e4b");
    sparse_e4b(&parent);
    let keepset = keepset_12k(tmp.path());
    let recipe = Recipe::read(&repository("recipes/osoi5.toml"), &values(&[("keepset", &keepset)])).unwrap();
    let plan = recipe::plan(&open(&parent), &recipe).unwrap();
    let preview = recipe::preview(&plan, &tmp.path().join("out")).unwrap();
    assert_eq!(preview.text_config, osoi5_text_config());
    assert_eq!(plan.config["tie_word_embeddings"], false);

    let c = preview.components;
    let mb = |bytes: u64| format!("{:.2}", bytes as f64 / 1e6);
    assert_eq!(mb(c.body), "1772.05", "as measured from the served file");
    assert_eq!((c.body, c.head), (preview.bytes_per_step.body, preview.bytes_per_step.head));
    // q, o and the MLP of 37 layers, keys and values of 21, two PLE linears a layer, the projection and the head.
    assert_eq!(c.shapes, 16 * (37 * 5 + 21 * 2 + 37 * 2 + 2));
    // 37 layers of 2 [256, 2560] and a projection [9472, 2560], at 4.125 bits.
    assert_eq!(preview.bytes_per_step.ple_linears, (37 * 2 * 256 * 2560 + 37 * 256 * 2560) * 33 / 64);
    // 12288 rows of 2560 nibbles and a scale.
    assert_eq!(preview.bytes_per_step.head, 12_288 * (1280 + 2));
    assert_eq!((c.embed, c.ple_embed), (262_144 * 2560 * 2, 262_144 * 37 * 256 * 2));
    assert_eq!(c.inert_kv, 0);

    let q = &plan.config["quantization_config"];
    let group = |name: &str, field: &str| q["config_groups"][name]["weights"][field].clone();
    assert_eq!((group("group_0", "num_bits"), group("group_0", "group_size")), (json!(4), json!(128)));
    assert_eq!(group("group_0_lmhead", "strategy"), "channel");
    assert_eq!(q["config_groups"]["group_0"]["targets"], json!(["Linear"]));
}

#[test]
fn int3_mixed_keeps_everything_and_counts_ten_fields_a_word() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = tmp.path().join("e4b");
    sparse_e4b(&parent);
    let recipe = Recipe::read(&repository("recipes/int3-mixed-42.toml"), &BTreeMap::new()).unwrap();
    let plan = recipe::plan(&open(&parent), &recipe).unwrap();
    let preview = recipe::preview(&plan, &tmp.path().join("out")).unwrap();
    assert_eq!(preview.text_config["num_hidden_layers"], 42);
    assert_eq!(preview.text_config["tie_word_embeddings"], true);

    // 2560 inputs at int3 are 256 words and 20 scales; at int4 a weight takes 4.125 bits with its share of a scale.
    let int4 = |weights: u64| weights * 33 / 64;
    let gate_up = 42 * 2 * 10_240 * (256 * 4 + 20 * 2);
    let down = int4(42 * 2560 * 10_240);
    // 35 sliding layers with heads of 256 and 7 full ones with heads of 512; 20 and 4 have keys and values of their own.
    let q_o = int4(2 * 2560 * (35 * 2048 + 7 * 4096));
    let k_v = int4(2 * 2560 * (20 * 512 + 4 * 1024));
    assert_eq!(preview.components.body, gate_up + down + q_o + k_v);

    let groups = plan.config["quantization_config"]["config_groups"].as_object().unwrap();
    let bits: Vec<_> = groups.values().map(|g| g["weights"]["num_bits"].as_u64().unwrap()).collect();
    assert!(bits.contains(&3) && bits.contains(&4) && bits.len() == 2, "{bits:?}");
}

/// The table above against the published file and keepset themselves, where a directory with them is named.
#[test]
fn osoi5_matches_the_published_file() {
    let Some(data) = std::env::var_os("CHIKU_FIELD_DATA").map(PathBuf::from) else {
        eprintln!("skipped: set CHIKU_FIELD_DATA to a directory with osoi5-config.json and keepset-12k.json");
        return;
    };
    let published = json(&data.join("osoi5-config.json"));
    assert_eq!(published["text_config"], osoi5_text_config());
    let tmp = tempfile::tempdir().unwrap();
    let parent = tmp.path().join("e4b");
    sparse_e4b(&parent);
    let set = values(&[("keepset", &data.join("keepset-12k.json"))]);
    let plan = recipe::plan(&open(&parent), &Recipe::read(&repository("recipes/osoi5.toml"), &set).unwrap()).unwrap();
    let preview = recipe::preview(&plan, &tmp.path().join("out")).unwrap();
    assert_eq!(preview.text_config, published["text_config"]);
    assert_eq!(preview.bytes_per_step.head, 12_288 * (1280 + 2));
    let groups = |config: &Value| {
        let of = |name: &str| config["quantization_config"]["config_groups"][name].clone();
        let weights = |g: Value| {
            ["num_bits", "group_size", "strategy", "symmetric", "type", "observer"].map(|f| g["weights"][f].clone())
        };
        [weights(of("group_0")), weights(of("group_0_lmhead"))]
    };
    assert_eq!(groups(&plan.config), groups(&published));
}
