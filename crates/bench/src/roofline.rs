//! What a step must read, from a checkpoint's real tensors, and the bound that follows at a device's bandwidth.
//!
//! Only headers are read. Each weight counts once a step, whatever the number of rows; keys and values by the context; a drafter once a
//! draft. Everything that comes out is `projected`: activations, launches and latencies are not in it, so no engine reaches it.
//!
//! A completion grows its own context: with a mean context of C over T tokens, contexts run from C - T/2 to C + T/2 - 1, and a sliding layer
//! reads no more than its window at any of them. The mean over these is what is counted.

use std::path::Path;

use kernels::roofline::{DeviceProfile, StepBytes};
use runtime::checkpoint::{Checkpoint, TensorFiles};
use runtime::config::assistant::AssistantConfig;
use runtime::config::{LayerConfig, LayerKind, ModelConfig};
use runtime::names;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::record::Kind;

/// Bytes of an element of a KV cache (bf16).
const KV_ELEMENT: f64 = 2.0;

/// What a step is.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Drafts a step.
    pub k: usize,
    /// Clusters of the drafter's head that are looked into; `None` for the drafter's own number.
    pub centroids: Option<usize>,
    /// Mean context in tokens.
    pub context: usize,
    /// Tokens of a completion, over which the context grows; 0 for one context.
    pub completion: usize,
    /// Mean tokens a step.
    pub tokens_per_step: f64,
}

/// Bytes by component.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Components {
    /// Linears of attention and MLP.
    pub body: u64,
    /// Per-layer-input linears and their model projection.
    pub ple: u64,
    /// The head.
    pub head: u64,
    /// Keys and values of the context.
    pub kv: u64,
    /// Norms and scalars, and the embedding rows of the step's tokens.
    pub norms_and_rows: u64,
    /// The drafter over all its passes, its keys and values included.
    pub drafter: u64,
}

impl Components {
    /// The sum.
    pub fn total(&self) -> u64 {
        let weights = self.body + self.ple + self.head + self.norms_and_rows;
        StepBytes { weights, kv: self.kv, drafter: self.drafter }.total()
    }
}

/// Bounds at a bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bound {
    /// 10^9 bytes a second.
    pub gb_per_s: f64,
    /// Least time of a step.
    pub floor_ms: f64,
    /// Most tokens a second, prefill left out.
    pub tps_bound: f64,
}

/// A checkpoint whose body and per-layer-input linears had another number of bits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Column {
    /// Bits of a weight.
    pub bits: u32,
    /// Bytes of the body.
    pub body: u64,
    /// Bytes of a step.
    pub bytes_per_step: u64,
    /// Bound at the bandwidth of the headline.
    pub bound: Bound,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Roofline {
    /// Always `projected`.
    pub kind: Kind,
    /// Bytes of a step by component.
    pub components: Components,
    /// Their sum.
    pub bytes_per_step: u64,
    /// Bytes of the body by linear.
    pub body_by_linear: Map<String, Value>,
    /// Tokens of the drafter's head that are scored each pass; 0 without a drafter.
    pub drafter_head_rows: usize,
    /// Mean tokens a step that was assumed.
    pub tokens_per_step: f64,
    /// Name of the device.
    pub device: String,
    /// Where its bandwidth comes from.
    pub source: String,
    /// Floor at the best bandwidth that reads have reached, or the data sheet's where nobody measured.
    pub floor_ms: f64,
    /// Bound at the same.
    pub tps_bound: f64,
    /// Bounds at each bandwidth that is known: nominal, read, copy.
    pub bounds: Map<String, Value>,
    /// The same step with packed linears at other widths; empty where none is packed.
    pub columns: Vec<Column>,
}

/// Bandwidth to project onto.
#[derive(Debug, Clone, PartialEq)]
pub struct Bandwidth {
    /// Name of the device.
    pub device: String,
    /// By the data sheet, in GB/s.
    pub nominal: Option<f64>,
    /// Of reads.
    pub read: Option<f64>,
    /// Of copies.
    pub copy: Option<f64>,
    /// Where the numbers come from.
    pub source: String,
}

impl From<&DeviceProfile> for Bandwidth {
    fn from(d: &DeviceProfile) -> Bandwidth {
        let (device, source) = (d.description.to_string(), d.source.to_string());
        Bandwidth { device, nominal: Some(d.nominal_gb_s), read: d.read_gb_s, copy: d.copy_gb_s, source }
    }
}

/// The linears of attention and MLP; the other two of a layer are its per-layer inputs.
const BODY_LINEARS: usize = 7;

impl Roofline {
    /// Projects a step of a checkpoint, with a drafter or without, onto a bandwidth.
    ///
    /// # Errors
    /// A checkpoint or drafter that cannot be opened or lacks a tensor; a load that makes no sense.
    pub fn new(model: &Path, drafter: Option<&Path>, load: &Load, bandwidth: &Bandwidth) -> Result<Roofline> {
        let checkpoint = Checkpoint::open(model)?;
        check(load, checkpoint.config().max_position_embeddings)?;
        let target = Target::read(&checkpoint, load)?;
        let (drafter, drafter_head_rows) = match drafter {
            Some(dir) => drafter_bytes(dir, load)?,
            None if load.k > 0 || load.centroids.is_some() => {
                let found = "no drafter".to_string();
                return Err(Error::Option { option: "k", expected: "a drafter to make the drafts", found });
            }
            None => (0, 0),
        };
        let components = Components { drafter, ..target.components };
        let best = bandwidth.read.or(bandwidth.nominal).ok_or_else(|| Error::Option {
            option: "device",
            expected: "a bandwidth of reads or of the data sheet",
            found: "neither".into(),
        })?;
        let bound = |bytes: u64, gb_per_s: f64| {
            let step = StepBytes { weights: bytes, kv: 0, drafter: 0 };
            let tps_bound = step.tokens_per_s_bound(gb_per_s, load.tokens_per_step);
            Bound { gb_per_s, floor_ms: step.floor_ms(gb_per_s), tps_bound }
        };
        let total = components.total();
        let known = [("nominal", bandwidth.nominal), ("read", bandwidth.read), ("copy", bandwidth.copy)];
        let bounds =
            known.into_iter().filter_map(|(name, gb)| Some((name.to_string(), json!(bound(total, gb?))))).collect();
        let column = |bits: u32| {
            let (body, ple) = (target.body.at(bits), target.ple.at(bits));
            let bytes_per_step = total - components.body - components.ple + body + ple;
            Column { bits, body, bytes_per_step, bound: bound(bytes_per_step, best) }
        };
        let headline = bound(total, best);
        Ok(Roofline {
            kind: Kind::Projected,
            bytes_per_step: total,
            body_by_linear: target.by_linear,
            drafter_head_rows,
            tokens_per_step: load.tokens_per_step,
            device: bandwidth.device.clone(),
            source: bandwidth.source.clone(),
            floor_ms: headline.floor_ms,
            tps_bound: headline.tps_bound,
            bounds,
            columns: if target.body.weights > 0 { [4, 3, 2].map(column).into() } else { Vec::new() },
            components,
        })
    }
}

fn check(load: &Load, positions: usize) -> Result<()> {
    let bad = |option, expected, found: String| Err(Error::Option { option, expected, found });
    let most = runtime::speculate::MAX_DEPTH;
    if load.k > most {
        return bad("k", "at most 15 drafts a step", load.k.to_string());
    }
    if !(load.tokens_per_step >= 1.0 && load.tokens_per_step <= load.k as f64 + 1.0) {
        return bad("tokens-per-step", "from 1 to k + 1", load.tokens_per_step.to_string());
    }
    if load.context == 0 || load.context > positions || load.context < load.completion / 2 {
        return bad(
            "context",
            "at least half a completion, and at most what the model allows",
            load.context.to_string(),
        );
    }
    Ok(())
}

/// Weights and scales of some linears.
#[derive(Default)]
struct Packed {
    /// Bytes as stored.
    stored: u64,
    /// Weights of packed linears.
    weights: u64,
    /// Bytes of all else: scales, and linears that are not packed.
    rest: u64,
}

impl Packed {
    /// Bytes with packed weights of so many bits and the same scales.
    fn at(&self, bits: u32) -> u64 {
        self.weights * u64::from(bits) / 8 + self.rest
    }

    /// Counts a linear of so many inputs; how many weights its packed words hold follows from that, whatever their width.
    fn add(&mut self, files: &TensorFiles, module: &str, inputs: usize) -> Result<()> {
        let bytes = linear_bytes(files, module)?;
        let packed = files.get(&files.full_name(&format!("{module}.weight_packed")));
        let (rows, packed) = packed.map_or((0, 0), |p| (p.shape.first().copied().unwrap_or(0), p.bytes.len() as u64));
        self.stored += bytes;
        self.weights += (rows * inputs) as u64;
        self.rest += bytes - packed;
        Ok(())
    }
}

/// Bytes of a linear: the weight, or packed weight and scales. Its `weight_shape` is not read in a step.
fn linear_bytes(files: &TensorFiles, module: &str) -> Result<u64> {
    let of = |suffix: &str| files.get(&files.full_name(&format!("{module}.{suffix}"))).map(|t| t.bytes.len() as u64);
    match (of("weight"), of("weight_packed")) {
        (Some(_), Some(_)) => Err(Error::Refused { reason: format!("`{module}` is stored twice, plain and packed") }),
        (Some(plain), _) => Ok(plain),
        (None, Some(packed)) => {
            let scales = files.require(&format!("{module}.weight_scale"), || "the scales of a packed linear".into())?;
            Ok(packed + scales.bytes.len() as u64)
        }
        (None, None) => Err(files
            .require(&format!("{module}.weight"), || "a linear".into())
            .err()
            .map_or_else(|| Error::Refused { reason: format!("`{module}` is no linear") }, Error::from)),
    }
}

struct Target {
    components: Components,
    body: Packed,
    ple: Packed,
    by_linear: Map<String, Value>,
}

impl Target {
    fn read(checkpoint: &Checkpoint, load: &Load) -> Result<Target> {
        let config = checkpoint.config();
        let (mut body, mut ple) = (Packed::default(), Packed::default());
        let mut by_linear = Map::new();
        for (i, linear) in names::LAYER_LINEARS.iter().enumerate() {
            let mut own = Packed::default();
            for (l, layer) in config.layers.iter().enumerate() {
                let shared = layer.kv_source.is_some() && names::KV_MODULES.contains(linear);
                if shared || (i >= BODY_LINEARS && config.ple_size == 0) {
                    continue;
                }
                own.add(checkpoint, &names::layer(l, linear), inputs(linear, layer, config))?;
            }
            let part = if i < BODY_LINEARS { &mut body } else { &mut ple };
            part.stored += own.stored;
            part.weights += own.weights;
            part.rest += own.rest;
            by_linear.insert(linear.to_string(), json!(own.stored));
        }
        if config.ple_size > 0 {
            ple.add(checkpoint, names::PLE_MODEL_PROJECTION, config.hidden_size)?;
        }
        let components = Components {
            body: body.stored,
            ple: ple.stored,
            head: head_bytes(checkpoint)?,
            kv: kv_bytes(&config.layers, config.sliding_window, load).round() as u64,
            norms_and_rows: norms(checkpoint) + rows(checkpoint, load.k as u64 + 1)?,
            drafter: 0,
        };
        Ok(Target { components, body, ple, by_linear })
    }
}

/// Inputs of a layer's linear.
fn inputs(linear: &str, layer: &LayerConfig, config: &ModelConfig) -> usize {
    match linear {
        "self_attn.o_proj" => config.num_attention_heads * layer.head_dim,
        "mlp.down_proj" => layer.intermediate_size,
        "per_layer_projection" => config.ple_size,
        _ => config.hidden_size,
    }
}

/// The head's bytes; a pruned head stores the kept rows only.
fn head_bytes(checkpoint: &Checkpoint) -> Result<u64> {
    let config = checkpoint.config();
    if config.tie_word_embeddings {
        let embed = checkpoint.require(names::EMBED, || "the token embedding, which is the head".into())?;
        return Ok(embed.bytes.len() as u64);
    }
    linear_bytes(checkpoint, names::LM_HEAD)
}

/// Keys and values that one step reads: of every layer, those of its own context.
fn kv_bytes(layers: &[LayerConfig], window: usize, load: &Load) -> f64 {
    let (mut sliding, mut full) = (0.0, 0.0);
    for layer in layers {
        let token = (2 * layer.kv_heads * layer.head_dim) as f64 * KV_ELEMENT;
        match layer.kind {
            LayerKind::Sliding => sliding += token,
            LayerKind::Full => full += token,
        }
    }
    sliding * mean_context(load, window) + full * mean_context(load, usize::MAX)
}

/// Mean over a completion of the positions that a layer reads.
fn mean_context(load: &Load, window: usize) -> f64 {
    let first = load.context - load.completion / 2;
    let lengths = first..first + load.completion.max(1);
    let count = lengths.len() as f64;
    lengths.map(|c| c.min(window) as f64).sum::<f64>() / count
}

/// Everything small that a pass reads whole: norms and scalars.
fn norms(checkpoint: &Checkpoint) -> u64 {
    let text = |name: &str| name.strip_prefix(checkpoint.prefix()).map(str::to_string);
    let small = |name: &str| {
        let layer = names::split_layer(name).is_some_and(|(_, rest)| rest.contains("norm") || rest == "layer_scalar");
        layer || name == names::FINAL_NORM || name == names::PLE_NORM
    };
    let tensors = checkpoint.tensors().filter(|t| text(&t.name).is_some_and(|n| small(&n)));
    tensors.map(|t| t.bytes.len() as u64).sum()
}

/// Embedding rows of the step's tokens, those of per-layer inputs included.
fn rows(checkpoint: &Checkpoint, tokens: u64) -> Result<u64> {
    let row = |name: &str| -> Result<u64> {
        let table = checkpoint.require(name, || "an embedding table".into())?;
        Ok(table.bytes.len() as u64 / (table.shape.first().copied().unwrap_or(1).max(1) as u64))
    };
    let per_layer = if checkpoint.config().ple_size > 0 { row(names::EMBED_PER_LAYER)? } else { 0 };
    Ok(tokens * (row(names::EMBED)? + per_layer))
}

/// Bytes of all passes of a drafter, and the rows of its head that each scores.
fn drafter_bytes(dir: &Path, load: &Load) -> Result<(u64, usize)> {
    let config = AssistantConfig::read(dir)?;
    let files = TensorFiles::open(dir)?;
    let embed = files.require(names::EMBED, || "the token embedding, which is the head".into())?;
    let whole = embed.bytes.len() as u64;
    let row = whole / (config.vocab_size.max(1) as u64);
    // Everything but the head is read whole in each pass; the ids of the scored tokens are some KB and not counted.
    let dense = files.tensors().filter(|t| t.name != embed.name && t.name != names::TOKEN_ORDERING);
    let dense: u64 = dense.map(|t| t.bytes.len() as u64).sum();
    let scored = match (config.centroids, load.centroids) {
        (None, Some(c)) if c > 0 => {
            let expected = "none, since this drafter has no clustered head";
            return Err(Error::Option { option: "centroids", expected, found: c.to_string() });
        }
        (None, _) | (Some(_), Some(0)) => config.vocab_size,
        (Some(c), wanted) => {
            let top = wanted.unwrap_or(c.top_k);
            if top > c.count {
                let found = format!("{top} of {}", c.count);
                return Err(Error::Option { option: "centroids", expected: "no more than there are", found });
            }
            top * (config.vocab_size / c.count)
        }
    };
    let kv = kv_bytes(&config.layers, config.sliding_window, load);
    let pass = dense as f64 + (scored as u64 * row) as f64 + kv;
    Ok(((pass * load.k as f64).round() as u64, scored))
}

#[cfg(test)]
mod tests;
