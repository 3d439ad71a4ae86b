//! `config.json` of a drafter (`gemma4_assistant`): a small Gemma 4 text stack without per-layer inputs, whose layers read the
//! target's keys and values.

use std::path::Path;

use super::{Fields, LayerConfig, layers, refuse_other_architectures, rms_norm_eps};
use crate::error::{Error, Result};
use crate::files;

/// A checked drafter configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct AssistantConfig {
    /// Hidden size of the target.
    pub backbone_hidden_size: usize,
    /// Rows of the head; the target's vocabulary.
    pub vocab_size: usize,
    /// The drafter's own hidden size.
    pub hidden_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Epsilon inside the root of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Window of the sliding layers.
    pub sliding_window: usize,
    /// Clusters of the head, and how many of them are looked into; whether the checkpoint has a clustered head is seen from its
    /// tensors.
    pub centroids: Option<Centroids>,
    /// Layers. None has keys and values of its own.
    pub layers: Vec<LayerConfig>,
}

/// Sizes of a clustered head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Centroids {
    /// Clusters of equal size.
    pub count: usize,
    /// Clusters whose tokens are scored, unless the user says otherwise.
    pub top_k: usize,
}

impl AssistantConfig {
    /// Reads `config.json` of a drafter's directory.
    pub fn read(dir: &Path) -> Result<AssistantConfig> {
        let path = dir.join("config.json");
        let json = files::read_json(&path)?;
        let root = Fields::new(&path, "", &json)?;
        let model_type = root.string("model_type", "")?;
        if model_type != "gemma4_assistant" {
            return Err(Error::Unsupported {
                path: path.clone(),
                what: format!("model_type \"{model_type}\" as a drafter"),
                hint: "a drafter is a \"gemma4_assistant\" (Gemma4AssistantForCausalLM)".into(),
            });
        }
        let text = root.object("text_config")?;
        refuse_other_architectures(&text)?;
        let ple = text.dimension_or("hidden_size_per_layer_input", 0)?;
        if ple != 0 {
            return Err(text.wrong("hidden_size_per_layer_input", "0 in a drafter", ple.to_string()));
        }
        let count = text.dimension("num_hidden_layers")?;
        let shared = text.dimension_or("num_kv_shared_layers", count)?;
        if shared != count {
            let expected = format!("{count} (num_hidden_layers): a drafter has no keys and values of its own");
            return Err(text.wrong("num_kv_shared_layers", &expected, shared.to_string()));
        }
        let vocab_size = text.dimension("vocab_size")?;
        let num_attention_heads = text.dimension("num_attention_heads")?;
        Ok(AssistantConfig {
            backbone_hidden_size: root.dimension("backbone_hidden_size")?,
            vocab_size,
            hidden_size: text.dimension("hidden_size")?,
            num_attention_heads,
            rms_norm_eps: rms_norm_eps(&text)?,
            sliding_window: text.dimension("sliding_window")?,
            centroids: centroids(&root, vocab_size)?,
            layers: layers(&text, num_attention_heads, shared)?,
        })
    }
}

fn centroids(root: &Fields, vocab: usize) -> Result<Option<Centroids>> {
    if !root.boolean("use_ordered_embeddings", false)? {
        return Ok(None);
    }
    let count = root.dimension("num_centroids")?;
    if !vocab.is_multiple_of(count) {
        return Err(root.wrong("num_centroids", &format!("a divisor of vocab_size ({vocab})"), count.to_string()));
    }
    let top_k = root.dimension("centroid_intermediate_top_k")?;
    if top_k > count {
        let expected = format!("at most num_centroids ({count})");
        return Err(root.wrong("centroid_intermediate_top_k", &expected, top_k.to_string()));
    }
    Ok(Some(Centroids { count, top_k }))
}
