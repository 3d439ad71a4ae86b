//! `chiku gpu-check` from outside. The program of these tests has the emulator in it, so the checks run for real.

#![cfg(target_arch = "x86_64")]

use std::process::{Command, Output};

use serde_json::Value;

fn gpu_check(args: &[&str]) -> Output {
    Command::new(assert_cmd::cargo::cargo_bin("chiku")).arg("gpu-check").args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn all_checks_hold_on_the_emulator_and_nothing_is_timed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record.jsonl");
    for _ in 0..2 {
        let only = ["--only", "mma", "--only", "read", "--only", "grid barrier"];
        let out = ["--backend", "emulated", "--json", "--node-id", "n1", "--out", path.to_str().unwrap()];
        let output = gpu_check(&[&only[..], &out].concat());
        assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
        let record: Value = serde_json::from_slice(&output.stdout).unwrap();
        let checks = record["checks"].as_array().unwrap();
        let names: Vec<&str> = checks.iter().map(|c| c["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["mma f16", "mma bf16", "mma s8", "read", "grid barrier"]);
        assert!(checks.iter().all(|c| c["passed"] == true && c["measured"] == serde_json::json!([])), "{record}");
        assert_eq!((&record["device"]["backend"], &record["node"]), (&"emulated".into(), &"n1".into()));
        assert_eq!((&record["complete"], &record["passed"]), (&false.into(), &false.into()), "some were left out");
    }
    let lines = std::fs::read_to_string(&path).unwrap();
    assert_eq!(lines.lines().count(), 2, "records are appended");
    assert!(lines.lines().all(|line| serde_json::from_str::<Value>(line).unwrap()["record"] == "gpu-check"));
}

#[test]
fn the_list_names_every_check_in_its_order() {
    let output = gpu_check(&["--list"]);
    assert_eq!(output.status.code(), Some(0));
    let list = text(&output.stdout);
    assert!(list.starts_with("mma f16"), "{list}");
    for family in ["mma s8", "read", "copy", "empty graph", "boundary", "grid barrier", "pinned ring"] {
        assert!(list.lines().any(|line| line.starts_with(family)), "{family} is not in\n{list}");
    }
}

#[test]
fn without_a_gpu_it_says_so_and_exits_3() {
    // A driver of this machine would be used; the test is for those without.
    let doctor = Command::new(assert_cmd::cargo::cargo_bin("chiku")).args(["doctor", "--json"]).output().unwrap();
    let gpu = serde_json::from_slice::<Value>(&doctor.stdout).unwrap()["gpu"].clone();
    if gpu["status"] == "available" {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("chiku"));
    let output = command.args(["gpu-check", "--json"]).current_dir(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&said["error"], &said["exit_code"]), (&gpu["reason"], &3.into()));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is recorded");
}

#[test]
fn a_check_that_does_not_exist_is_a_usage_error() {
    let output = gpu_check(&["--only", "absent"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--only absent: no check has such a name"));
}
