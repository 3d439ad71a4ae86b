//! Vision and audio towers of a synthetic checkpoint: names as published checkpoints have them, shapes from the widths in their
//! `vision_config` and `audio_config`.

use serde_json::{Value, json};

/// Widths of both towers.
pub(crate) struct Widths {
    vision_hidden: usize,
    vision_inner: usize,
    vision_layers: usize,
    vision_heads: usize,
    patch: usize,
    positions: usize,
    audio_hidden: usize,
    audio_layers: usize,
    audio_heads: usize,
    audio_output: usize,
    channels: [usize; 2],
    kernel: usize,
}

/// Those of E4B and E2B: 16 layers of 768 for images, 12 of 1024 for sound.
pub(crate) const PUBLISHED: Widths = Widths {
    vision_hidden: 768,
    vision_inner: 3072,
    vision_layers: 16,
    vision_heads: 12,
    patch: 16,
    positions: 10_240,
    audio_hidden: 1024,
    audio_layers: 12,
    audio_heads: 8,
    audio_output: 1536,
    channels: [128, 32],
    kernel: 5,
};

/// The same at a size that goes with the nano model, which has no towers of its own.
pub(crate) const SMALL: Widths = Widths {
    vision_hidden: 32,
    vision_inner: 64,
    vision_layers: 2,
    vision_heads: 2,
    patch: 4,
    positions: 64,
    audio_hidden: 32,
    audio_layers: 2,
    audio_heads: 2,
    audio_output: 48,
    channels: [8, 4],
    kernel: 5,
};

/// Mel bins of a sound frame; two convolutions of stride 2 leave a quarter of them.
const MELS: usize = 128;
/// Bounds of the activations around every linear of a tower that is clipped.
const BOUNDS: [&str; 4] = ["input_min", "input_max", "output_min", "output_max"];

impl Widths {
    /// `vision_config` and `audio_config`.
    pub fn configs(&self) -> [Value; 2] {
        let vision = json!({
            "dtype": "bfloat16",
            "head_dim": self.vision_hidden / self.vision_heads,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.vision_hidden,
            "intermediate_size": self.vision_inner,
            "model_type": "gemma4_vision",
            "num_attention_heads": self.vision_heads,
            "num_hidden_layers": self.vision_layers,
            "num_key_value_heads": self.vision_heads,
            "patch_size": self.patch,
            "pooling_kernel_size": 3,
            "position_embedding_size": self.positions,
            "rms_norm_eps": 1e-6,
            "standardize": false,
            "use_clipped_linears": true,
        });
        let audio = json!({
            "conv_kernel_size": self.kernel,
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.audio_hidden,
            "model_type": "gemma4_audio",
            "num_attention_heads": self.audio_heads,
            "num_hidden_layers": self.audio_layers,
            "output_proj_dims": self.audio_output,
            "rms_norm_eps": 1e-6,
            "subsampling_conv_channels": self.channels,
            "use_clipped_linears": true,
        });
        [vision, audio]
    }

    /// Full names and shapes of all tensors; `hidden` is the text model's width.
    pub fn tensors(&self, hidden: usize) -> Vec<(String, Vec<usize>)> {
        let mut out = Vec::new();
        self.vision(&mut out);
        self.audio(&mut out);
        out.push(("model.embed_vision.embedding_projection.weight".into(), vec![hidden, self.vision_hidden]));
        out.push(("model.embed_audio.embedding_projection.weight".into(), vec![hidden, self.audio_output]));
        out
    }

    fn vision(&self, out: &mut Vec<(String, Vec<usize>)>) {
        let tower = "model.vision_tower";
        let (hidden, inner) = (self.vision_hidden, self.vision_inner);
        let pixels = 3 * self.patch * self.patch;
        out.push((format!("{tower}.patch_embedder.input_proj.weight"), vec![hidden, pixels]));
        let table = vec![2, self.positions, hidden];
        out.push((format!("{tower}.patch_embedder.position_embedding_table"), table));
        for l in 0..self.vision_layers {
            let layer = format!("{tower}.encoder.layers.{l}");
            for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
                clipped(out, format!("{layer}.self_attn.{name}"), [hidden, hidden]);
            }
            clipped(out, format!("{layer}.mlp.gate_proj"), [inner, hidden]);
            clipped(out, format!("{layer}.mlp.up_proj"), [inner, hidden]);
            clipped(out, format!("{layer}.mlp.down_proj"), [hidden, inner]);
            for name in ["q_norm", "k_norm"] {
                out.push((format!("{layer}.self_attn.{name}.weight"), vec![hidden / self.vision_heads]));
            }
            for name in [
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ] {
                out.push((format!("{layer}.{name}.weight"), vec![hidden]));
            }
        }
    }

    fn audio(&self, out: &mut Vec<(String, Vec<usize>)>) {
        let tower = "model.audio_tower";
        let hidden = self.audio_hidden;
        let [first, second] = self.channels;
        let subsample = format!("{tower}.subsample_conv_projection");
        for (l, (from, to)) in [(1, first), (first, second)].into_iter().enumerate() {
            out.push((format!("{subsample}.layer{l}.conv.weight"), vec![to, from, 3, 3]));
            out.push((format!("{subsample}.layer{l}.norm.weight"), vec![to]));
        }
        out.push((format!("{subsample}.input_proj_linear.weight"), vec![hidden, second * MELS / 4]));
        for l in 0..self.audio_layers {
            let layer = format!("{tower}.layers.{l}");
            for half in ["feed_forward1", "feed_forward2"] {
                clipped(out, format!("{layer}.{half}.ffw_layer_1"), [4 * hidden, hidden]);
                clipped(out, format!("{layer}.{half}.ffw_layer_2"), [hidden, 4 * hidden]);
                for name in ["pre_layer_norm", "post_layer_norm"] {
                    out.push((format!("{layer}.{half}.{name}.weight"), vec![hidden]));
                }
            }
            for name in ["q_proj", "k_proj", "v_proj", "post"] {
                clipped(out, format!("{layer}.self_attn.{name}"), [hidden, hidden]);
            }
            out.push((format!("{layer}.self_attn.relative_k_proj.weight"), vec![hidden, hidden]));
            out.push((format!("{layer}.self_attn.per_dim_scale"), vec![hidden / self.audio_heads]));
            clipped(out, format!("{layer}.lconv1d.linear_start"), [2 * hidden, hidden]);
            clipped(out, format!("{layer}.lconv1d.linear_end"), [hidden, hidden]);
            out.push((format!("{layer}.lconv1d.depthwise_conv1d.weight"), vec![hidden, 1, self.kernel]));
            for name in ["lconv1d.pre_layer_norm", "lconv1d.conv_norm", "norm_pre_attn", "norm_post_attn", "norm_out"] {
                out.push((format!("{layer}.{name}.weight"), vec![hidden]));
            }
        }
        out.push((format!("{tower}.output_proj.weight"), vec![self.audio_output, hidden]));
        out.push((format!("{tower}.output_proj.bias"), vec![self.audio_output]));
    }
}

/// A linear with the bounds of its activations.
fn clipped(out: &mut Vec<(String, Vec<usize>)>, module: String, shape: [usize; 2]) {
    out.push((format!("{module}.linear.weight"), shape.to_vec()));
    out.extend(BOUNDS.iter().map(|bound| (format!("{module}.{bound}"), vec![])));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roles::is_tower;

    #[test]
    fn every_tensor_belongs_to_a_tower_and_has_a_name_of_its_own() {
        let mut tensors = PUBLISHED.tensors(2560);
        assert!(tensors.iter().all(|(name, _)| is_tower(name)));
        let count = tensors.len();
        tensors.sort();
        tensors.dedup_by(|a, b| a.0 == b.0);
        assert_eq!(tensors.len(), count);
        let has = |name: &str| tensors.iter().any(|(n, _)| n == name);
        // Modules that a published configuration lists as not quantised.
        assert!(has("model.vision_tower.encoder.layers.15.mlp.down_proj.linear.weight"));
        assert!(has("model.audio_tower.layers.11.self_attn.relative_k_proj.weight"));
        assert!(has("model.audio_tower.subsample_conv_projection.input_proj_linear.weight"));
    }
}
