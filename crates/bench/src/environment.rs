//! What a run ran on: the machine and the state it was in, the program, the checkpoint by its hash.
//!
//! Nothing here identifies a person or a place: no host name, no user, no directory, no serial number. A machine is named by what
//! it is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use runtime::checkpoint::{Checkpoint, KEEPSET_FILE};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

use crate::error::{Error, Result};

mod gpu;

pub use gpu::Gpu;

/// The machine, as far as the system tells. A field that it does not tell is `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Environment {
    /// Model name of the processor.
    pub cpu: Option<String>,
    /// Instruction set architecture, for example `x86_64`.
    pub arch: String,
    /// Physical cores.
    pub cores: Option<usize>,
    /// Hardware threads.
    pub cpus: Option<usize>,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Name and version of the operating system.
    pub os: Option<String>,
    /// Kernel version.
    pub kernel: Option<String>,
    /// Frequency governor of the first processor (Linux).
    pub governor: Option<String>,
    /// The state it was in before the run.
    #[serde(flatten)]
    pub conditions: Conditions,
}

/// What changes from one moment to the next, and with it the speed. A record holds it from before and from after a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Conditions {
    /// Load average over a minute: above the run's own threads, something else is running.
    pub load_1m: Option<f64>,
    /// Mean clock of the hardware threads in MHz.
    #[serde(default)]
    pub cpu_mhz: Option<f64>,
    /// NVIDIA GPUs; `None` where no driver answers.
    #[serde(default)]
    pub gpus: Option<Vec<Gpu>>,
    /// Why a field of the machine or of its state is `None`, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub missing: BTreeMap<String, String>,
}

impl Conditions {
    /// Asks the system and, where there is one, the GPU driver. Takes some milliseconds; call it outside of a run.
    pub fn capture() -> Conditions {
        let wanted = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing().with_frequency());
        let system = System::new_with_specifics(wanted).ok();
        let clocks: Vec<f64> = system.iter().flat_map(|s| s.cpus()).map(|c| c.frequency() as f64).collect();
        let mut missing = BTreeMap::new();
        let mut note = |field: &str, reason: String| {
            missing.insert(field.to_string(), reason);
        };
        let cpu_mhz = crate::stats::mean(&clocks).filter(|&mhz| mhz > 0.0);
        if cpu_mhz.is_none() {
            note("cpu_mhz", "the system tells no clock".into());
        }
        if !Path::new(GOVERNOR).exists() {
            note("governor", format!("the system has no {GOVERNOR}"));
        }
        let gpus = gpu::capture().map_err(|reason| note("gpus", reason)).ok();
        Conditions { load_1m: System::load_average().ok().map(|l| l.one), cpu_mhz, gpus, missing }
    }
}

impl Environment {
    /// Asks the system. Takes some milliseconds; call it before a run, not during one.
    pub fn capture() -> Environment {
        let wanted = RefreshKind::nothing()
            .with_cpu(CpuRefreshKind::nothing())
            .with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(wanted).ok();
        let cpus = system.as_ref().map(System::cpus).unwrap_or_default();
        let said = |text: &str| Some(text.trim().to_string()).filter(|t| !t.is_empty());
        Environment {
            cpu: cpus.first().and_then(|c| said(c.brand())),
            arch: std::env::consts::ARCH.to_string(),
            cores: System::physical_core_count().ok(),
            cpus: Some(cpus.len()).filter(|&n| n > 0),
            memory_bytes: system.as_ref().map(System::total_memory).filter(|&b| b > 0),
            os: System::long_os_version().ok().and_then(|v| said(&v)),
            kernel: System::kernel_version().ok().and_then(|v| said(&v)),
            governor: std::fs::read_to_string(GOVERNOR).ok().and_then(|g| said(&g)),
            conditions: Conditions::capture(),
        }
    }

    /// A file name for the machine: its processor and number of hardware threads, for example `intel-xeon-8375c-2t`.
    pub fn machine(&self) -> String {
        let cpu = self.cpu.as_deref().unwrap_or(&self.arch).to_ascii_lowercase();
        let cpu = cpu.split('@').next().unwrap_or_default().replace("(r)", " ").replace("(tm)", " ");
        let words = cpu.split(|c: char| !c.is_ascii_alphanumeric());
        let mut name: Vec<&str> = words.filter(|w| !w.is_empty() && !["cpu", "processor"].contains(w)).collect();
        let threads = self.cpus.map(|n| format!("{n}t"));
        name.extend(threads.as_deref());
        if name.is_empty() { "machine".to_string() } else { name.join("-") }
    }
}

const GOVERNOR: &str = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";

/// The program that measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Binary {
    /// Version.
    pub version: String,
    /// Commit it was built from, with `-dirty` where the tree was; `None` where it does not know.
    pub commit: Option<String>,
    /// blake3 of its file; `None` where that cannot be read.
    #[serde(default)]
    pub blake3: Option<String>,
    /// blake3 of the `flake.lock` that it was built beside; `None` where there was none.
    #[serde(default)]
    pub flake_lock: Option<String>,
}

impl Binary {
    /// The running program. `flake_lock` are the bytes of that file, none where it was built without one.
    pub fn running(version: &str, commit: Option<String>, flake_lock: &[u8]) -> Binary {
        let file = std::env::current_exe().ok().and_then(|path| hash_file(&path).ok());
        let lock = Some(flake_lock).filter(|bytes| !bytes.is_empty());
        Binary {
            version: version.to_string(),
            commit,
            blake3: file.map(|f| f.blake3),
            flake_lock: lock.map(|bytes| blake3::hash(bytes).to_hex().to_string()),
        }
    }
}

/// A file by its contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FileHash {
    /// Size.
    pub bytes: u64,
    /// blake3, 64 hexadecimal digits.
    pub blake3: String,
}

/// A checkpoint by its contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckpointHash {
    /// Name of its directory, or what the user or a server calls it.
    pub name: String,
    /// blake3 of a line `hash  name` for each file, in name order: what `b3sum` prints. Empty for a server's, which shows no files.
    pub blake3: String,
    /// Each file, by name.
    pub files: BTreeMap<String, FileHash>,
    /// The checkpoints that it was baked from, each as [`CheckpointHash::weights`] would name it, the nearest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ancestors: Vec<String>,
}

impl CheckpointHash {
    /// Hashes files, in parallel and memory-mapped: about a second for a gigabyte that is not cached.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn of_files(name: &str, paths: &[PathBuf]) -> Result<CheckpointHash> {
        let mut files = BTreeMap::new();
        for path in paths {
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            files.insert(name, hash_file(path)?);
        }
        let lines: String = files.iter().map(|(name, f)| format!("{}  {name}\n", f.blake3)).collect();
        let blake3 = blake3::hash(lines.as_bytes()).to_hex().to_string();
        Ok(CheckpointHash { name: name.to_string(), blake3, files, ancestors: Vec::new() })
    }

    /// A model that only a server knows.
    pub fn served(name: &str) -> CheckpointHash {
        CheckpointHash { name: name.to_string(), blake3: String::new(), files: BTreeMap::new(), ancestors: Vec::new() }
    }

    /// Hashes what decides a checkpoint's output: the weights, the configuration, the keepset, tokenizer and template.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn of(name: &str, checkpoint: &Checkpoint) -> Result<CheckpointHash> {
        let others = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            KEEPSET_FILE,
        ];
        let mut paths: Vec<PathBuf> = checkpoint.shards().iter().map(|s| s.path.clone()).collect();
        paths.extend(others.into_iter().filter_map(|name| checkpoint.file(name)));
        let mut hash = CheckpointHash::of_files(name, &paths)?;
        // A lineage that another program wrote, or none, is no reason not to measure.
        if let Ok(family) = bake::lineage::family(checkpoint.dir()) {
            let files = |g: &bake::lineage::Generation| {
                weights(g.files.iter().map(|(name, hash)| (name.as_str(), hash.as_str().unwrap_or_default())))
            };
            hash.ancestors = family.generations.iter().skip(1).map(files).collect();
        }
        Ok(hash)
    }

    /// Its weights and configuration alone, which is what a lineage always names: blake3 of a line `hash  name` for each.
    pub fn weights(&self) -> String {
        weights(self.files.iter().map(|(name, f)| (name.as_str(), f.blake3.as_str())))
    }
}

/// Of files in the order of their names.
fn weights<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let decisive = files.filter(|(name, _)| name.ends_with(".safetensors") || *name == "config.json");
    let lines: String = decisive.map(|(name, hash)| format!("{hash}  {name}\n")).collect();
    blake3::hash(lines.as_bytes()).to_hex().to_string()
}

fn hash_file(path: &Path) -> Result<FileHash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_mmap_rayon(path).map_err(Error::io(path, "read"))?;
    Ok(FileHash { bytes: hasher.count(), blake3: hasher.finalize().to_hex().to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(cpu: Option<&str>, cpus: Option<usize>) -> String {
        Environment { cpu: cpu.map(str::to_string), cpus, ..Environment::capture() }.machine()
    }

    #[test]
    fn this_machine_is_described() {
        let e = Environment::capture();
        assert!(e.cpus.unwrap() > 0 && e.memory_bytes.unwrap() > 1 << 20 && !e.arch.is_empty(), "{e:?}");
        // What is not known says why.
        let c = &e.conditions;
        assert_eq!(c.gpus.is_none(), c.missing.contains_key("gpus"), "{c:?}");
        assert_eq!(c.cpu_mhz.is_none(), c.missing.contains_key("cpu_mhz"), "{c:?}");
        assert_eq!(e.governor.is_none(), c.missing.contains_key("governor"), "{c:?}");
    }

    #[test]
    fn an_environment_from_before_there_were_conditions_still_parses() {
        let mut json = serde_json::to_value(Environment::capture()).unwrap();
        for field in ["cpu_mhz", "gpus", "missing"] {
            json.as_object_mut().unwrap().remove(field);
        }
        json["load_1m"] = 1.5.into();
        let e: Environment = serde_json::from_value(json).unwrap();
        assert_eq!(e.conditions, Conditions { load_1m: Some(1.5), ..Conditions::default() });
    }

    #[test]
    fn the_program_is_known_by_its_bytes() {
        let b = Binary::running("1", None, b"lock");
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(b.blake3, Some(blake3::hash(&own).to_hex().to_string()));
        assert_eq!(b.flake_lock, Some(blake3::hash(b"lock").to_hex().to_string()));
        assert_eq!(Binary::running("1", None, b"").flake_lock, None);
    }

    #[test]
    fn machines_are_named_by_what_they_are() {
        assert_eq!(machine(Some("Intel(R) Xeon(R) CPU E5-2686 v4 @ 2.30GHz"), Some(8)), "intel-xeon-e5-2686-v4-8t");
        assert_eq!(machine(Some("AMD EPYC 7R13 Processor"), Some(2)), "amd-epyc-7r13-2t");
        assert_eq!(machine(Some("../..//"), None), "machine");
        assert!(machine(None, Some(4)).ends_with("-4t"));
    }

    #[test]
    fn a_baked_checkpoint_names_the_one_that_it_was_baked_from() {
        let tmp = tempfile::tempdir().unwrap();
        let nano = Checkpoint::open(&runtime::nano::directory().unwrap()).unwrap();
        let bake = |from: &Checkpoint, name: &str, layer| {
            let dir = tmp.path().join(name);
            let options = bake::drop_layers::DropLayersOptions { layers: vec![layer], ..Default::default() };
            bake::drop_layers::run(from, &dir, &options, &bake::Context::quiet()).unwrap();
            Checkpoint::open(&dir).unwrap()
        };
        let child = bake(&nano, "child", 2);
        let grandchild = bake(&child, "grandchild", 1);
        let [nano, child, grandchild] = [&nano, &child, &grandchild].map(|c| CheckpointHash::of("x", c).unwrap());
        assert_eq!(nano.ancestors, Vec::<String>::new());
        assert_eq!(child.ancestors, [nano.weights()]);
        assert_eq!(grandchild.ancestors, [child.weights(), nano.weights()]);
        assert_ne!(child.weights(), nano.weights());
    }

    #[test]
    fn a_checkpoint_is_its_files_by_name_and_contents() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            std::fs::write(dir.path().join(name), text).unwrap();
            dir.path().join(name)
        };
        let (a, b) = (file("a", "one"), file("b", ""));
        let h = CheckpointHash::of_files("x", &[b.clone(), a.clone()]).unwrap();
        assert_eq!(h.files["a"], FileHash { bytes: 3, blake3: blake3::hash(b"one").to_hex().to_string() });
        assert_eq!(h.files["b"].bytes, 0);
        let lines = format!("{}  a\n{}  b\n", h.files["a"].blake3, h.files["b"].blake3);
        assert_eq!(h.blake3, blake3::hash(lines.as_bytes()).to_hex().to_string());
        assert_eq!(CheckpointHash::of_files("x", &[a.clone(), b]).unwrap(), h);
        let renamed = file("c", "");
        assert_ne!(CheckpointHash::of_files("x", &[a, renamed]).unwrap().blake3, h.blake3);
        let missing = CheckpointHash::of_files("x", &[dir.path().join("absent")]).unwrap_err().to_string();
        assert!(missing.contains("absent: cannot read"), "{missing}");
    }
}
