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
use serde_json::{Value, json};

use crate::check;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::lineage::Lineage;
use crate::plan::{Job, Output, Plan, Work};
use crate::quant::Arithmetic;
use crate::quant_config::{self, Strategies};
use crate::quantize::{check_strategy, describe, fitting, packed};
use crate::roles::{Linear, Part};
use crate::writer::{self, Report, WriteOptions};

/// Widths of a known model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Gemma 4 E4B: hidden 2560, MLP 10240, 8 heads of 256 (512 in full layers) over 2 KV heads, window 512, 42 layers with the
    /// last 18 shared, vocabulary 262144.
    E4b,
    /// The embedded nano model: hidden 128, MLP 192, 4 heads of 32 (64) over 2, window 64, 12 layers with the last 6 shared,
    /// vocabulary 2048.
    Nano,
}

struct Widths {
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    global_head_dim: usize,
    window: usize,
    ple: usize,
    layers: usize,
    shared: usize,
    vocab: usize,
    positions: usize,
}

impl Shape {
    fn widths(self) -> Widths {
        match self {
            Shape::E4b => Widths {
                hidden: 2560,
                intermediate: 10240,
                heads: 8,
                kv_heads: 2,
                head_dim: 256,
                global_head_dim: 512,
                window: 512,
                ple: 256,
                layers: 42,
                shared: 18,
                vocab: 262_144,
                positions: 131_072,
            },
            Shape::Nano => Widths {
                hidden: 128,
                intermediate: 192,
                heads: 4,
                kv_heads: 2,
                head_dim: 32,
                global_head_dim: 64,
                window: 64,
                ple: 16,
                layers: 12,
                shared: 6,
                vocab: 2048,
                positions: 2048,
            },
        }
    }

    /// Layers of the real model.
    pub fn layers(self) -> usize {
        self.widths().layers
    }

    /// Vocabulary of the real model.
    pub fn vocab(self) -> usize {
        self.widths().vocab
    }
}

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
    /// Replace an existing target.
    pub force: bool,
}

impl SynthOptions {
    /// The real model's depth and vocabulary, bf16, with inert keys and values.
    pub fn new(shape: Shape) -> SynthOptions {
        let w = shape.widths();
        SynthOptions { shape, layers: w.layers, vocab: w.vocab, seed: 0, int4: None, inert_kv: true, force: false }
    }
}

/// Most layers accepted.
const LAYER_LIMIT: usize = 1024;
/// Largest vocabulary accepted.
const VOCAB_LIMIT: usize = 1 << 20;

/// Writes a random checkpoint to `out`. It has no tokenizer.
pub fn run(out: &Path, options: &SynthOptions, context: &Context) -> Result<Report> {
    writer::execute(plan(options)?, None, out, WriteOptions { force: options.force }, context)
}

/// Kinds of `count` layers: every sixth has full attention, and so has the last.
fn layer_types(count: usize) -> Vec<&'static str> {
    let full = |l: usize| (l + 1).is_multiple_of(6) || l + 1 == count;
    (0..count).map(|l| if full(l) { "full_attention" } else { "sliding_attention" }).collect()
}

/// Trailing layers that share keys and values: the real model's proportion, rounded down, then lowered until every shared
/// layer has an unshared one of its kind below. Models too small for that (up to six layers) share nothing.
fn shared_layers(kinds: &[&str], w: &Widths) -> usize {
    let wanted = kinds.len() * w.shared / w.layers;
    let valid = |shared: &usize| {
        let (own, sharing) = kinds.split_at(kinds.len() - shared);
        sharing.iter().all(|k| own.contains(k))
    };
    (0..=wanted).rev().find(valid).unwrap_or(0)
}

/// Fields of the configuration class that dense models do not use.
const ABSENT: [&str; 5] = [
    "moe_intermediate_size",
    "num_experts",
    "num_global_key_value_heads",
    "top_k_experts",
    "use_bidirectional_attention",
];

/// `config.json` of a synthetic model.
fn config(options: &SynthOptions) -> Value {
    let w = options.shape.widths();
    let kinds = layer_types(options.layers);
    let shared = shared_layers(&kinds, &w);
    let mut config = json!({
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": null,
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "model_type": "gemma4",
        "text_config": {
            "attention_bias": false,
            "attention_dropout": 0.0,
            "attention_k_eq_v": false,
            "bos_token_id": 2,
            "dtype": "bfloat16",
            "enable_moe_block": false,
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "global_head_dim": w.global_head_dim,
            "head_dim": w.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": w.hidden,
            "hidden_size_per_layer_input": w.ple,
            "initializer_range": 0.02,
            "intermediate_size": w.intermediate,
            "layer_types": kinds,
            "max_position_embeddings": w.positions,
            "model_type": "gemma4_text",
            "num_attention_heads": w.heads,
            "num_hidden_layers": options.layers,
            "num_key_value_heads": w.kv_heads,
            "num_kv_shared_layers": shared,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
            },
            "sliding_window": w.window,
            "tie_word_embeddings": true,
            "use_cache": true,
            "use_double_wide_mlp": false,
            "vocab_size": options.vocab,
            "vocab_size_per_layer_input": options.vocab,
        },
        "tie_word_embeddings": true,
        "vision_config": null,
    });
    // Present and null in published files.
    for field in ABSENT {
        config["text_config"][field] = Value::Null;
    }
    config
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
    let mut json = config(options);
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

    let mut strategies = Strategies::new();
    let mut jobs = Vec::new();
    for (linear, shape) in linears {
        let stream = Stream::new(options.seed, &linear.tensor(prefix, Part::Dense), Law::Weight { inputs: shape[1] });
        match options.int4 {
            None => jobs.push(stream.job(linear.tensor(prefix, Part::Dense), &shape)),
            Some(wanted) => {
                let strategy = fitting(wanted, shape[1]);
                strategies.insert(linear, strategy);
                let read = move |rows: Range<usize>, weights: &mut [f32], _: &mut Vec<u8>| {
                    stream.fill(rows.start * shape[1], weights);
                    Ok(())
                };
                jobs.extend(packed(linear, prefix, shape, strategy, Arithmetic::Bf16, read));
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
    jobs.sort_by(|a, b| a.outputs[0].name.cmp(&b.outputs[0].name));

    if let (Some(strategy), Some(root)) = (options.int4, json.as_object_mut()) {
        let value = quant_config::build(strategy, &strategies, &[names::LM_HEAD.to_string()]);
        root.insert("quantization_config".into(), value);
    }
    let knobs = json!({
        "shape": format!("{:?}", options.shape).to_lowercase(),
        "layers": options.layers,
        "vocab": options.vocab,
        "seed": options.seed,
        "int4": options.int4.map(describe),
        "inert_kv": options.inert_kv,
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

/// Distribution of a tensor's elements.
#[derive(Debug, Clone, Copy)]
enum Law {
    /// Mean 0, variance 1 / inputs.
    Weight { inputs: usize },
    /// Mean 1, standard deviation 0.1.
    Norm,
    /// Uniform from 0.5 to 1.
    Scalar,
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
    fn shared_layers_are_valid_at_every_depth() {
        for shape in [Shape::E4b, Shape::Nano] {
            for layers in 1..=50 {
                let options = SynthOptions { layers, ..SynthOptions::new(shape) };
                let c = ModelConfig::from_json(&config(&options), Path::new("c")).unwrap();
                assert_eq!(c.layers.len(), layers);
            }
            let c = ModelConfig::from_json(&config(&SynthOptions::new(shape)), Path::new("c")).unwrap();
            assert_eq!(c.num_kv_shared_layers, shape.widths().shared);
        }
    }

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
