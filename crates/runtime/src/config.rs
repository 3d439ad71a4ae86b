//! `config.json` of a Gemma 4 checkpoint, checked and resolved: one [`LayerConfig`] a layer, with its head size, its rotary
//! embedding and the layer whose keys and values it reads. Nothing after this module looks at the JSON again.
//!
//! Source of the rules: the config class `gemma4_text` of transformers 5.x. Both spellings of the per-layer head sizes are
//! read (`global_head_dim`, and `per_layer_config` of newer files), with the text fields under `text_config` (multimodal
//! checkpoints) or at the top (text-only ones).

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};
use crate::files;

pub mod assistant;
mod fields;
mod quantization;
mod removal;

use fields::Fields;
pub use kernels::packing::Bits;
pub use quantization::{ModulePattern, Packing, Quantization, Strategy, WeightScheme};
pub use removal::Rule;

/// Kind of attention of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Sees the last `sliding_window` positions, itself included.
    Sliding,
    /// Sees every earlier position.
    Full,
}

impl LayerKind {
    /// Spelling in `layer_types`.
    pub fn as_str(self) -> &'static str {
        match self {
            LayerKind::Sliding => "sliding_attention",
            LayerKind::Full => "full_attention",
        }
    }
}

/// Rotary embedding of one kind of layer. Component `m` pairs with `m + head_dim / 2`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Number of leading pairs that rotate; the others have frequency zero.
    pub rotating_pairs: usize,
    /// Every frequency is divided by this.
    pub factor: f64,
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerConfig {
    /// Kind of attention.
    pub kind: LayerKind,
    /// Components of a query, key or value head.
    pub head_dim: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// `None`: this layer computes and stores its own keys and values. `Some(l)`: it reads those of layer `l`.
    pub kv_source: Option<usize>,
    /// Rotary embedding.
    pub rope: Rope,
}

/// A checked text configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Rows of the token embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads of every layer.
    pub num_attention_heads: usize,
    /// Width of the per-layer input of one layer; 0 where the model has none.
    pub ple_size: usize,
    /// Epsilon inside the root of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Keys that a sliding layer sees, the own one included.
    pub sliding_window: usize,
    /// Cap c of `c * tanh(z / c)`.
    pub final_logit_softcapping: Option<f32>,
    /// The head is the token embedding.
    pub tie_word_embeddings: bool,
    /// Largest number of positions.
    pub max_position_embeddings: usize,
    /// Trailing layers that have no keys and values of their own.
    pub num_kv_shared_layers: usize,
    /// All layers, in order.
    pub layers: Vec<LayerConfig>,
    /// How packed weights are stored, where any are.
    pub quantization: Option<Quantization>,
}

/// Field of the text configuration that names the rules a bake was told to break.
pub const ALLOW_FIELD: &str = "chiku_allow";

/// Dimensions above this are refused: no real model is near it, and products of two of them cannot overflow.
const DIMENSION_LIMIT: usize = 1 << 24;

impl ModelConfig {
    /// Reads `config.json` of a checkpoint directory; also returns the JSON, for who must write it back.
    pub fn read(dir: &Path) -> Result<(ModelConfig, Value)> {
        let path = dir.join("config.json");
        let json = files::read_json(&path)?;
        let config = ModelConfig::from_json(&json, &path)?;
        Ok((config, json))
    }

    /// Checks and resolves a configuration; `path` is for messages.
    pub fn from_json(json: &Value, path: &Path) -> Result<ModelConfig> {
        let root = Fields::new(path, "", json)?;
        let text = text_fields(&root)?;

        refuse_other_architectures(&text)?;
        let hidden_size = text.dimension("hidden_size")?;
        let vocab_size = text.dimension("vocab_size")?;
        let ple_size = text.dimension_or("hidden_size_per_layer_input", 0)?;
        let ple_vocab = text.dimension_or("vocab_size_per_layer_input", vocab_size)?;
        if ple_size > 0 && ple_vocab != vocab_size {
            let expected = format!("{vocab_size} (vocab_size)");
            return Err(text.wrong("vocab_size_per_layer_input", &expected, ple_vocab.to_string()));
        }
        let tie_word_embeddings = tied(&root, &text)?;
        let num_attention_heads = text.dimension("num_attention_heads")?;
        let num_kv_shared_layers = text.dimension_or("num_kv_shared_layers", 0)?;
        let sliding_window = text.dimension("sliding_window")?;
        let count = text.dimension("num_hidden_layers")?;
        if num_kv_shared_layers >= count {
            let expected = format!("less than num_hidden_layers ({count})");
            return Err(text.wrong("num_kv_shared_layers", &expected, num_kv_shared_layers.to_string()));
        }
        let mut layers = layers(&text, num_attention_heads, num_kv_shared_layers)?;
        share_kv(&text, &mut layers, num_kv_shared_layers)?;
        let softcap = text.optional_number("final_logit_softcapping")?;
        if let Some(cap) = softcap.filter(|c| !(*c > 0.0 && c.is_finite())) {
            return Err(text.wrong("final_logit_softcapping", "null or a positive number", cap.to_string()));
        }
        let max_positions = text.dimension_or("max_position_embeddings", 131_072)?;
        Ok(ModelConfig {
            vocab_size,
            hidden_size,
            num_attention_heads,
            ple_size,
            rms_norm_eps: rms_norm_eps(&text)?,
            sliding_window,
            final_logit_softcapping: softcap.map(|c| c as f32),
            tie_word_embeddings,
            max_position_embeddings: max_positions,
            num_kv_shared_layers,
            layers,
            quantization: Quantization::from_json(&root)?,
        })
    }

    /// First layer that shares keys and values; the number of layers where none does.
    pub fn first_kv_shared(&self) -> usize {
        self.layers.len() - self.num_kv_shared_layers
    }

    /// Layer whose keys and values `layer` reads: itself or its source.
    pub fn kv_layer(&self, layer: usize) -> usize {
        self.layers[layer].kv_source.unwrap_or(layer)
    }
}

/// Switches of the architecture that this program does not have.
fn refuse_other_architectures(text: &Fields) -> Result<()> {
    for (field, why) in [
        ("enable_moe_block", "a mixture of experts"),
        ("attention_k_eq_v", "keys used as values"),
        ("attention_bias", "attention with biases"),
    ] {
        if text.boolean(field, false)? {
            return Err(text.unsupported(field, why));
        }
    }
    match text.string("hidden_activation", "gelu_pytorch_tanh")?.as_str() {
        "gelu_pytorch_tanh" => Ok(()),
        other => Err(text.wrong("hidden_activation", "\"gelu_pytorch_tanh\"", format!("\"{other}\""))),
    }
}

fn rms_norm_eps(text: &Fields) -> Result<f32> {
    let eps = text.number("rms_norm_eps", 1e-6)?;
    if !(eps > 0.0 && eps < 1.0) {
        return Err(text.wrong("rms_norm_eps", "a number between 0 and 1", eps.to_string()));
    }
    Ok(eps as f32)
}

/// The object that holds the text fields.
fn text_fields<'a>(root: &Fields<'a>) -> Result<Fields<'a>> {
    let model_type = root.string("model_type", "")?;
    match model_type.as_str() {
        "gemma4" => root.object("text_config"),
        "gemma4_text" => Ok(root.clone()),
        "" => Err(root.wrong("model_type", "\"gemma4\" or \"gemma4_text\"", "nothing".into())),
        other => Err(Error::Unsupported {
            path: root.path().to_path_buf(),
            what: format!("model_type \"{other}\""),
            hint: "this program runs \"gemma4\" (Gemma4ForConditionalGeneration) and \"gemma4_text\"".into(),
        }),
    }
}

/// `tie_word_embeddings` stands in two places, which must agree.
fn tied(root: &Fields, text: &Fields) -> Result<bool> {
    let outer = root.optional_boolean("tie_word_embeddings")?;
    let inner = text.optional_boolean("tie_word_embeddings")?;
    match (outer, inner) {
        (Some(a), Some(b)) if a != b => {
            Err(text.wrong("tie_word_embeddings", &format!("{a}, as at the top of the file"), b.to_string()))
        }
        (a, b) => Ok(b.or(a).unwrap_or(true)),
    }
}

/// Every layer by itself; the last `shared` of them have no keys and values of their own. Who gives them theirs is left open.
fn layers(text: &Fields, heads: usize, shared: usize) -> Result<Vec<LayerConfig>> {
    let count = text.dimension("num_hidden_layers")?;
    let kinds = layer_kinds(text, count)?;
    let head_dim = text.dimension("head_dim")?;
    // Files of newer transformers drop `global_head_dim` where `per_layer_config` says the same; its default is 512.
    let global_head_dim = text.dimension_or("global_head_dim", 512)?;
    let kv_heads = text.dimension("num_key_value_heads")?;
    let intermediate = text.dimension("intermediate_size")?;
    let double_wide = text.boolean("use_double_wide_mlp", false)?;
    let per_layer = text.optional_object("per_layer_config")?;

    let mut out: Vec<LayerConfig> = Vec::with_capacity(kinds.len());
    for (i, &kind) in kinds.iter().enumerate() {
        let own = match &per_layer {
            Some(map) => map.optional_object(&i.to_string())?,
            None => None,
        };
        let default_dim = if kind == LayerKind::Full { global_head_dim } else { head_dim };
        let (dim, kv) = match &own {
            Some(own) => {
                (own.dimension_or("head_dim", default_dim)?, own.dimension_or("num_key_value_heads", kv_heads)?)
            }
            None => (default_dim, kv_heads),
        };
        if dim == 0 || !dim.is_multiple_of(2) {
            return Err(text.wrong("head_dim", "a positive even number", format!("{dim} for layer {i}")));
        }
        if kv == 0 || !heads.is_multiple_of(kv) {
            let expected = format!("a divisor of num_attention_heads ({heads})");
            return Err(text.wrong("num_key_value_heads", &expected, format!("{kv} for layer {i}")));
        }
        let doubled = double_wide && i >= count - shared;
        let intermediate_size = if doubled { 2 * intermediate } else { intermediate };
        let rope = rope(text, kind, dim)?;
        out.push(LayerConfig { kind, head_dim: dim, kv_heads: kv, intermediate_size, kv_source: None, rope });
    }
    Ok(out)
}

/// Index of the layer that a shared layer of this kind reads: the last unshared one of the kind.
fn source<'a>(
    mut own: impl ExactSizeIterator<Item = &'a LayerConfig> + DoubleEndedIterator,
    kind: LayerKind,
) -> Option<usize> {
    own.rposition(|layer| layer.kind == kind)
}

/// Gives each shared layer its source.
fn share_kv(text: &Fields, layers: &mut [LayerConfig], shared: usize) -> Result<()> {
    let first_shared = layers.len() - shared;
    let (own, readers) = layers.split_at_mut(first_shared);
    for (i, reader) in readers.iter_mut().enumerate().map(|(i, r)| (first_shared + i, r)) {
        let Some(source) = source(own.iter(), reader.kind) else {
            let kind = reader.kind.as_str();
            let expected = format!("a {kind} layer below layer {first_shared}, for layer {i} to share");
            return Err(text.wrong("layer_types", &expected, "none".into()));
        };
        let (dim, kv) = (reader.head_dim, reader.kv_heads);
        if own[source].head_dim != dim || own[source].kv_heads != kv {
            let expected = format!("the head sizes of layer {source}, whose keys and values layer {i} reads");
            return Err(text.wrong("per_layer_config", &expected, format!("{kv} heads of {dim}")));
        }
        reader.kv_source = Some(source);
    }
    Ok(())
}

fn layer_kinds(text: &Fields, count: usize) -> Result<Vec<LayerKind>> {
    let names = text.strings("layer_types")?;
    if names.len() != count {
        let expected = format!("{count} entries (num_hidden_layers)");
        return Err(text.wrong("layer_types", &expected, format!("{} entries", names.len())));
    }
    let mut kinds = Vec::with_capacity(names.len());
    for (i, name) in names.iter().enumerate() {
        kinds.push(match name.as_str() {
            "sliding_attention" => LayerKind::Sliding,
            "full_attention" => LayerKind::Full,
            other => {
                let expected = "\"sliding_attention\" or \"full_attention\"";
                return Err(text.wrong(&format!("layer_types[{i}]"), expected, format!("\"{other}\"")));
            }
        });
    }
    // transformers silently rewrites the last entry; a file that relies on it means another model than it says. A bake that was
    // told to end in a sliding layer leaves word of it.
    let waived = waived_rules(text)?;
    if kinds.last() != Some(&LayerKind::Full) && !waived.contains(&Rule::LastLayer) {
        let last = format!("layer_types[{}]", count - 1);
        let expected = "\"full_attention\" for the last layer (or \"chiku_allow\": [\"last-layer\"] beside it)";
        return Err(text.wrong(&last, expected, "\"sliding_attention\"".into()));
    }
    Ok(kinds)
}

/// The rules that `chiku_allow` of the text configuration lifts.
fn waived_rules(text: &Fields) -> Result<Vec<Rule>> {
    let names = if text.keys().any(|k| k == ALLOW_FIELD) { text.strings(ALLOW_FIELD)? } else { vec![] };
    let rule = |name: String| {
        Rule::named(&name)
            .ok_or_else(|| text.wrong(ALLOW_FIELD, "names of rules of layer removal", format!("\"{name}\"")))
    };
    names.into_iter().map(rule).collect()
}

fn rope(text: &Fields, kind: LayerKind, head_dim: usize) -> Result<Rope> {
    let field = text.object("rope_parameters")?.object(kind.as_str())?;
    let pairs = head_dim / 2;
    let theta = field.number("rope_theta", if kind == LayerKind::Full { 1e6 } else { 1e4 })?;
    if !(theta > 0.0 && theta.is_finite()) {
        return Err(field.wrong("rope_theta", "a positive number", theta.to_string()));
    }
    let factor = field.number("factor", 1.0)?;
    if !(factor > 0.0 && factor.is_finite()) {
        return Err(field.wrong("factor", "a positive number", factor.to_string()));
    }
    let rotating_pairs = match field.string("rope_type", "default")?.as_str() {
        "default" => pairs,
        "proportional" => {
            let share = field.number("partial_rotary_factor", 1.0)?;
            if !(0.0..=1.0).contains(&share) {
                return Err(field.wrong("partial_rotary_factor", "a number from 0 to 1", share.to_string()));
            }
            (share * pairs as f64).floor() as usize
        }
        other => return Err(field.wrong("rope_type", "\"default\" or \"proportional\"", format!("\"{other}\""))),
    };
    Ok(Rope { theta, rotating_pairs, factor })
}

/// Stop tokens and other defaults of generation, from `generation_config.json` with `config.json` behind it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationConfig {
    /// Generation ends after any of these.
    pub stop_ids: Vec<u32>,
}

impl GenerationConfig {
    /// Reads `generation_config.json` if there is one; `config` is the JSON of `config.json`.
    pub fn read(dir: &Path, config: &Value) -> Result<GenerationConfig> {
        let path = dir.join("generation_config.json");
        let json = if files::present(&path) { Some(files::read_object(&path)?) } else { None };
        let (path, ids): (PathBuf, Option<&Value>) = match json.as_ref().and_then(|j| j.get("eos_token_id")) {
            Some(ids) => (path, Some(ids)),
            None => {
                let inner = config.get("text_config").and_then(|t| t.get("eos_token_id"));
                (dir.join("config.json"), config.get("eos_token_id").or(inner))
            }
        };
        let one = |v: &Value| {
            v.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| Error::Field {
                path: path.clone(),
                field: "eos_token_id".into(),
                expected: "a token id or a list of them".into(),
                found: v.to_string(),
            })
        };
        let stop_ids = match ids {
            None | Some(Value::Null) => vec![],
            Some(Value::Array(list)) => list.iter().map(one).collect::<Result<_>>()?,
            Some(v) => vec![one(v)?],
        };
        Ok(GenerationConfig { stop_ids })
    }
}

#[cfg(test)]
mod tests;
