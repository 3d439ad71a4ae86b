//! Memory of the int4 path: the weights stay packed in the memory map, so what a process holds is the file, the KV cache, and
//! little else.

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;

fn json(args: &[&str]) -> Value {
    let out = Command::cargo_bin("chiku").unwrap().args(args).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

#[test]
fn int4_is_never_expanded_in_memory() {
    const LAYERS: u64 = 4;
    const TOKENS: u64 = 24;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = dir.path().join("e4b");
    let path = model.to_str().unwrap();
    let synth = ["bake", "synth", "--shape", "e4b", "--vocab", "8192", "--int4", "128", "--strip-inert-kv", "--json"];
    json(&[&synth[..], &["--layers", &LAYERS.to_string(), "--out", path]].concat());
    let file = std::fs::metadata(Path::new(path).join("model.safetensors")).unwrap().len();

    let ids: Vec<String> = (0..16).map(|i| (i * 37 % 8192).to_string()).collect();
    let generate = ["generate", "--model", path, "--json", "--ignore-eos", "--max-tokens", "8"];
    let report = json(&[&generate[..], &["--token-ids", &ids.join(",")]].concat());
    assert_eq!(report["token_ids"].as_array().unwrap().len(), 8);
    let peak = report["timings"]["peak_rss_bytes"].as_u64().expect("this system counts memory");
    // Two heads of at most 512 components, keys and values, f32, in every layer.
    let kv = LAYERS * TOKENS * 2 * 2 * 512 * 4;
    let limit = file + file * 15 / 100 + kv;
    assert!(peak <= limit, "peak {peak}, file {file}, kv {kv}: limit {limit}");
    // Nearly all of the file is weights that a step reads, so the test is about what it says.
    assert!(peak >= file / 2, "peak {peak}, file {file}");
}
