//! `lineage.json`: where a checkpoint comes from.
//!
//! Every bake writes one. It names each file of the parent by blake3, so the parent can be recognised under any name and on
//! any machine (no path but the directory's own name is stored), lists every knob turned, and carries the parent's own lineage
//! inside, so that the youngest file alone tells the whole history.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use runtime::checkpoint::Checkpoint;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};
use crate::manifest;

mod tree;

pub use tree::{Family, FileCheck, Generation, family, verify};

/// Name of the file.
pub const LINEAGE_FILE: &str = "lineage.json";
/// Largest file read, in bytes: each generation adds a few kilobytes.
const LIMIT: u64 = 16 << 20;
/// Value of `format` that this program writes.
pub const FORMAT: u32 = 1;
/// Version of this crate.
pub const TOOL_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Content of `lineage.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lineage {
    /// Version of this layout.
    pub format: u32,
    /// Program that wrote it.
    pub tool: Tool,
    /// The bake: `quantize`, `prune-vocab`, `drop-layers`, `recipe`, `synth`.
    pub command: String,
    /// Every option of the bake, defaults included.
    pub knobs: Map<String, Value>,
    /// What the bake measured of its result, by name.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub measured: Map<String, Value>,
    /// What the configuration came to, so that later edits of it show.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Outcome>,
    /// When, RFC 3339.
    pub time: String,
    /// The checkpoint that this one was made from.
    pub parent: Option<Parent>,
    /// What a reader should know and cannot see from the knobs.
    pub notes: Vec<String>,
}

/// A program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    /// Name.
    pub name: String,
    /// Version.
    pub version: String,
    /// Commit that it was built from, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
}

static COMMIT: OnceLock<String> = OnceLock::new();

/// States once, at the start of the program, which commit it was built from; an empty text states nothing.
pub fn set_tool_commit(commit: &str) {
    if !commit.is_empty() {
        let _ = COMMIT.set(commit.to_string());
    }
}

/// Layers of the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// `num_hidden_layers`.
    pub layers: usize,
    /// `num_kv_shared_layers`.
    pub kv_shared: usize,
}

impl Outcome {
    /// What a configuration that was checked says.
    pub(crate) fn of(config: &Value) -> Option<Outcome> {
        let text = config.get("text_config").unwrap_or(config);
        let number = |field: &str| text.get(field).and_then(Value::as_u64).map(|n| n as usize);
        Some(Outcome { layers: number("num_hidden_layers")?, kv_shared: number("num_kv_shared_layers").unwrap_or(0) })
    }
}

/// A checkpoint by content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Parent {
    /// Name of its directory, without what stands above.
    pub name: String,
    /// Its files, by name.
    pub files: BTreeMap<String, Digest>,
    /// Its own `lineage.json`, as it stands.
    pub lineage: Option<Value>,
}

/// A file by content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Digest {
    /// Length.
    pub bytes: u64,
    /// blake3, 64 hexadecimal digits.
    pub blake3: String,
    /// SHA-256, 64 hexadecimal digits: as the publisher states it, or computed on request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Where `sha256` comes from: the file that states it, `computed`, or both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256_from: Option<String>,
}

impl Parent {
    /// Whether a checkpoint is this parent, by its configuration's content and the length of its weights: enough to recognise it
    /// without reading gigabytes. [`verify`] compares everything.
    pub fn is(&self, checkpoint: &Checkpoint) -> Result<bool> {
        let config = digest(&checkpoint.dir().join("config.json"), &|| Ok(()))?;
        if self.files.get("config.json").is_none_or(|d| d.blake3 != config.blake3) {
            return Ok(false);
        }
        let length = |path: &Path| path.metadata().map(|m| m.len()).ok();
        Ok(checkpoint.shards().iter().all(|shard| {
            let name = shard.path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            self.files.get(&name).is_some_and(|d| Some(d.bytes) == length(&shard.path))
        }))
    }
}

impl Lineage {
    /// A lineage of now, without a parent yet.
    pub fn new(command: &str, knobs: Value, notes: Vec<String>) -> Lineage {
        let knobs = match knobs {
            Value::Object(map) => map,
            other => Map::from_iter([("options".to_string(), other)]),
        };
        Lineage {
            format: FORMAT,
            tool: Tool { name: "chiku".into(), version: TOOL_VERSION.into(), commit: COMMIT.get().cloned() },
            command: command.into(),
            knobs,
            measured: Map::new(),
            result: None,
            time: jiff::Timestamp::now().to_string(),
            parent: None,
            notes,
        }
    }

    /// The bakes that made this generation, in order, with their knobs: one, or the steps of a recipe.
    pub fn bakes(&self) -> Vec<(&str, &Map<String, Value>)> {
        let steps = self.knobs.get("steps").and_then(Value::as_array).filter(|_| self.command == "recipe");
        match steps {
            None => vec![(&self.command, &self.knobs)],
            Some(steps) => steps
                .iter()
                .filter_map(Value::as_object)
                .map(|knobs| (knobs.get("bake").and_then(Value::as_str).unwrap_or("unknown"), knobs))
                .collect(),
        }
    }

    /// What of the model this generation changed. More than one means that a difference in quality or speed has no single cause.
    pub fn changed(&self) -> Vec<String> {
        let mut out: Vec<String> = Vec::new();
        let mut add = |what: &str| {
            if !out.iter().any(|o| o == what) {
                out.push(what.to_string());
            }
        };
        for (bake, _) in self.bakes() {
            add(match bake {
                "drop-layers" => "layers",
                "prune-vocab" => "vocabulary",
                "quantize" => "quantisation",
                "synth" => continue,
                other => other,
            });
        }
        if self.knobs.get("drop_towers") == Some(&Value::Bool(true)) {
            add("towers");
        }
        out
    }

    /// Reads the lineage of a checkpoint directory, where it has one.
    pub fn read(dir: &Path) -> Result<Option<Lineage>> {
        let Some((path, value)) = read_value(dir)? else { return Ok(None) };
        serde_json::from_value(value).map(Some).map_err(|source| runtime::Error::Json { path, source }.into())
    }
}

fn read_value(dir: &Path) -> Result<Option<(PathBuf, Value)>> {
    let path = dir.join(LINEAGE_FILE);
    if !path.is_file() {
        return Ok(None);
    }
    let bytes = runtime::files::read(&path, LIMIT)?;
    match serde_json::from_slice(&bytes) {
        Ok(value) => Ok(Some((path, value))),
        Err(source) => Err(runtime::Error::Json { path, source }.into()),
    }
}

/// Names of the files of a checkpoint that a lineage lists: weights, index, configuration and the side files given.
fn files_of(checkpoint: &Checkpoint, side_files: &[String]) -> Vec<String> {
    let name = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned());
    let mut files: Vec<String> = checkpoint.shards().iter().filter_map(|s| name(&s.path)).collect();
    let others = [runtime::checkpoint::INDEX_FILE, "config.json", LINEAGE_FILE];
    files.extend(others.iter().filter(|f| checkpoint.file(f).is_some()).map(|f| f.to_string()));
    files.extend(side_files.iter().cloned());
    files
}

/// Hashes a parent. Reads every byte of it once, in blocks, on the calling thread; `go_on` is asked between blocks and its
/// error ends the work. SHA-256 sums are those that the parent's files state (`crate::manifest`); with `sha256` they are
/// computed, too, and must be the same.
///
/// # Errors
/// I/O errors, [`Error::Manifest`], [`Error::Sum`], [`Error::Lineage`] where the parent has too many ancestors already, and what `go_on` returns.
pub fn describe_parent(
    checkpoint: &Checkpoint,
    side_files: &[String],
    sha256: bool,
    go_on: impl Fn() -> Result<()>,
) -> Result<Parent> {
    let lineage = read_value(checkpoint.dir())?;
    if let Some((path, value)) = &lineage {
        let mut generations = 1;
        let mut at = value;
        while let Some(lineage) = at.pointer("/parent/lineage").filter(|l| l.is_object()) {
            (at, generations) = (lineage, generations + 1);
        }
        if generations >= tree::DEPTH {
            let reason = format!(
                "it names {generations} generations, and a child of it could not be read; bake from an older one"
            );
            return Err(Error::Lineage { path: path.clone(), reason });
        }
    }
    let mut files = BTreeMap::new();
    for name in files_of(checkpoint, side_files) {
        let digest = stated(checkpoint.dir(), &name, sha256, &go_on)?;
        files.insert(name, digest);
    }
    Ok(Parent { name: directory_name(checkpoint.dir()), files, lineage: lineage.map(|(_, value)| value) })
}

/// Last component of a path, with links and `.` resolved.
pub fn directory_name(dir: &Path) -> String {
    let full = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    full.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
}

/// [`digest`] of a file of a checkpoint, with the SHA-256 that the checkpoint states for it; with `sha256`, computed as well.
fn stated(dir: &Path, name: &str, sha256: bool, go_on: &impl Fn() -> Result<()>) -> Result<Digest> {
    let known = manifest::known(dir, name)?;
    let path = dir.join(name);
    let mut sha = sha256.then(Sha256::new);
    let digest = read_through(&path, go_on, |block| {
        if let Some(sha) = &mut sha {
            sha.update(block);
        }
    })?;
    let computed = sha.map(|s| s.finalize().iter().map(|b| format!("{b:02x}")).collect::<String>());
    let (sha256, sha256_from) = match (known, computed) {
        (Some(k), Some(found)) if k.sha256 != found => {
            return Err(Error::Sum { path, manifest: k.from, expected: k.sha256, found });
        }
        (Some(k), Some(found)) => (Some(found), Some(format!("computed, as {} states", k.from))),
        (Some(k), None) => (Some(k.sha256), Some(k.from)),
        (None, Some(found)) => (Some(found), Some("computed".into())),
        (None, None) => (None, None),
    };
    Ok(Digest { sha256, sha256_from, ..digest })
}

fn digest(path: &Path, go_on: &impl Fn() -> Result<()>) -> Result<Digest> {
    read_through(path, go_on, |_| ())
}

/// Length and blake3 of a file; `also` sees every block.
fn read_through(path: &Path, go_on: &impl Fn() -> Result<()>, mut also: impl FnMut(&[u8])) -> Result<Digest> {
    const BLOCK: usize = 1 << 20;
    let mut file = File::open(path).map_err(Error::io(path, "open"))?;
    let mut hasher = blake3::Hasher::new();
    let mut block = vec![0; BLOCK];
    loop {
        go_on()?;
        match file.read(&mut block).map_err(Error::io(path, "read"))? {
            0 => break,
            n => {
                hasher.update(&block[..n]);
                also(&block[..n]);
            }
        };
    }
    let blake3 = hasher.finalize().to_hex().to_string();
    Ok(Digest { bytes: hasher.count(), blake3, sha256: None, sha256_from: None })
}
