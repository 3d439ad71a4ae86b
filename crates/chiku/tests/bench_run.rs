//! `chiku bench run` from outside: what is recorded, what is exported, servers, configurations in turn.

use std::path::Path;
use std::process::Output;

use assert_cmd::Command;
use serde_json::{Value, json};

#[path = "../../bench/tests/common/faulty_server.rs"]
mod faulty_server;

use faulty_server::{Act, start};

fn run_in(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::cargo_bin("chiku").unwrap();
    command.env("CHIKU_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
    command.current_dir(dir).args(["bench", "run", "-q"]).args(args).output().unwrap()
}

fn expect(code: i32, dir: &Path, args: &[&str]) -> (String, String) {
    let out = run_in(dir, args);
    let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert_eq!(out.status.code(), Some(code), "bench run {args:?}\n{stdout}\n{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    (stdout, stderr)
}

const SMALL: [&str; 8] = ["--limit", "2", "--max-tokens", "6", "--warmup", "1", "--warmup-limit", "0"];

fn small<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&SMALL[..], args].concat()
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn of_private_prompts_only_the_hash_and_counts_are_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let text = "{\"id\": \"secret-1\", \"prompt\": \"Hidden words\"}\n{\"id\": \"secret-2\", \"prompt\": \"More\"}\n";
    std::fs::write(dir.path().join("confidential.jsonl"), text).unwrap();
    let args = ["--prompts", "confidential.jsonl", "--out", "r.jsonl", "--discarded", "the clocks fell"];
    expect(0, dir.path(), &small(&args));
    let recorded = std::fs::read_to_string(dir.path().join("r.jsonl")).unwrap();
    for word in ["secret", "confidential", "Hidden", dir.path().to_str().unwrap()] {
        assert!(!recorded.contains(word), "{word}: {recorded}");
    }
    let record = &lines(&dir.path().join("r.jsonl"))[0];
    assert_eq!((&record["prompts"]["name"], &record["prompts"]["private"]), (&json!("private"), &json!(true)));
    assert_eq!((&record["prompts"]["count"], &record["samples"][1]["id"]), (&json!(2), &json!("1")));
    // All that a record must say of its surroundings, or why it does not.
    for field in ["/binary/blake3", "/binary/flake_lock", "/checkpoint/blake3", "/prompts/blake3", "/warmup/requests"] {
        assert!(!record.pointer(field).unwrap().is_null(), "{field}");
    }
    for (value, field) in [("/environment/gpus", "gpus"), ("/environment/governor", "governor")] {
        let missing = record["environment"]["missing"].get(field).is_some();
        assert_eq!(record.pointer(value).unwrap().is_null(), missing, "{field}: {}", record["environment"]);
    }
    assert_eq!(record["discarded"][0], json!({"what": "a run", "reason": "the clocks fell"}));
    // Their number is enough to pair them with another run of the same set.
    expect(0, dir.path(), &small(&["--prompts", "confidential.jsonl", "--out", "r.jsonl", "--against", "nano"]));
    // Public prompts keep their names.
    expect(0, dir.path(), &small(&["--out", "p.jsonl"]));
    let public = &lines(&dir.path().join("p.jsonl"))[0];
    assert_eq!((&public["prompts"]["name"], &public["prompts"]["private"]), (&json!("public.jsonl"), &json!(false)));
    assert_ne!(public["samples"][1]["id"], "1");
}

#[test]
fn a_run_exported_for_the_field_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let set = r#"[{"id": "a", "conversations": [{"from": "human", "value": "Hello"}]},
                  {"id": "b", "conversations": [{"from": "human", "value": "Call me"}]}]"#;
    std::fs::write(dir.path().join("eval.json"), set).unwrap();
    expect(0, dir.path(), &small(&["--prompts", "eval.json", "--out", "r.jsonl", "--export", "field"]));
    let record = &lines(&dir.path().join("r.jsonl"))[0];
    let mut import = Command::cargo_bin("chiku").unwrap();
    let out = import.current_dir(dir.path()).args(["bench", "import", "run", "r.field", "--json"]).output().unwrap();
    let back: Value = serde_json::from_slice(&out.stdout).unwrap();
    let (tps, ours) = (back["tps"].as_f64().unwrap(), record["result"]["tokens_per_s"].as_f64().unwrap());
    assert!((tps / ours - 1.0).abs() < 1e-9, "{tps} {ours}");
    assert_eq!((&back["trajectory"], &back["prompts"]), (&record["result"]["trajectory"], &json!(2)));
    let outputs = lines(&dir.path().join("r.field/decode_outputs.jsonl"));
    assert_eq!((&outputs[1]["id"], &outputs[1]["prompt_text"]), (&json!("b"), &json!("Call me")));
    assert!(!outputs[1]["generated_text"].as_str().unwrap().is_empty());
    let again = expect(2, dir.path(), &small(&["--prompts", "eval.json", "--out", "r.jsonl", "--export", "field"])).1;
    assert!(again.contains("r.field: cannot write a run of the field to: it exists and is not empty"), "{again}");
    assert_eq!(lines(&dir.path().join("r.jsonl")).len(), 1, "nothing was measured for a place that cannot be written");
}

#[test]
fn a_server_is_measured_and_its_failure_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let url = start(&[Act::Ids]);
    let args = ["--url", &url, "--chat", "--out", "r.jsonl", "--export", "field", "--json"];
    let shown: Value = serde_json::from_str(&expect(0, dir.path(), &small(&args)).0).unwrap();
    assert_eq!((&shown[0]["target"]["backend"], &shown[0]["target"]["label"]), (&json!("server"), &json!("scripted")));
    assert_eq!((&shown[0]["result"]["completion_tokens"], &shown[0]["complete"]), (&json!(12), &json!(true)));
    assert!(
        !std::fs::read_to_string(dir.path().join("r.jsonl")).unwrap().contains("127.0.0.1"),
        "an address is a place"
    );
    assert_eq!(lines(&dir.path().join("r.field/decode_outputs.jsonl"))[1]["generated_text"], "xxxxxx");
    let url = start(&[Act::Ids, Act::Ids, Act::Drop]);
    let (_, stderr) = expect(2, dir.path(), &small(&["--url", &url, "--no-stream", "--out", "r.jsonl"]));
    assert!(stderr.contains("the run ended early") && stderr.contains("the answer breaks off"), "{stderr}");
    let failed = &lines(&dir.path().join("r.jsonl"))[1];
    assert_eq!((&failed["complete"], failed["samples"].as_array().unwrap().len()), (&json!(false), 1));
    assert!(failed["failure"].as_str().unwrap().contains("the answer breaks off"));
    let nobody = expect(2, dir.path(), &small(&["--url", "http://127.0.0.1:9", "--out", "r.jsonl"])).1;
    assert!(nobody.contains("it does not answer"), "{nobody}");
    assert!(expect(2, dir.path(), &small(&["--url", &url, "--k", "3"])).1.contains("cannot be used with"));
}

#[test]
fn a_killed_run_loses_no_request_that_was_finished() {
    let dir = tempfile::tempdir().unwrap();
    let four =
        ["--limit", "4", "--max-tokens", "6", "--warmup", "1", "--warmup-limit", "0", "--chat", "--out", "r.jsonl"];
    // The warm-up, two requests, and one that never ends.
    let url = start(&[Act::Ids, Act::Ids, Act::Ids, Act::Hang]);
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("chiku"))
        .args(["bench", "run", "-q", "--url", &url])
        .args(four)
        .current_dir(dir.path())
        .spawn()
        .unwrap();
    let journal = dir.path().join(format!(".r.jsonl.unfinished-{}", child.id()));
    let done = || std::fs::read_to_string(&journal).is_ok_and(|text| text.lines().count() == 3);
    for _ in 0..600 {
        if done() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert!(done(), "{journal:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!dir.path().join("r.jsonl").exists());
    let url = start(&[Act::Ids]);
    let (_, told) = expect(0, dir.path(), &[&["--url", &url][..], &four].concat());
    assert!(told.contains("a run of `scripted` was killed; the 2 of 4 requests that it had finished"), "{told}");
    let both = lines(&dir.path().join("r.jsonl"));
    let whole = |r: &Value| (r["complete"].as_bool().unwrap(), r["samples"].as_array().unwrap().len());
    assert_eq!(both.iter().map(whole).collect::<Vec<_>>(), [(false, 2), (true, 4)]);
    assert!(both[0]["failure"].as_str().unwrap().contains("ended before the run did"), "{}", both[0]["failure"]);
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["r.jsonl"], "both journals are gone");
}

#[test]
fn programs_take_turns_in_processes_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let program = assert_cmd::cargo::cargo_bin("chiku");
    let old = format!("model = \"nano\"\nthreads = 1\nbinary = {:?}\n", program.to_str().unwrap());
    std::fs::write(dir.path().join("old.toml"), old).unwrap();
    std::fs::write(dir.path().join("new.toml"), "model = \"nano\"\nthreads = 1\n").unwrap();
    let turns = ["--interleave", "old.toml", "new.toml", "--processes", "2", "--out", "r.jsonl"];
    let shown: Value =
        serde_json::from_str(&expect(0, dir.path(), &small(&[&turns[..], &["--json"]].concat())).0).unwrap();
    assert_eq!((&shown["in_turn"]["pairs"], &shown["in_turn"]["left_out"]), (&json!(2), &json!(0)), "{shown}");
    assert!(shown["in_turn"]["verdict"].to_string().contains("not-enough-data"), "{}", shown["in_turn"]);
    let all = lines(&dir.path().join("r.jsonl"));
    let labels: Vec<&str> = all.iter().map(|r| r["target"]["label"].as_str().unwrap()).collect();
    assert_eq!(labels, ["old", "new", "new", "old"]);
    assert!(!all[0].to_string().contains(program.to_str().unwrap()), "a record names no directory");
    let gone = "model = \"nano\"\nbinary = \"./gone\"\nthreads = 1\n";
    std::fs::write(dir.path().join("gone.toml"), gone).unwrap();
    let args = ["--interleave", "gone.toml", "new.toml", "--out", "r.jsonl"];
    assert!(expect(2, dir.path(), &small(&args)).1.contains("./gone: cannot start"));
}

#[test]
fn a_run_that_was_taken_apart_shows_what_each_op_takes_of_the_roofline() {
    let dir = tempfile::tempdir().unwrap();
    expect(0, dir.path(), &small(&["--profile", "--out", "results/r.jsonl"]));
    let record = &lines(&dir.path().join("results/r.jsonl"))[0];
    let ops = record["profile"]["roofline"]["ops"].as_array().unwrap();
    let bytes: u64 = ops.iter().map(|op| op["bytes"].as_u64().unwrap()).sum();
    assert_eq!(bytes as f64, record["result"]["bytes_per_step"]["value"].as_f64().unwrap());
    assert!(ops.iter().all(|op| op["percent"].as_f64().unwrap() > 0.0), "{ops:?}");
    let mut command = Command::cargo_bin("chiku").unwrap();
    let out = command.current_dir(dir.path()).args(["bench", "history"]).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("GB/s (projected): qkv ") && text.contains(", gate/up "), "{text}");
}

#[test]
fn configurations_take_turns_and_base_is_the_last_good_record() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.toml"), "model = \"nano\"\nthreads = 1\n").unwrap();
    std::fs::write(dir.path().join("b.toml"), "model = \"nano\"\ndraft = \"ngram\"\nk = 3\n").unwrap();
    let none = expect(2, dir.path(), &small(&["--interleave", "base", "b.toml", "--out", "r.jsonl"])).1;
    assert!(
        none.contains("`base` is the configuration of this machine's last good record, and there is none"),
        "{none}"
    );
    expect(0, dir.path(), &small(&["--interleave", "a.toml", "b.toml", "--out", "r.jsonl"]));
    let both = lines(&dir.path().join("r.jsonl"));
    assert_eq!((&both[0]["target"]["label"], &both[1]["target"]["label"]), (&json!("a"), &json!("b")));
    assert_eq!((&both[1]["comparison"]["pairs"], &both[1]["configuration"]["k"]), (&json!(2), &json!(3)));
    expect(0, dir.path(), &small(&["--interleave", "base", "a.toml", "--out", "r.jsonl"]));
    let third = &lines(&dir.path().join("r.jsonl"))[2];
    assert_eq!((&third["target"]["label"], &third["target"]["flags"]), (&json!("base"), &both[1]["target"]["flags"]));
    std::fs::write(dir.path().join("c.toml"), "model = \"nano\"\ndepth = 3\n").unwrap();
    assert!(expect(2, dir.path(), &small(&["--interleave", "a.toml", "c.toml"])).1.contains("c.toml:2: unknown field"));
}

#[test]
fn processes_are_pooled_and_their_variance_is_split() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--draws", "3", "--out", "r.jsonl", "--json"];
    let shown: Value = serde_json::from_str(&expect(0, dir.path(), &small(&args)).0).unwrap();
    let pooled = &shown["pooled"];
    assert_eq!((&pooled["processes"], &pooled["over"]), (&json!(3), &json!("processes")));
    assert_eq!((shown["records"].as_array().unwrap().len(), lines(&dir.path().join("r.jsonl")).len()), (3, 3));
    let mut command = Command::cargo_bin("chiku").unwrap();
    let out = command.current_dir(dir.path()).args(["bench", "components", "r.jsonl", "--json"]).output().unwrap();
    let parts: Value = serde_json::from_slice(&out.stdout).unwrap();
    let names: Vec<&str> =
        parts["components"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["node", "trajectory", "process", "prompt", "repeat"]);
}

#[test]
fn a_profile_adds_up_to_the_wall_time() {
    let dir = tempfile::tempdir().unwrap();
    for draft in [&[][..], &["--drafter", "nano", "--k", "4"]] {
        let mut command = Command::cargo_bin("chiku").unwrap();
        let args = ["bench", "profile", "--limit", "2", "--max-tokens", "16", "--json"];
        let out = command.current_dir(dir.path()).args(args).args(draft).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let p: Value = serde_json::from_slice(&out.stdout).unwrap();
        let parts = p["parts"].as_array().unwrap();
        let percent = |name: &str| parts.iter().find(|p| p["name"] == name).unwrap()["percent"].as_f64().unwrap();
        let sum: f64 = parts.iter().map(|p| p["percent"].as_f64().unwrap()).sum();
        assert!((sum - 100.0).abs() < 1e-6, "{p}");
        for name in ["qkv", "attention", "o", "gate/up", "down", "per-layer inputs", "head", "norms"] {
            assert!(percent(&format!("verify: {name}")) > 0.0, "{name}: {p}");
        }
        // No part is counted twice: what nothing claims is not negative.
        for name in ["verify: other", "host", "residual"] {
            assert!(percent(name) >= 0.0, "{name}: {p}");
        }
        assert!(draft.is_empty() || percent("draft") > 1.0, "{p}");
    }
}
