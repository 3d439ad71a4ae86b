//! A checkpoint directory as Hugging Face lays it out: `config.json`, and one `model.safetensors` or shards with an index.
//!
//! Files are memory-mapped; a tensor is a piece of a map until a kernel reads it. Nothing is read but headers until then, so
//! opening a 16 GB checkpoint costs milliseconds, and the tensors of vision and audio towers are never touched.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::Value;

use crate::config::{GenerationConfig, ModelConfig};
use crate::error::{Error, Result};
use crate::files;
use crate::names;

pub mod header;
pub mod keepset;
mod mmap;

pub use header::{Header, TensorInfo};
pub use keepset::{KEEPSET_FILE, Keepset};
pub use mmap::{Bytes, Mapped};

/// File name of an unsharded checkpoint.
pub const SINGLE_FILE: &str = "model.safetensors";
/// File name of the index of a sharded one.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// One safetensors file.
pub struct Shard {
    /// Full path.
    pub path: PathBuf,
    /// Checked header.
    pub header: Header,
    map: Mapped,
}

impl Shard {
    /// Maps a file and checks its header against its length.
    pub fn open(path: &Path) -> Result<Shard> {
        let map = Mapped::open(path)?;
        let len = map.len() as u64;
        let header = header::parse(&map, len).map_err(|e| match e {
            header::HeaderError::Truncated { expected } => {
                Error::Truncated { path: path.to_path_buf(), expected, found: len }
            }
            header::HeaderError::Invalid(reason) => Error::Header { path: path.to_path_buf(), reason },
        })?;
        Ok(Shard { path: path.to_path_buf(), header, map })
    }

    /// The bytes of one of this header's tensors.
    pub fn bytes(&self, info: &TensorInfo) -> Bytes {
        let start = self.header.data_start;
        self.map.slice(start + info.begin..start + info.end)
    }
}

/// A tensor in a checkpoint: its description and its mapped bytes (little endian, row-major).
#[derive(Clone)]
pub struct Tensor {
    /// Full name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// The file that holds it.
    pub path: PathBuf,
    /// Contents.
    pub bytes: Bytes,
}

impl Tensor {
    /// Shape and type for messages.
    pub fn describe(&self) -> String {
        format!("{} {:?}", self.dtype, self.shape)
    }

    /// The error for a tensor that is not what the configuration implies.
    pub fn mismatch(&self, expected: impl Into<String>) -> Error {
        Error::TensorMismatch {
            path: self.path.clone(),
            tensor: self.name.clone(),
            expected: expected.into(),
            found: self.describe(),
        }
    }

    /// Refuses another shape.
    pub fn expect_shape(&self, shape: &[usize]) -> Result<()> {
        if self.shape == shape { Ok(()) } else { Err(self.mismatch(format!("shape {shape:?}"))) }
    }

    /// The whole tensor as f32, for the small ones that are used all the time (norms, scalars). Refuses NaN and infinities.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let values: Vec<f32> = match self.dtype {
            Dtype::F32 => self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::BF16 => {
                self.bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
            }
            _ => return Err(self.mismatch("BF16 or F32")),
        };
        match values.iter().position(|v| !v.is_finite()) {
            None => Ok(values),
            Some(index) => Err(Error::NonFinite {
                path: self.path.clone(),
                tensor: self.name.clone(),
                index,
                value: values[index],
            }),
        }
    }
}

/// The tensors of a directory: one file, or shards with an index.
pub struct TensorFiles {
    dir: PathBuf,
    shards: Vec<Shard>,
    /// Full name -> shard, tensor in the shard's header.
    places: Places,
    prefix: &'static str,
}

impl TensorFiles {
    /// Opens a directory and checks every header and the index.
    pub fn open(dir: &Path) -> Result<TensorFiles> {
        let (shards, places) = open_shards(dir)?;
        let prefix = find_prefix(dir, &places)?;
        Ok(TensorFiles { dir: dir.into(), shards, places, prefix })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The files, in name order (one for an unsharded checkpoint).
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// What stands before the names of the text model's tensors.
    pub fn prefix(&self) -> &'static str {
        self.prefix
    }

    /// Full name of a text-model tensor (see [`names`]). Tensors of the top level have no prefix.
    pub fn full_name(&self, name: &str) -> String {
        let top = names::TOP_LEVEL.iter().any(|t| name.starts_with(t));
        if top { name.to_string() } else { format!("{}{name}", self.prefix) }
    }

    /// A tensor by full name.
    pub fn get(&self, full_name: &str) -> Option<Tensor> {
        let &(shard, index) = self.places.get(full_name)?;
        Some(self.tensor_at(shard, index))
    }

    /// Whether a text-model tensor exists.
    pub fn has(&self, name: &str) -> bool {
        self.places.contains_key(&self.full_name(name))
    }

    /// A text-model tensor that must exist; `expected` describes it for the message.
    pub fn require(&self, name: &str, expected: impl FnOnce() -> String) -> Result<Tensor> {
        let full = self.full_name(name);
        self.get(&full).ok_or_else(|| Error::MissingTensor {
            path: self.dir.clone(),
            tensor: full,
            expected: expected(),
        })
    }

    /// Every tensor, file by file in the order of its bytes.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor> {
        self.shards.iter().enumerate().flat_map(move |(s, shard)| {
            let listed = shard.header.tensors.iter().enumerate();
            // A tensor that the index places in another shard is a stray copy.
            listed
                .filter(move |(_, t)| self.places.get(&t.name).is_some_and(|p| p.0 == s))
                .map(move |(i, _)| self.tensor_at(s, i))
        })
    }

    /// Path of a file of the directory, if it exists.
    pub fn file(&self, name: &str) -> Option<PathBuf> {
        Some(self.dir.join(name)).filter(|p| p.is_file())
    }

    fn tensor_at(&self, shard: usize, index: usize) -> Tensor {
        let shard = &self.shards[shard];
        let info = &shard.header.tensors[index];
        Tensor {
            name: info.name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            path: shard.path.clone(),
            bytes: shard.bytes(info),
        }
    }
}

/// An open checkpoint of a target model: its tensors ([`TensorFiles`], whose methods it has) and what its side files say.
pub struct Checkpoint {
    files: TensorFiles,
    config: ModelConfig,
    config_json: Value,
    keepset: Option<Keepset>,
    generation: GenerationConfig,
}

impl std::ops::Deref for Checkpoint {
    type Target = TensorFiles;
    fn deref(&self) -> &TensorFiles {
        &self.files
    }
}

impl Checkpoint {
    /// Opens a directory: reads and checks the configuration, every header, the index and the keepset.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        let (config, config_json) = ModelConfig::read(dir)?;
        let files = TensorFiles::open(dir)?;
        let keepset_path = dir.join(KEEPSET_FILE);
        let keepset = if files::present(&keepset_path) { Some(Keepset::read(&keepset_path)?) } else { None };
        if let Some(k) = keepset.as_ref().filter(|k| k.full_vocab != config.vocab_size) {
            return Err(Error::Field {
                path: keepset_path,
                field: "full_vocab".into(),
                expected: format!("{} (vocab_size of config.json)", config.vocab_size),
                found: k.full_vocab.to_string(),
            });
        }
        let generation = GenerationConfig::read(dir, &config_json)?;
        Ok(Checkpoint { files, config, config_json, keepset, generation })
    }

    /// The resolved configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// `config.json` as it stands.
    pub fn config_json(&self) -> &Value {
        &self.config_json
    }

    /// Stop tokens.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// The keepset of a pruned head, where the directory has one.
    pub fn keepset(&self) -> Option<&Keepset> {
        self.keepset.as_ref()
    }
}

type Places = HashMap<String, (usize, usize)>;

fn open_shards(dir: &Path) -> Result<(Vec<Shard>, Places)> {
    let index_path = dir.join(INDEX_FILE);
    if !files::present(&index_path) {
        let shard = Shard::open(&dir.join(SINGLE_FILE))?;
        let places = shard.header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), (0, i))).collect();
        return Ok((vec![shard], places));
    }
    let weight_map = read_index(&index_path)?;
    let mut files: Vec<&String> = weight_map.values().collect();
    files.sort();
    files.dedup();
    let mut shards = Vec::with_capacity(files.len());
    let mut listed: HashMap<&String, (usize, HashMap<String, usize>)> = HashMap::new();
    for (s, &file) in files.iter().enumerate() {
        let shard = Shard::open(&dir.join(file))?;
        let names = shard.header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        listed.insert(file, (s, names));
        shards.push(shard);
    }
    let mut places = Places::new();
    for (tensor, file) in &weight_map {
        let (s, names) = &listed[file];
        let Some(&i) = names.get(tensor) else {
            let reason = format!("the index places it in `{file}`, which does not hold it");
            return Err(Error::Inconsistent { path: index_path, tensor: tensor.clone(), reason });
        };
        places.insert(tensor.clone(), (*s, i));
    }
    Ok((shards, places))
}

/// `weight_map` of an index file: tensor -> file name.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>> {
    let json = files::read_json(path)?;
    let field = |found: &str| Error::Field {
        path: path.to_path_buf(),
        field: "weight_map".into(),
        expected: "an object from tensor names to file names".into(),
        found: found.into(),
    };
    let map = json.get("weight_map").ok_or_else(|| field("nothing"))?;
    let map = map.as_object().ok_or_else(|| field("another type"))?;
    if map.is_empty() {
        return Err(field("an empty object"));
    }
    let mut out = BTreeMap::new();
    for (tensor, file) in map {
        let file = file.as_str().ok_or_else(|| field(&file.to_string()))?;
        // An index must not reach outside its directory.
        if Path::new(file).file_name().is_none_or(|f| f != file) {
            let reason = format!("`{file}` is not a file name");
            return Err(Error::Inconsistent { path: path.to_path_buf(), tensor: tensor.clone(), reason });
        }
        out.insert(tensor.clone(), file.to_string());
    }
    Ok(out)
}

fn find_prefix(dir: &Path, places: &Places) -> Result<&'static str> {
    names::PREFIXES.into_iter().find(|p| places.contains_key(&format!("{p}{}", names::EMBED))).ok_or_else(|| {
        Error::MissingTensor {
            path: dir.to_path_buf(),
            tensor: format!("{}{}", names::PREFIXES[0], names::EMBED),
            expected: format!("the token embedding, under one of the prefixes {:?}", names::PREFIXES),
        }
    })
}
