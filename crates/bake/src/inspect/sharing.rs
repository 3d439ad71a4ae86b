//! The map of KV-shared layers, derived from the parent.
//!
//! Bakes copy norms unchanged, so the norms of a layer say which layer of the parent it was. From the survivors follow the
//! number of shared layers and the sources; a bake that forgot to adjust
//! `num_kv_shared_layers` turns source layers into sharers, or sharers into readers of keys nobody trained, and still loads.

use runtime::checkpoint::Checkpoint;

use runtime::config::{LayerKind, ModelConfig};
use runtime::names;

use super::layer_mark;
use crate::error::Result;
use crate::lineage::Lineage;
use crate::source::Source;

/// What contradicts the numbers of layers that the bake wrote.
pub(super) fn edited(config: &ModelConfig, lineage: Option<&Lineage>) -> Vec<String> {
    let Some(result) = lineage.and_then(|l| l.result.as_ref()) else { return vec![] };
    let mut problems = Vec::new();
    for (field, found, wrote) in [
        ("num_hidden_layers", config.layers.len(), result.layers),
        ("num_kv_shared_layers", config.num_kv_shared_layers, result.kv_shared),
    ] {
        if found != wrote {
            problems.push(format!("{field} is {found}, but the bake wrote {wrote}: config.json was edited afterwards"));
        }
    }
    problems
}

/// A region of shared layers that begins where no published model lets it begin, and whose layers all hold keys and values, so
/// that shapes cannot show it. A bake of this program is held to its lineage instead.
pub(super) fn suspicious(checkpoint: &Checkpoint, lineage: Option<&Lineage>) -> Option<String> {
    let config = checkpoint.config();
    let first = config.first_kv_shared();
    let last_own = first.checked_sub(1).filter(|_| lineage.is_none() && first < config.layers.len())?;
    let holds = |l: usize| {
        let module = names::layer(l, "self_attn.k_proj");
        ["weight", "weight_packed"].iter().any(|part| checkpoint.has(&format!("{module}.{part}")))
    };
    let all_hold = (first..config.layers.len()).all(holds);
    (all_hold && config.layers[last_own].kind == LayerKind::Sliding).then(|| {
        format!(
            "layer {last_own}, the last one with keys and values of its own, has sliding attention; in published models it has full \
             attention. Were layers removed and num_kv_shared_layers ({}) not adjusted? Then source layers have become \
             sharers; --against PARENT tells",
            config.num_kv_shared_layers
        )
    })
}

/// What differs from a correct removal of layers from `parent`, one line each.
pub(super) fn compare(child: &Checkpoint, sources: &[Source], parent: &Checkpoint) -> Result<Vec<String>> {
    let (config, old) = (child.config(), parent.config());
    let parent_sources = Source::all(parent)?;
    let mut marks = Vec::with_capacity(old.layers.len());
    for layer in 0..old.layers.len() {
        marks.push(layer_mark(parent, &parent_sources, layer)?);
    }
    let mut origin = Vec::with_capacity(config.layers.len());
    for layer in 0..config.layers.len() {
        let mark = layer_mark(child, sources, layer)?;
        // Equal layers (all norms at one) are told apart by order.
        let from = origin.last().map_or(0, |&l: &usize| l + 1);
        let found = (from..old.layers.len()).find(|&l| mark.is_some() && marks[l] == mark);
        match found {
            Some(l) => origin.push(l),
            None => {
                return Ok(vec![format!(
                    "layer {layer} is none of the layers of the checkpoint compared with, in order"
                )]);
            }
        }
    }

    let mut problems = Vec::new();
    let expected = origin.iter().filter(|&&l| l >= old.first_kv_shared()).count();
    if config.num_kv_shared_layers != expected {
        let turned: Vec<usize> = (0..config.layers.len())
            .filter(|&l| config.layers[l].kv_source.is_some() && old.layers[origin[l]].kv_source.is_none())
            .collect();
        let mut line = format!(
            "num_kv_shared_layers is {}, but {expected} layers of the shared region survived",
            config.num_kv_shared_layers
        );
        if !turned.is_empty() {
            line += &format!("; layers {turned:?} had keys and values of their own and now read another layer's");
        }
        problems.push(line);
    }
    for (l, layer) in config.layers.iter().enumerate() {
        if layer.kind != old.layers[origin[l]].kind {
            problems.push(format!(
                "layer {l} is {}, but was {} (layer {} of the checkpoint compared with)",
                layer.kind.as_str(),
                old.layers[origin[l]].kind.as_str(),
                origin[l]
            ));
        }
        if let (Some(now), Some(then)) = (layer.kv_source, old.layers[origin[l]].kv_source)
            && origin[now] != then
        {
            problems.push(format!(
                "layer {l} reads the keys and values of layer {} of the checkpoint compared with; there it read layer {then}",
                origin[now]
            ));
        }
    }
    Ok(problems)
}
