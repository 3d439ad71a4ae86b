//! What is done to a model: layers removed, groups of linears narrowed. A variant is its own name: two that do the same have
//! the same [`Variant::key`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use bake::in_memory;
use runtime::Model;
use runtime::names;

/// Linears that get one width. Layer numbers are those of the unchanged model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// One linear of all layers (`mlp.down_proj`), or one outside the layers (`per_layer_model_projection`, `lm_head`).
    Kind(&'static str),
    /// All linears of a layer.
    Layer(usize),
    /// One linear of a layer.
    Linear(usize, &'static str),
}

/// How linears are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// q of all layers, k of all layers, ...
    Kind,
    /// All linears of layer 0, of layer 1, ...
    Layer,
    /// Each by itself.
    Linear,
}

/// Linears outside the layers.
const OUTSIDE: [&str; 2] = [names::PLE_MODEL_PROJECTION, names::LM_HEAD];

impl Group {
    /// The groups of a model, in a fixed order; none without a linear that can be quantised. A head that is the embedding is in
    /// only if `tied_head`: a bake quantises it only once it is a tensor of its own.
    pub fn all(model: &Model, by: By, tied_head: bool) -> Vec<Group> {
        let layers = 0..model.config().layers.len();
        let mut groups: Vec<Group> = match by {
            By::Kind => names::LAYER_LINEARS.map(Group::Kind).into(),
            By::Layer => layers.map(Group::Layer).collect(),
            By::Linear => layers.flat_map(|l| names::LAYER_LINEARS.map(|name| Group::Linear(l, name))).collect(),
        };
        groups.extend(OUTSIDE.map(Group::Kind));
        let tied = model.config().tie_word_embeddings;
        groups.retain(|g| *g != Group::Kind(names::LM_HEAD) || !tied || tied_head);
        groups.retain(|g| !g.modules(model).is_empty());
        groups
    }

    /// Whether a linear of this name stands outside the layers.
    pub(super) fn is_outside(name: &str) -> bool {
        OUTSIDE.contains(&name)
    }

    /// The only layer that the group is about.
    pub fn layer(self) -> Option<usize> {
        match self {
            Group::Kind(_) => None,
            Group::Layer(l) | Group::Linear(l, _) => Some(l),
        }
    }

    /// Modules of the group that this model has, dense, each with the layer it belongs to.
    pub fn modules(self, model: &Model) -> Vec<(Option<usize>, String)> {
        let layers = 0..model.config().layers.len();
        let of_layer = |l: usize, name: &str| (Some(l), names::layer(l, name));
        let mut modules: Vec<(Option<usize>, String)> = match self {
            Group::Kind(name) if OUTSIDE.contains(&name) => vec![(None, name.to_string())],
            Group::Kind(name) => layers.map(|l| of_layer(l, name)).collect(),
            Group::Layer(l) => names::LAYER_LINEARS.iter().map(|name| of_layer(l, name)).collect(),
            Group::Linear(l, name) => vec![of_layer(l, name)],
        };
        modules.retain(|(_, module)| model.weights(module).is_some_and(in_memory::is_dense));
        modules
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Group::Kind(name) => f.write_str(name),
            Group::Layer(l) => write!(f, "layers.{l}"),
            Group::Linear(l, name) => write!(f, "layers.{l}.{name}"),
        }
    }
}

/// A model with some layers removed and some groups quantised. What is not named stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Variant {
    /// Layers removed.
    pub removed: BTreeSet<usize>,
    /// Bits of the groups that are quantised. Groups are disjoint.
    pub widths: BTreeMap<Group, u8>,
}

impl Variant {
    /// The unchanged model.
    pub fn unchanged() -> Variant {
        Variant::default()
    }

    /// Without one more layer. Widths that only concerned that layer go with it, so that what is the same has one name.
    pub fn without(&self, layer: usize) -> Variant {
        let mut next = self.clone();
        next.removed.insert(layer);
        next.widths.retain(|group, _| group.layer() != Some(layer));
        next
    }

    /// With a layer back in its place.
    pub fn with_layer(&self, layer: usize) -> Variant {
        let mut next = self.clone();
        next.removed.remove(&layer);
        next
    }

    /// With a group at a width, or as it was.
    pub fn with(&self, group: Group, bits: Option<u8>) -> Variant {
        let mut next = self.clone();
        match bits {
            Some(bits) => next.widths.insert(group, bits),
            None => next.widths.remove(&group),
        };
        next
    }

    /// Bits of a group, where it is quantised.
    pub fn width(&self, group: Group) -> Option<u8> {
        self.widths.get(&group).copied()
    }

    /// Its name: `-2 -7 mlp.down_proj=4`, or `unchanged`.
    pub fn key(&self) -> String {
        let removed = self.removed.iter().map(|l| format!("-{l}"));
        let widths = self.widths.iter().map(|(g, bits)| format!("{g}={bits}"));
        let parts: Vec<String> = removed.chain(widths).collect();
        if parts.is_empty() { "unchanged".into() } else { parts.join(" ") }
    }
}
