//! Whether tensors and configuration say the same: the rules of `gemma4-text.md`, section 8, as one function.
//!
//! The writer asks it about every plan before the first byte, `inspect --strict` about what lies on disk. A wrong number of
//! KV-shared layers, an unsliced projection or table, a head that does not match its keepset all show here as shapes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use runtime::checkpoint::{KEEPSET_FILE, Keepset};
use runtime::config::ModelConfig;
use runtime::names;
use safetensors::Dtype;

use crate::error::Result;
use crate::plan::{Output, Plan, Work};
use crate::roles::{Linear, PACKED_PARTS, Part, Role, role};

/// What [`tensors`] looks at.
pub(crate) struct Subject<'a> {
    /// The configuration.
    pub config: &'a ModelConfig,
    /// What stands before the names of the text model.
    pub prefix: &'a str,
    /// All tensors.
    pub tensors: &'a [Output],
    /// Content of the `weight_shape` tensors.
    pub weight_shapes: &'a HashMap<String, [i64; 2]>,
    /// Rows of a pruned head.
    pub keepset_rows: Option<usize>,
}

/// Checks a plan; `target` is for messages. An empty list means that all is well.
pub fn plan(plan: &Plan, target: &Path) -> Result<Vec<String>> {
    let config_path = target.join("config.json");
    let config = match ModelConfig::from_json(&plan.config, &config_path) {
        Ok(config) => config,
        Err(e) => return Ok(vec![e.to_string()]),
    };
    let mut outputs = Vec::new();
    let mut weight_shapes = HashMap::new();
    let mut problems = Vec::new();
    for job in &plan.jobs {
        for output in &job.outputs {
            outputs.push(output.clone());
            if let Role::Linear(_, Part::Shape) = role(&plan.prefix, &output.name) {
                let pair = match &job.work {
                    Work::Copy(source) => Some(source.read_pair()?),
                    Work::Bytes(bytes) => pair_of(bytes),
                    Work::Rows { .. } | Work::Hole => None,
                };
                weight_shapes.extend(pair.map(|p| (output.name.clone(), p)));
            }
        }
        let rows = job.outputs.first().map_or(0, Output::rows);
        let lengths_agree = match &job.work {
            Work::Copy(source) => job.outputs.len() == 1 && job.outputs[0].bytes() == source.len(),
            Work::Bytes(bytes) => job.outputs.len() == 1 && job.outputs[0].bytes() == bytes.len() as u64,
            Work::Hole => job.outputs.len() == 1,
            Work::Rows { .. } => job.outputs.iter().all(|o| o.rows() == rows),
        };
        if !lengths_agree {
            let names: Vec<&str> = job.outputs.iter().map(|o| o.name.as_str()).collect();
            problems.push(format!("tensors {names:?} do not have the length of what fills them"));
        }
    }
    problems.extend(tensors(&Subject {
        config: &config,
        prefix: &plan.prefix,
        tensors: &outputs,
        weight_shapes: &weight_shapes,
        keepset_rows: plan_keepset_rows(plan),
    }));
    Ok(problems)
}

/// Rows of the keepset beside the output of a plan.
pub(crate) fn plan_keepset_rows(plan: &Plan) -> Option<usize> {
    match plan.files.iter().find(|(name, _)| name == KEEPSET_FILE) {
        Some((_, bytes)) => keep_ids(bytes),
        None => plan.inherited_keepset,
    }
}

fn pair_of(bytes: &[u8]) -> Option<[i64; 2]> {
    match bytes.as_chunks::<8>() {
        ([a, b], []) => Some([i64::from_le_bytes(*a), i64::from_le_bytes(*b)]),
        _ => None,
    }
}

fn keep_ids(bytes: &[u8]) -> Option<usize> {
    let json: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    json.get("keep_ids")?.as_array().map(Vec::len)
}

/// A keepset's rows, for [`Subject`].
pub(crate) fn keepset_rows(keepset: Option<&Keepset>) -> Option<usize> {
    keepset.map(|k| k.ids.len())
}

/// `[out, in]` of every linear that the configuration implies; for KV-shared layers without keys and values.
pub fn linears(config: &ModelConfig, head_rows: Option<usize>) -> Vec<(Linear, [usize; 2])> {
    let (hidden, ple) = (config.hidden_size, config.ple_size);
    let mut out = Vec::new();
    for (l, layer) in config.layers.iter().enumerate() {
        for name in names::LAYER_LINEARS {
            if layer.kv_source.is_some() && names::KV_MODULES.contains(&name) {
                continue;
            }
            if let Some(shape) = layer_linear(config, l, name).filter(|_| ple > 0 || !Linear::Layer(l, name).is_ple()) {
                out.push((Linear::Layer(l, name), shape));
            }
        }
    }
    if ple > 0 {
        out.push((Linear::ModelProjection, [config.layers.len() * ple, hidden]));
    }
    if let Some(rows) = head_rows {
        out.push((Linear::Head, [rows, hidden]));
    }
    out
}

/// `[out, in]` of a linear of a layer, keys and values of shared layers included.
pub fn layer_linear(config: &ModelConfig, layer: usize, name: &str) -> Option<[usize; 2]> {
    let (hidden, ple, l) = (config.hidden_size, config.ple_size, config.layers.get(layer)?);
    let q = config.num_attention_heads * l.head_dim;
    let kv = l.kv_heads * l.head_dim;
    let inner = l.intermediate_size;
    Some(match name {
        "self_attn.q_proj" => [q, hidden],
        "self_attn.k_proj" | "self_attn.v_proj" => [kv, hidden],
        "self_attn.o_proj" => [hidden, q],
        "mlp.gate_proj" | "mlp.up_proj" => [inner, hidden],
        "mlp.down_proj" => [hidden, inner],
        "per_layer_input_gate" => [ple, hidden],
        "per_layer_projection" => [hidden, ple],
        _ => return None,
    })
}

/// Names (without prefix) and shapes of all other tensors that the configuration implies, [`Role::Other`] aside.
pub fn plain_tensors(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (hidden, ple, count) = (config.hidden_size, config.ple_size, config.layers.len());
    let mut out = vec![
        (names::EMBED.to_string(), vec![config.vocab_size, hidden]),
        (names::FINAL_NORM.to_string(), vec![hidden]),
    ];
    if ple > 0 {
        out.push((names::EMBED_PER_LAYER.to_string(), vec![config.vocab_size, count * ple]));
        out.push((names::PLE_NORM.to_string(), vec![ple]));
    }
    for (l, layer) in config.layers.iter().enumerate() {
        for norm in [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "post_per_layer_input_norm",
        ] {
            if ple > 0 || norm != "post_per_layer_input_norm" {
                out.push((names::layer(l, &format!("{norm}.weight")), vec![hidden]));
            }
        }
        out.push((names::layer(l, "layer_scalar"), vec![1]));
        out.push((names::layer(l, "self_attn.q_norm.weight"), vec![layer.head_dim]));
        if layer.kv_source.is_none() {
            out.push((names::layer(l, "self_attn.k_norm.weight"), vec![layer.head_dim]));
        }
    }
    out
}

/// All contradictions between tensors and configuration, one line each.
pub(crate) fn tensors(subject: &Subject) -> Vec<String> {
    let Subject { config, prefix, .. } = subject;
    let by_name: HashMap<&str, &Output> = subject.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    let mut problems = Vec::new();
    if by_name.len() != subject.tensors.len() {
        problems.push("two tensors have the same name".to_string());
    }

    for (name, shape) in plain_tensors(config) {
        let name = format!("{prefix}{name}");
        match by_name.get(name.as_str()) {
            None => problems.push(format!("`{name}` is missing (expected {shape:?})")),
            Some(t) if t.shape != shape => problems.push(unequal(&name, &shape, t, slicing_hint(&name))),
            Some(t) if !is_float(t.dtype) => problems.push(format!("`{name}` is {}, expected BF16 or F32", t.dtype)),
            Some(_) => {}
        }
    }

    let head_rows = (!config.tie_word_embeddings).then(|| subject.keepset_rows.unwrap_or(config.vocab_size));
    for (linear, shape) in linears(config, head_rows) {
        check_linear(subject, &by_name, linear, shape, &mut problems);
    }
    if config.tie_word_embeddings && by_name.keys().any(|n| n.starts_with("lm_head.")) {
        problems.push("the configuration ties the head to the embedding, but the file holds an `lm_head`".into());
    }
    if let Some(rows) = subject.keepset_rows.filter(|_| config.tie_word_embeddings) {
        problems.push(format!(
            "{KEEPSET_FILE} lists {rows} rows, but the head is tied to the embedding of {} rows",
            config.vocab_size
        ));
    }

    let mut beyond: BTreeMap<usize, usize> = BTreeMap::new();
    let mut shared_with_kv = Vec::new();
    for t in subject.tensors {
        let role = role(prefix, &t.name);
        match role.layer() {
            Some(l) if l >= config.layers.len() => *beyond.entry(l).or_default() += 1,
            Some(l) if config.layers[l].kv_source.is_some() && role.is_kv() => shared_with_kv.push(l),
            _ => {}
        }
    }
    for (l, count) in beyond {
        problems.push(format!("{count} tensors of layer {l}, but num_hidden_layers is {}", config.layers.len()));
    }
    shared_with_kv.dedup();
    let shared: HashSet<usize> = (config.first_kv_shared()..config.layers.len()).collect();
    let with_kv: HashSet<usize> = shared_with_kv.iter().copied().collect();
    if !with_kv.is_empty() && with_kv.len() < shared.len() {
        let mut list: Vec<_> = with_kv.into_iter().collect();
        list.sort_unstable();
        problems.push(format!(
            "KV-shared layers {list:?} hold keys and values while the other shared layers do not: num_kv_shared_layers \
             ({}) may be too large",
            config.num_kv_shared_layers
        ));
    }
    problems.extend(ignore_list(subject));
    problems
}

fn check_linear(
    subject: &Subject,
    by_name: &HashMap<&str, &Output>,
    linear: Linear,
    shape: [usize; 2],
    problems: &mut Vec<String>,
) {
    let find = |part: Part| by_name.get(linear.tensor(subject.prefix, part).as_str()).copied();
    let module = linear.module(subject.prefix);
    let [out, inputs] = shape;
    if let Some(dense) = find(Part::Dense) {
        if PACKED_PARTS.iter().any(|p| find(*p).is_some()) {
            problems.push(format!("`{module}` is stored both dense and packed"));
        }
        if dense.shape != shape {
            problems.push(unequal(&dense.name, &shape, dense, slicing_hint(&module)));
        }
        if !is_float(dense.dtype) {
            problems.push(format!("`{}` is {}, expected BF16 or F32", dense.name, dense.dtype));
        }
        return;
    }
    let (Some(packed), Some(scale), Some(shape_tensor)) = (find(Part::Packed), find(Part::Scale), find(Part::Shape))
    else {
        problems.push(format!("`{module}` is missing or incomplete (expected {shape:?}, dense or packed)"));
        return;
    };
    // That there is a configuration at all is asked once, in `ignore_list`.
    if let Some(quantization) = &subject.config.quantization {
        match quantization.packing(&module, inputs) {
            Err(reason) => problems.push(format!("`{module}` {reason}")),
            Ok(packing) => {
                let said = format!(" ({packing})");
                let want = [out, packing.words];
                if packed.shape != want || packed.dtype != Dtype::I32 {
                    problems.push(unequal(&packed.name, &want, packed, &(said.clone() + slicing_hint(&module))));
                }
                let want = [out, packing.groups];
                if scale.shape != want || scale.dtype != Dtype::BF16 {
                    problems.push(unequal(&scale.name, &want, scale, &(said + slicing_hint(&module))));
                }
            }
        }
    }
    match subject.weight_shapes.get(&shape_tensor.name) {
        Some(&[a, b]) if [a, b] == [out as i64, inputs as i64] => {}
        Some(found) => problems.push(format!("`{}` says {found:?}, expected {shape:?}", shape_tensor.name)),
        None => problems.push(format!("`{}` is not I64 [2]", shape_tensor.name)),
    }
}

/// Dense linears of the text model must be ignored, or other programs look for packed ones.
fn ignore_list(subject: &Subject) -> Vec<String> {
    let Some(q) = &subject.config.quantization else {
        return match subject.tensors.iter().filter(|t| t.name.ends_with(".weight_packed")).count() {
            0 => vec![],
            n => vec![format!("{n} linears are packed, but config.json has no quantization_config")],
        };
    };
    let dense = subject.tensors.iter().filter_map(|t| match role(subject.prefix, &t.name) {
        Role::Linear(linear, Part::Dense) => Some(linear.module(subject.prefix)),
        _ => None,
    });
    dense
        .filter(|module| !q.ignores(module) && q.scheme(module).is_some())
        .map(|module| format!("`{module}` is dense, but not in the ignore list of quantization_config"))
        .collect()
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::BF16 | Dtype::F32)
}

fn unequal(name: &str, want: &[usize], found: &Output, hint: &str) -> String {
    format!("`{name}` is {} {:?}, expected {want:?}{hint}", found.dtype, found.shape)
}

/// The two tensors that a careless layer removal forgets.
fn slicing_hint(name: &str) -> &'static str {
    if name.ends_with(names::PLE_MODEL_PROJECTION) || name.ends_with(names::EMBED_PER_LAYER) {
        "; it has one block a layer: was it left unsliced when layers were removed?"
    } else {
        ""
    }
}
