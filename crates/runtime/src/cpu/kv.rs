//! The KV cache: keys (after norm and rotary embedding) and values (after norm) of every layer that owns some.
//!
//! Rows of the sequence are appended. Branch rows of a star tree keep theirs in *side slots*, which live until the next pass;
//! accepting a branch copies its slot to the end of the sequence, in every owning layer.

use kernels::cpu::KvView;

use crate::config::{LayerConfig, ModelConfig};

/// Keys and values of one owning layer, `[rows, kv_heads, head_dim]` f32 each.
struct LayerCache {
    keys: Vec<f32>,
    values: Vec<f32>,
    side_keys: Vec<f32>,
    side_values: Vec<f32>,
    kv_heads: usize,
    head_dim: usize,
}

impl LayerCache {
    fn new(layer: &LayerConfig) -> LayerCache {
        LayerCache {
            keys: Vec::new(),
            values: Vec::new(),
            side_keys: Vec::new(),
            side_values: Vec::new(),
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
        }
    }

    /// Values of one row.
    fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn view<'a>(&self, keys: &'a [f32], values: &'a [f32]) -> KvView<'a> {
        KvView { keys, values, kv_heads: self.kv_heads, head_dim: self.head_dim }
    }
}

/// The cache of one sequence. It grows with the sequence; memory for the whole context is never claimed ahead.
pub(crate) struct KvCache {
    /// `None` for layers that read another layer's.
    layers: Vec<Option<LayerCache>>,
    len: usize,
}

impl KvCache {
    pub fn new(config: &ModelConfig) -> KvCache {
        let layers = config.layers.iter().map(|l| l.kv_source.is_none().then(|| LayerCache::new(l))).collect();
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

    /// Forgets positions from `len` on, and the side slots.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        for layer in self.layers.iter_mut().flatten() {
            let end = self.len * layer.width();
            layer.keys.truncate(end);
            layer.values.truncate(end);
            layer.side_keys.clear();
            layer.side_values.clear();
        }
    }

    /// Drops what a layer holds, which nothing may read again.
    pub fn clear(&mut self, layer: usize) {
        if let Some(cache) = &mut self.layers[layer] {
            (cache.keys, cache.values) = (Vec::new(), Vec::new());
        }
    }

    /// Appends the first `chain` rows to the sequence of an owning layer and puts the others into its side slots, in order.
    pub fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], chain: usize) {
        if let Some(cache) = &mut self.layers[layer] {
            let split = chain * cache.width();
            cache.keys.extend_from_slice(&keys[..split]);
            cache.values.extend_from_slice(&values[..split]);
            cache.side_keys = keys[split..].to_vec();
            cache.side_values = values[split..].to_vec();
        }
    }

    /// Cuts the sequence to `len` positions and makes side slot `slot` the next one.
    pub fn adopt(&mut self, len: usize, slot: usize) {
        for layer in self.layers.iter_mut().flatten() {
            let (width, end) = (layer.width(), len * layer.width());
            layer.keys.truncate(end);
            layer.values.truncate(end);
            layer.keys.extend_from_slice(&layer.side_keys[slot * width..(slot + 1) * width]);
            layer.values.extend_from_slice(&layer.side_values[slot * width..(slot + 1) * width]);
        }
        self.len = len + 1;
    }

    /// The sequence of an owning layer; empty for a layer that owns nothing.
    pub fn view(&self, layer: usize) -> KvView<'_> {
        self.layers[layer].as_ref().map_or(EMPTY, |c| c.view(&c.keys, &c.values))
    }

    /// The side slots of an owning layer.
    pub fn side(&self, layer: usize) -> KvView<'_> {
        self.layers[layer].as_ref().map_or(EMPTY, |c| c.view(&c.side_keys, &c.side_values))
    }
}

const EMPTY: KvView = KvView { keys: &[], values: &[], kv_heads: 0, head_dim: 0 };
