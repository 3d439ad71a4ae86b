//! `quantization_config`, as compressed-tensors writes it.

use std::collections::BTreeMap;

use runtime::config::Strategy;
use runtime::names;
use serde_json::{Map, Value, json};

use crate::precision::Scheme;
use crate::roles::Linear;

/// Version of the layout of `quantization_config` and of the packing: the library that `tests/interop` compares with.
pub const COMPRESSED_TENSORS_VERSION: &str = "0.20.1";

/// How each packed linear is packed.
pub type Schemes = BTreeMap<Linear, Scheme>;

/// The value of `quantization_config`: one config group for each distinct scheme.
///
/// `group_0` targets every `Linear` with the default scheme; linears that differ from it are named by patterns, which the
/// library prefers over class names: `group_0_channel` for those whose input width the group does not divide,
/// `group_0_lmhead` for an untied head, `group_1` and so on for the others. No two patterns match one linear. The patterns come
/// first: a class name before them makes the library warn that they match nothing. `ignore` lists the modules that stay dense.
pub fn build(default: Scheme, schemes: &Schemes, ignore: &[String]) -> Value {
    let mut distinct: Vec<(Scheme, Vec<Linear>)> = Vec::new();
    for (&linear, &scheme) in schemes.iter().filter(|(l, _)| **l != Linear::Head) {
        match distinct.iter_mut().find(|(s, _)| *s == scheme) {
            Some((_, linears)) => linears.push(linear),
            None => distinct.push((scheme, vec![linear])),
        }
    }
    let mut groups = Map::new();
    let narrow = Scheme { strategy: Strategy::Channel, ..default };
    let mut number = 0;
    for (scheme, linears) in distinct.iter().filter(|(s, _)| *s != default) {
        let name = if *scheme == narrow {
            "group_0_channel".to_string()
        } else {
            number += 1;
            format!("group_{number}")
        };
        groups.insert(name, group(patterns(linears, schemes), *scheme));
    }
    if let Some(&head) = schemes.get(&Linear::Head) {
        groups.insert("group_0_lmhead".into(), group(vec!["re:.*lm_head$".into()], head));
    }
    // Without a linear of the default scheme the class must not be a target: those that stay dense are of it, too.
    if distinct.iter().any(|(s, _)| *s == default) {
        groups.insert("group_0".into(), group(vec!["Linear".into()], default));
    }
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

fn group(targets: Vec<String>, scheme: Scheme) -> Value {
    let (name, size) = match scheme.strategy {
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
            "num_bits": scheme.bits.get(),
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
fn patterns(linears: &[Linear], all: &Schemes) -> Vec<String> {
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
    use runtime::config::Bits;

    const INT4: Scheme = Scheme { bits: Bits::Four, strategy: Strategy::Group(32) };
    const NARROW: Scheme = Scheme { bits: Bits::Four, strategy: Strategy::Channel };
    const INT3: Scheme = Scheme { bits: Bits::Three, strategy: Strategy::Group(64) };

    #[test]
    fn patterns_name_a_kind_or_single_layers() {
        let mut s = Schemes::new();
        for l in 0..3 {
            s.insert(Linear::Layer(l, "mlp.down_proj"), NARROW);
            s.insert(Linear::Layer(l, "mlp.up_proj"), INT4);
            s.insert(Linear::Layer(l, "self_attn.o_proj"), if l == 2 { NARROW } else { INT4 });
        }
        let q = build(INT4, &s, &["lm_head".into()]);
        let channel = &q["config_groups"]["group_0_channel"];
        assert_eq!(
            channel["targets"],
            json!(["re:.*layers\\.2\\.self_attn\\.o_proj$", "re:.*layers\\.\\d+\\.mlp\\.down_proj$"])
        );
        assert_eq!(channel["weights"]["strategy"], "channel");
        assert_eq!(q["config_groups"]["group_0"]["weights"]["group_size"], 32);
        assert!(q["config_groups"].get("group_0_lmhead").is_none());
    }

    #[test]
    fn every_distinct_scheme_is_one_group() {
        let mut s = Schemes::new();
        for l in 0..2 {
            s.insert(Linear::Layer(l, "mlp.up_proj"), INT3);
            s.insert(Linear::Layer(l, "mlp.gate_proj"), if l == 0 { INT4 } else { INT3 });
            s.insert(Linear::Layer(l, "mlp.down_proj"), Scheme { bits: Bits::Eight, ..NARROW });
        }
        s.insert(Linear::ModelProjection, INT3);
        let q = build(INT4, &s, &[]);
        let groups = q["config_groups"].as_object().unwrap();
        let found: Vec<_> = groups
            .iter()
            .map(|(n, g)| (n.as_str(), &g["weights"]["num_bits"], g["targets"].as_array().unwrap().len()))
            .collect();
        assert_eq!(found, [("group_1", &json!(8), 1), ("group_2", &json!(3), 3), ("group_0", &json!(4), 1)]);
    }

    #[test]
    fn a_scheme_that_no_linear_has_is_not_written() {
        let s = Schemes::from([(Linear::ModelProjection, INT3)]);
        let q = build(INT4, &s, &["model.layers.0.mlp.up_proj".into()]);
        assert_eq!(q["config_groups"].as_object().unwrap().keys().collect::<Vec<_>>(), ["group_1"]);
    }
}
