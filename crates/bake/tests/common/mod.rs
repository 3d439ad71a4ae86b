//! Checkpoints for the integration tests: the oracle's, nano, and damaged copies of them.
#![allow(dead_code, missing_docs)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use bake::Context;
use runtime::checkpoint::Checkpoint;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;

/// Type, shape, bytes.
pub type Content = (Dtype, Vec<usize>, Vec<u8>);
/// All tensors of a directory, whatever file they are in.
pub type Tensors = BTreeMap<String, Content>;

pub const LM: &str = "model.language_model.";

pub fn oracle(variant: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../runtime/tests/oracle")).join(variant)
}

pub fn nano() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano"))
}

pub fn fixture(name: &str) -> Tensors {
    read_file(&Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop")).join(name))
}

pub fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open(dir).unwrap()
}

pub fn quiet() -> Context<'static> {
    Context::quiet()
}

pub fn read_file(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.iter().map(|(n, v)| (n.to_string(), (v.dtype(), v.shape().to_vec(), v.data().to_vec()))).collect()
}

pub fn tensors(checkpoint: &Checkpoint) -> Tensors {
    checkpoint.tensors().map(|t| (t.name, (t.dtype, t.shape, t.bytes.to_vec()))).collect()
}

pub fn tensors_of(dir: &Path) -> Tensors {
    tensors(&open(dir))
}

/// Writes a checkpoint directory with these tensors and this configuration.
pub fn write(dir: &Path, tensors: &Tensors, config: &Value) {
    fs::create_dir_all(dir).unwrap();
    let views = tensors.iter().map(|(n, (d, s, b))| (n.clone(), TensorView::new(*d, s.clone(), b).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// A changed copy of a checkpoint in `dir`.
pub fn damaged(from: &Path, dir: &Path, change: impl FnOnce(&mut Tensors, &mut Value)) -> PathBuf {
    let parent = open(from);
    let mut all = tensors(&parent);
    let mut config = parent.config_json().clone();
    change(&mut all, &mut config);
    write(dir, &all, &config);
    for name in ["pck04_keepset.json", "generation_config.json"] {
        if let Some(file) = parent.file(name) {
            fs::copy(file, dir.join(name)).unwrap();
        }
    }
    dir.to_path_buf()
}

/// Compares tensor by tensor, so that a failure names one instead of printing megabytes.
#[track_caller]
pub fn assert_same(got: &Tensors, want: &Tensors) {
    let names = |t: &Tensors| t.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(got), names(want), "tensor names");
    for (name, (dtype, shape, bytes)) in want {
        let (d, s, b) = &got[name];
        assert_eq!((d, s), (dtype, shape), "{name}");
        if let Some(i) = (0..bytes.len()).find(|&i| b[i] != bytes[i]) {
            panic!("{name}: byte {i} is {:#x}, expected {:#x}", b[i], bytes[i]);
        }
    }
}

pub fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

pub fn bf16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect()
}
