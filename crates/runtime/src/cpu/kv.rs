//! The KV cache: keys (after norm and rotary embedding) and values (after norm) of every layer that owns some.

use kernels::cpu::KvView;

use crate::config::ModelConfig;

/// Keys and values of one owning layer, `[positions, kv_heads, head_dim]` f32 each.
struct LayerCache {
    keys: Vec<f32>,
    values: Vec<f32>,
    kv_heads: usize,
    head_dim: usize,
}

/// The cache of one sequence. It grows with the sequence; memory for the whole context is never claimed ahead.
pub(crate) struct KvCache {
    /// `None` for layers that read another layer's.
    layers: Vec<Option<LayerCache>>,
    len: usize,
}

impl KvCache {
    pub fn new(config: &ModelConfig) -> KvCache {
        let cache = |l: &crate::config::LayerConfig| LayerCache {
            keys: Vec::new(),
            values: Vec::new(),
            kv_heads: l.kv_heads,
            head_dim: l.head_dim,
        };
        let layers = config.layers.iter().map(|l| l.kv_source.is_none().then(|| cache(l))).collect();
        KvCache { layers, len: 0 }
    }

    /// Positions that every owning layer holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Declares that all layers have appended up to `len`.
    pub fn commit(&mut self, len: usize) {
        self.len = len;
    }

    /// Forgets positions from `len` on, and whatever an unfinished pass appended.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        for layer in self.layers.iter_mut().flatten() {
            let width = layer.kv_heads * layer.head_dim;
            layer.keys.truncate(self.len * width);
            layer.values.truncate(self.len * width);
        }
    }

    /// Appends rows to an owning layer.
    pub fn append(&mut self, layer: usize, keys: &[f32], values: &[f32]) {
        if let Some(cache) = &mut self.layers[layer] {
            cache.keys.extend_from_slice(keys);
            cache.values.extend_from_slice(values);
        }
    }

    /// What an owning layer holds; empty for a layer that owns nothing.
    pub fn view(&self, layer: usize) -> KvView<'_> {
        match &self.layers[layer] {
            Some(c) => KvView { keys: &c.keys, values: &c.values, kv_heads: c.kv_heads, head_dim: c.head_dim },
            None => KvView { keys: &[], values: &[], kv_heads: 0, head_dim: 0 },
        }
    }
}
