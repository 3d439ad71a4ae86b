//! Results files: one record a line, only ever appended to.
//!
//! An append takes an exclusive advisory lock, writes the line with its newline in one call, and syncs. Two writers never
//! interleave; a write that fails half-way is undone. What a killed machine leaves behind is at worst a torn last line: the next append
//! ends it with a newline first, and a reader skips and reports it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::record::{Record, SCHEMA};

/// How long to wait for another process to finish its append, which takes milliseconds.
const LOCK_WAIT: Duration = Duration::from_secs(10);
/// Time between two attempts.
const LOCK_POLL: Duration = Duration::from_millis(10);

/// A line that is no record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Line number, from 1.
    pub line: usize,
    /// Why.
    pub reason: String,
    /// Its schema, where it is a record of another one.
    pub schema: Option<u64>,
}

/// Contents of a results file.
#[derive(Debug, Clone, PartialEq)]
pub struct Log<R = Record> {
    /// Every record, in order.
    pub records: Vec<R>,
    /// Lines that are none: torn, damaged, or of another schema.
    pub skipped: Vec<Skipped>,
}

/// Where a machine's records of this month belong: `{results}/{year}/{machine}-{month}.jsonl`, by UTC.
pub fn monthly(results: &Path, machine: &str) -> PathBuf {
    monthly_at(results, machine, jiff::Timestamp::now())
}

fn monthly_at(results: &Path, machine: &str, time: jiff::Timestamp) -> PathBuf {
    results.join(time.strftime("%Y").to_string()).join(format!("{machine}-{}.jsonl", time.strftime("%m")))
}

/// Fails where [`append`] would: before a run, so that nothing is measured for a file that cannot be written.
///
/// # Errors
/// [`Error::Io`]; a file that holds something else than records.
pub fn check(path: &Path) -> Result<()> {
    writable(path)?;
    if path.is_file() {
        let log = read(path)?;
        if log.records.is_empty() && !log.skipped.is_empty() {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidData, "it holds something else than records");
            return Err(Error::Io { path: path.to_path_buf(), action: "append", source });
        }
    }
    Ok(())
}

/// [`check`] of the file alone, for lines of another kind than runs.
///
/// # Errors
/// [`Error::Io`].
pub fn writable(path: &Path) -> Result<()> {
    if path.symlink_metadata().is_ok() && !path.is_file() {
        let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
        return Err(Error::Io { path: path.to_path_buf(), action: "append", source });
    }
    if path.is_file() {
        OpenOptions::new().append(true).open(path).map_err(Error::io(path, "append"))?;
        return Ok(());
    }
    let dir = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).map_err(Error::io(dir, "create the directory"))?;
    // Whether a file can be made is only known by making one; it does not stay.
    let probe = dir.join(format!(".chiku-probe-{}", std::process::id()));
    File::create(&probe).map_err(Error::io(dir, "write to"))?;
    std::fs::remove_file(&probe).map_err(Error::io(&probe, "remove"))
}

/// Appends a record, creating the file and its directories where they are missing. Returns the torn line that the file ended
/// with, if it did.
///
/// # Errors
/// [`Error::Io`], after which the file is as it was; [`Error::Locked`].
pub fn append(path: &Path, record: &impl Serialize) -> Result<Option<Skipped>> {
    let line = serde_json::to_string(record).map_err(|source| Error::Encode { source })?;
    append_line(path, &line)
}

/// Appends a line that is no [`Record`] with the same care.
pub(crate) fn append_line(path: &Path, line: &str) -> Result<Option<Skipped>> {
    append_waiting(path, line, LOCK_WAIT)
}

fn append_waiting(path: &Path, line: &str, wait: Duration) -> Result<Option<Skipped>> {
    if let Some(dir) = path.parent().filter(|d| !d.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).map_err(Error::io(dir, "create the directory"))?;
    }
    let mut file = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .open(path)
        .map_err(Error::io(path, "open for appending"))?;
    lock(&file, path, FlockOperation::NonBlockingLockExclusive, wait)?;
    let before = file.seek(SeekFrom::End(0)).map_err(Error::io(path, "seek"))?;
    let torn = torn_end(&mut file, before).map_err(Error::io(path, "read"))?;
    let newline = if torn.is_some() { "\n" } else { "" };
    let written = file.write_all(format!("{newline}{line}\n").as_bytes()).and_then(|()| file.sync_all());
    if let Err(source) = written {
        // The write is what failed and what is reported; an undo that fails too leaves a torn line, which readers skip.
        let _ = file.set_len(before);
        return Err(Error::Io { path: path.to_path_buf(), action: "append", source });
    }
    if before == 0 {
        sync_directory(path);
    }
    // The lock ends with the file.
    Ok(torn.flatten())
}

/// `None`: the file ends with a newline or is empty. `Some(None)`: its last line only lacks one. `Some(Some(_))`: it is torn.
fn torn_end(file: &mut File, len: u64) -> std::io::Result<Option<Option<Skipped>>> {
    if len == 0 {
        return Ok(None);
    }
    let mut last = [0];
    file.seek(SeekFrom::Start(len - 1))?;
    file.read_exact(&mut last)?;
    if last == *b"\n" {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_end(&mut bytes)?;
    let start = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
    let line = bytes[..start].iter().filter(|&&b| b == b'\n').count() + 1;
    Ok(Some(parse::<Record>(&bytes[start..]).err().map(|(reason, schema)| Skipped { line, reason, schema })))
}

/// A new file is on disk once its directory entry is. Not all file systems let a directory be synced; the contents are safe
/// either way.
fn sync_directory(path: &Path) {
    let dir = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Ok(dir) = File::open(dir) {
        let _ = dir.sync_all();
    }
}

fn lock(file: &File, path: &Path, operation: FlockOperation, wait: Duration) -> Result<()> {
    let start = Instant::now();
    loop {
        match flock(file, operation) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if start.elapsed() < wait => sleep(LOCK_POLL),
            Err(Errno::WOULDBLOCK) => {
                return Err(Error::Locked { path: path.to_path_buf(), waited_s: wait.as_secs() });
            }
            Err(e) => return Err(Error::Io { path: path.to_path_buf(), action: "lock", source: e.into() }),
        }
    }
}

/// Reads a results file. A line that is no record is skipped and reported, never fatal: other records must stay readable.
///
/// # Errors
/// [`Error::Io`], [`Error::Locked`].
pub fn read(path: &Path) -> Result<Log> {
    read_as(path)
}

/// [`read`], with as much of each record as `R` holds: a file of long runs is mostly times of steps, which few analyses look at.
///
/// # Errors
/// Those of [`read`].
pub fn read_as<R: DeserializeOwned>(path: &Path) -> Result<Log<R>> {
    let mut file = File::open(path).map_err(Error::io(path, "open"))?;
    // Reading a pipe or a device may never end.
    if !file.metadata().map_err(Error::io(path, "read"))?.is_file() {
        let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
        return Err(Error::Io { path: path.to_path_buf(), action: "read", source });
    }
    lock(&file, path, FlockOperation::NonBlockingLockShared, LOCK_WAIT)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(Error::io(path, "read"))?;
    let mut log = Log { records: Vec::new(), skipped: Vec::new() };
    for (index, line) in bytes.split(|&b| b == b'\n').enumerate().filter(|(_, l)| !l.trim_ascii().is_empty()) {
        match parse(line) {
            Ok(record) => log.records.push(record),
            Err((reason, schema)) => log.skipped.push(Skipped { line: index + 1, reason, schema }),
        }
    }
    Ok(log)
}

/// [`read`] for an analysis: a file that also holds records of another schema is refused, since leaving them out would change the answer
/// unnoticed.
///
/// # Errors
/// Those of [`read`]; [`Error::Schema`].
pub fn read_uniform(path: &Path) -> Result<Log> {
    read_uniform_as(path)
}

/// [`read_uniform`] with as much of each record as `R` holds.
///
/// # Errors
/// Those of [`read_uniform`].
pub fn read_uniform_as<R: DeserializeOwned>(path: &Path) -> Result<Log<R>> {
    let log = read_as(path)?;
    match log.skipped.iter().find_map(|s| s.schema.map(|schema| (s.line, schema))) {
        Some((line, found)) => Err(Error::Schema { path: path.to_path_buf(), line, found, expected: SCHEMA }),
        None => Ok(log),
    }
}

/// Folder of what is no run: levers have records of their own.
const LEVERS: &str = "levers";

/// The results files in a folder and those below it, in the order of their paths. Links are not followed, and the records of levers are
/// left out.
///
/// # Errors
/// A folder that cannot be listed.
pub fn files(results: &Path) -> Result<Vec<PathBuf>> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(results).map_err(Error::io(results, "list"))? {
        let entry = entry.map_err(Error::io(results, "list"))?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(Error::io(results, "list"))?);
        if kind.is_dir() && entry.file_name() != LEVERS {
            out.extend(files(&path)?);
        } else if kind.is_file() && path.extension().is_some_and(|e| e == "jsonl") {
            out.push(path);
        }
    }
    out.sort();
    Ok(out)
}

/// The version alone, whatever else a line holds.
#[derive(Deserialize)]
struct Versioned {
    #[serde(default)]
    schema: Option<Value>,
}

fn parse<R: DeserializeOwned>(line: &[u8]) -> std::result::Result<R, (String, Option<u64>)> {
    let versioned: Versioned =
        serde_json::from_slice(line).map_err(|e| (format!("not a whole JSON object: {e}"), None))?;
    match versioned.schema.as_ref().and_then(Value::as_u64) {
        Some(schema) if schema == u64::from(SCHEMA) => {}
        Some(schema) => return Err((format!("schema {schema}; this program reads {SCHEMA}"), Some(schema))),
        None => return Err(("no schema version".to_string(), None)),
    }
    serde_json::from_slice(line).map_err(|e| (format!("not a record: {e}"), None))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::run;
    use crate::record::tests::setup;
    use crate::stats::BootstrapOptions;

    fn record(seed: u64) -> Record {
        let options = BootstrapOptions { seed, resamples: 100, ..Default::default() };
        Record::measured(run("plain", &[128.0, 256.0]), setup(), &options).unwrap()
    }

    fn file() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("2026/machine-01.jsonl");
        (dir, path)
    }

    fn seeds(log: &Log) -> Vec<u64> {
        log.records.iter().map(|r| r.seed).collect()
    }

    #[test]
    fn records_are_appended_and_read_in_order() {
        let (_dir, path) = file();
        for seed in [3, 1, 2] {
            assert_eq!(append(&path, &record(seed)).unwrap(), None);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!((text.lines().count(), text.ends_with("}\n")), (3, true));
        let log = read(&path).unwrap();
        assert_eq!((seeds(&log), log.skipped.len()), (vec![3, 1, 2], 0));
    }

    #[test]
    fn a_torn_last_line_is_reported_ended_and_skipped() {
        let (_dir, path) = file();
        append(&path, &record(1)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        // Cut at several places, in the middle of the second record.
        for cut in [1, 10, whole.len() / 2, whole.len() - 2] {
            std::fs::write(&path, [&whole[..], &whole[..cut]].concat()).unwrap();
            let before = read(&path).unwrap();
            assert_eq!((seeds(&before), before.skipped[0].line), (vec![1], 2), "cut at {cut}");
            let torn = append(&path, &record(7)).unwrap().unwrap();
            assert_eq!(torn.line, 2);
            let log = read(&path).unwrap();
            assert_eq!((seeds(&log), log.skipped.len()), (vec![1, 7], 1), "cut at {cut}");
        }
    }

    #[test]
    fn a_whole_last_line_without_a_newline_is_a_record() {
        let (_dir, path) = file();
        append(&path, &record(1)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.trim_end()).unwrap();
        assert_eq!(append(&path, &record(2)).unwrap(), None);
        let log = read(&path).unwrap();
        assert_eq!((seeds(&log), log.skipped.len()), (vec![1, 2], 0));
    }

    #[test]
    fn damaged_lines_and_other_schemas_do_not_hide_the_others() {
        let (_dir, path) = file();
        append(&path, &record(1)).unwrap();
        let good = std::fs::read_to_string(&path).unwrap();
        let newer = good.replace("\"schema\":1", "\"schema\":2");
        let text = format!("{good}garbage\n\n{{}}\n{newer}{{\"schema\":1}}\n{good}");
        std::fs::write(&path, [text.as_bytes(), b"\xff\xfe\n"].concat()).unwrap();
        let log = read(&path).unwrap();
        assert_eq!(seeds(&log), [1, 1]);
        let skipped: Vec<(usize, &str)> = log.skipped.iter().map(|s| (s.line, s.reason.as_str())).collect();
        assert_eq!(skipped.iter().map(|s| s.0).collect::<Vec<_>>(), [2, 4, 5, 6, 8]);
        assert!(skipped[1].1.contains("no schema") && skipped[2].1.contains("schema 2; this program reads 1"));
        assert!(skipped[3].1.starts_with("not a record: missing field"), "{}", skipped[3].1);
        let refused = read_uniform(&path).unwrap_err().to_string();
        assert!(refused.contains("machine-01.jsonl:5: a record of schema 2 among those of schema 1"), "{refused}");
        std::fs::write(&path, format!("{good}garbage\n")).unwrap();
        assert_eq!(seeds(&read_uniform(&path).unwrap()), [1]);
    }

    #[test]
    fn writers_never_interleave() {
        let (_dir, path) = file();
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || (0..10).for_each(|i| assert!(append(path, &record(writer * 10 + i)).is_ok())));
            }
        });
        let log = read(&path).unwrap();
        let mut all = seeds(&log);
        all.sort_unstable();
        assert_eq!((all, log.skipped.len()), ((0..40).collect(), 0));
    }

    #[test]
    fn a_lock_that_is_held_is_waited_for_and_then_named() {
        let (_dir, path) = file();
        append(&path, &record(1)).unwrap();
        let held = File::open(&path).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        let error = append_waiting(&path, "{}", Duration::from_millis(30)).unwrap_err();
        assert!(matches!(error, Error::Locked { .. }), "{error}");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| append(&path, &record(2)));
            sleep(Duration::from_millis(50));
            drop(held);
            assert!(waiting.join().unwrap().is_ok());
        });
        assert_eq!(seeds(&read(&path).unwrap()), [1, 2]);
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let (dir, path) = file();
        assert!(read(&path).unwrap_err().to_string().contains("machine-01.jsonl: cannot open"));
        assert!(append(dir.path(), &record(1)).unwrap_err().to_string().contains("cannot open for appending"));
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_its_paths() {
        let (dir, path) = file();
        append(&path, &record(1)).unwrap();
        for other in ["2025/b.jsonl", "2026/a.jsonl", "2026/levers/x.jsonl", "2026/notes.txt"] {
            let other = dir.path().join(other);
            std::fs::create_dir_all(other.parent().unwrap()).unwrap();
            std::fs::write(other, "").unwrap();
        }
        std::os::unix::fs::symlink(dir.path(), dir.path().join("2026/loop")).unwrap();
        let found = files(dir.path()).unwrap();
        let names: Vec<&str> = found.iter().map(|p| p.strip_prefix(dir.path()).unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["2025/b.jsonl", "2026/a.jsonl", "2026/machine-01.jsonl"]);
        assert!(files(&dir.path().join("absent")).unwrap_err().to_string().contains("absent: cannot list"));
    }

    #[test]
    fn files_are_by_year_machine_and_month() {
        let time: jiff::Timestamp = "2026-03-31T23:59:59Z".parse().unwrap();
        assert_eq!(monthly_at(Path::new("results"), "a10g", time), Path::new("results/2026/a10g-03.jsonl"));
    }
}
