//! What a run has finished so far, kept beside its results file until its record is written: a process that is killed loses no request
//! that was done.
//!
//! A journal is a file `.NAME.unfinished-PID`: a record without samples for each target, then a line for each finished request. A line
//! is written before the next request begins, so that a kill loses none; a thread of its own syncs it, so that waiting for the
//! disk is not timed. Its owner holds a lock on it; a journal that nobody holds is one of a process that is gone, and the next
//! run into the same results file makes a record of it that says so.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::log;
use crate::protocol::{PromptSample, Run};
use crate::record::{Discarded, Record, RunResult};
use crate::stats::BootstrapOptions;

/// Why a recovered record is not whole.
pub const KILLED: &str = "the process ended before the run did, without a word; its finished requests were recovered";

/// The journal of a run in progress.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Finished requests in it.
    kept: usize,
    sync: Option<Sender<()>>,
    syncing: Option<JoinHandle<()>>,
}

/// A finished request.
#[derive(Serialize, Deserialize)]
struct Line<S> {
    label: String,
    sample: S,
}

impl Journal {
    /// Begins one beside a results file. `heads` are records without samples, one a target.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn begin(results: &Path, heads: &[Record]) -> Result<Journal> {
        let path = place(results).join(format!("{}{}", prefix(results), std::process::id()));
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io(&path, "create"))?;
        let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
        locked.map_err(|e| Error::Io { path: path.clone(), action: "lock", source: e.into() })?;
        // One of an earlier run of this very process is done with: its record was written, or its writing failed and was told.
        file.set_len(0).map_err(Error::io(&path, "empty"))?;
        let (sender, receiver) = channel::<()>();
        let twin = file.try_clone().map_err(Error::io(&path, "open twice"))?;
        let syncing = std::thread::spawn(move || {
            while receiver.recv().is_ok() {
                // A disk that refuses shows when the record itself is written, and fails there.
                let _ = twin.sync_data();
            }
        });
        let mut journal = Journal { path, file, kept: 0, sync: Some(sender), syncing: Some(syncing) };
        for head in heads {
            journal.write(head)?;
        }
        Ok(journal)
    }

    /// Keeps a finished request.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn keep(&mut self, label: &str, sample: &PromptSample) -> Result<()> {
        self.kept += 1;
        self.write(&Line { label: label.to_string(), sample })
    }

    fn write(&mut self, value: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(value).map_err(|source| Error::Encode { source })?;
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(Error::io(&self.path, "append"))?;
        if let Some(sync) = &self.sync {
            // The thread lives as long as this does.
            let _ = sync.send(());
        }
        Ok(())
    }

    /// The record is written: the journal goes.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn finish(mut self) -> Result<()> {
        // The drop has nothing left to remove.
        self.kept = self.kept.max(1);
        fs::remove_file(&self.path).map_err(Error::io(&self.path, "remove"))
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        drop(self.sync.take());
        if let Some(thread) = self.syncing.take() {
            // It does nothing that panics.
            let _ = thread.join();
        }
        if self.kept == 0 {
            // An error before the first request: nothing is lost with it, and nobody is there to tell.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn place(results: &Path) -> &Path {
    results.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn prefix(results: &Path) -> String {
    let name = results.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    format!(".{name}.unfinished-")
}

/// Appends to a results file what its killed runs had finished, and removes their journals. Returns the records; runs that had finished
/// nothing leave none.
///
/// # Errors
/// [`Error::Io`], those of [`log::append`]; a journal that cannot be recovered stays.
pub fn recover(results: &Path) -> Result<Vec<Record>> {
    let (dir, prefix) = (place(results), prefix(results));
    let mut out = Vec::new();
    let Ok(entries) = fs::read_dir(dir) else { return Ok(out) };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    paths.retain(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix)));
    paths.sort();
    for path in paths {
        let mut file = File::open(&path).map_err(Error::io(&path, "open"))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // Its owner lives.
            Err(Errno::WOULDBLOCK) => continue,
            other => other.map_err(|e| Error::Io { path: path.clone(), action: "lock", source: e.into() })?,
        }
        // Another process may have recovered and removed it between the two.
        if file.metadata().map_err(Error::io(&path, "read"))?.nlink() == 0 {
            continue;
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(Error::io(&path, "read"))?;
        for record in records(&bytes)? {
            log::append(results, &record)?;
            out.push(record);
        }
        fs::remove_file(&path).map_err(Error::io(&path, "remove"))?;
    }
    Ok(out)
}

/// The records of a journal, those that have a sample. Lines that are torn or strange are passed over.
fn records(bytes: &[u8]) -> Result<Vec<Record>> {
    let lines = || bytes.split(|&b| b == b'\n');
    let samples: Vec<Line<PromptSample>> = lines().filter_map(|l| serde_json::from_slice(l).ok()).collect();
    let mut out = Vec::new();
    for mut record in lines().filter_map(|l| serde_json::from_slice::<Record>(l).ok()) {
        let own = samples.iter().filter(|l| l.label == record.target.label).map(|l| l.sample.clone());
        let mut run = Run::new(&record.target.label, record.planned);
        run.samples = own.collect();
        if run.samples.is_empty() {
            continue;
        }
        record.result = RunResult::new(&run, &BootstrapOptions { seed: record.seed, ..Default::default() })?;
        record.samples = run.samples;
        (record.complete, record.failure, record.after) = (false, Some(KILLED.into()), None);
        record.discarded.push(Discarded { what: "the request in progress".into(), reason: KILLED.into() });
        out.push(record);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::run;
    use crate::record::tests::setup;

    fn head(label: &str) -> Record {
        let mut setup = setup();
        setup.target.label = label.into();
        let mut head = Record::measured(Run::new(label, 5), setup, &BootstrapOptions::default()).unwrap();
        head.discarded.clear();
        head
    }

    /// A results file in a folder of its own, and the journal of two targets that have done two requests and one.
    fn begun(dir: &Path) -> (PathBuf, Journal) {
        let results = dir.join("r.jsonl");
        let mut journal = Journal::begin(&results, &[head("a"), head("b")]).unwrap();
        let done = run("a", &[100.0, 300.0]);
        journal.keep("a", &done.samples[0]).unwrap();
        journal.keep("b", &done.samples[0]).unwrap();
        journal.keep("a", &done.samples[1]).unwrap();
        (results, journal)
    }

    /// As a kill leaves it: the file stays, the lock goes.
    fn killed(journal: Journal) -> PathBuf {
        journal.path.clone()
    }

    #[test]
    fn what_a_killed_run_had_done_becomes_a_record_that_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let (results, journal) = begun(dir.path());
        assert!(recover(&results).unwrap().is_empty(), "its owner lives");
        let left = killed(journal);
        // The last line was being written.
        let mut file = OpenOptions::new().append(true).open(&left).unwrap();
        file.write_all(b"{\"label\":\"b\",\"sample\":{\"id\":\"p1\",\"prom").unwrap();
        let found = recover(&results).unwrap();
        assert_eq!(found, log::read(&results).unwrap().records);
        let told: Vec<(&str, usize, usize)> =
            found.iter().map(|r| (r.target.label.as_str(), r.samples.len(), r.planned)).collect();
        assert_eq!(told, [("a", 2, 5), ("b", 1, 5)]);
        let a = &found[0];
        assert_eq!((a.complete, a.failure.as_deref(), &a.after), (false, Some(KILLED), &None));
        assert!((a.result.as_ref().unwrap().tokens_per_s - 500.0).abs() < 1e-9, "{:?}", a.result);
        assert!(!left.exists() && recover(&results).unwrap().is_empty());
    }

    #[test]
    fn a_number_of_planned_requests_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let results = dir.path().join("r.jsonl");
        let mut absurd = head("a");
        absurd.planned = usize::MAX >> 4;
        let mut journal = Journal::begin(&results, &[absurd]).unwrap();
        journal.keep("a", &run("a", &[100.0]).samples[0]).unwrap();
        killed(journal);
        assert_eq!(recover(&results).unwrap()[0].samples.len(), 1);
    }

    #[test]
    fn a_finished_run_leaves_nothing_and_one_that_did_nothing_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let (results, journal) = begun(dir.path());
        journal.finish().unwrap();
        // An error before the first request.
        assert!(!killed(Journal::begin(&results, &[head("a")]).unwrap()).exists());
        // A kill before it.
        let mut early = Journal::begin(&results, &[head("a")]).unwrap();
        early.kept = 1;
        let empty = killed(early);
        assert!(empty.exists() && recover(&results).unwrap().is_empty() && !empty.exists());
        assert!(!results.exists());
        // Of another results file it takes nothing.
        let (_, journal) = begun(dir.path());
        killed(journal);
        assert!(recover(&dir.path().join("other.jsonl")).unwrap().is_empty());
        assert_eq!(recover(&results).unwrap().len(), 2);
    }
}
