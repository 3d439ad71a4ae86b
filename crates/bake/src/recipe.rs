//! `bake recipe`: several bakes in one, from a TOML file.
//!
//! Each step is planned against what the step before describes ([`Parent::planned`]); one pass then writes the last. There are no
//! intermediate checkpoints: nothing to remove, half the bytes moved, and the target appears whole or not at all, as with any
//! bake.
//!
//! ```toml
//! name = "example"
//! description = "what it is for"
//!
//! [parameters]                     # given with --set NAME=VALUE
//! keepset = "tokens that the head keeps"
//!
//! [[step]]
//! bake = "drop-layers"
//! layers = [2, 3]
//!
//! [[step]]
//! bake = "prune-vocab"
//! keepset = "$keepset"             # or a path, relative to this file
//!
//! [[step]]
//! bake = "quantize"
//! bits = 4
//! group = 128
//!
//! [[step.rule]]                    # as in the plan of `bake quantize`
//! modules = "*.mlp.{gate,up}_proj"
//! bits = 3
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use runtime::checkpoint::{Checkpoint, Keepset};
use runtime::config::{Bits, ModelConfig, Rule, Strategy};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::check;
use crate::context::Context;
use crate::drop_layers::{self, DropLayersOptions};
use crate::error::{Error, Result};
use crate::inspect::{self, BytesPerStep, Components};
use crate::lineage::Lineage;
use crate::method::Method;
use crate::parent::Parent;
use crate::plan::{self, Output, Plan};
use crate::precision::{PrecisionPlan, RuleText};
use crate::prune_vocab::{self, PruneVocabOptions};
use crate::quantize::{self, QuantizeOptions};
use crate::writer::{self, Report, WriteOptions};

/// Largest file read.
const FILE_LIMIT: u64 = 1 << 20;

/// A recipe, with its parameters filled in.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// What the result is called.
    pub name: String,
    /// What it is for, for people.
    pub description: String,
    path: PathBuf,
    steps: Vec<Step>,
}

/// The file as it stands.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    description: String,
    /// Name -> what it is.
    #[serde(default)]
    parameters: BTreeMap<String, String>,
    step: Vec<toml::Table>,
}

/// One bake with its options, spelled as on the command line.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "bake", rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
enum Step {
    DropLayers {
        layers: Vec<usize>,
        #[serde(default)]
        strip_inert_kv: bool,
        #[serde(default)]
        allow: Vec<String>,
    },
    PruneVocab {
        keepset: PathBuf,
    },
    Quantize {
        bits: Option<usize>,
        #[serde(default)]
        method: Method,
        group: Option<usize>,
        #[serde(default)]
        per_channel: bool,
        #[serde(default)]
        head: HeadScales,
        #[serde(default)]
        rule: Vec<RuleText>,
    },
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum HeadScales {
    #[default]
    Channel,
    Group,
}

impl Step {
    fn bake(&self) -> &'static str {
        match self {
            Step::DropLayers { .. } => "drop-layers",
            Step::PruneVocab { .. } => "prune-vocab",
            Step::Quantize { .. } => "quantize",
        }
    }

    fn plan(&self, parent: &Parent, recipe: &Path) -> Result<Plan> {
        match self {
            Step::DropLayers { layers, strip_inert_kv, allow } => {
                let rule = |name: &String| {
                    let expected = Rule::ALL.map(Rule::name).join(" or ");
                    Rule::named(name).ok_or(Error::Option { option: "allow", expected, found: name.clone() })
                };
                let allow = allow.iter().map(rule).collect::<Result<_>>()?;
                let options = DropLayersOptions {
                    layers: layers.clone(),
                    allow,
                    strip_inert_kv: *strip_inert_kv,
                    ..Default::default()
                };
                drop_layers::plan(parent, &options)
            }
            Step::PruneVocab { keepset } => {
                let path = recipe.parent().unwrap_or(Path::new("")).join(keepset);
                let origin = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
                let options = PruneVocabOptions { origin, ..Default::default() };
                prune_vocab::plan(parent, &Keepset::read(&path)?, &options)
            }
            Step::Quantize { bits, method, group, per_channel, head, rule } => {
                let bits = bits.map_or(Ok(Bits::Four), |n| {
                    let refuse =
                        || Error::Option { option: "bits", expected: "8, 4, 3 or 2".into(), found: n.to_string() };
                    Bits::new(n).ok_or_else(refuse)
                })?;
                let strategy = match (group, per_channel) {
                    (Some(_), true) => {
                        let (expected, found) = ("either `group` or `per-channel`".into(), "both".into());
                        return Err(Error::Option { option: "per-channel", expected, found });
                    }
                    (None, true) => Strategy::Channel,
                    (Some(size), false) => Strategy::Group(*size),
                    (None, false) => QuantizeOptions::default().strategy,
                };
                let head = match head {
                    HeadScales::Channel => Strategy::Channel,
                    HeadScales::Group => strategy,
                };
                let precision = PrecisionPlan::new(rule.clone(), recipe)?;
                let (gptq, write) = (None, WriteOptions::default());
                let options = QuantizeOptions { bits, method: *method, strategy, head, precision, gptq, write };
                quantize::plan(parent, &options)
            }
        }
    }
}

impl Recipe {
    /// Reads a recipe and puts `values` in the place of its parameters. Paths given in `values` are relative to the working
    /// directory, paths in the file to the file.
    ///
    /// # Errors
    /// [`Error::Recipe`] for a file that is not a recipe, a parameter without a value, a value without a parameter.
    pub fn read(path: &Path, values: &BTreeMap<String, String>) -> Result<Recipe> {
        let refuse = |reason: String| Error::Recipe { path: path.to_path_buf(), reason };
        let bytes = runtime::files::read(path, FILE_LIMIT)?;
        let text = std::str::from_utf8(&bytes).map_err(|_| refuse("it is not UTF-8 text".into()))?;
        let file: File = toml::from_str(text).map_err(|e| refuse(e.to_string()))?;
        if let Some(unknown) = values.keys().find(|k| !file.parameters.contains_key(*k)) {
            let known: Vec<&String> = file.parameters.keys().collect();
            return Err(refuse(format!("it has no parameter `{unknown}`; it has {known:?}")));
        }
        let missing = file.parameters.iter().find(|(name, _)| !values.contains_key(*name));
        if let Some((name, what)) = missing {
            return Err(refuse(format!("it needs --set {name}=VALUE: {what}")));
        }
        if file.step.is_empty() {
            return Err(refuse("it has no [[step]]".into()));
        }
        let mut steps = Vec::new();
        for (i, mut table) in file.step.into_iter().enumerate() {
            let number = i + 1;
            for (key, value) in &mut table {
                let Some(name) = value.as_str().and_then(|v| v.strip_prefix('$')) else { continue };
                let Some(given) = values.get(name) else {
                    return Err(refuse(format!("step {number}: `{key}` asks for `${name}`, which is no parameter")));
                };
                *value = toml::Value::String(absolute(given, key == "keepset"));
            }
            let step = table.try_into::<Step>().map_err(|e| refuse(format!("step {number}: {}", e.message())))?;
            steps.push(step);
        }
        Ok(Recipe { name: file.name, description: file.description, path: path.to_path_buf(), steps })
    }
}

/// A value of a parameter; a path becomes independent of the recipe's place.
fn absolute(value: &str, is_path: bool) -> String {
    match std::path::absolute(value) {
        Ok(path) if is_path => path.to_string_lossy().into_owned(),
        _ => value.to_string(),
    }
}

/// Bakes `checkpoint` by a recipe into `out`.
///
/// # Errors
/// [`Error::Step`] with the number of the step and its reason; all errors of the writer.
pub fn run(
    checkpoint: &Checkpoint,
    out: &Path,
    recipe: &Recipe,
    write: WriteOptions,
    context: &Context,
) -> Result<Report> {
    let plan = plan(checkpoint, recipe)?;
    writer::execute(plan, Some(checkpoint), out, write, context)
}

/// What [`run`] writes.
pub fn plan(checkpoint: &Checkpoint, recipe: &Recipe) -> Result<Plan> {
    let mut parent = Parent::open(checkpoint)?;
    let (mut steps, mut notes, mut measured) = (Vec::new(), Vec::new(), Map::new());
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    for (i, step) in recipe.steps.iter().enumerate() {
        let number = i + 1;
        let bake = step.bake();
        let fail = |source: Error| Error::Step { number, bake, source: Box::new(source) };
        let mut plan = step.plan(&parent, &recipe.path).map_err(fail)?;
        let mut knobs = Map::from_iter([("bake".to_string(), json!(bake))]);
        knobs.extend(std::mem::take(&mut plan.lineage.knobs));
        steps.push(Value::Object(knobs));
        measured.extend(std::mem::take(&mut plan.lineage.measured));
        notes.extend(plan.lineage.notes.iter().map(|n| format!("{bake}: {n}")));
        files.retain(|(name, _)| plan.files.iter().all(|(n, _)| n != name));
        files.extend(plan.files.iter().cloned());
        if number == recipe.steps.len() {
            let knobs = json!({"recipe": recipe.name, "steps": steps});
            let lineage = Lineage { measured, ..Lineage::new("recipe", knobs, notes) };
            let jobs = plan::fuse(plan.jobs);
            return Ok(Plan { jobs, files, lineage, ..plan });
        }
        let problems = check::plan(&plan, checkpoint.dir()).map_err(fail)?;
        if !problems.is_empty() {
            return Err(fail(Error::Inconsistent { problems }));
        }
        parent = Parent::planned(plan, &parent)?;
    }
    Err(Error::Recipe { path: recipe.path.clone(), reason: "it has no [[step]]".into() })
}

/// What a plan would write, known without writing it.
#[derive(Debug, Clone, Serialize)]
pub struct Preview {
    /// `text_config` of the result.
    pub text_config: Value,
    /// Bytes by purpose.
    pub components: Components,
    /// Bytes a decode step reads.
    pub bytes_per_step: BytesPerStep,
    /// Every option of every step, and what to know about them.
    pub lineage: Lineage,
}

/// Describes the result of a plan.
///
/// # Errors
/// [`Error::Inconsistent`] for a plan that the writer would refuse.
pub fn preview(plan: &Plan, target: &Path) -> Result<Preview> {
    let problems = check::plan(plan, target)?;
    if !problems.is_empty() {
        return Err(Error::Inconsistent { problems });
    }
    let config = ModelConfig::from_json(&plan.config, &target.join("config.json"))?;
    let outputs: Vec<&Output> = plan.jobs.iter().flat_map(|j| &j.outputs).collect();
    let (components, bytes_per_step) = inspect::weigh(&config, &plan.prefix, outputs);
    let text_config = plan.config.get("text_config").unwrap_or(&plan.config).clone();
    Ok(Preview { text_config, components, bytes_per_step, lineage: plan.lineage.clone() })
}
