//! `lineage.json`: where a checkpoint comes from.
//!
//! Every bake writes one. It names each file of the parent by blake3, so the parent can be recognised under any name and on
//! any machine (no path but the directory's own name is stored), lists every knob turned, and carries the parent's own lineage
//! inside, so that the youngest file alone tells the whole history.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use runtime::checkpoint::Checkpoint;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result};

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
    /// The bake: `quantize`, `prune-vocab`, `drop-layers`, `synth`.
    pub command: String,
    /// Every option of the bake, defaults included.
    pub knobs: Map<String, Value>,
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
            tool: Tool { name: "chiku".into(), version: TOOL_VERSION.into() },
            command: command.into(),
            knobs,
            time: jiff::Timestamp::now().to_string(),
            parent: None,
            notes,
        }
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
/// error ends the work.
pub fn describe_parent(
    checkpoint: &Checkpoint,
    side_files: &[String],
    go_on: impl Fn() -> Result<()>,
) -> Result<Parent> {
    let mut files = BTreeMap::new();
    for name in files_of(checkpoint, side_files) {
        let digest = digest(&checkpoint.dir().join(&name), &go_on)?;
        files.insert(name, digest);
    }
    Ok(Parent {
        name: directory_name(checkpoint.dir()),
        files,
        lineage: read_value(checkpoint.dir())?.map(|(_, value)| value),
    })
}

/// Last component of a path, with links and `.` resolved.
pub fn directory_name(dir: &Path) -> String {
    let full = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    full.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
}

fn digest(path: &Path, go_on: &impl Fn() -> Result<()>) -> Result<Digest> {
    const BLOCK: usize = 1 << 20;
    let mut file = File::open(path).map_err(Error::io(path, "open"))?;
    let mut hasher = blake3::Hasher::new();
    let mut block = vec![0; BLOCK];
    loop {
        go_on()?;
        match file.read(&mut block).map_err(Error::io(path, "read"))? {
            0 => break,
            n => hasher.update(&block[..n]),
        };
    }
    Ok(Digest { bytes: hasher.count(), blake3: hasher.finalize().to_hex().to_string() })
}
