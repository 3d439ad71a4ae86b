//! `quantization_config`: the part of `compressed-tensors` that this program reads.
//!
//! Only weights are quantised (no activations): symmetric integers in `pack-quantized` order, one scale a group of inputs or
//! one an output channel. Which tensors are packed is seen from their names; which group size, from their shapes.

use super::Fields;
use crate::error::Result;

/// How the weights of one config group are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// One scale for each run of this many inputs.
    Group(usize),
    /// One scale an output row.
    Channel,
}

/// One entry of `config_groups`.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightScheme {
    /// Name of the group in the file.
    pub name: String,
    /// Module patterns it applies to, as written.
    pub targets: Vec<String>,
    /// Bits a weight.
    pub bits: usize,
    /// Scale layout.
    pub strategy: Strategy,
}

/// A checked `quantization_config`.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantization {
    /// The config groups, in file order.
    pub schemes: Vec<WeightScheme>,
    /// Modules that are left alone, as written.
    pub ignore: Vec<String>,
}

/// Bits a packed weight that the CPU kernels read.
const SUPPORTED_BITS: [usize; 1] = [4];

impl Quantization {
    pub(super) fn from_json(root: &Fields) -> Result<Option<Quantization>> {
        let Some(q) = root.optional_object("quantization_config")? else {
            return Ok(None);
        };
        for (field, want) in [("quant_method", "compressed-tensors"), ("format", "pack-quantized")] {
            let found = q.string(field, "")?;
            if found != want {
                return Err(q.wrong(field, &format!("\"{want}\""), format!("\"{found}\"")));
            }
        }
        if q.optional_object("kv_cache_scheme")?.is_some() {
            return Err(q.unsupported("kv_cache_scheme", "a quantised KV cache in the checkpoint"));
        }
        let groups = q.object("config_groups")?;
        let mut schemes = Vec::new();
        for name in groups.keys() {
            let group = groups.object(name)?;
            let weights = group.object("weights")?;
            if group.optional_object("input_activations")?.is_some() {
                return Err(group.unsupported("input_activations", "quantised activations"));
            }
            if !weights.boolean("symmetric", true)? {
                return Err(weights.unsupported("symmetric", "weights with a zero point"));
            }
            let kind = weights.string("type", "int")?;
            if kind != "int" {
                return Err(weights.wrong("type", "\"int\"", format!("\"{kind}\"")));
            }
            if !weights.string("actorder", "")?.is_empty() {
                return Err(weights.unsupported("actorder", "weights in another order than their inputs"));
            }
            let bits = weights.dimension("num_bits")?;
            if !SUPPORTED_BITS.contains(&bits) {
                return Err(weights.wrong("num_bits", "4", bits.to_string()));
            }
            let strategy = match weights.string("strategy", "")?.as_str() {
                "group" => Strategy::Group(weights.dimension("group_size")?),
                "channel" => Strategy::Channel,
                other => return Err(weights.wrong("strategy", "\"group\" or \"channel\"", format!("\"{other}\""))),
            };
            schemes.push(WeightScheme { name: name.clone(), targets: group.strings("targets")?, bits, strategy });
        }
        let ignore = q.strings("ignore")?;
        Ok(Some(Quantization { schemes, ignore }))
    }
}
