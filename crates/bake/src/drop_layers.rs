//! `bake drop-layers`: removes any set of layers.
//!
//! Dropping layers is a re-indexing (`gemma4-text.md`, section 9): survivors are renumbered, `layer_types` loses the same
//! entries, the KV-shared region keeps its surviving layers, and the two tensors that hold one block a layer lose theirs: the
//! columns of `embed_tokens_per_layer` and the rows of `per_layer_model_projection`. Which layer a shared layer reads follows
//! from the new configuration, so dropping a source redirects its readers to the layer of that type before it.

use std::collections::BTreeSet;
use std::path::Path;

use runtime::checkpoint::Checkpoint;
use runtime::config::{ALLOW_FIELD, LayerKind, ModelConfig, ModulePattern, Quantization, Rule};
use runtime::names;
use serde_json::{Map, Value, json};

use crate::config_edit::Config;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::lineage::Lineage;
use crate::parent::Parent;
use crate::plan::{Job, Plan};
use crate::roles::{Linear, Part, Role, role};
use crate::source::Source;
use crate::writer::{self, Report, WriteOptions};

/// Options of [`run`].
#[derive(Debug, Clone, Default)]
pub struct DropLayersOptions {
    /// Layers of the parent to remove, in any order.
    pub layers: Vec<usize>,
    /// Rules of removal that do not hold this time.
    pub allow: Vec<Rule>,
    /// Also leave out keys and values of KV-shared layers, which nothing reads. Published checkpoints hold them.
    pub strip_inert_kv: bool,
    /// How to write.
    pub write: WriteOptions,
}

/// Writes a checkpoint without some layers to `out`.
///
/// # Errors
/// [`runtime::Error::Layers`] with the reason where the removal has no valid result; all errors of the writer.
pub fn run(checkpoint: &Checkpoint, out: &Path, options: &DropLayersOptions, context: &Context) -> Result<Report> {
    let plan = plan(&Parent::open(checkpoint)?, options)?;
    writer::execute(plan, Some(checkpoint), out, options.write, context)
}

/// A sentence for each kind of shared layer whose source is removed: legal, but its readers then attend to keys and values that they
/// were not trained on.
fn redirected(config: &ModelConfig, keep: &[usize]) -> Vec<String> {
    let mut notes = Vec::new();
    for kind in [LayerKind::Sliding, LayerKind::Full] {
        let own = |l: &usize| *l < config.first_kv_shared() && config.layers[*l].kind == kind;
        let readers = keep.iter().filter(|&&l| l >= config.first_kv_shared() && config.layers[l].kind == kind).count();
        let before = (0..config.layers.len()).rfind(own);
        let after = keep.iter().copied().rfind(own);
        if let (Some(before), Some(after)) = (before, after)
            && before != after
            && readers > 0
        {
            notes.push(format!(
                "layer {before} gave keys and values to {readers} shared {} layers; they now read those of layer {after} \
                 (numbers of the parent)",
                kind.as_str()
            ));
        }
    }
    notes
}

/// A sentence for each rule that does not hold for the result.
fn broken(old: &ModelConfig, new: &ModelConfig, keep: &[usize]) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(last) = keep.last().filter(|&&l| old.layers[l].kind != LayerKind::Full) {
        notes.push(format!(
            "layer {last} of the parent is now the last and has sliding attention: only this program runs that"
        ));
    }
    let revived: Vec<usize> = (0..keep.len())
        .filter(|&l| new.layers[l].kv_source.is_none() && old.layers[keep[l]].kv_source.is_some())
        .map(|l| keep[l])
        .collect();
    if !revived.is_empty() {
        notes.push(format!(
            "no layer is left for some shared ones to read, so that their region begins later: layers {revived:?} of the parent now \
             use the keys and values stored with them, which nobody trained"
        ));
    }
    notes
}

/// What [`run`] writes.
pub fn plan(checkpoint: &Parent, options: &DropLayersOptions) -> Result<Plan> {
    let config = checkpoint.config();
    let prefix = checkpoint.prefix();
    if options.layers.is_empty() {
        let expected = "at least one layer".into();
        return Err(Error::Option { option: "layers", expected, found: "none".into() });
    }
    let keep = config.survivors_allowing(&options.layers, &options.allow)?;
    let new_config = config.with_layers(&keep);
    let new_index = |old: usize| keep.binary_search(&old).ok();
    let (old_count, ple) = (config.layers.len(), config.ple_size);
    let block_rows: Vec<usize> = keep.iter().flat_map(|&l| l * ple..(l + 1) * ple).collect();

    let mut jobs = Vec::new();
    let mut notes = redirected(config, &keep);
    notes.extend(broken(config, &new_config, &keep));
    let mut stripped = 0;
    for source in checkpoint.sources() {
        let role = role(prefix, &source.name);
        if let Some(old) = role.layer() {
            let Some(layer) = config.layers.get(old) else {
                notes.push(format!("`{}` belongs to no layer of the configuration and was left out", source.name));
                continue;
            };
            let shares = new_index(old).map_or(layer.kv_source, |new| new_config.layers[new].kv_source).is_some();
            if options.strip_inert_kv && shares && role.is_kv() {
                stripped += usize::from(new_index(old).is_some());
                continue;
            }
            if let (Some(new), Some(rest)) = (new_index(old), role.rest()) {
                jobs.push(Job::copy(source, format!("{prefix}{}", names::layer(new, &rest))));
            }
            continue;
        }
        jobs.push(match role {
            Role::PleEmbed => {
                let [vocab, width] = source.shape[..] else {
                    return Err(source.wrong("a matrix", "the table has one row a token"));
                };
                if width != old_count * ple {
                    let hint = "it must have one block of columns a layer; repair the parent first";
                    return Err(source.wrong(format!("[vocab, {old_count} * {ple}]"), hint));
                }
                let block = source.row_bytes() / old_count;
                let columns = runs(&keep).into_iter().map(|r| r.start * block..r.end * block).collect();
                Job::select_columns(source, &source.name, &[vocab, keep.len() * ple], columns)
            }
            Role::Linear(Linear::ModelProjection, Part::Shape) => {
                let [_, inputs] = source.read_pair()?;
                Job::weight_shape(&source.name, block_rows.len(), usize::try_from(inputs).unwrap_or(0))
            }
            Role::Linear(Linear::ModelProjection, _) => {
                if source.rows() != old_count * ple || source.shape.len() != 2 {
                    let hint = "it must have one block of rows a layer; repair the parent first";
                    return Err(source.wrong(format!("[{old_count} * {ple}, ...]"), hint));
                }
                Job::select_rows(source, &source.name, block_rows.clone())
            }
            _ => Job::copy(source, &source.name),
        });
    }

    let knobs = json!({
        "layers": options.layers.iter().collect::<BTreeSet<_>>(),
        "strip_inert_kv": options.strip_inert_kv,
        "allow": options.allow.iter().map(|r| r.name()).collect::<Vec<_>>(),
    });
    let new_json = edit_config(checkpoint, &keep, &options.allow, &mut notes)?;
    let problems = changed_packing(checkpoint, &new_json, &keep)?;
    if !problems.is_empty() {
        return Err(Error::Inconsistent { problems });
    }
    if stripped > 0 {
        notes.push(format!("{stripped} tensors of keys and values that no layer reads were left out"));
    }
    Ok(Plan {
        jobs,
        config: new_json,
        prefix: prefix.to_string(),
        files: vec![],
        inherited_keepset: crate::check::keepset_rows(checkpoint.keepset()),
        lineage: Lineage::new("drop-layers", knobs, notes),
    })
}

/// Ranges of consecutive numbers in an ascending list.
fn runs(sorted: &[usize]) -> Vec<std::ops::Range<usize>> {
    let mut out: Vec<std::ops::Range<usize>> = Vec::new();
    for &i in sorted {
        match out.last_mut() {
            Some(last) if last.end == i => last.end += 1,
            _ => out.push(i..i + 1),
        }
    }
    out
}

/// The configuration of the result, and what to know about it.
fn edit_config(parent: &Parent, keep: &[usize], allow: &[Rule], notes: &mut Vec<String>) -> Result<Value> {
    let (old_count, new) = (parent.config().layers.len(), parent.config().with_layers(keep));
    let mut config = Config::new(parent);
    let text = config.text()?;
    for (field, value) in text.iter_mut() {
        // Whatever has one entry a layer, also in configurations of tomorrow.
        if let Some(list) = value.as_array_mut().filter(|l| l.len() == old_count && !field.contains("token")) {
            *list = keep.iter().map(|&l| list[l].clone()).collect();
            if field != "layer_types" {
                notes.push(format!(
                    "`{field}` of config.json has one entry a layer; those of the dropped ones were taken out"
                ));
            }
        }
    }
    text.insert("num_hidden_layers".into(), json!(keep.len()));
    text.insert("num_kv_shared_layers".into(), json!(new.num_kv_shared_layers));
    if let Some(per_layer) = text.get_mut("per_layer_config").and_then(Value::as_object_mut) {
        let mut renumbered = Map::new();
        for (new, l) in keep.iter().enumerate() {
            if let Some(value) = per_layer.get(&l.to_string()) {
                renumbered.insert(new.to_string(), value.clone());
            }
        }
        *per_layer = renumbered;
    }
    // Word of a broken rule, for whoever opens the result.
    let sliding_end = new.layers.last().is_some_and(|l| l.kind != LayerKind::Full);
    if sliding_end && allow.contains(&Rule::LastLayer) {
        text.insert(ALLOW_FIELD.into(), json!([Rule::LastLayer.name()]));
    } else {
        text.remove(ALLOW_FIELD);
    }
    let modules = Modules::new(parent, keep);
    config.edit_modules(|entry| modules.patched(entry))?;
    Ok(config.into_json())
}

/// The modules of a checkpoint before and after the removal, for entries of ignore lists and targets.
struct Modules<'a> {
    prefix: &'a str,
    keep: &'a [usize],
    /// Name before, name after; nothing for modules of dropped layers.
    names: Vec<(&'a str, Option<String>)>,
}

impl<'a> Modules<'a> {
    fn new(parent: &'a Parent, keep: &'a [usize]) -> Modules<'a> {
        let prefix = parent.prefix();
        let suffixes = [".weight", ".weight_packed"];
        let module = |s: &'a Source| suffixes.iter().find_map(|suffix| s.name.strip_suffix(suffix));
        let names = parent.sources().iter().filter_map(module).map(|m| (m, renumber(m, prefix, keep))).collect();
        Modules { prefix, keep, names }
    }

    /// What becomes of an entry: a name with its new number, an expression that means the same modules as before.
    fn patched(&self, entry: &str) -> Vec<String> {
        let renumbered = renumber(entry, self.prefix, self.keep);
        let Ok(old) = ModulePattern::new(entry) else { return vec![entry.to_string()] };
        if !old.is_expression() {
            return renumbered.into_iter().collect();
        }
        let named: Vec<&(&str, Option<String>)> = self.names.iter().filter(|(before, _)| old.names(before)).collect();
        let meant: BTreeSet<&str> = named.iter().filter_map(|(_, after)| after.as_deref()).collect();
        if named.is_empty() {
            return vec![entry.to_string()];
        }
        if meant.is_empty() {
            return vec![];
        }
        let means_that = |candidate: &String| {
            ModulePattern::new(candidate).is_ok_and(|p| {
                let after = self.names.iter().filter_map(|(_, after)| after.as_deref());
                after.filter(|a| p.names(a)).collect::<BTreeSet<_>>() == meant
            })
        };
        match [Some(entry.to_string()), renumbered].into_iter().flatten().find(means_that) {
            Some(expression) => vec![expression],
            // An expression over numbers of layers that have moved: only names say it now.
            None => meant.into_iter().map(str::to_string).collect(),
        }
    }
}

/// A problem for each linear whose packing, or exemption from it, the edited lists changed.
fn changed_packing(parent: &Parent, config: &Value, keep: &[usize]) -> Result<Vec<String>> {
    let path = parent.dir().join("config.json");
    let new = ModelConfig::from_json(config, &path)?;
    let (Some(before), Some(after)) = (&parent.config().quantization, &new.quantization) else { return Ok(vec![]) };
    let modules = Modules::new(parent, keep);
    let mut problems = Vec::new();
    for (old, new) in modules.names.iter().filter_map(|(old, new)| Some((old, new.as_ref()?))) {
        let how = |q: &Quantization, m: &str| (q.ignores(m), q.scheme(m).map(|s| (s.bits, s.strategy)));
        if how(before, old) != how(after, new) {
            problems.push(format!("`{old}` would be read in another way as `{new}`: its entry in quantization_config"));
        }
    }
    Ok(problems)
}

/// A module name or pattern of the text model with its layer renumbered; `None` where the layer is gone. Names of towers and
/// patterns without a layer stay.
fn renumber(module: &str, prefix: &str, keep: &[usize]) -> Option<String> {
    let unchanged = Some(module.to_string());
    if let Some((old, rest)) = module.strip_prefix(prefix).and_then(names::split_layer) {
        let new = keep.binary_search(&old).ok()?;
        return Some(format!("{prefix}{}", names::layer(new, rest)));
    }
    // Patterns as `quant_config` writes them: `re:.*layers\.3\.mlp\.down_proj$`.
    let Some((head, tail)) = module.split_once("layers\\.") else { return unchanged };
    if !module.starts_with("re:") || head.contains("tower") {
        return unchanged;
    }
    let Some((digits, rest)) = tail.split_once("\\.") else { return unchanged };
    let Ok(old) = digits.parse::<usize>() else { return unchanged };
    let new = keep.binary_search(&old).ok()?;
    Some(format!("{head}layers\\.{new}\\.{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_renumbered_and_towers_are_not() {
        let keep = [0, 2, 5];
        let prefix = "model.language_model.";
        for (module, want) in [
            ("model.language_model.layers.2.mlp.up_proj", Some("model.language_model.layers.1.mlp.up_proj")),
            ("model.language_model.layers.1.mlp.up_proj", None),
            (
                "model.vision_tower.encoder.layers.1.mlp.up_proj",
                Some("model.vision_tower.encoder.layers.1.mlp.up_proj"),
            ),
            ("lm_head", Some("lm_head")),
            ("Linear", Some("Linear")),
            ("re:.*layers\\.5\\.self_attn\\.o_proj$", Some("re:.*layers\\.2\\.self_attn\\.o_proj$")),
            ("re:.*layers\\.4\\.self_attn\\.o_proj$", None),
            ("re:.*layers\\.\\d+\\.self_attn\\.o_proj$", Some("re:.*layers\\.\\d+\\.self_attn\\.o_proj$")),
            ("re:.*vision_tower.*layers\\.1\\.q$", Some("re:.*vision_tower.*layers\\.1\\.q$")),
        ] {
            assert_eq!(renumber(module, prefix, &keep).as_deref(), want, "{module}");
        }
    }

    #[test]
    fn runs_join_neighbours() {
        assert_eq!(runs(&[0, 1, 3, 7, 8, 9]), [0..2, 3..4, 7..10]);
        assert!(runs(&[]).is_empty());
    }
}
