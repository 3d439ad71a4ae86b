//! What the program says of drivers that it cannot use, and of one that it can: real dynamic loading, of a driver library made for this
//! test.

#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// A folder with a `libcuda.so.1` and nothing else.
fn driver(flags: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver/libcuda.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(folder.path().join("libcuda.so.1")).arg(source).args(flags);
    assert!(cc.status().expect("the tests need a C compiler, as the emulator does").success());
    folder
}

fn gpu(driver: &Path, settings: &[(&str, &str)]) -> Value {
    let mut chiku = Command::new(assert_cmd::cargo::cargo_bin("chiku"));
    chiku.args(["doctor", "--json"]).env("LD_LIBRARY_PATH", driver).envs(settings.iter().copied());
    let output = chiku.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "no panic may be heard");
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["gpu"].clone()
}

#[test]
fn each_reason_why_a_gpu_cannot_be_used_is_told_apart() {
    let driver = driver(&[]);
    let reason = |settings: &[(&str, &str)]| {
        let gpu = gpu(driver.path(), settings);
        assert_eq!(gpu["status"], "unavailable", "{gpu}");
        gpu["reason"].as_str().unwrap().to_string()
    };
    assert!(reason(&[("FAKE_VERSION", "11080")]).contains("supports CUDA 11.8; 12.0 or later is needed"));
    assert!(reason(&[("FAKE_DEVICES", "0")]).contains("reports no device"));
    assert!(reason(&[("FAKE_DEVICES", "-1")]).contains("reports no device"));
    let old = reason(&[("FAKE_CAPABILITY", "75")]);
    assert_eq!(old, "GPU 0 (Test Driver's GPU) is sm_75; the kernels need sm_80 or later");
}

#[test]
fn a_driver_without_a_function_is_a_reason_and_no_panic() {
    let gpu = gpu(driver(&["-DWITHOUT_NAMES"]).path(), &[]);
    assert!(gpu["reason"].as_str().unwrap().contains("lacks functions that this program needs"), "{gpu}");
}

#[test]
fn a_usable_driver_is_described() {
    let gpu = gpu(driver(&[]).path(), &[("FAKE_DEVICES", "2")]);
    assert_eq!((&gpu["status"], &gpu["driver_cuda"]), (&"available".into(), &"12.4".into()), "{gpu}");
    assert_eq!(gpu["devices"].as_array().unwrap().len(), 2);
    let device = &gpu["devices"][1];
    assert_eq!((&device["compute_capability"], &device["supported"]), (&"8.6".into(), &true.into()));
    assert_eq!((&device["multiprocessors"], &device["memory_bytes"]), (&80.into(), &(24_u64 << 30).into()));
}

#[test]
fn a_gpu_without_code_for_it_in_this_build_is_exit_code_3() {
    let driver = driver(&[]);
    if !kernels::device::images().is_empty() {
        // This build has the code, and would ask the driver to run it.
        return;
    }
    let mut chiku = Command::new(assert_cmd::cargo::cargo_bin("chiku"));
    let output = chiku.arg("gpu-check").env("LD_LIBRARY_PATH", driver.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("this build has no code for a GPU") && message.contains("--features cuda"), "{message}");
}

#[test]
fn without_a_driver_the_hint_is_that_of_the_readme() {
    let empty = tempfile::tempdir().unwrap();
    let gpu = gpu(empty.path(), &[]);
    if gpu["status"] == "available" {
        // The machine's own driver, found without LD_LIBRARY_PATH.
        return;
    }
    let reason = gpu["reason"].as_str().unwrap();
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    for word in ["libcuda.so.1", "libnvidia-ml.so.1", "LD_LIBRARY_PATH", "folder of their own"] {
        assert!(reason.contains(word), "{reason}");
        assert!(readme.contains(word), "README.md says nothing of {word}");
    }
}
