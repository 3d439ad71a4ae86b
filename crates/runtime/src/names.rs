//! Names of the tensors of a Gemma 4 checkpoint, without the prefix that depends on how it was saved.

/// Prefixes under which the text model's tensors are found, most common first.
pub const PREFIXES: [&str; 4] = ["model.language_model.", "language_model.model.", "model.", ""];

/// Token embedding, `[vocab, hidden]`.
pub const EMBED: &str = "embed_tokens.weight";
/// Per-layer embedding, `[vocab, layers * ple]`, layer-major columns.
pub const EMBED_PER_LAYER: &str = "embed_tokens_per_layer.weight";
/// Projection of the embedding to per-layer inputs, `[layers * ple, hidden]`, layer-major rows; a linear.
pub const PLE_MODEL_PROJECTION: &str = "per_layer_model_projection";
/// Norm of the projected per-layer input, `[ple]`.
pub const PLE_NORM: &str = "per_layer_projection_norm.weight";
/// Final norm, `[hidden]`.
pub const FINAL_NORM: &str = "norm.weight";
/// The head, a linear at the top level of the file, without prefix.
pub const LM_HEAD: &str = "lm_head";

/// Linear `[drafter hidden, 2 * target hidden]` of a drafter, from the target's embedding and state.
pub const PRE_PROJECTION: &str = "pre_projection";
/// Linear `[target hidden, drafter hidden]` of a drafter, to the state that its next step takes.
pub const POST_PROJECTION: &str = "post_projection";
/// Centroids `[clusters, drafter hidden]` of a drafter's clustered head; a linear.
pub const CENTROIDS: &str = "masked_embedding.centroids";
/// Token ids `[vocab]` in cluster order.
pub const TOKEN_ORDERING: &str = "masked_embedding.token_ordering";

/// Beginnings of the names that stand at the top level of a file, without the text model's prefix.
pub const TOP_LEVEL: [&str; 4] = [LM_HEAD, PRE_PROJECTION, POST_PROJECTION, "masked_embedding."];

/// Linears of a layer (modules, without `.weight`), in the order of the computation.
pub const LAYER_LINEARS: [&str; 9] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "per_layer_input_gate",
    "per_layer_projection",
];

/// Tensors of a layer that only exist for keys and values of its own.
pub const KV_MODULES: [&str; 3] = ["self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm"];

/// `layers.{layer}.{rest}`.
pub fn layer(layer: usize, rest: &str) -> String {
    format!("layers.{layer}.{rest}")
}

/// Splits `layers.{n}.{rest}` (prefix already removed).
pub fn split_layer(name: &str) -> Option<(usize, &str)> {
    let (index, rest) = name.strip_prefix("layers.")?.split_once('.')?;
    Some((index.parse().ok()?, rest))
}

/// Suffixes of the tensors that store one packed linear.
pub const PACKED_SUFFIXES: [&str; 3] = ["weight_packed", "weight_scale", "weight_shape"];
