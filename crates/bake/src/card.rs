//! The model card and the licence files that every bake writes.
//!
//! A card says what was done with which knobs, and what the result measures: bytes, from its own tensors. It repeats nothing that
//! the parent's card claims (size, quality, speed), since none of that is true of the child. The licence files are what section
//! 4 of Apache-2.0 asks of a derivative work: a copy of the licence, the notices that came with it, and a prominent statement
//! that files were changed. What is known about the parent is its own card's front matter; nothing is guessed beyond that.

use std::fmt;
use std::path::Path;

use runtime::checkpoint::Checkpoint;
use runtime::config::ModelConfig;
use serde_json::{Map, Value};

use crate::error::Result;
use crate::inspect;
use crate::lineage::{self, Lineage};
use crate::plan::{Output, Plan};
use crate::side_files::{CARDS, LICENSES, NOTICE_FILE, NOTICES};

/// Name of the card.
pub const CARD_FILE: &str = "README.md";
/// Largest card or notice read.
const LIMIT: u64 = 4 << 20;
/// The licence's text, for parents that name it and do not bring it.
const APACHE: &str = include_str!("../../../LICENSE-APACHE");
/// What a card calls that licence.
const APACHE_ID: &str = "apache-2.0";

/// Front matter of a parent's card.
#[derive(Debug, Default, PartialEq)]
struct FrontMatter {
    license: Option<String>,
    license_name: Option<String>,
    license_link: Option<String>,
    base_model: Option<String>,
}

impl FrontMatter {
    /// The top-level `key: value` lines between the first two `---` lines; lists and nested values are passed over.
    fn parse(card: &str) -> FrontMatter {
        let mut out = FrontMatter::default();
        let mut lines = card.trim_start_matches('\u{feff}').lines();
        if lines.next().map(str::trim_end) != Some("---") {
            return out;
        }
        for line in lines.take_while(|l| l.trim_end() != "---") {
            let Some((key, value)) = line.split_once(':') else { continue };
            let value = value.trim().trim_matches(['"', '\'']);
            let field = match key {
                "license" => &mut out.license,
                "license_name" => &mut out.license_name,
                "license_link" => &mut out.license_link,
                "base_model" => &mut out.base_model,
                _ => continue,
            };
            if !value.is_empty() {
                *field = Some(value.to_string());
            }
        }
        out
    }
}

/// What a card says about the parent.
struct Origin {
    front: FrontMatter,
    /// The model at the root of the family: an id of the Hub where one is known, else the name of a directory.
    base_model: Option<String>,
    licenses: Vec<String>,
    notices: Vec<String>,
}

impl Origin {
    fn of(parent: Option<&Checkpoint>) -> Result<Origin> {
        let Some(parent) = parent else {
            return Ok(Origin { front: FrontMatter::default(), base_model: None, licenses: vec![], notices: vec![] });
        };
        let front = match CARDS.iter().find_map(|name| parent.file(name)) {
            Some(path) => FrontMatter::parse(&String::from_utf8_lossy(&runtime::files::read(&path, LIMIT)?)),
            None => FrontMatter::default(),
        };
        let baked = Lineage::read(parent.dir())?.is_some();
        // A card of a bake names the root of the family; any other names what the parent itself was made from.
        let inherited = front.base_model.clone().filter(|_| baked);
        let base_model = inherited
            .or_else(|| hub_id(parent.dir()))
            .or_else(|| named(parent.config_json()))
            .or_else(|| Some(lineage::directory_name(parent.dir())));
        let present =
            |names: &[&str]| names.iter().filter(|n| parent.file(n).is_some()).map(|n| n.to_string()).collect();
        Ok(Origin { front, base_model, licenses: present(&LICENSES), notices: present(&NOTICES) })
    }

    fn is_apache(&self) -> bool {
        self.front.license.as_deref() == Some(APACHE_ID)
    }
}

/// `org/name` from a path of the Hub's cache, `.../models--org--name/snapshots/<revision>`.
fn hub_id(dir: &Path) -> Option<String> {
    let dir = std::path::absolute(dir).ok()?;
    let mut parts = dir.components().rev().map(|c| c.as_os_str().to_string_lossy());
    parts.next()?;
    if parts.next()? != "snapshots" {
        return None;
    }
    let (org, name) =
        parts.next()?.strip_prefix("models--")?.split_once("--").map(|(o, n)| (o.to_string(), n.to_string()))?;
    Some(format!("{org}/{name}"))
}

/// `_name_or_path` of a configuration, where it is an id of the Hub.
fn named(config: &Value) -> Option<String> {
    let name = config.get("_name_or_path")?.as_str()?;
    let id = name.split_once('/').is_some_and(|(org, name)| !org.is_empty() && !name.is_empty() && !name.contains('/'));
    id.then(|| name.to_string()).filter(|n| !n.starts_with('.'))
}

/// The files, by name: a card, a NOTICE of the changes, and the licence where only its name came with the parent.
/// `plan.lineage.parent` is known already.
pub(crate) fn files(plan: &Plan, parent: Option<&Checkpoint>, target: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let origin = Origin::of(parent)?;
    let name = lineage::directory_name(target);
    let config = ModelConfig::from_json(&plan.config, &target.join("config.json"))?;
    let mut out = vec![(CARD_FILE.to_string(), card(plan, &config, &origin, &name).into_bytes())];
    if let Some(parent) = parent {
        out.push((NOTICE_FILE.to_string(), notice(plan, parent, &origin, &name)?));
        if origin.is_apache() && origin.licenses.is_empty() {
            out.push((LICENSES[0].to_string(), APACHE.as_bytes().to_vec()));
        }
    }
    Ok(out)
}

/// A text that grows by lines.
#[derive(Default)]
struct Text(String);

impl Text {
    fn line(&mut self, line: fmt::Arguments) {
        self.0 += &line.to_string();
        self.0.push('\n');
    }
}

/// The parent's NOTICE with a paragraph on the changes below it.
fn notice(plan: &Plan, parent: &Checkpoint, origin: &Origin, name: &str) -> Result<Vec<u8>> {
    let mut text = Text::default();
    if let Some(path) = parent.file(NOTICE_FILE) {
        text.line(format_args!("{}\n", String::from_utf8_lossy(&runtime::files::read(&path, LIMIT)?).trim_end()));
    }
    let l = &plan.lineage;
    let parent_name = lineage::directory_name(parent.dir());
    text.line(format_args!(
        "{name} is a modified version of {parent_name}. The weights (*.safetensors) and config.json were"
    ));
    text.line(format_args!("changed by {} {} on {}: {}.", l.tool.name, l.tool.version, day(&l.time), summary(l)));
    text.line(format_args!(
        "README.md, NOTICE and lineage.json were written anew. Everything else is the parent's, unchanged."
    ));
    if let Some(base) = origin.base_model.as_ref().filter(|b| **b != parent_name) {
        text.line(format_args!("At the root of this family stands {base}."));
    }
    Ok(text.0.into_bytes())
}

/// The day of an RFC 3339 time.
fn day(time: &str) -> &str {
    time.split('T').next().unwrap_or(time)
}

/// One bake as a sentence: `drop-layers (layers [2, 3])`.
fn sentence(bake: &str, knobs: &Map<String, Value>) -> String {
    let knobs: Vec<String> =
        knobs.iter().filter(|(k, _)| *k != "bake").map(|(k, v)| format!("{k} {}", plain(v))).collect();
    if knobs.is_empty() { bake.to_string() } else { format!("{bake} ({})", knobs.join(", ")) }
}

/// A value without quotation marks around text.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

/// What was done, step by step.
fn steps(lineage: &Lineage) -> Vec<String> {
    lineage.bakes().into_iter().map(|(bake, knobs)| sentence(bake, knobs)).collect()
}

fn summary(lineage: &Lineage) -> String {
    steps(lineage).join("; then ")
}

fn card(plan: &Plan, config: &ModelConfig, origin: &Origin, name: &str) -> String {
    let outputs: Vec<&Output> = plan.jobs.iter().flat_map(|j| &j.outputs).collect();
    let (components, step) = inspect::weigh(config, &plan.prefix, outputs.iter().copied());
    let others = inspect::chiku_only(config, crate::check::plan_keepset_rows(plan));
    let l = &plan.lineage;
    let mut t = Text::default();
    front_matter(&mut t, origin, config, &others);
    t.line(format_args!("# {name}\n"));
    let made_by = format!(
        "{} {}{}",
        l.tool.name,
        l.tool.version,
        l.tool.commit.as_ref().map_or(String::new(), |c| format!(" (commit {c})"))
    );
    match (&l.parent, &origin.base_model) {
        (Some(parent), Some(base)) => {
            let root = if *base == parent.name { String::new() } else { format!(", of the family of `{base}`") };
            t.line(format_args!(
                "**A modified version of `{}`{root}.** Its weights and configuration were changed by",
                parent.name
            ));
            t.line(format_args!(
                "`{made_by}` on {}; the list below is all that was done. It is not published or endorsed",
                day(&l.time)
            ));
            t.line(format_args!("by the makers of the original.\n"));
        }
        _ => {
            t.line(format_args!("Made by `{made_by}` on {}, from no other model.\n", day(&l.time)));
        }
    }
    if let Some(base) = origin.base_model.as_ref().filter(|b| !b.contains('/')) {
        t.line(format_args!(
            "`{base}` is the name of a directory: put the id of the model there before this card is published.\n"
        ));
    }
    t.line(format_args!("## What was done\n"));
    for (i, step) in steps(l).iter().enumerate() {
        t.line(format_args!("{}. {step}", i + 1));
    }
    if !l.notes.is_empty() {
        t.line(format_args!(""));
        l.notes.iter().for_each(|note| t.line(format_args!("- {note}")));
    }
    for (what, value) in &l.measured {
        t.line(format_args!("- measured, {what}: `{value}`"));
    }
    t.line(format_args!("\n`lineage.json` lists the parent's files by hash, and all earlier bakes.\n"));

    t.line(format_args!("## What it holds\n"));
    t.line(format_args!(
        "Counted from its tensors; MB are 10^6 bytes. A step is one decode step: weights read, no KV cache.\n"
    ));
    let shared = config.num_kv_shared_layers;
    t.line(format_args!("- {} layers, of which the last {shared} share keys and values", config.layers.len()));
    t.line(format_args!("- {} rows in the head, vocabulary of {}", head_rows(config, plan), config.vocab_size));
    for group in inspect::groups(config) {
        t.line(format_args!("- {group}"));
    }
    t.line(format_args!("\n| | MB in the files | MB read a step |\n|---|--:|--:|"));
    for (what, bytes, read) in inspect::rows(&components, &step) {
        t.line(format_args!("| {what} | {:.2} | {:.2} |", bytes as f64 / 1e6, read as f64 / 1e6));
    }

    t.line(format_args!("\n## What is not known\n"));
    t.line(format_args!(
        "Perplexity, accuracy and speed were not measured by this bake. What cards of its ancestors state about"
    ));
    t.line(format_args!("them is not true of this checkpoint. `chiku ppl` and `chiku verify` measure it.\n"));

    t.line(format_args!("## How to run it\n"));
    t.line(format_args!("    chiku generate --model {name} --prompt \"Hello\"\n"));
    if others.is_empty() {
        let packed = match config.quantization {
            Some(_) => "Layout and packing are those of Hugging Face and of `compressed-tensors` (`pack-quantized`)",
            None => "The layout is that of Hugging Face",
        };
        t.line(format_args!("{packed}, which transformers and vLLM read."));
        t.line(format_args!("Neither of them was run on this checkpoint.\n"));
    } else {
        t.line(format_args!("Other programs do not run it as it is:\n"));
        others.iter().for_each(|reason| t.line(format_args!("- {reason}")));
        t.line(format_args!(""));
    }
    licence(&mut t, origin, l.parent.is_some());
    t.0
}

fn front_matter(t: &mut Text, origin: &Origin, config: &ModelConfig, others: &[String]) {
    t.line(format_args!("---"));
    if let Some(base) = &origin.base_model {
        t.line(format_args!("base_model: {base}"));
        if config.quantization.is_some() {
            t.line(format_args!("base_model_relation: quantized"));
        }
    }
    let front = &origin.front;
    for (key, value) in
        [("license", &front.license), ("license_name", &front.license_name), ("license_link", &front.license_link)]
    {
        if let Some(value) = value {
            t.line(format_args!("{key}: {value}"));
        }
    }
    t.line(format_args!("library_name: {}", if others.is_empty() { "transformers" } else { "chiku" }));
    t.line(format_args!("pipeline_tag: text-generation"));
    t.line(format_args!("tags:\n- gemma4\n- chiku"));
    if config.quantization.is_some() {
        t.line(format_args!("- compressed-tensors"));
    }
    t.line(format_args!("---"));
}

fn head_rows(config: &ModelConfig, plan: &Plan) -> usize {
    match crate::check::plan_keepset_rows(plan).filter(|_| !config.tie_word_embeddings) {
        Some(rows) => rows,
        None => config.vocab_size,
    }
}

fn licence(t: &mut Text, origin: &Origin, has_parent: bool) {
    t.line(format_args!("## Licence\n"));
    if !has_parent {
        t.line(format_args!("Random numbers; no licence is claimed."));
        return;
    }
    let stated = origin.front.license.as_deref();
    match stated {
        Some(id) => t.line(format_args!("The parent's card states `{id}`; the same applies to this derivative.")),
        None => {
            t.line(format_args!("The parent states no licence in its card. Ask its makers before passing this on."))
        }
    }
    match (&origin.licenses[..], origin.is_apache()) {
        ([], true) => t.line(format_args!("The parent brought no licence file; `LICENSE` is the text of Apache-2.0.")),
        ([], false) => t.line(format_args!("The parent brought no licence file, so none is here.")),
        (files, _) => t.line(format_args!("Copied from the parent: {}.", files.join(", "))),
    }
    match &origin.notices[..] {
        [] => t.line(format_args!("The parent brought no NOTICE; the one here states the changes.")),
        files => {
            t.line(format_args!("The parent's {} is kept; `{NOTICE_FILE}` also states the changes.", files.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn front_matter_is_read_and_the_rest_is_not() {
        let card =
            "---\nlicense: apache-2.0\nbase_model: \"google/gemma-4-E4B\"\ntags:\n- license: no\n---\nlicense: mit\n";
        let front = FrontMatter::parse(card);
        assert_eq!(front.license.as_deref(), Some("apache-2.0"));
        assert_eq!(front.base_model.as_deref(), Some("google/gemma-4-E4B"));
        assert_eq!(FrontMatter::parse("# A card\nlicense: mit"), FrontMatter::default());
        // A list of base models is passed over.
        assert_eq!(FrontMatter::parse("---\nbase_model:\n- a/b\n---").base_model, None);
    }

    #[test]
    fn the_hub_is_known_by_its_cache_or_by_the_configuration() {
        let path = Path::new("/x/models--google--gemma-4-E4B-it/snapshots/0123abc");
        assert_eq!(hub_id(path).as_deref(), Some("google/gemma-4-E4B-it"));
        assert_eq!(hub_id(Path::new("/x/models--google--gemma/0123abc")), None);
        let id = |name: &str| named(&serde_json::json!({"_name_or_path": name}));
        assert_eq!(id("google/gemma-4-E4B-it").as_deref(), Some("google/gemma-4-E4B-it"));
        assert_eq!([id("/models/x"), id("./x"), id("x"), id("a/b/c")], [None, None, None, None]);
    }
}
