//! What must hold of every input. Included by the fuzz targets and by the test that runs their corpus on a stable compiler.
#![allow(dead_code)]

use std::collections::HashSet;
use std::path::Path;

use runtime::checkpoint::header;
use runtime::config::ModelConfig;

/// A header that is accepted places tensors of different names without hole or overlap up to the end of the file, and the
/// `safetensors` library, where it accepts the file, sees the same. All else is refused; nothing panics.
pub fn header(data: &[u8]) {
    let Ok(parsed) = header::parse(data, data.len() as u64) else { return };
    let mut names = HashSet::new();
    let mut at = 0;
    for t in &parsed.tensors {
        assert!(names.insert(&t.name), "{} twice", t.name);
        assert_eq!(t.begin, at, "{}", t.name);
        assert_eq!(header::byte_len(t.dtype, &t.shape), Some(t.end - t.begin), "{}", t.name);
        at = t.end;
    }
    assert_eq!(parsed.data_start + at, data.len());
    let Ok(theirs) = safetensors::SafeTensors::deserialize(data) else { return };
    assert_eq!(theirs.len(), parsed.tensors.len());
    for t in &parsed.tensors {
        let view = theirs.tensor(&t.name).expect("the library lists it, too");
        assert_eq!((view.dtype(), view.shape(), view.data().len()), (t.dtype, &t.shape[..], t.end - t.begin));
        let place = view.data().as_ptr() as usize - data.as_ptr() as usize;
        assert!(view.data().is_empty() || place == parsed.data_start + t.begin, "{}", t.name);
    }
}

/// A configuration that is accepted is one that the rest of the program can use without looking twice.
pub fn config(data: &[u8]) {
    let Ok(json) = serde_json::from_slice(data) else { return };
    let Ok(config) = ModelConfig::from_json(&json, Path::new("config.json")) else { return };
    assert!(!config.layers.is_empty() && config.num_kv_shared_layers < config.layers.len());
    for (l, layer) in config.layers.iter().enumerate() {
        assert_eq!(layer.kv_source.is_some(), l >= config.first_kv_shared());
        let source = &config.layers[config.kv_layer(l)];
        assert!(source.kv_source.is_none());
        assert_eq!((source.kind, source.head_dim, source.kv_heads), (layer.kind, layer.head_dim, layer.kv_heads));
        assert!(layer.rope.rotating_pairs <= layer.head_dim / 2 && config.num_attention_heads % layer.kv_heads == 0);
    }
}
