//! Removal of layers: which may go, and what is left.
//!
//! A removal is a re-indexing. Survivors keep what they are; the KV-shared region keeps its surviving layers, so it begins at
//! the same original layer; which layer a shared layer reads follows from what is below it now.

use std::collections::BTreeSet;

use super::{LayerKind, ModelConfig, source};
use crate::error::{Error, Result};

/// A rule of removals that the user may lift.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// The last layer has full attention. Without it, only this program reads the result as it is meant.
    LastLayer,
    /// Every shared layer has a layer below to read from. Without it, the region of shared layers begins later, above the layers
    /// that lost theirs; these use the keys and values stored with them, which nobody trained.
    KvSource,
}

impl Rule {
    /// All rules.
    pub const ALL: [Rule; 2] = [Rule::LastLayer, Rule::KvSource];

    /// Name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Rule::LastLayer => "last-layer",
            Rule::KvSource => "kv-source",
        }
    }

    /// The rule of that name.
    pub fn named(name: &str) -> Option<Rule> {
        Rule::ALL.into_iter().find(|r| r.name() == name)
    }
}

impl ModelConfig {
    /// The layers that stay without `drop`, ascending.
    ///
    /// # Errors
    /// [`Error::Layers`] with the reason where the rest is no model: a layer that does not exist, none left, a last layer
    /// without full attention, a shared layer without a layer to read from.
    pub fn survivors(&self, drop: &[usize]) -> Result<Vec<usize>> {
        self.survivors_allowing(drop, &[])
    }

    /// [`ModelConfig::survivors`] without some of its rules.
    ///
    /// # Errors
    /// As there; the reason says which rule to lift.
    pub fn survivors_allowing(&self, drop: &[usize], allow: &[Rule]) -> Result<Vec<usize>> {
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
        if self.layers[last].kind != LayerKind::Full && !allow.contains(&Rule::LastLayer) {
            return Err(refuse(format!(
                "layer {last} would be the last one, and it has sliding attention; the last layer must have full attention \
                 (--allow {} for a result that only this program runs)",
                Rule::LastLayer.name()
            )));
        }
        let first_shared = self.first_kv_shared();
        let own: Vec<usize> = keep.iter().copied().filter(|&l| l < first_shared).collect();
        for &reader in keep.iter().filter(|&&l| l >= first_shared) {
            let layer = &self.layers[reader];
            let Some(source) = source(own.iter().map(|&l| &self.layers[l]), layer.kind).map(|i| own[i]) else {
                if allow.contains(&Rule::KvSource) {
                    continue;
                }
                return Err(refuse(format!(
                    "layer {reader} shares the keys and values of a {} layer below {first_shared}, and none would be left \
                     (--allow {} to let it use those stored with it, which nobody trained)",
                    layer.kind.as_str(),
                    Rule::KvSource.name()
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

    /// The configuration of a model of the layers `keep`, which are [`ModelConfig::survivors`]. Where [`Rule::KvSource`] was
    /// lifted, layers that nothing is left to read from have keys and values of their own again.
    pub fn with_layers(&self, keep: &[usize]) -> ModelConfig {
        let mut layers: Vec<_> = keep.iter().map(|&l| self.layers[l].clone()).collect();
        let mut first_shared = keep.partition_point(|&l| l < self.first_kv_shared());
        while let Some(reader) =
            (first_shared..layers.len()).find(|&r| source(layers[..first_shared].iter(), layers[r].kind).is_none())
        {
            first_shared = reader + 1;
        }
        let (own, readers) = layers.split_at_mut(first_shared);
        own.iter_mut().for_each(|layer| layer.kv_source = None);
        readers.iter_mut().for_each(|reader| reader.kv_source = source(own.iter(), reader.kind));
        ModelConfig { num_kv_shared_layers: readers.len(), layers, ..self.clone() }
    }
}
