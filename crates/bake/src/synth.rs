//! `bake synth`: a random checkpoint of a real shape, for tests of scale and speed without the real weights.
//!
//! Weights are about N(0, 1/sqrt(in)), norms about 1, layer scalars 0.5 to 1. Every tensor has its own ChaCha8 stream, keyed by
//! seed and name, and element i takes word i of it: tiles can be made in any order on any number of threads, and the same
//! seed gives the same bytes everywhere. The normal is the sum of the four bytes of a word: mean and variance are exact, tails
//! end at 3.45 standard deviations, and it costs one addition chain an element.

use std::ops::Range;
use std::path::Path;

use half::bf16;
use rand::SeedableRng;
use rand::rand_core::Rng;
use rand_chacha::ChaCha8Rng;
use runtime::config::{ModelConfig, Strategy};
use runtime::names;
use safetensors::Dtype;
use serde_json::json;

use crate::check;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::lineage::Lineage;
use crate::method::{ByRow, Method};
use crate::plan::{Job, Output, Plan, Work};
use crate::precision::{Choice, Scheme};
use crate::quant::{Arithmetic, Bits};
use crate::quant_config::{self, Schemes};
use crate::quantize::{check_strategy, describe, fitting, packed};
use crate::roles::{Linear, Part};
use crate::writer::{self, Report, WriteOptions};

mod shape;
mod towers;

pub use shape::Shape;

/// Options of [`run`].
#[derive(Debug, Clone, Copy)]
pub struct SynthOptions {
    /// Widths.
    pub shape: Shape,
    /// Decoder layers.
    pub layers: usize,
    /// Rows of the embedding tables.
    pub vocab: usize,
    /// Seed of all weights.
    pub seed: u64,
    /// `None`: bf16. Otherwise the linears are written packed, with the bytes that [`crate::quantize`] makes of the bf16
    /// checkpoint of the same seed.
    pub int4: Option<Strategy>,
    /// Write keys and values of KV-shared layers, too, as published checkpoints do.
    pub inert_kv: bool,
    /// Write vision and audio towers, too, as published checkpoints do. They are never packed.
    pub towers: bool,
    /// Leave all weights but `weight_shape` as holes in the file: zeros that take no disk, for what only looks at shapes.
    pub sparse: bool,
    /// How to write.
    pub write: WriteOptions,
}

impl SynthOptions {
    /// The real model's depth and vocabulary, bf16, with inert keys and values.
    pub fn new(shape: Shape) -> SynthOptions {
        SynthOptions {
            shape,
            layers: shape.layers(),
            vocab: shape.vocab(),
            seed: 0,
            int4: None,
            inert_kv: true,
            towers: false,
            sparse: false,
            write: WriteOptions::default(),
        }
    }
}

/// Most layers accepted.
const LAYER_LIMIT: usize = 1024;
/// Largest vocabulary accepted.
const VOCAB_LIMIT: usize = 1 << 20;

/// Writes a random checkpoint to `out`. It has no tokenizer.
pub fn run(out: &Path, options: &SynthOptions, context: &Context) -> Result<Report> {
    writer::execute(plan(options)?, None, out, options.write, context)
}

/// What [`run`] writes.
pub fn plan(options: &SynthOptions) -> Result<Plan> {
    let range = |option, found: usize, limit: usize| match found {
        n if n == 0 || n > limit => {
            Err(Error::Option { option, expected: format!("a number from 1 to {limit}"), found: found.to_string() })
        }
        _ => Ok(()),
    };
    range("layers", options.layers, LAYER_LIMIT)?;
    range("vocab", options.vocab, VOCAB_LIMIT)?;
    if let Some(strategy) = options.int4 {
        check_strategy("int4", strategy)?;
    }
    let mut json = shape::config(options);
    let config = ModelConfig::from_json(&json, Path::new("config.json"))?;
    let prefix = names::PREFIXES[0];

    let mut linears = check::linears(&config, None);
    if options.inert_kv {
        for layer in config.first_kv_shared()..config.layers.len() {
            let inert = ["self_attn.k_proj", "self_attn.v_proj"];
            linears.extend(
                inert
                    .into_iter()
                    .filter_map(|name| Some((Linear::Layer(layer, name), check::layer_linear(&config, layer, name)?))),
            );
        }
    }
    let mut plain = check::plain_tensors(&config);
    if options.inert_kv {
        for layer in config.first_kv_shared()..config.layers.len() {
            plain.push((names::layer(layer, "self_attn.k_norm.weight"), vec![config.layers[layer].head_dim]));
        }
    }

    let mut schemes = Schemes::new();
    let mut jobs = Vec::new();
    for (linear, shape) in linears {
        let stream = Stream::new(options.seed, &linear.tensor(prefix, Part::Dense), Law::Weight { inputs: shape[1] });
        match options.int4 {
            None => jobs.push(stream.job(linear.tensor(prefix, Part::Dense), &shape)),
            Some(wanted) => {
                let strategy = fitting(wanted, shape[1]);
                let scheme = Scheme { bits: Bits::Four, strategy };
                schemes.insert(linear, scheme);
                let read = move |rows: Range<usize>, weights: &mut [f32], _: &mut Vec<u8>| {
                    stream.fill(rows.start * shape[1], weights);
                    Ok(())
                };
                let choice = Choice { scheme, method: Method::Rtn };
                let quantiser = ByRow::new(choice, shape[1], Arithmetic::Bf16);
                jobs.extend(packed(linear, prefix, shape, scheme, Arithmetic::Bf16, quantiser, read));
            }
        }
    }
    for (name, shape) in plain {
        let law = match name.as_str() {
            names::EMBED | names::EMBED_PER_LAYER => Law::Weight { inputs: shape[1] },
            n if n.ends_with("layer_scalar") => Law::Scalar,
            _ => Law::Norm,
        };
        let full = format!("{prefix}{name}");
        jobs.push(Stream::new(options.seed, &full, law).job(full, &shape));
    }
    let mut ignore = Vec::new();
    if options.towers {
        let widths = options.shape.widths();
        for (name, shape) in widths.towers.tensors(widths.hidden) {
            // As the quantiser lists them.
            ignore.extend(name.strip_suffix(".weight").filter(|_| shape.len() == 2).map(str::to_string));
            jobs.push(Stream::new(options.seed, &name, tower_law(&name, &shape)).job(name, &shape));
        }
    }
    ignore.sort();
    ignore.push(names::LM_HEAD.to_string());
    if options.sparse {
        jobs = jobs.into_iter().flat_map(hollow).collect();
    }
    jobs.sort_by(|a, b| a.outputs[0].name.cmp(&b.outputs[0].name));

    if let (Some(strategy), Some(root)) = (options.int4, json.as_object_mut()) {
        let default = Scheme { bits: Bits::Four, strategy };
        let value = quant_config::build(default, &schemes, &ignore);
        root.insert("quantization_config".into(), value);
    }
    let knobs = json!({
        "shape": format!("{:?}", options.shape).to_lowercase(),
        "layers": options.layers,
        "vocab": options.vocab,
        "seed": options.seed,
        "int4": options.int4.map(describe),
        "inert_kv": options.inert_kv,
        "towers": options.towers,
        "sparse": options.sparse,
        "shards": options.write.shards,
    });
    Ok(Plan {
        jobs,
        config: json,
        prefix: prefix.to_string(),
        files: vec![],
        inherited_keepset: None,
        lineage: Lineage::new(
            "synth",
            knobs,
            vec!["random weights: speed and layout mean something, text does not".into()],
        ),
    })
}

/// The tensors of a job as holes.
fn hollow(job: Job) -> Vec<Job> {
    match job.work {
        Work::Rows { .. } => job.outputs.into_iter().map(|o| Job { outputs: vec![o], work: Work::Hole }).collect(),
        _ => vec![job],
    }
}

/// Distribution of a tensor of a tower.
fn tower_law(name: &str, shape: &[usize]) -> Law {
    match shape {
        [] if name.ends_with("_min") => Law::Constant(-TOWER_BOUND),
        [] => Law::Constant(TOWER_BOUND),
        [_] => Law::Norm,
        [_, inner @ ..] => Law::Weight { inputs: inner.iter().product() },
    }
}

/// Largest activation that a clipped linear of a tower lets pass.
const TOWER_BOUND: f32 = 8.0;

/// Distribution of a tensor's elements.
#[derive(Debug, Clone, Copy)]
enum Law {
    /// Mean 0, variance 1 / inputs.
    Weight { inputs: usize },
    /// Mean 1, standard deviation 0.1.
    Norm,
    /// Uniform from 0.5 to 1.
    Scalar,
    /// This number.
    Constant(f32),
}

/// Sum of the four bytes of a uniform word: mean 510.
const BYTES_MEAN: f32 = 510.0;
/// Its standard deviation: the root of 4 * (256^2 - 1) / 12.
const BYTES_DEVIATION: f32 = 147.800_54;

/// All elements of one tensor.
#[derive(Clone)]
struct Stream {
    key: [u8; 32],
    law: Law,
}

impl Stream {
    fn new(seed: u64, name: &str, law: Law) -> Stream {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"chiku synth 1\0").update(&seed.to_le_bytes()).update(name.as_bytes());
        Stream { key: *hasher.finalize().as_bytes(), law }
    }

    /// Elements from `first` on, rounded to bf16.
    fn fill(&self, first: usize, out: &mut [f32]) {
        let mut rng = ChaCha8Rng::from_seed(self.key);
        rng.set_word_pos(first as u128);
        let (mean, scale) = match self.law {
            Law::Weight { inputs } => (0.0, (inputs.max(1) as f32).sqrt().recip() / BYTES_DEVIATION),
            Law::Norm => (1.0, 0.1 / BYTES_DEVIATION),
            Law::Scalar => (0.5, 0.5 / 2f32.powi(32)),
            Law::Constant(value) => (value, 0.0),
        };
        let mut block = [0u8; 1024];
        for chunk in out.chunks_mut(block.len() / 4) {
            let bytes = &mut block[..chunk.len() * 4];
            rng.fill_bytes(bytes);
            for (o, b) in chunk.iter_mut().zip(bytes.as_chunks::<4>().0) {
                let x = match self.law {
                    Law::Scalar => u32::from_le_bytes(*b) as f32 * scale,
                    _ => (b.iter().map(|&b| u32::from(b)).sum::<u32>() as f32 - BYTES_MEAN) * scale,
                };
                *o = bf16::from_f32(mean + x).to_f32();
            }
        }
    }

    /// The tensor in bf16.
    fn job(self, name: String, shape: &[usize]) -> Job {
        let output = Output::new(name, Dtype::BF16, shape);
        let width = output.row_bytes() / 2;
        let fill = move |rows: Range<usize>, buffers: &mut [&mut [u8]]| {
            let mut values = [0f32; 1024];
            let mut at = rows.start * width;
            for bytes in buffers[0].chunks_mut(values.len() * 2) {
                let values = &mut values[..bytes.len() / 2];
                self.fill(at, values);
                for (b, v) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(&*values) {
                    *b = bf16::from_f32(*v).to_le_bytes();
                }
                at += values.len();
            }
            Ok(())
        };
        Job { outputs: vec![output], work: Work::Rows { input_bytes: 0, fill: Box::new(fill) } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_do_not_depend_on_where_a_tile_begins() {
        let stream = Stream::new(7, "x", Law::Weight { inputs: 64 });
        let mut whole = vec![0.0; 3000];
        stream.fill(0, &mut whole);
        for start in [1, 15, 16, 17, 255, 1024, 2999] {
            let mut part = vec![0.0; 3000 - start];
            stream.fill(start, &mut part);
            assert_eq!(part, whole[start..], "from {start}");
        }
    }

    #[test]
    fn moments_are_those_of_the_law() {
        let n = 1 << 16;
        let mut values = vec![0f32; n];
        for (law, mean, deviation) in
            [(Law::Weight { inputs: 4 }, 0.0, 0.5), (Law::Norm, 1.0, 0.1), (Law::Scalar, 0.75, 0.25 / 3f64.sqrt())]
        {
            Stream::new(1, "moments", law).fill(0, &mut values);
            let m = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n as f64;
            let d = (values.iter().map(|&v| (f64::from(v) - m).powi(2)).sum::<f64>() / n as f64).sqrt();
            // Four standard errors.
            assert!((m - mean).abs() < 4.0 * deviation / (n as f64).sqrt(), "{law:?}: mean {m}");
            assert!((d / deviation - 1.0).abs() < 0.02, "{law:?}: deviation {d}");
        }
    }

    #[test]
    fn streams_differ_by_seed_and_name() {
        let first = |seed, name| {
            let mut v = [0.0; 8];
            Stream::new(seed, name, Law::Norm).fill(0, &mut v);
            v
        };
        assert_ne!(first(0, "a"), first(1, "a"));
        assert_ne!(first(0, "a"), first(0, "b"));
    }
}
