//! What an unfinished bake has done so far, so that another run can go on with it.
//!
//! The first line of the journal says what is being baked ([`Fingerprint`]), each further line names a tensor whose bytes are
//! whole and on the disk: a line is appended only after the data it speaks of is synced, so a line that can be read is true,
//! whatever ended the bake. Who holds the lock on the file owns the directory it lies in; the system lifts the lock with the
//! process, however that ends.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use runtime::checkpoint::Checkpoint;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::lineage::TOOL_VERSION;
use crate::plan::Plan;
use crate::writer::pretty;

/// Name of the file in the partial directory.
pub(crate) const JOURNAL_FILE: &str = "bake.journal";
/// Data is synced, and its tensors entered, once there is so much of it ...
const BATCH_BYTES: u64 = 64 << 20;
/// ... or after so long. What a kill can cost.
const BATCH_TIME: Duration = Duration::from_millis(500);

/// All that decides the bytes of a bake. Two bakes with equal fingerprints write the same files.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fingerprint {
    tool: String,
    command: String,
    knobs: Map<String, Value>,
    /// The parent's weights, by file name.
    parent: BTreeMap<String, Mark>,
    /// blake3 of the headers of all output files, the configuration and the files made by the bake.
    output: String,
}

/// A file without reading all of it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Mark {
    bytes: u64,
    /// Time of the last change, in ns since 1970.
    changed: i128,
    /// blake3 of the safetensors header.
    header: String,
}

impl Fingerprint {
    pub fn new(plan: &Plan, layout: &Layout, parent: Option<&Checkpoint>) -> Result<Fingerprint> {
        let mut output = blake3::Hasher::new();
        for file in &layout.files {
            output.update(file.name.as_bytes()).update(&file.header);
        }
        output.update(&pretty(&plan.config));
        for (name, bytes) in &plan.files {
            output.update(name.as_bytes()).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
        }
        let mut marks = BTreeMap::new();
        for shard in parent.map_or(&[][..], |p| p.shards()) {
            let path = &shard.path;
            let meta = path.metadata().map_err(Error::io(path, "look at"))?;
            let mut header = vec![0; shard.header.data_start];
            let read = File::open(path).and_then(|mut f| f.read_exact(&mut header));
            read.map_err(Error::io(path, "read"))?;
            let mark = Mark {
                bytes: meta.len(),
                changed: i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()),
                header: blake3::hash(&header).to_hex().to_string(),
            };
            marks.insert(path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned()), mark);
        }
        Ok(Fingerprint {
            tool: TOOL_VERSION.into(),
            command: plan.lineage.command.clone(),
            knobs: plan.lineage.knobs.clone(),
            parent: marks,
            output: output.finalize().to_hex().to_string(),
        })
    }

    /// In what an earlier bake differs from this one; `None` where they are the same.
    fn difference(&self, earlier: &Fingerprint) -> Option<String> {
        let unequal =
            |what: &str, then: &str, now: &str| Some(format!("it was begun with {what} {then}, this is {now}"));
        if self.tool != earlier.tool {
            return unequal("version", &earlier.tool, &self.tool);
        }
        if self.command != earlier.command {
            return unequal("the command", &earlier.command, &self.command);
        }
        let keys: BTreeSet<&String> = self.knobs.keys().chain(earlier.knobs.keys()).collect();
        for key in keys {
            let (then, now) = (earlier.knobs.get(key), self.knobs.get(key));
            if then != now {
                let show = |v: Option<&Value>| v.map_or("nothing".to_string(), Value::to_string);
                return unequal(&format!("`{key}`"), &show(then), &show(now));
            }
        }
        if self.parent != earlier.parent {
            return Some("the parent's weights are not those that it was begun with".into());
        }
        (self.output != earlier.output).then(|| "its output would have another configuration or other tensors".into())
    }
}

/// Whether a partial directory is one that an ended bake has left.
pub(crate) fn is_idle(dir: &Path) -> bool {
    File::open(dir.join(JOURNAL_FILE)).is_ok_and(|f| f.try_lock().is_ok())
}

/// A locked journal.
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    /// Names of the tensors that are whole, first outputs of their jobs.
    done: HashSet<String>,
}

impl Journal {
    /// Begins the journal of a new directory.
    pub fn create(dir: &Path, fingerprint: &Fingerprint) -> Result<Journal> {
        let path = dir.join(JOURNAL_FILE);
        let mut file = File::create_new(&path).map_err(Error::io(&path, "create"))?;
        // Someone who looks for work to resume may hold it for the moment that it takes to see that it is empty.
        file.lock().map_err(Error::io(&path, "lock"))?;
        let mut line = serde_json::to_vec(fingerprint).unwrap_or_default();
        line.push(b'\n');
        file.write_all(&line).and_then(|()| file.sync_all()).map_err(Error::io(&path, "write"))?;
        Ok(Journal { file, path, done: HashSet::new() })
    }

    /// Takes over the journal of an unfinished bake, or says why it cannot be gone on with.
    pub fn adopt(dir: &Path, fingerprint: &Fingerprint) -> std::result::Result<Journal, String> {
        let path = dir.join(JOURNAL_FILE);
        let refused = |e: std::io::Error| format!("its journal cannot be read: {e}");
        let mut file = match OpenOptions::new().read(true).write(true).open(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err("it has no journal".into()),
            other => other.map_err(refused)?,
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err("another bake is writing it at this moment".into()),
            Err(TryLockError::Error(e)) => return Err(refused(e)),
        }
        // Its owner may have finished between our opening and locking: then the name is gone or stands for another file.
        let same = |m: &std::fs::Metadata, n: &std::fs::Metadata| (m.dev(), m.ino()) == (n.dev(), n.ino());
        if !matches!((path.metadata(), file.metadata()), (Ok(a), Ok(b)) if same(&a, &b)) {
            return Err("another bake has just finished it".into());
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(refused)?;
        // What stands behind the last line feed was being written when the bake ended.
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
        let mut lines = bytes[..whole].split_inclusive(|&b| b == b'\n');
        let earlier: Option<Fingerprint> = lines.next().and_then(|line| serde_json::from_slice(line).ok());
        let Some(earlier) = earlier else { return Err("it was ended before it had written anything".into()) };
        if let Some(difference) = fingerprint.difference(&earlier) {
            return Err(difference);
        }
        let mut done = HashSet::new();
        for line in lines {
            match serde_json::from_slice::<String>(line) {
                Ok(name) => done.insert(name),
                Err(_) => return Err("its journal is damaged".into()),
            };
        }
        file.set_len(whole as u64).and_then(|()| file.seek(SeekFrom::End(0))).map_err(refused)?;
        Ok(Journal { file, path, done })
    }

    /// Whether a job, known by the name of its first output, is done.
    pub fn has(&self, name: &str) -> bool {
        self.done.contains(name)
    }

    /// Whether no job is done.
    pub fn is_empty(&self) -> bool {
        self.done.is_empty()
    }

    /// Jobs that are done.
    pub fn len(&self) -> usize {
        self.done.len()
    }

    /// Enters the tensors that come in (with their bytes) until the senders are gone, each after its data is on the disk.
    pub fn keep(&mut self, finished: &Receiver<(String, u64)>, weights: &[(PathBuf, File)]) -> Result<()> {
        loop {
            let Ok((name, mut bytes)) = finished.recv() else { return Ok(()) };
            let (mut names, since) = (vec![name], Instant::now());
            while bytes < BATCH_BYTES {
                match finished.recv_timeout(BATCH_TIME.saturating_sub(since.elapsed())) {
                    Ok((name, more)) => {
                        names.push(name);
                        bytes += more;
                    }
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
                }
            }
            for (path, file) in weights {
                file.sync_data().map_err(Error::io(path, "sync"))?;
            }
            let mut lines = Vec::new();
            for name in &names {
                lines.extend(serde_json::to_vec(name).unwrap_or_default());
                lines.push(b'\n');
            }
            let written = self.file.write_all(&lines).and_then(|()| self.file.sync_data());
            written.map_err(Error::io(&self.path, "write"))?;
            self.done.extend(names);
        }
    }

    /// Removes the file: the bake is whole. The lock holds until then.
    pub fn remove(self) -> Result<()> {
        std::fs::remove_file(&self.path).map_err(Error::io(&self.path, "remove"))
    }
}
