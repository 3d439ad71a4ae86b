//! The widths of the models that a synthetic checkpoint can have.

use serde_json::{Value, json};

use super::SynthOptions;
use super::towers;

/// Widths of a known model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Gemma 4 E4B: hidden 2560, MLP 10240, 8 heads of 256 (512 in full layers) over 2 KV heads, window 512, 42 layers with the
    /// last 18 shared, vocabulary 262144.
    E4b,
    /// Gemma 4 E2B: hidden 1536, MLP 6144 (12288 in shared layers), 8 heads of 256 (512) over one KV head, window 512, 35 layers
    /// with the last 20 shared, vocabulary 262144.
    E2b,
    /// The embedded nano model: hidden 128, MLP 192, 4 heads of 32 (64) over 2, window 64, 12 layers with the last 6 shared,
    /// vocabulary 2048.
    Nano,
}

pub(super) struct Widths {
    pub hidden: usize,
    intermediate: usize,
    /// The MLP of shared layers is twice as wide.
    double_wide: bool,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    global_head_dim: usize,
    window: usize,
    ple: usize,
    pub layers: usize,
    pub shared: usize,
    /// Every so many layers one has full attention.
    period: usize,
    pub vocab: usize,
    positions: usize,
    pub towers: towers::Widths,
}

impl Shape {
    pub(super) fn widths(self) -> Widths {
        match self {
            Shape::E4b => Widths {
                hidden: 2560,
                intermediate: 10240,
                double_wide: false,
                heads: 8,
                kv_heads: 2,
                head_dim: 256,
                global_head_dim: 512,
                window: 512,
                ple: 256,
                layers: 42,
                shared: 18,
                period: 6,
                vocab: 262_144,
                positions: 131_072,
                towers: towers::PUBLISHED,
            },
            Shape::E2b => Widths {
                hidden: 1536,
                intermediate: 6144,
                double_wide: true,
                heads: 8,
                kv_heads: 1,
                head_dim: 256,
                global_head_dim: 512,
                window: 512,
                ple: 256,
                layers: 35,
                shared: 20,
                period: 5,
                vocab: 262_144,
                positions: 131_072,
                towers: towers::PUBLISHED,
            },
            Shape::Nano => Widths {
                hidden: 128,
                intermediate: 192,
                double_wide: false,
                heads: 4,
                kv_heads: 2,
                head_dim: 32,
                global_head_dim: 64,
                window: 64,
                ple: 16,
                layers: 12,
                shared: 6,
                period: 6,
                vocab: 2048,
                positions: 2048,
                towers: towers::SMALL,
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

/// Kinds of `count` layers: every `period`th has full attention, and so has the last.
fn layer_types(count: usize, period: usize) -> Vec<&'static str> {
    let full = |l: usize| (l + 1).is_multiple_of(period) || l + 1 == count;
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
pub(super) fn config(options: &SynthOptions) -> Value {
    let w = options.shape.widths();
    let kinds = layer_types(options.layers, w.period);
    let shared = shared_layers(&kinds, &w);
    let [vision, audio] = match options.towers {
        true => w.towers.configs(),
        false => [Value::Null, Value::Null],
    };
    let mut config = json!({
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": audio,
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
            "use_double_wide_mlp": w.double_wide,
            "vocab_size": options.vocab,
            "vocab_size_per_layer_input": options.vocab,
        },
        "tie_word_embeddings": true,
        "vision_config": vision,
    });
    // Present and null in published files.
    for field in ABSENT {
        config["text_config"][field] = Value::Null;
    }
    config
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use runtime::config::ModelConfig;

    use super::*;

    #[test]
    fn shared_layers_are_valid_at_every_depth() {
        for shape in [Shape::E4b, Shape::E2b, Shape::Nano] {
            for layers in 1..=50 {
                let options = SynthOptions { layers, ..SynthOptions::new(shape) };
                let c = ModelConfig::from_json(&config(&options), Path::new("c")).unwrap();
                assert_eq!(c.layers.len(), layers);
            }
            let c = ModelConfig::from_json(&config(&SynthOptions::new(shape)), Path::new("c")).unwrap();
            assert_eq!(c.num_kv_shared_layers, shape.widths().shared);
        }
    }
}
