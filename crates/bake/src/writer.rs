//! Carries out a [`Plan`]: one pass, bounded memory, all cores.
//!
//! What always holds:
//! - the output is one `model.safetensors`, also where the parent has shards: a reader needs no index, and a layer's tensors
//!   lie together again;
//! - tensors stand in the plan's order, except that wider elements come first, as the safetensors library itself writes. So
//!   every tensor starts at a multiple of its element size (torch refuses others), and a copy of a file that the library
//!   wrote keeps its order;
//! - the plan is checked before a byte is written, and nothing stands under the target's name before all bytes are synced;
//! - memory is a few MB a thread, whatever the size of the checkpoint: tiles of rows are made in any order and written to
//!   their place.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;
use runtime::checkpoint::{Checkpoint, SINGLE_FILE};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::card;
use crate::check;
use crate::context::{Context, Meter};
use crate::error::{Error, Result};
use crate::lineage::{self, LINEAGE_FILE, Lineage, Outcome, TOOL_VERSION};
use crate::plan::{Job, Plan, Work};
use crate::side_files::SIDE_FILES;
use crate::source::Source;
use crate::staging::Staging;

/// Bytes that a tile reads and writes together. Small enough to stay in a core's cache and to answer a cancel flag at once,
/// large enough that system calls do not count.
const TILE_BYTES: usize = 2 << 20;

/// How to write.
#[derive(Debug, Clone, Copy, Default)]
pub struct WriteOptions {
    /// Replace an existing checkpoint of this name, once the new one is complete.
    pub force: bool,
}

/// What a bake did.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The checkpoint directory.
    pub path: PathBuf,
    /// Tensors in it.
    pub tensors: usize,
    /// Bytes of their data.
    pub tensor_bytes: u64,
    /// Bytes of the parent's tensors (0 without a parent).
    pub parent_bytes: u64,
    /// Names of the side files that were copied.
    pub copied: Vec<String>,
    /// `lineage.json` as written; its notes are for the user, too.
    pub lineage: Lineage,
    /// Time taken, in seconds.
    pub seconds: f64,
}

/// Writes the checkpoint that `plan` describes. `parent` gives side files, header metadata and lineage.
pub fn execute(
    mut plan: Plan,
    parent: Option<&Checkpoint>,
    target: &Path,
    options: WriteOptions,
    context: &Context,
) -> Result<Report> {
    let start = std::time::Instant::now();
    let staging = Staging::new(target, options.force, parent.map(|p| p.dir()))?;
    let problems = check::plan(&plan, target)?;
    if !problems.is_empty() {
        return Err(Error::Inconsistent { problems });
    }
    let layout = Layout::new(&plan.jobs, metadata(parent));
    let side_files = side_files(&plan, parent);
    let side_bytes: u64 = side_files.iter().map(|(_, path)| path.metadata().map_or(0, |m| m.len())).sum();
    staging.require_space(layout.file_bytes() + side_bytes)?;

    let meter = Meter::new(context, layout.data_bytes);
    let copied: Vec<String> = side_files.iter().map(|(name, _)| name.clone()).collect();
    let weights = staging.dir().join(SINGLE_FILE);
    // Hashing the parent reads the bytes that the bake reads: side by side, the page cache serves one of them.
    let failed = AtomicBool::new(false);
    let go_on = || match failed.load(Ordering::Relaxed) {
        false => context.check(target),
        true => Err(Error::Cancelled { target: target.to_path_buf() }),
    };
    let described = std::thread::scope(|scope| {
        let hashing = parent.map(|p| scope.spawn(|| lineage::describe_parent(p, &copied, go_on)));
        let written = write_weights(&plan.jobs, &layout, &weights, target, context, &meter);
        // Else the scope would hash on to the end before it reports a failed write.
        failed.store(written.is_err(), Ordering::Relaxed);
        written?;
        match hashing.map(std::thread::ScopedJoinHandle::join) {
            None => Ok(None),
            Some(Ok(described)) => described.map(Some),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    })?;
    plan.lineage.parent = described;
    plan.lineage.result = Outcome::of(&plan.config);

    for (name, path) in &side_files {
        staging.copy(path, name)?;
    }
    for (name, bytes) in &plan.files {
        staging.write(name, bytes)?;
    }
    for (name, bytes) in card::files(&plan, parent, target)? {
        staging.write(&name, &bytes)?;
    }
    staging.write("config.json", &pretty(&plan.config))?;
    staging.write(LINEAGE_FILE, &pretty(&plan.lineage))?;
    context.check(target)?;
    staging.finish()?;
    Ok(Report {
        path: target.to_path_buf(),
        tensors: layout.places.len(),
        tensor_bytes: layout.data_bytes,
        parent_bytes: parent.map_or(0, |p| p.tensors().map(|t| t.bytes.len() as u64).sum()),
        copied,
        lineage: plan.lineage,
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// JSON as people read it. Writing to memory cannot fail for values with string keys, which all of ours are.
pub(crate) fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

fn side_files(plan: &Plan, parent: Option<&Checkpoint>) -> Vec<(String, PathBuf)> {
    let made = |name: &str| plan.files.iter().any(|(n, _)| n == name);
    let names = SIDE_FILES.into_iter().filter(|n| !made(n));
    names.filter_map(|n| Some((n.to_string(), parent?.file(n)?))).collect()
}

/// `__metadata__`: the parent's keys, `format` and our version.
fn metadata(parent: Option<&Checkpoint>) -> Map<String, Value> {
    let mut out = Map::new();
    out.insert("format".into(), json!("pt"));
    if let Some(shard) = parent.and_then(|p| p.shards().first()) {
        let mut keys: Vec<_> = shard.header.metadata.iter().collect();
        keys.sort();
        out.extend(keys.into_iter().map(|(k, v)| (k.clone(), json!(v))));
    }
    out.insert("chiku_bake".into(), json!(TOOL_VERSION));
    out
}

/// Where every output of every job lies.
struct Layout {
    /// Length field and JSON, padded.
    header: Vec<u8>,
    data_bytes: u64,
    /// (job, output) -> first byte of the data area.
    places: HashMap<(usize, usize), u64>,
}

impl Layout {
    fn new(jobs: &[Job], metadata: Map<String, Value>) -> Layout {
        let mut order: Vec<(usize, usize)> =
            jobs.iter().enumerate().flat_map(|(j, job)| (0..job.outputs.len()).map(move |o| (j, o))).collect();
        order.sort_by_key(|&(j, o)| std::cmp::Reverse(jobs[j].outputs[o].dtype.bitsize()));
        let mut json = Map::new();
        json.insert("__metadata__".into(), Value::Object(metadata));
        let mut places = HashMap::new();
        let mut at = 0;
        for (j, o) in order {
            let output = &jobs[j].outputs[o];
            let end = at + output.bytes();
            let entry = json!({"dtype": output.dtype, "shape": output.shape, "data_offsets": [at, end]});
            json.insert(output.name.clone(), entry);
            places.insert((j, o), at);
            at = end;
        }
        let mut text = Value::Object(json).to_string().into_bytes();
        // The data area starts at a multiple of 8, the widest element.
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.append(&mut text);
        Layout { header, data_bytes: at, places }
    }

    fn file_bytes(&self) -> u64 {
        self.header.len() as u64 + self.data_bytes
    }

    /// Position in the file.
    fn position(&self, job: usize, output: usize) -> u64 {
        self.header.len() as u64 + self.places.get(&(job, output)).copied().unwrap_or(0)
    }
}

/// Rows (or, for copies, bytes) of one job.
struct Tile {
    job: usize,
    range: Range<usize>,
}

fn tiles(jobs: &[Job]) -> Vec<Tile> {
    let mut out = Vec::new();
    for (job, j) in jobs.iter().enumerate() {
        let (count, step) = match &j.work {
            Work::Copy(source) => (source.len() as usize, TILE_BYTES),
            Work::Bytes(_) => (1, 1),
            Work::Rows { input_bytes, .. } => {
                let row = input_bytes + j.outputs.iter().map(|o| o.row_bytes()).sum::<usize>();
                (j.outputs.first().map_or(0, |o| o.rows()), (TILE_BYTES / row.max(1)).max(1))
            }
        };
        out.extend((0..count).step_by(step).map(|start| Tile { job, range: start..(start + step).min(count) }));
    }
    out
}

fn write_weights(
    jobs: &[Job],
    layout: &Layout,
    path: &Path,
    target: &Path,
    context: &Context,
    meter: &Meter,
) -> Result<()> {
    let file = File::create(path).map_err(Error::io(path, "create"))?;
    file.set_len(layout.file_bytes()).map_err(Error::io(path, "extend"))?;
    file.write_all_at(&layout.header, 0).map_err(Error::io(path, "write"))?;
    let put = |bytes: &[u8], at: u64| file.write_all_at(bytes, at).map_err(Error::io(path, "write"));
    tiles(jobs).into_par_iter().try_for_each_init(Vec::new, |buffer: &mut Vec<u8>, tile| {
        context.check(target)?;
        let job = &jobs[tile.job];
        match &job.work {
            Work::Copy(source) => {
                let to = layout.position(tile.job, 0) + tile.range.start as u64;
                copy_range(source, tile.range.clone(), &file, path, to, buffer)?;
                meter.add(tile.range.len() as u64);
            }
            Work::Bytes(bytes) => {
                put(bytes, layout.position(tile.job, 0))?;
                meter.add(bytes.len() as u64);
            }
            Work::Rows { fill, .. } => {
                let sizes: Vec<usize> = job.outputs.iter().map(|o| o.row_bytes() * tile.range.len()).collect();
                buffer.resize(sizes.iter().sum(), 0);
                let mut rest = buffer.as_mut_slice();
                let mut pieces: Vec<&mut [u8]> = Vec::with_capacity(sizes.len());
                for &size in &sizes {
                    let (piece, later) = rest.split_at_mut(size);
                    pieces.push(piece);
                    rest = later;
                }
                fill(tile.range.clone(), &mut pieces)?;
                for (o, piece) in pieces.iter().enumerate() {
                    let first = tile.range.start as u64 * job.outputs[o].row_bytes() as u64;
                    put(piece, layout.position(tile.job, o) + first)?;
                    meter.add(piece.len() as u64);
                }
            }
        }
        Ok::<(), Error>(())
    })?;
    file.sync_all().map_err(Error::io(path, "sync"))
}

/// Copies bytes of a parent's tensor: inside the kernel where it can (which also shares blocks on file systems that do), else
/// through a buffer.
fn copy_range(
    source: &Source,
    range: Range<usize>,
    file: &File,
    path: &Path,
    to: u64,
    buffer: &mut Vec<u8>,
) -> Result<()> {
    let mut done = 0;
    while let Some((from_file, from)) = source.place().filter(|_| done < range.len()) {
        let (mut at_in, mut at_out) = (from + (range.start + done) as u64, to + done as u64);
        let left = range.len() - done;
        match rustix::fs::copy_file_range(from_file, Some(&mut at_in), file, Some(&mut at_out), left) {
            Ok(n) if n > 0 => done += n,
            // Zero: a file shorter than its header said, or a file system that cannot. The read below tells which.
            _ => break,
        }
    }
    if done < range.len() {
        buffer.resize(range.len() - done, 0);
        source.read_at((range.start + done) as u64, buffer)?;
        file.write_all_at(buffer, to + done as u64).map_err(Error::io(path, "write"))?;
    }
    Ok(())
}
