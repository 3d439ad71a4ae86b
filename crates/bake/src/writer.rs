//! Carries out a [`Plan`]: one pass, bounded memory, all cores.
//!
//! What always holds:
//! - the output of a bake is one `model.safetensors`, also where the parent has shards: a reader needs no index, and a layer's
//!   tensors lie together again; their order is that of `crate::layout`;
//! - the plan is checked before a byte is written, and nothing stands under the target's name before all bytes are synced;
//! - memory is a few MB a thread, whatever the size of the checkpoint: tiles of rows are made in any order and written to
//!   their place;
//! - tiles are taken in the order of the file, so that disks are read and written in order, and what a bake has done when it
//!   is stopped is a run of whole tensors (`crate::journal`) that another run need not do again;
//! - holes of a sparse parent and tiles of zeros stay holes.

use std::fs::{File, OpenOptions};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};

use rayon::prelude::*;
use runtime::checkpoint::{Checkpoint, INDEX_FILE};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::card;
use crate::check;
use crate::context::{Context, Meter};
use crate::error::{Error, Result};
use crate::journal::{self, Fingerprint, Journal};
use crate::layout::Layout;
use crate::lineage::{self, LINEAGE_FILE, Lineage, Outcome, TOOL_VERSION};
use crate::plan::{Job, Plan, Work};
use crate::side_files::SIDE_FILES;
use crate::source::Source;
use crate::staging::{self, Staging};

/// Bytes that a tile reads and writes together. Small enough to stay in a core's cache and to answer a cancel flag at once,
/// large enough that system calls do not count.
const TILE_BYTES: usize = 2 << 20;
/// Bytes that a stopped bake must have done for its partial directory to be kept: less is done again in a moment.
const KEEP_BYTES: u64 = 64 << 20;

/// How to write.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WriteOptions {
    /// Replace an existing checkpoint of this name, once the new one is complete.
    pub force: bool,
    /// Go on with an unfinished bake of this target, which must have been the same in all that decides its bytes. Without one
    /// it is an error.
    pub resume: bool,
    /// Compute the SHA-256 of the parent's files and hold them to the sums that it states ([`lineage::Digest`]).
    pub sha256: bool,
    /// Leave out the vision and audio towers.
    pub drop_towers: bool,
    /// Files of about equal size to spread the tensors over; none for one file.
    pub shards: Option<NonZeroUsize>,
}

impl WriteOptions {
    /// The defaults, and an existing target is replaced.
    pub fn force() -> WriteOptions {
        WriteOptions { force: true, ..WriteOptions::default() }
    }
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
    /// Of these, bytes that an earlier, unfinished run had written.
    pub resumed_bytes: u64,
    /// Bytes of the parent's tensors (0 without a parent).
    pub parent_bytes: u64,
    /// Names of the side files that were copied.
    pub copied: Vec<String>,
    /// `lineage.json` as written; its notes are for the user, too.
    pub lineage: Lineage,
    /// Partial directories of this target that ended bakes have left, and that nobody uses.
    pub unfinished: Vec<PathBuf>,
    /// Time taken, in seconds.
    pub seconds: f64,
}

/// Writes the checkpoint that `plan` describes. `parent` gives side files, header metadata and lineage.
///
/// # Errors
/// What is wrong with the target, the plan, the parent or the disk. [`Error::Kept`] where a stopped bake had done enough for
/// another run to go on with; in all other cases nothing is left.
pub fn execute(
    mut plan: Plan,
    parent: Option<&Checkpoint>,
    target: &Path,
    options: WriteOptions,
    context: &Context,
) -> Result<Report> {
    let start = std::time::Instant::now();
    staging::check_target(target, options.force, parent.map(|p| p.dir()))?;
    if parent.is_some() {
        plan.set_drop_towers(options.drop_towers);
    }
    let problems = check::plan(&plan, target)?;
    if !problems.is_empty() {
        return Err(Error::Inconsistent { problems });
    }
    let layout = Layout::new(&plan.jobs, &metadata(parent), options.shards.map_or(1, NonZeroUsize::get));
    let fingerprint = Fingerprint::new(&plan, &layout, parent)?;
    let (staging, mut journal) = begin(target, options, parent, &layout, &fingerprint)?;
    let resumed_bytes = done_bytes(&plan.jobs, &journal);
    let mut bake = Bake { plan, parent, target, layout, options, context };
    let copied = match bake.fill(&staging, &mut journal) {
        Ok(copied) => copied,
        Err(e) if e.may_pass() && done_bytes(&bake.plan.jobs, &journal) >= KEEP_BYTES => {
            let tensors = journal.len();
            return Err(Error::Kept { partial: staging.keep(), tensors, source: Box::new(e) });
        }
        Err(e) => return Err(e),
    };
    journal.remove()?;
    staging.finish()?;
    let unfinished = staging::partials(target)?.into_iter().filter(|dir| journal::is_idle(dir)).collect();
    Ok(Report {
        path: target.to_path_buf(),
        tensors: bake.layout.tensors(),
        tensor_bytes: bake.layout.data_bytes(),
        resumed_bytes,
        parent_bytes: parent.map_or(0, |p| p.tensors().map(|t| t.bytes.len() as u64).sum()),
        copied,
        lineage: bake.plan.lineage,
        unfinished,
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// A new partial directory, or the one to go on with.
fn begin(
    target: &Path,
    options: WriteOptions,
    parent: Option<&Checkpoint>,
    layout: &Layout,
    fingerprint: &Fingerprint,
) -> Result<(Staging, Journal)> {
    let parent = parent.map(|p| p.dir());
    if !options.resume {
        let staging = Staging::new(target, options.force, parent)?;
        let journal = Journal::create(staging.dir(), fingerprint)?;
        return Ok((staging, journal));
    }
    let mut reasons = Vec::new();
    for dir in staging::partials(target)? {
        match Journal::adopt(&dir, fingerprint) {
            Ok(journal) if journal.is_empty() || layout.files.iter().all(|f| has_header(&dir, f)) => {
                return Ok((Staging::adopt(dir, target, options.force, parent)?, journal));
            }
            Ok(_) => reasons.push(format!("{}: its weights are damaged; remove it", dir.display())),
            Err(reason) => reasons.push(format!("{}: {reason}", dir.display())),
        }
    }
    let reason = match reasons.is_empty() {
        true => "there is no unfinished bake of it; leave out --resume".into(),
        false => format!("{}; repeat the command that it was begun with, or leave out --resume", reasons.join("; ")),
    };
    Err(Error::Resume { target: target.to_path_buf(), reason })
}

/// Whether an unfinished file has its length and header.
fn has_header(dir: &Path, file: &crate::layout::WeightsFile) -> bool {
    let mut header = vec![0; file.header.len()];
    let Ok(f) = File::open(dir.join(&file.name)) else { return false };
    f.metadata().is_ok_and(|m| m.len() == file.bytes())
        && f.read_exact_at(&mut header, 0).is_ok()
        && header == file.header
}

/// Bytes of the jobs that a journal lists.
fn done_bytes(jobs: &[Job], journal: &Journal) -> u64 {
    jobs.iter().filter(|j| is_done(j, journal)).flat_map(|j| &j.outputs).map(|o| o.bytes()).sum()
}

fn is_done(job: &Job, journal: &Journal) -> bool {
    job.outputs.first().is_some_and(|o| journal.has(&o.name))
}

/// JSON as people read it. Writing to memory cannot fail for values with string keys, which all of ours are.
pub(crate) fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).unwrap_or_default();
    bytes.push(b'\n');
    bytes
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

/// A bake that is being carried out.
struct Bake<'a> {
    plan: Plan,
    parent: Option<&'a Checkpoint>,
    target: &'a Path,
    layout: Layout,
    options: WriteOptions,
    context: &'a Context<'a>,
}

impl Bake<'_> {
    /// Makes every file of the partial directory; returns the names of the side files.
    fn fill(&mut self, staging: &Staging, journal: &mut Journal) -> Result<Vec<String>> {
        let side_files = self.side_files();
        let copied: Vec<String> = side_files.iter().map(|(name, _)| name.clone()).collect();
        let side_bytes: u64 = side_files.iter().map(|(_, path)| path.metadata().map_or(0, |m| m.len())).sum();
        let files = self.open_files(staging)?;
        let allocated: u64 = files.iter().map(|(_, f)| f.metadata().map_or(0, |m| m.blocks() * 512)).sum();
        staging.require_space((self.disk_bytes() + side_bytes).saturating_sub(allocated))?;
        for ((path, file), shard) in files.iter().zip(&self.layout.files) {
            file.set_len(shard.bytes()).map_err(Error::io(path, "extend"))?;
            file.write_all_at(&shard.header, 0).map_err(Error::io(path, "write"))?;
        }
        self.plan.lineage.parent = self.write_and_hash(&files, journal, &copied)?;
        self.plan.lineage.result = Outcome::of(&self.plan.config);

        for (name, path) in &side_files {
            staging.copy(path, name)?;
        }
        for (name, bytes) in &self.plan.files {
            staging.write(name, bytes)?;
        }
        for (name, bytes) in card::files(&self.plan, self.parent, self.target)? {
            staging.write(&name, &bytes)?;
        }
        if let Some(index) = self.layout.index(&self.plan.jobs) {
            staging.write(INDEX_FILE, &pretty(&index))?;
        }
        staging.write("config.json", &pretty(&self.plan.config))?;
        staging.write(LINEAGE_FILE, &pretty(&self.plan.lineage))?;
        self.context.check(self.target)?;
        Ok(copied)
    }

    fn side_files(&self) -> Vec<(String, PathBuf)> {
        let made = |name: &str| self.plan.files.iter().any(|(n, _)| n == name);
        let names = SIDE_FILES.into_iter().filter(|n| !made(n));
        names.filter_map(|n| Some((n.to_string(), self.parent?.file(n)?))).collect()
    }

    fn open_files(&self, staging: &Staging) -> Result<Vec<(PathBuf, File)>> {
        let open = |path: PathBuf| {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
            let file = file.map_err(Error::io(&path, "create"))?;
            Ok((path, file))
        };
        self.layout.files.iter().map(|f| open(staging.dir().join(&f.name))).collect()
    }

    /// Bytes that the weights take on the disk, at most: holes take none, and copies no more than they do in the parent.
    fn disk_bytes(&self) -> u64 {
        let headers: u64 = self.layout.files.iter().map(|f| f.header.len() as u64).sum();
        let (mut made, mut copied) = (headers, 0);
        for job in &self.plan.jobs {
            let bytes: u64 = job.outputs.iter().map(|o| o.bytes()).sum();
            match job.work {
                Work::Hole => {}
                Work::Copy(ref source) if source.place().is_some() => copied += bytes,
                Work::Copy(_) | Work::Bytes(_) | Work::Rows { .. } => made += bytes,
            }
        }
        let blocks = |p: &Checkpoint| -> u64 {
            p.shards().iter().map(|s| s.path.metadata().map_or(u64::MAX >> 8, |m| m.blocks() * 512)).sum()
        };
        made + copied.min(self.parent.map_or(u64::MAX, blocks))
    }

    /// Writes the tensors and, at the same time, hashes the parent: both read the same bytes, and the page cache serves one.
    fn write_and_hash(
        &self,
        files: &[(PathBuf, File)],
        journal: &mut Journal,
        copied: &[String],
    ) -> Result<Option<lineage::Parent>> {
        let meter = Meter::new(self.context, self.layout.data_bytes());
        meter.add(done_bytes(&self.plan.jobs, journal));
        let jobs: Vec<usize> = (0..self.plan.jobs.len()).filter(|&j| !is_done(&self.plan.jobs[j], journal)).collect();
        // Whoever fails stops the others; else they would go on to the end before anyone is told.
        let stop = AtomicBool::new(false);
        let go_on = || match stop.load(Ordering::Relaxed) {
            false => self.context.check(self.target),
            true => Err(Error::Cancelled { target: self.target.to_path_buf() }),
        };
        let stopping = |failed: bool| {
            if failed {
                stop.store(true, Ordering::Relaxed);
            }
        };
        let (sender, finished) = mpsc::channel();
        std::thread::scope(|scope| {
            let hashing = self.parent.map(|p| {
                scope.spawn(move || {
                    let described = lineage::describe_parent(p, copied, self.options.sha256, go_on);
                    stopping(described.is_err());
                    described
                })
            });
            let keeping = scope.spawn(move || {
                let kept = journal.keep(&finished, files);
                stopping(kept.is_err());
                kept
            });
            let pass = Pass { bake: self, files, meter, stop: &stop, sender };
            let written = pass.run(&jobs);
            stopping(written.is_err());
            let kept = join(keeping);
            let hashed = hashing.map(join).transpose();
            written?;
            kept?;
            hashed
        })
    }
}

fn join<T>(thread: std::thread::ScopedJoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Rows (or, for copies, bytes) of one job.
struct Tile {
    job: usize,
    range: Range<usize>,
}

/// The tiles of some jobs, in their order.
fn tiles(jobs: &[Job], wanted: &[usize]) -> Vec<Tile> {
    let mut out = Vec::new();
    for &job in wanted {
        let j = &jobs[job];
        let (count, step) = match &j.work {
            Work::Copy(source) => (source.len() as usize, TILE_BYTES),
            Work::Bytes(_) | Work::Hole => (1, 1),
            Work::Rows { input_bytes, .. } => {
                let row = input_bytes + j.outputs.iter().map(|o| o.row_bytes()).sum::<usize>();
                (j.outputs.first().map_or(0, |o| o.rows()), (TILE_BYTES / row.max(1)).max(1))
            }
        };
        out.extend((0..count).step_by(step).map(|start| Tile { job, range: start..(start + step).min(count) }));
    }
    out
}

/// The one pass over all tiles.
struct Pass<'a> {
    bake: &'a Bake<'a>,
    files: &'a [(PathBuf, File)],
    meter: Meter<'a>,
    stop: &'a AtomicBool,
    /// Takes the jobs that are whole.
    sender: Sender<(String, u64)>,
}

impl Pass<'_> {
    /// Makes the tiles of the jobs `wanted` and syncs the files. Stops early, without an error of its own, when others failed.
    fn run(self, wanted: &[usize]) -> Result<()> {
        let jobs = &self.bake.plan.jobs;
        let tiles = tiles(jobs, wanted);
        let mut counts = vec![0usize; jobs.len()];
        tiles.iter().for_each(|t| counts[t.job] += 1);
        let left: Vec<AtomicUsize> = counts.into_iter().map(AtomicUsize::new).collect();
        let next = AtomicUsize::new(0);
        (0..rayon::current_num_threads()).into_par_iter().with_max_len(1).try_for_each(|_| {
            let mut buffer = Vec::new();
            while !self.stop.load(Ordering::Relaxed)
                && let Some(tile) = tiles.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let made = self.bake.context.check(self.bake.target).and_then(|()| self.make(tile, &mut buffer));
                if made.is_err() {
                    self.stop.store(true, Ordering::Relaxed);
                    return made;
                }
                if left[tile.job].fetch_sub(1, Ordering::AcqRel) == 1 {
                    let outputs = &jobs[tile.job].outputs;
                    let bytes = outputs.iter().map(|o| o.bytes()).sum();
                    // The receiver is only gone when it failed, and then it says so itself.
                    let _ = self.sender.send((outputs[0].name.clone(), bytes));
                }
            }
            Ok(())
        })?;
        drop(self.sender);
        if self.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.files.iter().try_for_each(|(path, file)| file.sync_all().map_err(Error::io(path, "sync")))
    }

    fn put(&self, bytes: &[u8], job: usize, output: usize, at: u64) -> Result<()> {
        let (file, start) = self.bake.layout.place(job, output);
        let (path, file) = &self.files[file];
        // The file is as long as it will be and holds zeros where nothing was written.
        if !is_zero(bytes) {
            file.write_all_at(bytes, start + at).map_err(Error::io(path, "write"))?;
        }
        self.meter.add(bytes.len() as u64);
        Ok(())
    }

    fn make(&self, tile: &Tile, buffer: &mut Vec<u8>) -> Result<()> {
        let job = &self.bake.plan.jobs[tile.job];
        match &job.work {
            Work::Copy(source) => {
                self.copy(source, tile, buffer)?;
                self.meter.add(tile.range.len() as u64);
                Ok(())
            }
            Work::Bytes(bytes) => self.put(bytes, tile.job, 0, 0),
            Work::Hole => {
                self.meter.add(job.outputs[0].bytes());
                Ok(())
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
                    self.put(piece, tile.job, o, tile.range.start as u64 * job.outputs[o].row_bytes() as u64)?;
                }
                Ok(())
            }
        }
    }

    /// Copies bytes of a parent's tensor: inside the kernel where it can (which also shares blocks on file systems that do),
    /// else through a buffer. Holes are passed over.
    fn copy(&self, source: &Source, tile: &Tile, buffer: &mut Vec<u8>) -> Result<()> {
        let (file, to) = self.bake.layout.place(tile.job, 0);
        let (path, file) = &self.files[file];
        let mut at = tile.range.start;
        while let Some(range) = source.data_in(at..tile.range.end) {
            let mut done = range.start;
            while let Some((from_file, from)) = source.place().filter(|_| done < range.end) {
                let (mut at_in, mut at_out) = (from + done as u64, to + done as u64);
                let length = range.end - done;
                match rustix::fs::copy_file_range(from_file, Some(&mut at_in), file, Some(&mut at_out), length) {
                    Ok(n) if n > 0 => done += n,
                    // Zero: a file shorter than its header said, or a file system that cannot. The read below tells which.
                    _ => break,
                }
            }
            if done < range.end {
                buffer.resize(range.end - done, 0);
                source.read_at(done as u64, buffer)?;
                file.write_all_at(buffer, to + done as u64).map_err(Error::io(path, "write"))?;
            }
            at = range.end;
        }
        Ok(())
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    let (blocks, rest) = bytes.as_chunks::<64>();
    blocks.iter().all(|b| *b == [0; 64]) && rest.iter().all(|b| *b == 0)
}
