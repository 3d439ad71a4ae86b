//! What the integration tests share: the oracle's checkpoints and goldens.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use runtime::checkpoint::{Checkpoint, Shard};
use runtime::{Engine, EngineOptions, Model, Precision};

/// Every target of the oracle.
pub const TARGETS: [&str; 18] = [
    "01_plain_bf16",
    "01_plain_fp32",
    "02_kvshare",
    "03_window",
    "04_global_head_dim",
    "05_softcap",
    "06_layer_scalar_double_wide",
    "07a_drop_early",
    "07b_drop_kv_source",
    "07c_drop_shared",
    "07d_drop_many_sharded",
    "08_int4",
    "09_pruned_head",
    "09b_int4_pruned_head",
    "10_drafter/target",
    "11_e4b_like_fp32",
    "11_e4b_like_sharded",
    "nano",
];

/// Largest difference of a logit from the golden that is not a defect.
pub const LOGIT_TOLERANCE: f32 = 5e-4;

/// Directory of a target.
pub fn dir(target: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    match target {
        "nano" => root.join("../../models/nano"),
        _ => root.join("tests/oracle").join(target),
    }
}

/// A loaded target.
pub fn model(target: &str) -> Arc<Model> {
    Arc::new(Model::load(Checkpoint::open(&dir(target)).unwrap()).unwrap())
}

/// An engine on two threads.
pub fn engine(model: &Arc<Model>, precision: Precision) -> Engine {
    Engine::new(model.clone(), &EngineOptions { precision, threads: 2, context: None }).unwrap()
}

/// A file of golden tensors.
pub struct Golden(Shard);

impl Golden {
    pub fn open(target: &str) -> Golden {
        Golden(Shard::open(&dir(target).join("golden.safetensors")).unwrap())
    }

    fn bytes(&self, name: &str) -> Option<Vec<u8>> {
        let info = self.0.header.tensors.iter().find(|t| t.name == name)?;
        Some(self.0.bytes(info).to_vec())
    }

    pub fn has(&self, name: &str) -> bool {
        self.bytes(name).is_some()
    }

    /// f32 values.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let bytes = self.bytes(name).unwrap_or_else(|| panic!("no golden {name}"));
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    /// i64 values as token ids.
    pub fn ids(&self, name: &str) -> Vec<u32> {
        let bytes = self.bytes(name).unwrap_or_else(|| panic!("no golden {name}"));
        bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect()
    }
}

/// Largest absolute difference.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
