//! What a tensor is for, read from its name.
//!
//! Every bake and the inspection sort tensors through [`role`]; nothing else in this crate looks at names.

use runtime::checkpoint::Checkpoint;
use runtime::names;

/// Which part of a linear a tensor stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// `weight`, dense, `[out, in]`.
    Dense,
    /// `weight_packed`, I32 `[out, words]`: ceil(in / 8) words of int4.
    Packed,
    /// `weight_scale`, `[out, groups]`.
    Scale,
    /// `weight_shape`, I64 `[2]`.
    Shape,
}

/// All parts of a packed linear.
pub const PACKED_PARTS: [Part; 3] = [Part::Packed, Part::Scale, Part::Shape];

impl Part {
    /// The suffix after the module's name and a dot.
    pub fn suffix(self) -> &'static str {
        match self {
            Part::Dense => "weight",
            Part::Packed => "weight_packed",
            Part::Scale => "weight_scale",
            Part::Shape => "weight_shape",
        }
    }

    fn of(suffix: &str) -> Option<Part> {
        [Part::Dense, Part::Packed, Part::Scale, Part::Shape].into_iter().find(|p| p.suffix() == suffix)
    }
}

/// A linear of the text model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Linear {
    /// One of [`names::LAYER_LINEARS`] in a layer.
    Layer(usize, &'static str),
    /// `per_layer_model_projection`.
    ModelProjection,
    /// `lm_head`.
    Head,
}

impl Linear {
    /// Full module name: the tensor names without the part.
    pub fn module(self, prefix: &str) -> String {
        match self {
            Linear::Layer(layer, name) => format!("{prefix}{}", names::layer(layer, name)),
            Linear::ModelProjection => format!("{prefix}{}", names::PLE_MODEL_PROJECTION),
            Linear::Head => names::LM_HEAD.to_string(),
        }
    }

    /// Full tensor name.
    pub fn tensor(self, prefix: &str, part: Part) -> String {
        format!("{}.{}", self.module(prefix), part.suffix())
    }

    /// Whether it belongs to the per-layer-embedding path rather than to attention, MLP or head.
    pub fn is_ple(self) -> bool {
        match self {
            Linear::Layer(_, name) => !name.starts_with("self_attn.") && !name.starts_with("mlp."),
            Linear::ModelProjection => true,
            Linear::Head => false,
        }
    }
}

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role<'a> {
    /// Token embedding.
    Embed,
    /// Per-layer embedding table.
    PleEmbed,
    /// A part of a linear of the text model.
    Linear(Linear, Part),
    /// Anything else of a layer: norms and `layer_scalar`; the rest of the name.
    LayerOther(usize, &'a str),
    /// A norm outside the layers.
    Norm,
    /// Not part of the text model: vision and audio towers and their projections.
    Other,
}

impl Role<'_> {
    /// Layer of the tensor, where it belongs to one.
    pub fn layer(&self) -> Option<usize> {
        match self {
            Role::Linear(Linear::Layer(layer, _), _) | Role::LayerOther(layer, _) => Some(*layer),
            _ => None,
        }
    }

    /// The name inside the layer, without index.
    pub fn rest(&self) -> Option<String> {
        match self {
            Role::Linear(Linear::Layer(_, name), part) => Some(format!("{name}.{}", part.suffix())),
            Role::LayerOther(_, rest) => Some((*rest).to_string()),
            _ => None,
        }
    }

    /// Whether the tensor only serves keys and values of its layer's own.
    pub fn is_kv(&self) -> bool {
        match self {
            Role::Linear(Linear::Layer(_, name), _) => names::KV_MODULES.contains(name),
            Role::LayerOther(_, rest) => {
                names::KV_MODULES.iter().any(|m| rest.strip_prefix(m).is_some_and(|r| r.starts_with('.')))
            }
            _ => false,
        }
    }
}

/// Sorts a full tensor name; `prefix` is `Checkpoint::prefix`.
pub fn role<'a>(prefix: &str, full_name: &'a str) -> Role<'a> {
    if let Some(part) = full_name.strip_prefix("lm_head.").and_then(Part::of) {
        return Role::Linear(Linear::Head, part);
    }
    let Some(name) = full_name.strip_prefix(prefix) else { return Role::Other };
    match name {
        names::EMBED => return Role::Embed,
        names::EMBED_PER_LAYER => return Role::PleEmbed,
        names::PLE_NORM | names::FINAL_NORM => return Role::Norm,
        _ => {}
    }
    let projection = name.strip_prefix(names::PLE_MODEL_PROJECTION).and_then(|r| r.strip_prefix('.'));
    if let Some(part) = projection.and_then(Part::of) {
        return Role::Linear(Linear::ModelProjection, part);
    }
    let Some((layer, rest)) = names::split_layer(name) else { return Role::Other };
    if let Some((module, suffix)) = rest.rsplit_once('.')
        && let Some(module) = names::LAYER_LINEARS.into_iter().find(|m| *m == module)
        && let Some(part) = Part::of(suffix)
    {
        return Role::Linear(Linear::Layer(layer, module), part);
    }
    Role::LayerOther(layer, rest)
}

/// Modules of the vision and audio towers and of their way into the text model, under the top level or `model.`.
const TOWERS: [&str; 4] = ["vision_tower", "audio_tower", "embed_vision", "embed_audio"];

/// Whether a tensor or module, by full name, belongs to a tower.
pub fn is_tower(full_name: &str) -> bool {
    let name = full_name.strip_prefix("model.").unwrap_or(full_name);
    TOWERS.contains(&name.split('.').next().unwrap_or(name))
}

/// [`role`] with the checkpoint's own prefix.
pub fn role_in<'a>(checkpoint: &Checkpoint, full_name: &'a str) -> Role<'a> {
    role(checkpoint.prefix(), full_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_under_every_prefix() {
        for prefix in names::PREFIXES {
            for (name, want) in [
                ("embed_tokens.weight", Role::Embed),
                ("embed_tokens_per_layer.weight", Role::PleEmbed),
                ("norm.weight", Role::Norm),
                ("per_layer_projection_norm.weight", Role::Norm),
                ("per_layer_model_projection.weight_scale", Role::Linear(Linear::ModelProjection, Part::Scale)),
                ("layers.7.mlp.up_proj.weight", Role::Linear(Linear::Layer(7, "mlp.up_proj"), Part::Dense)),
                (
                    "layers.11.per_layer_projection.weight_packed",
                    Role::Linear(Linear::Layer(11, "per_layer_projection"), Part::Packed),
                ),
                ("layers.3.layer_scalar", Role::LayerOther(3, "layer_scalar")),
                ("layers.3.self_attn.k_norm.weight", Role::LayerOther(3, "self_attn.k_norm.weight")),
                ("vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight", Role::Other),
            ] {
                assert_eq!(role(prefix, &format!("{prefix}{name}")), want, "{prefix} {name}");
            }
            assert_eq!(role(prefix, "lm_head.weight_shape"), Role::Linear(Linear::Head, Part::Shape));
            assert_eq!(role(prefix, "model.audio_tower.output_proj.weight"), Role::Other);
        }
    }

    #[test]
    fn towers_are_told_from_the_text_model() {
        for (name, want) in [
            ("model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight", true),
            ("vision_tower.patch_embedder.input_proj.weight", true),
            ("model.audio_tower.output_proj", true),
            ("model.embed_audio.embedding_projection.weight", true),
            ("model.language_model.embed_tokens.weight", false),
            ("model.language_model.vision_tower.x", false),
            ("lm_head.weight", false),
            ("re:.*vision_tower.*", false),
        ] {
            assert_eq!(is_tower(name), want, "{name}");
        }
    }

    #[test]
    fn keys_and_values_are_told_from_queries() {
        for (name, want) in [
            ("layers.0.self_attn.k_proj.weight", true),
            ("layers.0.self_attn.v_proj.weight_packed", true),
            ("layers.0.self_attn.k_norm.weight", true),
            ("layers.0.self_attn.q_norm.weight", false),
            ("layers.0.self_attn.o_proj.weight", false),
            ("norm.weight", false),
        ] {
            assert_eq!(role("", name).is_kv(), want, "{name}");
        }
    }
}
