use super::*;
use serde_json::json;

fn base() -> Value {
    json!({
        "model_type": "gemma4", "tie_word_embeddings": true,
        "text_config": {
            "model_type": "gemma4_text", "vocab_size": 100, "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "global_head_dim": 16, "sliding_window": 4, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention",
                            "sliding_attention", "full_attention"],
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}}})
}

fn read(json: &Value) -> Result<ModelConfig> {
    ModelConfig::from_json(json, Path::new("x/config.json"))
}

fn with(pointer: &str, value: Value) -> Value {
    let mut json = base();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    let parent = if parent.is_empty() { &mut json } else { json.pointer_mut(parent).unwrap() };
    parent[field] = value;
    json
}

#[test]
fn layers_are_resolved() {
    let c = read(&base()).unwrap();
    let sources: Vec<_> = c.layers.iter().map(|l| l.kv_source).collect();
    assert_eq!(sources, [None, None, None, None, Some(2), Some(3)]);
    assert_eq!(c.first_kv_shared(), 4);
    assert_eq!(c.layers[0].head_dim, 8);
    assert_eq!(c.layers[1].head_dim, 16);
    assert_eq!(c.layers[0].rope.rotating_pairs, 4);
    // floor(0.25 * 16 / 2)
    assert_eq!(c.layers[1].rope.rotating_pairs, 2);
}

#[test]
fn both_spellings_of_the_head_size_mean_the_same() {
    let mut newer = with(
        "/text_config/per_layer_config",
        json!({"1": {"head_dim": 16}, "3": {"head_dim": 16}, "5": {"head_dim": 16}}),
    );
    newer["text_config"].as_object_mut().unwrap().remove("global_head_dim");
    assert_eq!(read(&newer).unwrap(), read(&base()).unwrap());
}

#[test]
fn text_only_files_are_read() {
    let mut flat = base()["text_config"].clone();
    flat["tie_word_embeddings"] = json!(true);
    assert_eq!(read(&flat).unwrap(), read(&base()).unwrap());
}

#[test]
fn double_width_is_for_shared_layers() {
    let c = read(&with("/text_config/use_double_wide_mlp", json!(true))).unwrap();
    let widths: Vec<_> = c.layers.iter().map(|l| l.intermediate_size).collect();
    assert_eq!(widths, [32, 32, 32, 32, 64, 64]);
}

#[test]
fn contradictions_name_the_field() {
    let s = "sliding_attention";
    for (pointer, value, want) in [
        ("/model_type", json!("llama"), "llama"),
        ("/text_config", json!(null), "text_config"),
        ("/text_config/hidden_size", json!("16"), "text_config.hidden_size"),
        ("/text_config/hidden_size", json!(0), "text_config.hidden_size"),
        ("/text_config/hidden_size", json!(1u64 << 40), "text_config.hidden_size"),
        ("/text_config/vocab_size", json!(-3), "text_config.vocab_size"),
        ("/text_config/num_hidden_layers", json!(7), "layer_types"),
        ("/text_config/num_kv_shared_layers", json!(6), "num_kv_shared_layers"),
        ("/text_config/num_kv_shared_layers", json!(5), "layer_types"),
        ("/text_config/layer_types", json!([s, s, s, s, s, s]), "last layer"),
        ("/text_config/layer_types", json!([s, s, s, s, s, "conv"]), "layer_types[5]"),
        ("/text_config/num_key_value_heads", json!(3), "num_key_value_heads"),
        ("/text_config/head_dim", json!(7), "head_dim"),
        ("/text_config/tie_word_embeddings", json!(false), "tie_word_embeddings"),
        ("/text_config/enable_moe_block", json!(true), "enable_moe_block"),
        ("/text_config/attention_k_eq_v", json!(true), "attention_k_eq_v"),
        ("/text_config/hidden_activation", json!("silu"), "silu"),
        ("/text_config/rms_norm_eps", json!(0.0), "rms_norm_eps"),
        ("/text_config/final_logit_softcapping", json!(-1.0), "final_logit_softcapping"),
        ("/text_config/rope_parameters", json!({}), "rope_parameters.sliding_attention"),
        ("/text_config/rope_parameters/full_attention", json!({"rope_type": "yarn"}), "rope_type"),
        ("/text_config/vocab_size_per_layer_input", json!(50), "vocab_size_per_layer_input"),
        ("/text_config/per_layer_config", json!({"5": {"head_dim": 32}}), "per_layer_config"),
        ("/quantization_config", json!({"quant_method": "gptq"}), "quant_method"),
    ] {
        let message = read(&with(pointer, value)).unwrap_err().to_string();
        assert!(message.contains(want) && message.contains("x/config.json"), "{pointer}: {message}");
    }
}
