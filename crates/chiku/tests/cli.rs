//! The program from outside: exit codes, JSON, files, messages.

use std::path::{Path, PathBuf};
use std::process::Output;

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

/// One cache for all tests, so that the embedded model is written once.
fn chiku() -> Command {
    let mut command = Command::cargo_bin("chiku").unwrap();
    command.env("CHIKU_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
    command
}

fn oracle(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/oracle").join(name)
}

fn run(args: &[&str]) -> Output {
    chiku().args(args).output().unwrap()
}

/// Runs, asserts the exit code, and returns standard output and standard error.
fn expect(code: i32, args: &[&str]) -> (String, String) {
    let out = run(args);
    let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert_eq!(out.status.code(), Some(code), "chiku {args:?}\n{stdout}\n{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    (stdout, stderr)
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&expect(0, args).0).unwrap()
}

fn s(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn generate_reports_ids_text_and_timings() {
    let prompt = "In view of the impaired financial resources of Venezuela consequent upon the recent revolution there, a modified \
                  arrangement for the satisfaction";
    let out = json(&["generate", "--model", "nano", "--prompt", prompt, "--json"]);
    // The continuation on the model card.
    let want = " of the Government, and the United States have been made to the Government of the United States.";
    assert_eq!(out["text"], want);
    assert_eq!(out["stop_reason"], "stop");
    assert_eq!(*out["token_ids"].as_array().unwrap().last().unwrap(), 1);
    assert_eq!(out["prompt_token_ids"][0], 2);
    assert!(out["timings"]["prefill_ms"].as_f64().unwrap() > 0.0);
    let streamed = expect(0, &["generate", "--model", "nano", "--prompt", prompt, "--quiet"]);
    assert_eq!(streamed, (format!("{want}\n"), String::new()));
}

#[test]
fn limits_and_stops_are_kept() {
    let ids = ["generate", "--model", "nano", "--token-ids", "2,313,635", "--json", "--max-tokens", "5"];
    assert_eq!(json(&ids)["token_ids"].as_array().unwrap().len(), 5);
    let context = [&ids[..], &["--ignore-eos", "--context", "6"]].concat();
    let out = json(&context);
    assert_eq!(out["stop_reason"], "context");
    // Three prompt tokens, three that fit behind them, and the one that the last position chooses.
    assert_eq!(out["token_ids"].as_array().unwrap().len(), 4);
    expect(2, &[&ids[..], &["--context", "2"]].concat());
    expect(2, &[&ids[..], &["--context", "4096"]].concat());
    let chat = json(&["generate", "--model", "nano", "--chat", "--prompt", "hello", "--json", "--max-tokens", "1"]);
    assert_eq!(chat["prompt_token_ids"][1], 5, "the turn token comes from the template");
}

/// A file of safetensors with f32 tensors: shape and values.
fn tensor(path: &Path, name: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let t = file.tensor(name).unwrap();
    let values = t.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    (t.shape().to_vec(), values)
}

fn ids_of(target: &str) -> String {
    let bytes = std::fs::read(oracle(target).join("golden.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let data = file.tensor("seq0.tokens").unwrap();
    let ids: Vec<String> = data.data().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b).to_string()).collect();
    ids.join(",")
}

#[test]
fn logits_are_the_goldens() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("l.safetensors");
    for (target, precision) in [("11_e4b_like_sharded", "f32"), ("09b_int4_pruned_head", "native")] {
        let (ids, model) = (ids_of(target), oracle(target));
        let args = ["logits", "--model", s(&model), "--token-ids", &ids, "--backend", "cpu", "--precision", precision];
        expect(0, &[&args[..], &["--out", s(&out)]].concat());
        let (shape, full) = tensor(&out, "logits");
        assert_eq!(shape, [ids.split(',').count(), 512]);
        let golden = oracle(target).join("golden.safetensors");
        let (got, want) = if target.starts_with("09b") {
            assert_eq!(full.iter().filter(|v| **v == f32::NEG_INFINITY).count(), shape[0] * (512 - 136));
            (tensor(&out, "logits_kept").1, tensor(&golden, "seq0.logits_kept").1)
        } else {
            (full, tensor(&golden, "seq0.logits").1)
        };
        assert_eq!(got.len(), want.len());
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 5e-4), "{target}");
    }
    let leftovers = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(leftovers, 1);
}

#[test]
fn a_bake_passes_its_gate_and_says_what_it_did() {
    let dir = TempDir::new().unwrap();
    let (int4, small) = (dir.path().join("int4"), dir.path().join("small"));
    let report = json(&["bake", "quantize", "--model", "nano", "--group", "32", "--out", s(&int4), "--json"]);
    assert!(report["tensor_bytes"].as_u64().unwrap() < report["parent_bytes"].as_u64().unwrap());
    expect(0, &["bake", "drop-layers", "--model", s(&int4), "--layers", "2", "--out", s(&small)]);
    let inspect = json(&["bake", "inspect", s(&small), "--strict", "--json"]);
    assert_eq!((inspect["layers"].as_u64(), inspect["kv_shared"].as_u64()), (Some(11), Some(6)));
    assert_eq!(inspect["problems"], serde_json::json!([]));
    assert!(small.join("lineage.json").is_file());

    let gate = ["verify", "--model", s(&small), "--limit", "4", "--tokens", "32", "--json"];
    let report = json(&[&gate[..], &["--reference-ppl", "33.066"]].concat());
    assert_eq!(report["identity"]["status"], "GREEDY_IDENTICAL");
    assert_eq!(report["identity"]["max_logit_delta"], 0.0);
    assert!((report["ppl"].as_f64().unwrap() - 33.571).abs() < 0.01);
    let (refused, _) = expect(1, &[&gate[..], &["--cap", "33.5"]].concat());
    assert_eq!(serde_json::from_str::<Value>(&refused).unwrap()["passed"], false);
    expect(2, &gate);

    // A target that exists is only replaced with --force.
    let again = ["bake", "quantize", "--model", "nano", "--out", s(&int4)];
    assert!(expect(2, &again).1.contains("--force"));
    expect(0, &[&again[..], &["--force"]].concat());
    expect(2, &["bake", "quantize", "--model", s(&int4), "--out", s(&dir.path().join("twice"))]);
    expect(2, &["bake", "drop-layers", "--model", "nano", "--layers", "11", "--out", s(&dir.path().join("x"))]);
    let mut names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["int4", "small"], "nothing half-made is left");
}

#[test]
fn a_pruned_target_has_no_perplexity_and_fails() {
    let dir = TempDir::new().unwrap();
    let (tokens, pruned) = (dir.path().join("tokens.jsonl"), dir.path().join("pruned"));
    std::fs::write(&tokens, "{\"id\":\"a\",\"completion_token_ids\":[313,635,313,668]}\n").unwrap();
    expect(0, &["bake", "prune-vocab", "--model", "nano", "--from-tokens", s(&tokens), "--out", s(&pruned)]);
    let (out, _) = expect(1, &["ppl", "--model", s(&pruned), "--limit", "2", "--json"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["ppl"], Value::Null);
    assert!(report["pruned_targets"].as_array().unwrap().len() > 50);
    let generated = json(&["generate", "--model", s(&pruned), "--prompt", "the", "--json", "--max-tokens", "20"]);
    for id in generated["token_ids"].as_array().unwrap() {
        let id = id.as_u64().unwrap();
        assert!(id < 263 || [313, 635, 668].contains(&id), "{id} has no row");
    }
}

#[test]
fn files_of_generations_are_compared_id_by_id() {
    let dir = TempDir::new().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let line = |id: &str, ids: &str| format!("{{\"id\":\"{id}\",\"completion_token_ids\":[{ids}]}}\n");
    let reference = file("a", &(line("x", "1,2,3") + &line("y", "4")));
    let shorter = file("b", &(line("x", "1,2") + &line("y", "4")));
    let other = file("c", &line("z", "1"));
    let compare = |code, b: &Path| {
        let out = expect(code, &["verify", "--compare", s(&reference), s(b), "--json"]).0;
        serde_json::from_str::<Value>(&out).unwrap()["status"].as_str().unwrap().to_string()
    };
    assert_eq!(compare(0, &reference), "GREEDY_IDENTICAL");
    assert_eq!(compare(1, &shorter), "DIVERGENT");
    assert_eq!(compare(2, &other), "INCOMPARABLE");
    expect(2, &["verify", "--compare", s(&reference), s(&dir.path().join("absent"))]);
}

#[test]
fn a_measurement_is_one_whole_record() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("2026/record.jsonl");
    let args = ["bench", "run", "--limit", "3", "--max-tokens", "8", "--warmup", "1", "--out", s(&out), "--json"];
    let shown = json(&args);
    assert_eq!(shown[0]["kind"], "measured");
    expect(
        0,
        &[
            "bench",
            "--limit",
            "2",
            "--max-tokens",
            "4",
            "--out",
            s(&out),
            "--against",
            "nano",
            "--model",
            s(&model_copy(&dir)),
        ],
    );
    let text = std::fs::read_to_string(&out).unwrap();
    let records: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(records.len(), 3);
    assert_eq!(records[0]["samples"].as_array().unwrap().len(), 3);
    assert_eq!(records[0]["result"]["completion_tokens"], 24);
    assert_eq!(records[0]["result"]["trajectory"].as_str().unwrap().len(), 64);
    assert_eq!(records[0]["result"]["bytes_per_step"]["kind"], "projected");
    assert_eq!(records[2]["comparison"]["pairs"], 2);
    assert_eq!(records[2]["comparison"]["different_outputs"], 0);
}

/// The embedded model under another name.
fn model_copy(dir: &TempDir) -> PathBuf {
    let (from, to) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano"), dir.path().join("copy"));
    std::fs::create_dir(&to).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    to
}

#[test]
fn errors_name_the_file_and_exit_with_2() {
    let dir = TempDir::new().unwrap();
    let empty = dir.path().join("empty.jsonl");
    std::fs::write(&empty, "").unwrap();
    let broken = dir.path().join("broken.jsonl");
    std::fs::write(&broken, "{\"id\":\"a\",\"prompt\":\"x\"}\n{\"id\":").unwrap();
    for (args, want) in [
        (vec!["generate", "--model", "absent", "--prompt", "x"], "absent: no such directory"),
        (vec!["generate", "--model", "nano", "--token-ids", "9999"], "9999"),
        (vec!["generate", "--model", "nano", "--prompt-file", "absent.txt"], "absent.txt"),
        (vec!["generate", "--model", "nano"], "--prompt"),
        (vec!["logits", "--model", "nano", "--token-ids", "1,x", "--out", "o"], "x"),
        (vec!["logits", "--model", "nano", "--token-ids", "1", "--out", "/absent/o"], "/absent"),
        (vec!["ppl", "--model", "nano", "--records", s(&empty)], "empty.jsonl"),
        (vec!["ppl", "--model", "nano", "--records", s(&broken)], "broken.jsonl"),
        (vec!["bench", "--prompts", s(&empty)], "empty.jsonl"),
        (vec!["bench", "--prompts", s(&broken)], "broken.jsonl"),
        (vec!["bench", "--limit", "1", "--max-tokens", "0", "--out", "o"], "max_tokens"),
        (vec!["bake", "inspect", "absent"], "absent: no such directory"),
        (vec!["bake", "synth", "--shape", "nano", "--layers", "0", "--out", "o"], "layers"),
        (vec!["frobnicate"], "frobnicate"),
    ] {
        let (_, stderr) = expect(2, &args);
        assert!(stderr.contains(want), "{args:?}: {stderr}");
    }
    let (out, _) = expect(2, &["ppl", "--model", "absent", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["exit_code"], 2);
}

#[test]
fn drafts_change_speed_and_nothing_else() {
    let base =
        ["generate", "--model", "nano", "--prompt", "In view of", "--ignore-eos", "--max-tokens", "60", "--json"];
    let plain = json(&base);
    for draft in [
        &["--drafter", "nano"][..],
        &["--drafter", "nano", "--tree", "1,1,1,1", "--k", "7"],
        &["--draft", "ngram", "--k", "3"],
    ] {
        let out = json(&[&base[..], draft].concat());
        assert_eq!(out["token_ids"], plain["token_ids"], "{draft:?}");
        let s = &out["speculation"];
        let accepted: Vec<u64> = s["accepted"].as_array().unwrap().iter().map(|a| a.as_u64().unwrap()).collect();
        let mean = accepted.iter().sum::<u64>() as f64 / accepted.len() as f64;
        assert!((s["tokens_per_step"].as_f64().unwrap() - mean - 1.0).abs() < 1e-9);
        assert_eq!(s["drafts"].as_array().unwrap().len(), accepted.len());
        // All tokens but the first, which belongs to the prefill, and those beyond the limit.
        assert!(accepted.iter().map(|a| a + 1).sum::<u64>() >= 59);
    }
    let report = json(&[
        "verify",
        "--model",
        "nano",
        "--drafter",
        "nano",
        "--tree",
        "2,1",
        "--cap",
        "34",
        "--limit",
        "2",
        "--tokens",
        "24",
        "--json",
    ]);
    assert_eq!(report["identity"]["paths"].as_array().unwrap().len(), 5);
    let report = json(&["bench", "acceptance", "--drafter", "nano", "--limit", "4", "--json"]);
    assert!(report["off_loop"]["steps"].as_u64() <= report["all"]["steps"].as_u64());
}

#[test]
fn impossible_drafts_state_the_limit() {
    let base = ["generate", "--model", "nano", "--prompt", "x", "--drafter", "nano"];
    let no_centroids = TempDir::new().unwrap();
    for name in ["config.json", "model.safetensors"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano/assistant").join(name);
        std::fs::copy(from, no_centroids.path().join(name)).unwrap();
    }
    let config = std::fs::read_to_string(no_centroids.path().join("config.json")).unwrap();
    let config = config.replace("\"use_ordered_embeddings\": true", "\"use_ordered_embeddings\": false");
    std::fs::write(no_centroids.path().join("config.json"), config).unwrap();
    for (args, want) in [
        (&["--k", "16"][..], "15"),
        (&["--tree", "4,4,4,1"], "16"),
        (&["--tree", "5"], "4"),
        (&["--tree", "1,1,1", "--k", "2"], "--k is 2"),
        (&["--centroids", "65"], "at most 64"),
    ] {
        let (_, stderr) = expect(2, &[&base[..], args].concat());
        assert!(stderr.contains(want), "{args:?}: {stderr}");
    }
    for (args, want) in [
        (vec!["--drafter", s(no_centroids.path()), "--centroids", "8"], "no clustered head"),
        (vec!["--k", "3"], "need a drafter"),
        (vec!["--draft", "mtp"], "--drafter"),
        (vec!["--draft", "ngram", "--tree", "1"], "no branches"),
        (vec!["--draft", "ngram", "--centroids", "1"], "--draft mtp"),
        (vec!["--stats"], "--drafter"),
        (vec!["--drafter", "absent"], "absent/config.json"),
    ] {
        let (_, stderr) = expect(2, &[&base[..5], &args[..]].concat());
        assert!(stderr.contains(want), "{args:?}: {stderr}");
    }
    // Another target's drafter: both values are named.
    let other = oracle("10_drafter/assistant");
    let (_, stderr) = expect(2, &[&base[..5], &["--drafter", s(&other)]].concat());
    assert!(stderr.contains("48") && stderr.contains("128"), "{stderr}");
}

#[test]
fn doctor_answers_on_any_machine() {
    let report = json(&["doctor", "--json"]);
    assert!(report["cpu"]["cores"].as_u64().unwrap() >= 1);
    assert!(["available", "unavailable"].contains(&report["gpu"]["status"].as_str().unwrap()));
}

#[test]
fn the_demo_passes_its_own_gate() {
    let dir = TempDir::new().unwrap();
    let report = json(&["demo", "--json", "--out", s(dir.path())]);
    let verify = &report["verify"];
    assert_eq!(verify["identity"]["status"], "GREEDY_IDENTICAL");
    assert!(verify["ppl"].as_f64().unwrap() <= verify["ppl_cap"].as_f64().unwrap());
    let steps = report["bake"]["steps"].as_array().unwrap();
    assert_eq!(steps.iter().map(|s| s["kept"].as_bool().unwrap()).collect::<Vec<_>>(), [true, true, false]);
    let vocabulary = &report["bake"]["vocabulary"];
    assert_eq!(vocabulary["coverage_generated"], 1.0);
    assert!(vocabulary["coverage_ppl_records"].as_f64().unwrap() < 1.0);
    assert_eq!(report["bench"]["baked"]["comparison"]["pairs"], 48);
    assert!(Path::new(report["bake"]["path"].as_str().unwrap()).join("model.safetensors").is_file());
}

#[test]
fn sensitivity_continues_where_it_was() {
    let dir = TempDir::new().unwrap();
    let journal = dir.path().join("journal.jsonl");
    let layers = ["sensitivity", "layers", "--model", "nano", "--limit", "1", "--json", "--out", s(&journal)];
    let first = json(&layers);
    assert_eq!(first["rows"].as_array().unwrap().len(), 10);
    assert_eq!(first["fixed"][1]["layer"], 11);
    let written = std::fs::read(&journal).unwrap();
    assert_eq!(json(&layers), first);
    assert_eq!(std::fs::read(&journal).unwrap(), written, "nothing is measured twice");
    let bits = ["sensitivity", "bits", "--model", "nano", "--group", "32", "--widths", "4", "--limit", "1", "--json"];
    let report = json(&[&bits[..], &["--out", s(&journal)]].concat());
    assert_eq!(report["baseline"], first["baseline"], "known from the first command");
    assert!(report["rows"][0]["step_bytes"].as_u64() < report["baseline"]["step_bytes"].as_u64());

    let other = ["sensitivity", "layers", "--model", "nano", "--limit", "2", "--out", s(&journal)];
    assert!(expect(2, &other).1.contains("differs in records"));
    assert!(expect(2, &[&bits[..6], &["--widths", "5"]].concat()).1.contains("8, 4, 3 or 2"));
    let (int4, records) = (oracle("08_int4"), dir.path().join("records.jsonl"));
    std::fs::write(&records, "{\"id\": 1, \"prompt_token_ids\": [2, 3, 4]}\n").unwrap();
    let packed = ["sensitivity", "tensors", "--model", s(&int4), "--records", s(&records)];
    assert!(expect(2, &packed).1.contains("no dense linear"));
}

#[test]
fn a_search_is_judged_on_records_that_it_did_not_see() {
    let search = ["sensitivity", "search", "--model", "nano", "--group", "32", "--widths", "4", "--limit", "2"];
    let few = ["--evaluations", "40", "--beam", "2", "--branch", "2", "--patience", "1", "--cap", "1.2", "--json"];
    let dir = TempDir::new().unwrap();
    let recipe = dir.path().join("cut.toml");
    let report = json(&[&search[..], &few, &["--recipe", s(&recipe)]].concat());
    assert!(std::fs::read_to_string(&recipe).unwrap().contains("bake = \"quantize\""));
    let chosen = &report["finalists"][report["chosen"].as_u64().unwrap() as usize];
    assert!(chosen["search"]["ratio"].as_f64().unwrap() <= 1.2);
    assert!(chosen["held_out"]["ratio"].as_f64().unwrap() <= 1.2);
    assert!(report["finalists"][0]["step_bytes"].as_u64() <= report["least_sensitive"]["step_bytes"].as_u64());
    let slice = |name: &str| report[name]["ppl"].as_f64().unwrap();
    assert!(slice("baseline_search") != slice("baseline_held_out"));
    // What is only luck on the records of the search is no plan.
    let strict = ["--only", "widths", "--widths", "2", "--cap", "1.0000001", "--limit", "1"];
    let none = dir.path().join("none.toml");
    expect(1, &[&search[..6], &strict, &["--evaluations", "40", "--finalists", "1", "--recipe", s(&none)]].concat());
    assert!(!none.exists());
}

#[test]
fn draws_of_many_nodes_come_together_in_one_file() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    for node in ["n1", "n2"] {
        let out = path(node);
        expect(
            0,
            &[
                "bench",
                "run",
                "--limit",
                "2",
                "--max-tokens",
                "8",
                "--warmup",
                "0",
                "--node-id",
                node,
                "--out",
                s(&out),
                "-q",
            ],
        );
    }
    let (first, second, all) = (path("n1"), path("n2"), path("all"));
    let merge = ["bench", "import", "records", s(&first), s(&second), "--out", s(&all), "--json"];
    let merged = json(&merge);
    assert_eq!((&merged["added"], &merged["known"], &merged["nodes"]), (&2.into(), &0.into(), &2.into()));
    assert_eq!(json(&merge)["known"], 2);
    let records = std::fs::read_to_string(&all).unwrap();
    let nodes: Vec<Value> =
        records.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["node"].clone()).collect();
    assert_eq!(nodes, ["n1", "n2"]);
    // Two runs are no verdict, and never one against the same file.
    let said = json(&["bench", "compare", s(&all), s(&all), "--fail-on", "slower", "--json"]);
    assert_eq!((&said["verdict"]["is"], &said["pairs"]), (&"not-enough-data".into(), &2.into()));
    expect(1, &["bench", "compare", s(&all), s(&all), "--fail-on", "not-enough-data"]);
    let (_, message) = expect(2, &["bench", "import", "records", s(&path("absent")), "--out", s(&all)]);
    assert!(message.contains("absent"), "{message}");
    expect(2, &["bench", "run", "--limit", "1", "--node-id", "two words", "--out", s(&all)]);
}
