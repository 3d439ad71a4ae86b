//! `quantization_config`, as compressed-tensors writes it.

use std::collections::BTreeMap;

use runtime::config::Strategy;
use runtime::names;
use serde_json::{Map, Value, json};

use crate::roles::Linear;

/// Version of the layout of `quantization_config` and of the packing: the library that `tests/interop` compares with.
pub const COMPRESSED_TENSORS_VERSION: &str = "0.20.1";

/// Which strategy each packed linear got.
pub type Strategies = BTreeMap<Linear, Strategy>;

/// The value of `quantization_config`.
///
/// `group_0` targets every `Linear` with the `body` strategy; linears that differ from it are named by patterns, which the
/// library prefers over class names: `group_0_channel` for those whose input width the group does not divide,
/// `group_0_lmhead` for an untied head. The patterns come first: a class name before them makes the library warn that they
/// match nothing. `ignore` lists the modules that stay dense.
pub fn build(body: Strategy, strategies: &Strategies, ignore: &[String]) -> Value {
    let mut groups = Map::new();
    let differing: Vec<Linear> =
        strategies.iter().filter(|&(&l, &s)| l != Linear::Head && s != body).map(|(&l, _)| l).collect();
    if !differing.is_empty() {
        groups.insert("group_0_channel".into(), group(patterns(&differing, strategies), Strategy::Channel));
    }
    if let Some(&head) = strategies.get(&Linear::Head) {
        groups.insert("group_0_lmhead".into(), group(vec!["re:.*lm_head$".into()], head));
    }
    groups.insert("group_0".into(), group(vec!["Linear".into()], body));
    json!({
        "config_groups": groups,
        "format": "pack-quantized",
        "global_compression_ratio": null,
        "ignore": ignore,
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": COMPRESSED_TENSORS_VERSION,
    })
}

fn group(targets: Vec<String>, strategy: Strategy) -> Value {
    let (name, size) = match strategy {
        Strategy::Group(size) => ("group", json!(size)),
        Strategy::Channel => ("channel", Value::Null),
    };
    json!({
        "format": "pack-quantized",
        "input_activations": null,
        "output_activations": null,
        "targets": targets,
        "weights": {
            "actorder": null,
            "block_structure": null,
            "dynamic": false,
            "group_size": size,
            "num_bits": 4,
            "observer": "memoryless_minmax",
            "observer_kwargs": {},
            "scale_dtype": null,
            "strategy": name,
            "symmetric": true,
            "type": "int",
            "zp_dtype": null,
        },
    })
}

/// Patterns for linears: one for a name where all layers that have it agree, else one a layer. They match under any prefix,
/// since programs disagree about that; a tower's linear has another end (`.linear`) or stands in the ignore list.
fn patterns(linears: &[Linear], all: &Strategies) -> Vec<String> {
    let mut out = Vec::new();
    for name in names::LAYER_LINEARS {
        let layers: Vec<usize> = linears.iter().filter_map(|l| layer_of(*l, name)).collect();
        let having = all.keys().filter(|l| layer_of(**l, name).is_some()).count();
        let escaped = name.replace('.', "\\.");
        if layers.is_empty() {
            continue;
        } else if layers.len() == having {
            out.push(format!("re:.*layers\\.\\d+\\.{escaped}$"));
        } else {
            out.extend(layers.iter().map(|l| format!("re:.*layers\\.{l}\\.{escaped}$")));
        }
    }
    if linears.contains(&Linear::ModelProjection) {
        out.push(format!("re:.*{}$", names::PLE_MODEL_PROJECTION));
    }
    out
}

fn layer_of(linear: Linear, name: &str) -> Option<usize> {
    match linear {
        Linear::Layer(layer, n) if n == name => Some(layer),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_a_kind_or_single_layers() {
        let mut s = Strategies::new();
        for l in 0..3 {
            s.insert(Linear::Layer(l, "mlp.down_proj"), Strategy::Channel);
            s.insert(Linear::Layer(l, "mlp.up_proj"), Strategy::Group(32));
            let o = if l == 2 { Strategy::Channel } else { Strategy::Group(32) };
            s.insert(Linear::Layer(l, "self_attn.o_proj"), o);
        }
        let q = build(Strategy::Group(32), &s, &["lm_head".into()]);
        let channel = &q["config_groups"]["group_0_channel"];
        assert_eq!(
            channel["targets"],
            json!(["re:.*layers\\.2\\.self_attn\\.o_proj$", "re:.*layers\\.\\d+\\.mlp\\.down_proj$"])
        );
        assert_eq!(channel["weights"]["strategy"], "channel");
        assert_eq!(q["config_groups"]["group_0"]["weights"]["group_size"], 32);
        assert!(q["config_groups"].get("group_0_lmhead").is_none());
    }
}
