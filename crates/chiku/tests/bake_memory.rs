//! Memory of the bakes, by the system's own count of the real program: a few MB a thread, whatever the size of the model.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The promise, in bytes.
const LIMIT: u64 = 300 << 20;

fn bake(args: &[&str]) -> Value {
    let out = Command::new(env!("CARGO_BIN_EXE_chiku")).arg("bake").args(args).arg("--json").output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// Every bake on E4B with so many layers and tokens, whose weights are holes: the shape is all there, and takes no disk.
fn bakes_stay_small(layers: usize, vocab: usize, at_least: u64) {
    let disk = std::env::var("CHIKU_SCALE_DIR").unwrap_or_else(|_| env!("CARGO_TARGET_TMPDIR").into());
    let dir = tempfile::tempdir_in(disk).unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (layers, tokens) = (layers.to_string(), vocab.to_string());
    let synth = ["synth", "--shape", "e4b", "--sparse", "--towers", "--shards", "4", "--layers", &layers];
    let parent = path("parent");
    let made = bake(&[&synth[..], &["--vocab", &tokens, "--out", &parent]].concat());
    assert!(made["tensor_bytes"].as_u64().unwrap() >= at_least);
    let keepset = path("keepset.json");
    let ids: Vec<usize> = (0..vocab).step_by(3).collect();
    std::fs::write(&keepset, serde_json::json!({"keep_ids": ids, "full_vocab": vocab}).to_string()).unwrap();
    let limit = |what: &str, report: &Value| {
        let peak = report["peak_rss_bytes"].as_u64().expect("this system counts memory");
        let (read, written) = (&report["parent_bytes"], &report["tensor_bytes"]);
        println!("{what}: peak {:.1} MiB, {read} bytes in, {written} bytes out", peak as f64 / f64::from(1 << 20));
        assert!(peak <= LIMIT, "{what}: peak {peak} bytes");
    };
    limit("synth", &made);
    for (what, more) in [
        ("drop-layers", &["--layers", "1,2"][..]),
        ("prune-vocab", &["--keepset", &keepset]),
        ("quantize", &["--group", "128"]),
    ] {
        let out = path(what);
        limit(what, &bake(&[&[what, "--model", &parent, "--out", &out], more].concat()));
        std::fs::remove_dir_all(Path::new(&out)).unwrap();
    }
}

#[test]
fn a_small_model_takes_little_memory() {
    bakes_stay_small(7, 32_768, 1_500_000_000);
}

#[test]
#[ignore = "reads 16 GB of zeros three times"]
fn a_large_model_takes_no_more() {
    bakes_stay_small(42, 262_144, 15_900_000_000);
}
