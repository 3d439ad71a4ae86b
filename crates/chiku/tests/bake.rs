//! `chiku bake` from outside: its commands, their exit codes and JSON.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::{Value, json};
use tempfile::TempDir;

fn expect(code: i32, args: &[&str]) -> (String, String) {
    let mut command = Command::cargo_bin("chiku").unwrap();
    command.env("CHIKU_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("bake-cache"));
    let out = command.arg("bake").args(args).output().unwrap();
    let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert_eq!(out.status.code(), Some(code), "chiku bake {args:?}\n{stdout}\n{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    (stdout, stderr)
}

fn report(code: i32, args: &[&str]) -> Value {
    serde_json::from_str(&expect(code, &[args, &["--json"]].concat()).0).unwrap()
}

fn s(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

#[test]
fn inspect_answers_with_the_agreed_keys() {
    let r = report(0, &["inspect", "nano"]);
    for key in ["layers", "kv_shared", "sources", "components", "quantization", "problems"] {
        assert!(r.get(key).is_some(), "{key} in {r}");
    }
    for key in ["embed", "ple_embed", "body", "ple_linears", "head", "norms", "towers"] {
        assert!(r["components"][key].is_u64(), "{key} in {r}");
    }
    let weights: u64 = r["components"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
    let tensors = r["tensors"].as_array().unwrap();
    assert_eq!(weights, tensors.iter().map(|t| t["bytes"].as_u64().unwrap()).sum::<u64>());
    assert_eq!((&r["layers"], &r["kv_shared"]), (&json!(12), &json!(6)));
    assert_eq!(r["sources"], json!({"full_attention": 5, "sliding_attention": 4}));
    let long = expect(0, &["inspect", "nano", "--tensors"]).0;
    assert!(long.contains("model.language_model.layers.11.mlp.up_proj.weight"), "{long}");
}

#[test]
fn a_recipe_is_one_bake_with_a_family_and_a_difference() {
    let dir = TempDir::new().unwrap();
    let path = |n: &str| dir.path().join(n);
    let ids: Vec<u32> = (0..1024).collect();
    std::fs::write(path("keep.json"), json!({"keep_ids": ids, "full_vocab": 2048}).to_string()).unwrap();
    std::fs::write(
        path("r.toml"),
        "name = \"mine\"\ndescription = \"d\"\n[parameters]\nkeepset = \"tokens\"\n[[step]]\nbake = \"drop-layers\"\nlayers = [2]\n\
         [[step]]\nbake = \"prune-vocab\"\nkeepset = \"$keepset\"\n[[step]]\nbake = \"quantize\"\ngroup = 32\n",
    )
    .unwrap();
    let set = format!("keepset={}", path("keep.json").display());
    let (recipe, out) = (path("r.toml"), path("out"));
    let base = ["recipe", s(&recipe), "--model", "nano", "--out", s(&out)];
    assert!(expect(2, &base).1.contains("it needs --set keepset=VALUE: tokens"));
    let full = [&base[..], &["--set", &set]].concat();
    let preview = report(0, &[&full[..], &["--dry-run"]].concat());
    assert_eq!(preview["text_config"]["num_hidden_layers"], 11);
    assert!(!out.exists());
    let done = report(0, &full);
    assert_eq!(done["lineage"]["command"], "recipe");
    let inspected = report(0, &["inspect", s(&out), "--strict"]);
    assert_eq!(inspected["components"], preview["components"]);
    assert_eq!(inspected["bytes_per_step"], preview["bytes_per_step"]);
    assert_eq!(inspected["chiku_only"].as_array().unwrap().len(), 1);

    let family = report(0, &["lineage", s(&out), "--parent", "nano"]);
    assert_eq!(family["generations"][1]["name"].as_str().map(|n| n.starts_with("nano")), Some(true));
    assert!(family["flags"][0].as_str().unwrap().contains("3 knobs at once (layers, vocabulary, quantisation)"));
    assert!(family["parent_files"].as_array().unwrap().iter().all(|f| f["state"] == "same"));
    assert!(family["generations"][0]["made"]["tool"].get("commit").is_none_or(Value::is_string));
    let other = report(1, &["lineage", s(&out), "--parent", s(&out)]);
    assert!(other["parent_files"].as_array().unwrap().iter().any(|f| f["state"] == "other"));
    assert!(expect(2, &["lineage", "nano"]).1.contains("no lineage.json"));

    let difference = report(1, &["diff", "nano", s(&out)]);
    assert_eq!(difference["seen_through"], json!(["without layers [2]", "with the 1024 head rows of the second"]));
    assert!(
        difference["tensors"].as_array().unwrap().iter().all(|t| t["error"]["relative_rms"].as_f64().unwrap() < 0.2)
    );
    assert_eq!(report(0, &["diff", s(&out), s(&out)])["tensors"], json!([]));

    let shipped = repository("recipes/osoi5.toml");
    let error = expect(2, &["recipe", s(&shipped), "--model", "nano", "--out", s(&path("x")), "--set", &set]).1;
    assert!(error.contains("step 1 (drop-layers)") && error.contains("there is no layer 36"), "{error}");
}

#[test]
fn a_keepset_is_built_judged_and_never_fitted_in_silence() {
    let dir = TempDir::new().unwrap();
    let path = |n: &str| dir.path().join(n);
    std::fs::write(path("corpus.txt"), "The Government of the United States, and the Congress of the United States.\n")
        .unwrap();
    std::fs::write(path("generated.jsonl"), "{\"completion_token_ids\": [300, 300, 301]}\n{\"token_ids\": [2, 1]}\n")
        .unwrap();
    let (corpus, generated) = (path("corpus.txt"), path("generated.jsonl"));
    let (heldout, ppl) = (repository("prompts/heldout.jsonl"), repository("prompts/ppl.jsonl"));
    let coverage =
        [format!("generated={}", s(&generated)), format!("heldout={}", s(&heldout)), format!("gate={}", s(&ppl))];
    let out = path("a");
    let done = report(
        0,
        &[
            "prune-vocab",
            "--model",
            "nano",
            "--out",
            s(&out),
            "--from-text",
            s(&corpus),
            "--size",
            "512",
            "--coverage",
            &coverage[0],
            "--coverage",
            &coverage[1],
            "--coverage",
            &coverage[2],
        ],
    );
    let kept: Value = serde_json::from_slice(&std::fs::read(out.join("pck04_keepset.json")).unwrap()).unwrap();
    assert_eq!(kept["keep_ids"].as_array().unwrap().len(), 512);
    let measured = &done["lineage"]["measured"]["coverage"];
    assert_eq!((&measured["generated"]["tokens"], &measured["generated"]["records"]), (&json!(5), &json!(2)));
    let share = |name: &str| measured[name]["share"].as_f64().unwrap();
    assert!(share("heldout") > 0.3 && share("heldout") < 1.0 && share("gate") < 1.0, "{measured}");

    // With the targets kept, the gate file is covered by construction, and the bake says so.
    let out = path("b");
    let base =
        ["prune-vocab", "--model", "nano", "--out", s(&out), "--from-tokens", s(&generated), "--keep-targets", s(&ppl)];
    let done = report(0, &[&base[..], &["--coverage", &coverage[1], "--coverage", &coverage[2]]].concat());
    let measured = &done["lineage"]["measured"]["coverage"];
    assert_eq!(measured["gate"]["share"], 1.0);
    assert!(measured["heldout"]["share"].as_f64().unwrap() < 1.0);
    let notes = done["lineage"]["notes"].to_string();
    assert!(notes.contains("kept on purpose"), "{notes}");

    let nowhere = path("c");
    let with =
        |more: &[&str]| expect(2, &[&["prune-vocab", "--model", "nano", "--out", s(&nowhere)][..], more].concat()).1;
    assert!(with(&["--from-text", s(&corpus), "--size", "3"]).contains("no room for the"));
    assert!(with(&["--from-text", s(&corpus), "--coverage", "heldout"]).contains("expected NAME=FILE"));
    assert!(with(&["--keepset", s(&corpus), "--size", "9"]).contains("cannot be used with"));
    assert!(with(&[]).contains("required"));
    assert!(!nowhere.exists());
}

#[test]
fn gptq_calibrates_on_a_file_and_says_so() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let public = repository("prompts/public.jsonl");
    let base = ["quantize", "--model", "nano", "--bits", "3", "--group", "32", "--out", s(&out)];
    let gptq = [&base[..], &["--method", "gptq"]].concat();
    assert!(expect(2, &gptq).1.contains("--calibration"));
    // Text for a method that does not read it would be ignored.
    let unread = [&base[..], &["--method", "rtn", "--calibration", s(&public)]].concat();
    assert!(expect(2, &unread).1.contains("calibration"));
    let full =
        [&gptq[..], &["--calibration", s(&public), "--calibration-tokens", "512", "--order", "activation"]].concat();
    let knobs = report(0, &full)["lineage"]["knobs"].clone();
    assert_eq!(knobs["method"], "gptq", "{knobs}");
    assert!(knobs.to_string().contains("public.jsonl") && knobs.to_string().contains("512"), "{knobs}");
    assert!(report(0, &["inspect", s(&out), "--strict"])["problems"].as_array().unwrap().is_empty());
    // It is not what rounding to nearest gives.
    let nearest = dir.path().join("rtn");
    expect(0, &["quantize", "--model", "nano", "--bits", "3", "--group", "32", "--out", s(&nearest)]);
    let bytes = |of: &Path| std::fs::read(of.join("model.safetensors")).unwrap();
    assert_ne!(bytes(&out), bytes(&nearest));
}
