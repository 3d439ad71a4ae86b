//! The model under study: makes variants of it in memory, and counts the bytes that they read.

use std::collections::HashMap;
use std::sync::Arc;

use bake::in_memory::{self, Quantiser};
use bake::quant::Bits;
use runtime::Model;
use runtime::model::Weights;
use runtime::names;

use super::variant::{Group, Variant};
use crate::error::{Error, Result};

/// Widths that linears can be quantised to, wide to narrow.
pub const WIDTHS: [u8; 4] = [8, 4, 3, 2];

/// A model, and what quantising its linears gave so far. Memory: a packed copy of the model for each width tried.
pub struct Subject {
    model: Arc<Model>,
    quantiser: Quantiser,
    packed: HashMap<(String, u8), Weights>,
}

impl Subject {
    /// A model whose variants are quantised in this way.
    pub fn new(model: Arc<Model>, quantiser: Quantiser) -> Subject {
        Subject { model, quantiser, packed: HashMap::new() }
    }

    /// The unchanged model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Whether these layers can be removed together, by the rules of `bake drop-layers`.
    pub fn removable(&self, layers: impl IntoIterator<Item = usize>) -> bool {
        let layers: Vec<usize> = layers.into_iter().collect();
        self.model.config().survivors(&layers).is_ok()
    }

    /// A variant, computing on packed weights as its checkpoint would.
    ///
    /// # Errors
    /// Weights that cannot be quantised; layers that cannot be removed.
    pub fn build(&mut self, variant: &Variant) -> Result<Model> {
        let mut model = Model::clone(&self.model);
        for (&group, &bits) in &variant.widths {
            for (layer, module) in group.modules(&self.model) {
                if layer.is_none_or(|l| !variant.removed.contains(&l)) {
                    let weights = self.quantised(&module, bits)?;
                    model.set_weights(&module, weights).map_err(|e| failed(variant, e))?;
                }
            }
        }
        if variant.removed.is_empty() {
            return Ok(model);
        }
        let removed: Vec<usize> = variant.removed.iter().copied().collect();
        model.without_layers(&removed).map_err(|e| failed(variant, e))
    }

    fn quantised(&mut self, module: &str, bits: u8) -> Result<Weights> {
        let key = (module.to_string(), bits);
        if let Some(weights) = self.packed.get(&key) {
            return Ok(weights.clone());
        }
        let Some(weights) = self.model.weights(module) else {
            return Err(Error::Nothing { what: "the model lacks a linear of the variant" });
        };
        let packed = in_memory::quantise(module, weights, width(bits)?, &self.quantiser)?;
        self.packed.insert(key, packed.clone());
        Ok(packed)
    }

    /// What the numbers of a variant are kept under: all that they depend on besides model, records and arithmetic.
    pub fn name(&self, variant: &Variant) -> String {
        match variant.widths.is_empty() {
            true => variant.key(),
            false => format!("{} ({})", variant.key(), self.quantiser.describe()),
        }
    }

    /// Bytes of weights that a decode step of a variant reads on a device, without building it:
    /// [`Model::step_device_bytes`].
    pub fn step_bytes(&self, variant: &Variant) -> u64 {
        let model = &self.model;
        let mut bytes = model.step_device_bytes() as i128;
        let narrowed: HashMap<String, u8> = variant
            .widths
            .iter()
            .flat_map(|(group, &bits)| group.modules(model).into_iter().map(move |(_, module)| (module, bits)))
            .collect();
        let size = |module: &str| -> Option<(i128, i128)> {
            let w = model.weights(module)?;
            let (rows, cols, before) = (w.rows(), w.cols(), w.device_bytes());
            let after = narrowed.get(module).and_then(|&bits| Bits::new(bits.into()));
            let after = after.map_or(before, |bits| self.quantiser.device_bytes(bits, rows, cols));
            Some((before as i128, after as i128))
        };
        for l in 0..model.config().layers.len() {
            for module in names::LAYER_LINEARS.map(|name| names::layer(l, name)) {
                let Some((before, after)) = size(&module) else { continue };
                bytes += if variant.removed.contains(&l) { -before } else { after - before };
            }
        }
        if let Some((before, after)) = size(names::LM_HEAD) {
            bytes += after - before;
        }
        if let Some((before, after)) = size(names::PLE_MODEL_PROJECTION) {
            // A block of rows a layer.
            let layers = model.config().layers.len() as i128;
            bytes += after * (layers - variant.removed.len() as i128) / layers - before;
        }
        bytes as u64
    }

    /// The groups to choose widths for.
    pub fn groups(&self, by: super::variant::By, tied_head: bool) -> Vec<Group> {
        Group::all(&self.model, by, tied_head)
    }
}

fn failed(variant: &Variant, source: runtime::Error) -> Error {
    Error::Model { id: variant.key(), source: source.into() }
}

/// The width of that many bits.
fn width(bits: u8) -> Result<Bits> {
    Bits::new(bits.into()).ok_or_else(|| Error::Option {
        option: "bits",
        expected: "8, 4, 3 or 2",
        found: bits.to_string(),
    })
}
