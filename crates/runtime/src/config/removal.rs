//! Removal of layers: which may go, and what is left.
//!
//! A removal is a re-indexing. Survivors keep what they are; the KV-shared region keeps its surviving layers, so it begins at
//! the same original layer; which layer a shared layer reads follows from what is below it now.

use std::collections::BTreeSet;

use super::{LayerKind, ModelConfig, source};
use crate::error::{Error, Result};

impl ModelConfig {
    /// The layers that stay without `drop`, ascending.
    ///
    /// # Errors
    /// [`Error::Layers`] with the reason where the rest is no model: a layer that does not exist, none left, a last layer
    /// without full attention, a shared layer without a layer to read from.
    pub fn survivors(&self, drop: &[usize]) -> Result<Vec<usize>> {
        let dropped: BTreeSet<usize> = drop.iter().copied().collect();
        let count = self.layers.len();
        let refuse = |reason: String| Error::Layers { layers: dropped.iter().copied().collect(), reason };
        if let Some(unknown) = dropped.iter().find(|&&l| l >= count) {
            return Err(refuse(format!("there is no layer {unknown}; the model has layers 0 to {}", count - 1)));
        }
        let keep: Vec<usize> = (0..count).filter(|l| !dropped.contains(l)).collect();
        let Some(&last) = keep.last() else {
            return Err(refuse(format!("that is all {count} of them; at least one must stay")));
        };
        if self.layers[last].kind != LayerKind::Full {
            return Err(refuse(format!(
                "layer {last} would be the last one, and it has sliding attention; the last layer must have full attention"
            )));
        }
        let first_shared = self.first_kv_shared();
        let own: Vec<usize> = keep.iter().copied().filter(|&l| l < first_shared).collect();
        for &reader in keep.iter().filter(|&&l| l >= first_shared) {
            let layer = &self.layers[reader];
            let Some(source) = source(own.iter().map(|&l| &self.layers[l]), layer.kind).map(|i| own[i]) else {
                return Err(refuse(format!(
                    "layer {reader} shares the keys and values of a {} layer below {first_shared}, and none would be left",
                    layer.kind.as_str()
                )));
            };
            let sizes = |l: usize| (self.layers[l].kv_heads, self.layers[l].head_dim);
            if sizes(source) != sizes(reader) {
                let ((heads, dim), (other_heads, other_dim)) = (sizes(reader), sizes(source));
                return Err(refuse(format!(
                    "layer {reader} would read keys and values of layer {source}, which has {other_heads} heads of \
                     {other_dim} and not {heads} of {dim}"
                )));
            }
        }
        Ok(keep)
    }

    /// The configuration of a model of the layers `keep`, which are [`ModelConfig::survivors`].
    pub fn with_layers(&self, keep: &[usize]) -> ModelConfig {
        let first_shared = keep.partition_point(|&l| l < self.first_kv_shared());
        let mut layers: Vec<_> = keep.iter().map(|&l| self.layers[l].clone()).collect();
        let (own, readers) = layers.split_at_mut(first_shared);
        readers.iter_mut().for_each(|reader| reader.kv_source = source(own.iter(), reader.kind));
        ModelConfig { num_kv_shared_layers: readers.len(), layers, ..self.clone() }
    }
}
