//! A drafter with random weights, of the real one's shape: hidden 256, 4 layers, MLP 2048, clusters of 8 tokens. It drafts nothing that
//! is right; what it costs is real.

use std::fs;
use std::path::{Path, PathBuf};

use runtime::model::Model;
use runtime::names;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use crate::error::{Error, Result};
use crate::stats::Draws;

const HIDDEN: usize = 256;
const MLP: usize = 2048;
const HEADS: usize = 4;
/// Tokens of a cluster.
const CLUSTER: usize = 8;
/// Kinds of its layers, and their head sizes.
const LAYERS: [(&str, usize); 4] =
    [("sliding_attention", 256), ("sliding_attention", 256), ("sliding_attention", 256), ("full_attention", 512)];

/// Clusters that the real drafter looks into.
pub(super) const TOP_K: usize = 32;

/// Writes it below `work` for a target of E4B's width, unless it is there.
pub(super) fn write(work: &Path, target: &Model, seed: u64) -> Result<PathBuf> {
    let dir = work.join("wide-drafter");
    if dir.exists() {
        return Ok(dir);
    }
    fs::create_dir_all(&dir).map_err(Error::io(&dir, "create the directory"))?;
    let (vocab, backbone) = (target.config().vocab_size, target.config().hidden_size);
    let kinds: Vec<&str> = LAYERS.iter().map(|l| l.0).collect();
    let config = json!({
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "dtype": "bfloat16",
        "backbone_hidden_size": backbone, "use_ordered_embeddings": true, "num_centroids": vocab / CLUSTER,
        "centroid_intermediate_top_k": TOP_K, "tie_word_embeddings": true,
        "text_config": {
            "model_type": "gemma4_text", "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": MLP,
            "num_hidden_layers": LAYERS.len(), "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": null, "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "sliding_window": 512, "layer_types": kinds,
            "final_logit_softcapping": null, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": LAYERS.len(), "attention_k_eq_v": false, "use_double_wide_mlp": false,
            "enable_moe_block": false, "attention_bias": false, "tie_word_embeddings": true,
            "use_bidirectional_attention": null,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        },
    });
    let path = dir.join("config.json");
    fs::write(&path, config.to_string()).map_err(Error::io(&path, "write"))?;

    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        (format!("{}.weight", names::PRE_PROJECTION), vec![HIDDEN, 2 * backbone]),
        (format!("{}.weight", names::POST_PROJECTION), vec![backbone, HIDDEN]),
        (format!("{}.weight", names::CENTROIDS), vec![vocab / CLUSTER, HIDDEN]),
        (format!("model.{}", names::EMBED), vec![vocab, HIDDEN]),
        (format!("model.{}", names::FINAL_NORM), vec![HIDDEN]),
    ];
    for (l, (_, head)) in LAYERS.iter().enumerate() {
        let mut put =
            |rest: &str, shape: &[usize]| tensors.push((format!("model.{}", names::layer(l, rest)), shape.to_vec()));
        for norm in ["input", "post_attention", "pre_feedforward", "post_feedforward"] {
            put(&format!("{norm}_layernorm.weight"), &[HIDDEN]);
        }
        put("self_attn.q_proj.weight", &[HEADS * head, HIDDEN]);
        put("self_attn.q_norm.weight", &[*head]);
        put("self_attn.o_proj.weight", &[HIDDEN, HEADS * head]);
        put("mlp.gate_proj.weight", &[MLP, HIDDEN]);
        put("mlp.up_proj.weight", &[MLP, HIDDEN]);
        put("mlp.down_proj.weight", &[HIDDEN, MLP]);
        put("layer_scalar", &[1]);
    }
    let mut draws = Draws::new(seed);
    let mut bytes: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, shape) in tensors {
        let (count, inputs) = (shape.iter().product::<usize>(), shape[shape.len() - 1]);
        // Norms and scalars are 1; weights are uniform with the variance 1 / inputs.
        let width = (12.0 / inputs as f64).sqrt();
        let value = |draws: &mut Draws| match shape.len() {
            1 => 1.0,
            _ => ((draws.uniform() - 0.5) * width) as f32,
        };
        // The upper half of an f32 is its bf16, rounded towards zero.
        let data = (0..count).flat_map(|_| (((value(&mut draws)).to_bits() >> 16) as u16).to_le_bytes()).collect();
        bytes.push((name, Dtype::BF16, shape, data));
    }
    let order = (0..vocab as i64).flat_map(i64::to_le_bytes).collect();
    bytes.push((names::TOKEN_ORDERING.into(), Dtype::I64, vec![vocab], order));
    let path = dir.join("model.safetensors");
    let failed = |e: safetensors::SafeTensorError| Error::Io {
        path: path.clone(),
        action: "write",
        source: std::io::Error::other(e.to_string()),
    };
    let views = bytes.iter().map(|(name, dtype, shape, data)| {
        Ok((name.clone(), TensorView::new(*dtype, shape.clone(), data).map_err(failed)?))
    });
    let views = views.collect::<Result<Vec<_>>>()?;
    safetensors::serialize_to_file(views, None, &path).map_err(failed)?;
    Ok(dir)
}
