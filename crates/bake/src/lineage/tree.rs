//! The family of a checkpoint: its generations, and whether a directory is the parent that it names.

use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

use super::{Lineage, Parent, Tool, digest, directory_name};
use crate::error::{Error, Result};

/// Most generations of a file. Each lies two levels deeper in its JSON, of which the reader takes 128; the rest is for the oldest one's knobs.
pub(super) const DEPTH: usize = 60;

/// A checkpoint and its ancestors. The JSON keys are stable.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Family {
    /// From the checkpoint itself to the oldest ancestor that is known.
    pub generations: Vec<Generation>,
    /// What a reader should be wary of, one line each.
    pub flags: Vec<String>,
}

/// One checkpoint of a family.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Generation {
    /// Name of its directory when it was last seen.
    pub name: String,
    /// How it was made; nothing for one that no bake made.
    pub made: Option<Made>,
    /// Files by blake3, as its child recorded them; empty for the checkpoint itself.
    pub files: Map<String, Value>,
}

/// How a generation was made.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Made {
    /// Bake.
    pub command: String,
    /// Program.
    pub tool: Tool,
    /// When.
    pub time: String,
    /// Options.
    pub knobs: Map<String, Value>,
    /// Notes of the bake.
    pub notes: Vec<String>,
    /// What it measured.
    pub measured: Map<String, Value>,
    /// What of the model it changed.
    pub changed: Vec<String>,
}

/// The family of a checkpoint directory.
///
/// # Errors
/// [`Error::Lineage`] for a directory without `lineage.json`, and one whose ancestors cannot be read.
pub fn family(dir: &Path) -> Result<Family> {
    let none =
        || Error::Lineage { path: dir.to_path_buf(), reason: "there is no lineage.json: no bake wrote it".into() };
    let mut generations = Vec::new();
    let mut flags = Vec::new();
    let (mut name, mut files) = (directory_name(dir), Map::new());
    let mut next = Some(Lineage::read(dir)?.ok_or_else(none)?);
    while let Some(lineage) = next {
        if generations.len() == DEPTH {
            let reason = format!("it names more than {DEPTH} ancestors");
            return Err(Error::Lineage { path: dir.to_path_buf(), reason });
        }
        let changed = lineage.changed();
        if let (Some(parent), true) = (&lineage.parent, changed.len() > 1) {
            flags.push(format!(
                "{name} differs from {} in {} knobs at once ({}): what each of them does cannot be told apart",
                parent.name,
                changed.len(),
                changed.join(", ")
            ));
        }
        let Lineage { command, tool, time, knobs, notes, measured, parent, .. } = lineage;
        let made = Some(Made { command, tool, time, knobs, notes, measured, changed });
        generations.push(Generation { name: name.clone(), made, files: std::mem::take(&mut files) });
        next = None;
        if let Some(parent) = parent {
            name = parent.name;
            files = parent.files.iter().map(|(n, d)| (n.clone(), Value::from(d.blake3.as_str()))).collect();
            match parent.lineage {
                None => {
                    generations.push(Generation { name: name.clone(), made: None, files: std::mem::take(&mut files) })
                }
                Some(value) => {
                    let read = serde_json::from_value(value);
                    next = Some(read.map_err(|e| Error::Lineage {
                        path: dir.to_path_buf(),
                        reason: format!("the lineage of the ancestor {name} cannot be read: {e}"),
                    })?);
                }
            }
        }
    }
    Ok(Family { generations, flags })
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for (depth, g) in self.generations.iter().enumerate() {
            let indent = "   ".repeat(depth);
            let weights = g.files.iter().find(|(n, _)| n.ends_with(".safetensors"));
            let hash =
                weights.and_then(|(_, h)| h.as_str()).map_or_else(String::new, |h| format!("  blake3 {:.16}", h));
            writeln!(f, "{indent}{}{}{hash}", if depth == 0 { "" } else { "from " }, g.name)?;
            let Some(made) = &g.made else { continue };
            let commit = made.tool.commit.as_ref().map_or_else(String::new, |c| format!(" ({c:.12})"));
            writeln!(
                f,
                "{indent}   {} by {} {}{commit}, {}",
                made.command, made.tool.name, made.tool.version, made.time
            )?;
            for (knob, value) in made.knobs.iter().filter(|(k, _)| *k != "steps") {
                writeln!(f, "{indent}   {knob}: {value}")?;
            }
            for step in made.knobs.get("steps").and_then(Value::as_array).into_iter().flatten() {
                writeln!(f, "{indent}   step: {step}")?;
            }
        }
        self.flags.iter().try_for_each(|flag| writeln!(f, "flag: {flag}"))
    }
}

/// Whether a file is the one that a lineage names.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FileCheck {
    /// Name.
    pub name: String,
    /// `same`, `other` or `missing`.
    pub state: &'static str,
}

/// Hashes the files of `dir` and compares them with those that the lineage of `child` names as its parent's.
///
/// # Errors
/// [`Error::Lineage`] where `child` names no parent; I/O errors; what `go_on` returns, which is asked all the time.
pub fn verify(child: &Path, dir: &Path, go_on: impl Fn() -> Result<()>) -> Result<Vec<FileCheck>> {
    let none = || Error::Lineage { path: child.to_path_buf(), reason: "it names no parent to compare with".into() };
    let Parent { files, .. } = Lineage::read(child)?.and_then(|l| l.parent).ok_or_else(none)?;
    let mut out = Vec::new();
    for (name, expected) in files {
        // A name from a file must not reach outside the directory.
        let plain = Path::new(&name).file_name().is_some_and(|f| f == name.as_str());
        let path = dir.join(&name);
        let state = if !plain || !path.is_file() {
            "missing"
        } else if path.metadata().is_ok_and(|m| m.len() != expected.bytes) {
            "other"
        } else if digest(&path, &go_on)?.blake3 == expected.blake3 {
            "same"
        } else {
            "other"
        };
        out.push(FileCheck { name, state });
    }
    Ok(out)
}
