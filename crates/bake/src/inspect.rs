//! `bake inspect`: what a checkpoint holds, what a decode step reads of it, and what is wrong with it.
//!
//! The plain report reads headers only. `strict` also reads every float for NaN and infinities and holds tensors to the
//! configuration ([`crate::check`]). With the checkpoint it was made from at hand (`against`), the map of KV-shared layers is
//! derived a second time, from which layers survived: a file alone cannot show that `num_kv_shared_layers` was not adjusted.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use rayon::prelude::*;
use runtime::checkpoint::Checkpoint;
use runtime::config::{LayerKind, ModelConfig, Strategy};
use runtime::names;
use safetensors::Dtype;
use serde::Serialize;

use crate::check::{self, Subject};
use crate::context::{Context, Meter};
use crate::error::{Error, Result};
use crate::lineage::{self, Lineage};
use crate::plan::Output;
use crate::roles::{Linear, Part, Role, role, role_in};
use crate::source::Source;

mod render;
mod sharing;

/// Options of [`run`].
#[derive(Clone, Copy, Default)]
pub struct InspectOptions<'a> {
    /// Read all floats and hold tensors to the configuration.
    pub strict: bool,
    /// The checkpoint that this one was made from by removing layers: compare the maps of KV-shared layers.
    pub against: Option<&'a Checkpoint>,
}

/// Result of [`run`]. The JSON keys are stable.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// Name of the directory.
    pub name: String,
    /// Decoder layers.
    pub layers: usize,
    /// Of these, trailing ones without keys and values of their own.
    pub kv_shared: usize,
    /// Attention kind of the shared layers -> layer whose keys and values they read.
    pub sources: BTreeMap<String, usize>,
    /// Rows of the head.
    pub head_rows: usize,
    /// Bytes in the files.
    pub components: Components,
    /// Weight bytes that one decode step reads.
    pub bytes_per_step: BytesPerStep,
    /// How linears are packed; null where none is.
    pub quantization: Option<Quantization>,
    /// The bake that wrote it, from `lineage.json`.
    pub baked_by: Option<String>,
    /// Why other programs do not run it as it is, one line each; empty where they do.
    pub chiku_only: Vec<String>,
    /// Whether the checks of `strict` were made.
    pub strict: bool,
    /// What is wrong, one line each.
    pub problems: Vec<String>,
    /// All tensors, file by file in the order of their bytes.
    pub tensors: Vec<TensorRow>,
}

/// Bytes of tensor data by purpose. The fields add up to the data of all files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Components {
    /// Token embedding.
    pub embed: u64,
    /// Per-layer embedding table.
    pub ple_embed: u64,
    /// Attention and MLP linears, scales included.
    pub body: u64,
    /// `per_layer_input_gate`, `per_layer_projection`, `per_layer_model_projection`.
    pub ple_linears: u64,
    /// An untied head.
    pub head: u64,
    /// Norms and layer scalars.
    pub norms: u64,
    /// Vision and audio towers and whatever else is not the text model.
    pub towers: u64,
    /// Keys and values of KV-shared layers, which nothing reads.
    pub inert_kv: u64,
    /// The `weight_shape` tensors of packed linears, which only loaders read.
    pub shapes: u64,
}

impl Components {
    /// Sum.
    pub fn total(&self) -> u64 {
        let Components { embed, ple_embed, body, ple_linears, head, norms, towers, inert_kv, shapes } = *self;
        embed + ple_embed + body + ple_linears + head + norms + towers + inert_kv + shapes
    }
}

/// Weight bytes that one decode step of any number of rows up to 16 reads: everything once, of the tables one row. Not counted: KV
/// cache, activations, `weight_shape`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BytesPerStep {
    /// Attention and MLP linears.
    pub body: u64,
    /// Linears of the per-layer embedding.
    pub ple_linears: u64,
    /// The head: the whole token embedding where it is tied.
    pub head: u64,
    /// Norms and layer scalars.
    pub norms: u64,
    /// One row of the token embedding.
    pub embed_row: u64,
    /// One row of the per-layer embedding.
    pub ple_row: u64,
    /// Sum.
    pub total: u64,
}

/// Packed weights of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Quantization {
    /// Always `pack-quantized`.
    pub format: String,
    /// Config groups, in file order.
    pub groups: Vec<Group>,
    /// Packed linears.
    pub packed: usize,
    /// Dense linears of the text model.
    pub dense: usize,
    /// Bits a weight over all packed linears, scales included.
    pub bits_per_weight: f64,
    /// Modules in the ignore list.
    pub ignored: usize,
}

/// A config group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    /// Name in the file.
    pub name: String,
    /// Module patterns.
    pub targets: Vec<String>,
    /// Bits a weight without scales.
    pub bits: usize,
    /// `group` or `channel`.
    pub strategy: String,
    /// Inputs a scale; null for a channel.
    pub group_size: Option<usize>,
}

impl Group {
    fn all(quantization: &runtime::config::Quantization) -> Vec<Group> {
        let group = |s: &runtime::config::WeightScheme| {
            let (strategy, group_size) = match s.strategy {
                Strategy::Group(size) => ("group", Some(size)),
                Strategy::Channel => ("channel", None),
            };
            Group {
                name: s.name.clone(),
                targets: s.targets.iter().map(|t| t.as_str().to_string()).collect(),
                bits: s.bits.get(),
                strategy: strategy.into(),
                group_size,
            }
        };
        quantization.schemes.iter().map(group).collect()
    }
}

/// One tensor.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorRow {
    /// Full name.
    pub name: String,
    /// Element type as safetensors spells it.
    pub dtype: String,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Length.
    pub bytes: u64,
    /// Name of its file.
    pub file: String,
}

/// Reports on a checkpoint. Progress counts the bytes that `strict` scans.
///
/// # Errors
/// I/O errors and [`Error::Cancelled`]. What is wrong with the checkpoint itself is in `problems`.
pub fn run(checkpoint: &Checkpoint, options: &InspectOptions, context: &Context) -> Result<Inspection> {
    let config = checkpoint.config();
    let sources = Source::all(checkpoint)?;
    let outputs: Vec<Output> = sources.iter().map(Source::output).collect();
    let (components, bytes_per_step) = weigh(config, checkpoint.prefix(), &outputs);
    let mut problems = Vec::new();
    let lineage = Lineage::read(checkpoint.dir())?;
    if options.strict {
        problems.extend(sharing::edited(config, lineage.as_ref()));
        problems.extend(sharing::suspicious(checkpoint, lineage.as_ref()));
        problems.extend(contradictions(checkpoint, &sources, &outputs)?);
        problems.extend(scan(checkpoint, &sources, context)?);
    }
    if let Some(parent) = options.against {
        problems.extend(sharing::compare(checkpoint, &sources, parent)?);
    }
    let head_rows = match checkpoint.keepset().filter(|_| !config.tie_word_embeddings) {
        Some(k) => k.ids.len(),
        None => config.vocab_size,
    };
    Ok(Inspection {
        name: lineage::directory_name(checkpoint.dir()),
        layers: config.layers.len(),
        kv_shared: config.num_kv_shared_layers,
        sources: kv_sources(config),
        head_rows,
        components,
        bytes_per_step,
        quantization: quantization(checkpoint, &sources),
        chiku_only: chiku_only(config, check::keepset_rows(checkpoint.keepset())),
        baked_by: lineage.map(|l| format!("{} {} {}", l.tool.name, l.tool.version, l.command)),
        strict: options.strict,
        problems,
        tensors: sources.iter().map(TensorRow::new).collect(),
    })
}

impl TensorRow {
    fn new(source: &Source) -> TensorRow {
        TensorRow {
            name: source.name.clone(),
            dtype: source.dtype.to_string(),
            shape: source.shape.clone(),
            bytes: source.len(),
            file: file_name(&source.path),
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
}

/// Why other programs do not run a checkpoint as it is, one line each.
pub(crate) fn chiku_only(config: &ModelConfig, keepset_rows: Option<usize>) -> Vec<String> {
    let mut reasons = Vec::new();
    if let Some(rows) = keepset_rows.filter(|_| !config.tie_word_embeddings) {
        reasons.push(format!(
            "the head has rows for {rows} of {} tokens, listed in {}: a convention of this model's community, which transformers \
             and vLLM do not know",
            config.vocab_size,
            runtime::checkpoint::KEEPSET_FILE
        ));
    }
    for scheme in config.quantization.iter().flat_map(|q| &q.schemes) {
        if !INTEROPERABLE_BITS.contains(&scheme.bits.get()) {
            reasons.push(format!(
                "config group `{}` has {} bits a weight; loaders read 4 and 8",
                scheme.name,
                scheme.bits.get()
            ));
        }
    }
    if config.layers.last().is_some_and(|l| l.kind != LayerKind::Full) {
        reasons.push("the last layer has sliding attention; transformers makes it a full one without saying so".into());
    }
    reasons
}

/// Widths of `pack-quantized` that other programs load.
const INTEROPERABLE_BITS: [usize; 2] = [4, 8];

/// One line a config group.
pub(crate) fn groups(config: &ModelConfig) -> Vec<String> {
    config.quantization.iter().flat_map(Group::all).map(|g| g.to_string()).collect()
}

/// Bytes in the files and bytes read a step, by purpose, with the totals.
pub(crate) fn rows(c: &Components, s: &BytesPerStep) -> [(&'static str, u64, u64); 10] {
    [
        ("embedding", c.embed, s.embed_row),
        ("ple embedding", c.ple_embed, s.ple_row),
        ("body", c.body, s.body),
        ("ple linears", c.ple_linears, s.ple_linears),
        ("head", c.head, s.head),
        ("norms", c.norms, s.norms),
        ("inert k/v", c.inert_kv, 0),
        ("shapes", c.shapes, 0),
        ("towers", c.towers, 0),
        ("total", c.total(), s.total),
    ]
}

/// Which layer the shared layers of each kind read.
pub(crate) fn kv_sources(config: &ModelConfig) -> BTreeMap<String, usize> {
    let shared = config.layers.iter().filter_map(|l| Some((l.kind.as_str().to_string(), l.kv_source?)));
    shared.collect()
}

/// Bytes by purpose of these tensors.
pub fn weigh<'a>(
    config: &ModelConfig,
    prefix: &str,
    tensors: impl IntoIterator<Item = &'a Output>,
) -> (Components, BytesPerStep) {
    let (mut c, mut step) = (Components::default(), BytesPerStep::default());
    for tensor in tensors {
        let bytes = tensor.bytes();
        let role = role(prefix, &tensor.name);
        let shared = |l: usize| config.layers.get(l).is_some_and(|l| l.kv_source.is_some());
        if role.is_kv() && role.layer().is_some_and(shared) {
            c.inert_kv += bytes;
            continue;
        }
        match role {
            Role::Linear(_, Part::Shape) => c.shapes += bytes,
            Role::Embed => {
                c.embed += bytes;
                step.embed_row += tensor.row_bytes() as u64;
                if config.tie_word_embeddings {
                    step.head += bytes;
                }
            }
            Role::PleEmbed => {
                c.ple_embed += bytes;
                step.ple_row += tensor.row_bytes() as u64;
            }
            Role::Linear(Linear::Head, _) => {
                c.head += bytes;
                step.head += if config.tie_word_embeddings { 0 } else { bytes };
            }
            Role::Linear(linear, _) if linear.is_ple() => {
                c.ple_linears += bytes;
                step.ple_linears += bytes;
            }
            Role::Linear(_, _) => {
                c.body += bytes;
                step.body += bytes;
            }
            Role::Norm | Role::LayerOther(_, _) => {
                c.norms += bytes;
                step.norms += bytes;
            }
            Role::Other => c.towers += bytes,
        }
    }
    step.total = step.body + step.ple_linears + step.head + step.norms + step.embed_row + step.ple_row;
    (c, step)
}

fn quantization(checkpoint: &Checkpoint, sources: &[Source]) -> Option<Quantization> {
    let (mut packed, mut dense, mut bytes, mut weights) = (0, 0, 0, 0i64);
    for source in sources {
        match role_in(checkpoint, &source.name) {
            Role::Linear(_, Part::Packed) => {
                packed += 1;
                bytes += source.len();
            }
            Role::Linear(_, Part::Scale) => bytes += source.len(),
            // The number of weights stands in the third tensor; a damaged one is a problem that `strict` names.
            Role::Linear(_, Part::Shape) => {
                weights = source.read_pair().map_or(weights, |[a, b]| weights.saturating_add(a.saturating_mul(b)));
            }
            Role::Linear(_, Part::Dense) => dense += 1,
            _ => {}
        }
    }
    let config = checkpoint.config().quantization.as_ref();
    if packed == 0 && config.is_none() {
        return None;
    }
    Some(Quantization {
        format: "pack-quantized".into(),
        groups: config.map_or(vec![], Group::all),
        packed,
        dense,
        bits_per_weight: if weights > 0 { bytes as f64 * 8.0 / weights as f64 } else { 0.0 },
        ignored: config.map_or(0, |q| q.ignore.len()),
    })
}

/// [`check::tensors`] on what lies on disk.
fn contradictions(checkpoint: &Checkpoint, sources: &[Source], outputs: &[Output]) -> Result<Vec<String>> {
    let mut weight_shapes = HashMap::new();
    let mut problems = Vec::new();
    for source in sources {
        if let Role::Linear(_, Part::Shape) = role_in(checkpoint, &source.name) {
            match source.read_pair() {
                Ok(pair) => drop(weight_shapes.insert(source.name.clone(), pair)),
                Err(Error::Tensor { .. }) => {}
                Err(e) => return Err(e),
            }
        }
    }
    problems.extend(check::tensors(&Subject {
        config: checkpoint.config(),
        prefix: checkpoint.prefix(),
        tensors: outputs,
        weight_shapes: &weight_shapes,
        keepset_rows: check::keepset_rows(checkpoint.keepset()),
    }));
    Ok(problems)
}

/// Elements read at a time.
const BATCH: usize = 1 << 19;

/// NaN and infinities of every bf16 and f32 tensor, the first of each tensor.
fn scan(checkpoint: &Checkpoint, sources: &[Source], context: &Context) -> Result<Vec<String>> {
    let floats: Vec<&Source> = sources.iter().filter(|s| matches!(s.dtype, Dtype::BF16 | Dtype::F32)).collect();
    let meter = Meter::new(context, floats.iter().map(|s| s.len()).sum());
    let tiles: Vec<(usize, usize, usize)> = floats
        .iter()
        .enumerate()
        .flat_map(|(i, s)| {
            let count: usize = s.shape.iter().product();
            (0..count).step_by(BATCH).map(move |start| (i, start, BATCH.min(count - start)))
        })
        .collect();
    let found: Vec<Option<(usize, Error)>> = tiles
        .into_par_iter()
        .map_init(
            || (Vec::new(), Vec::new()),
            |(values, scratch), (i, start, count)| {
                context.check(checkpoint.dir())?;
                values.resize(count, 0.0);
                let result = floats[i].read_f32(start, values, scratch);
                meter.add((count * floats[i].dtype.bitsize() / 8) as u64);
                match result {
                    Ok(()) => Ok(None),
                    Err(e @ Error::NonFinite { .. }) => Ok(Some((i, e))),
                    Err(e) => Err(e),
                }
            },
        )
        .collect::<Result<_>>()?;
    let mut found: Vec<(usize, Error)> = found.into_iter().flatten().collect();
    // Tiles are in order, so the first of a tensor is its smallest index.
    found.dedup_by_key(|(i, _)| *i);
    Ok(found.into_iter().map(|(_, e)| nameless(&e)).collect())
}

/// The message with the file's name instead of its path: reports are compared and pasted.
fn nameless(error: &Error) -> String {
    match error {
        Error::NonFinite { path, tensor, index, value } => {
            format!("{}: `{tensor}`: element {index} is {value}", file_name(path))
        }
        other => other.to_string(),
    }
}

/// Used by both submodules: names of a layer's norms, which every bake copies unchanged.
const LAYER_MARKS: [&str; 2] = ["input_layernorm.weight", "post_attention_layernorm.weight"];

/// The bytes that tell a layer from the others of its model.
fn layer_mark(checkpoint: &Checkpoint, sources: &[Source], layer: usize) -> Result<Option<blake3::Hash>> {
    let mut hasher = blake3::Hasher::new();
    for mark in LAYER_MARKS {
        let name = checkpoint.full_name(&names::layer(layer, mark));
        let Some(source) = sources.iter().find(|s| s.name == name) else { return Ok(None) };
        let mut bytes = vec![0; source.len() as usize];
        source.read_at(0, &mut bytes)?;
        hasher.update(&bytes);
    }
    Ok(Some(hasher.finalize()))
}
