//! What was measured, line by line, so that hours of work survive the program that did it.
//!
//! The first line is a [`Header`]: what the numbers depend on and the names of variants do not say. Every other line is one
//! variant on one slice, with a sum for each record, written and synced when it is known. A file whose header differs holds
//! other numbers and is refused; a last line without an end was being written when the program stopped, and is cut off. A line
//! is the same whoever asked for it: studies of the same records may share a file.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::paired::Scores;
use super::trials::Slice;
use crate::error::{Error, Result};
use crate::records::Record;

/// How the first line begins, whatever follows.
const MAGIC: &str = "{\"chiku_sensitivity\":1,";

/// What all numbers of a journal have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Version of the layout: 1. First, so that a journal is known by its first bytes.
    chiku_sensitivity: u32,
    /// Content of the checkpoint, as a hash.
    pub model: String,
    /// sha256 of the records of each slice.
    pub records: BTreeMap<String, String>,
    /// Arithmetic of the forward pass: two instruction sets round differently.
    pub arithmetic: String,
}

impl Header {
    /// For these slices of records.
    pub fn new(model: String, slices: &[&Slice], arithmetic: String) -> Header {
        let records = slices.iter().map(|s| (s.name.clone(), hash(&s.records))).collect();
        Header { chiku_sensitivity: 1, model, records, arithmetic }
    }
}

/// sha256 of ids, tokens and scored spans.
fn hash(records: &[Record]) -> String {
    let mut hasher = Sha256::new();
    for r in records {
        let span = (r.scored.start, r.scored.end);
        hasher.update(serde_json::json!([r.id, r.token_ids, span]).to_string());
        hasher.update("\n");
    }
    hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// One variant on one slice.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    slice: String,
    variant: String,
    /// Perplexity, for people.
    ppl: f64,
    nll: Vec<f64>,
}

/// Results by slice and variant, with the file that keeps them, where there is one.
pub struct Journal {
    known: BTreeMap<(String, String), Scores>,
    file: Option<(PathBuf, File)>,
}

impl Journal {
    /// One that ends with the program.
    pub fn in_memory() -> Journal {
        Journal { known: BTreeMap::new(), file: None }
    }

    /// The journal in a file, which is begun if it does not exist.
    ///
    /// # Errors
    /// [`Error::Journal`] for a file that is no journal, one of other numbers, one that another process has open, or a line in
    /// the middle that cannot be read.
    pub fn open(path: &Path, header: &Header) -> Result<Journal> {
        let io = |action| Error::io(path, action);
        let refuse = |reason: String| Error::Journal { path: path.to_path_buf(), reason };
        if path.exists() && !path.is_file() {
            return Err(refuse("is not a regular file".into()));
        }
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io("open"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(refuse("another process is writing it".into())),
            Err(TryLockError::Error(e)) => return Err(io("lock")(e)),
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io("read"))?;
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
        let begins = MAGIC.len().min(bytes.len());
        if bytes[..begins] != MAGIC.as_bytes()[..begins] {
            return Err(refuse("exists and is no sensitivity journal; give another name".into()));
        }
        let text = std::str::from_utf8(&bytes[..whole]).map_err(|_| refuse("is not UTF-8 text".into()))?;
        let mut lines = text.lines().enumerate();
        let mut known = BTreeMap::new();
        match lines.next() {
            None => {}
            Some((_, first)) => {
                let found: Header = serde_json::from_str(first)
                    .map_err(|e| refuse(format!("line 1 is no header of this version: {e}")))?;
                if found != *header {
                    return Err(refuse(difference(&found, header)));
                }
            }
        }
        for (index, line) in lines {
            let e: Entry = serde_json::from_str(line).map_err(|e| refuse(format!("line {}: {e}", index + 1)))?;
            known.insert((e.slice, e.variant), Scores { nll: e.nll });
        }
        file.set_len(whole as u64).map_err(io("cut"))?;
        file.seek(SeekFrom::End(0)).map_err(io("read"))?;
        let mut journal = Journal { known, file: Some((path.to_path_buf(), file)) };
        if whole == 0 {
            journal.append(header)?;
        }
        Ok(journal)
    }

    /// Results known.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// What is known of a variant on a slice.
    pub fn get(&self, slice: &str, variant: &str) -> Option<&Scores> {
        self.known.get(&(slice.to_string(), variant.to_string()))
    }

    /// Keeps a result.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn put(&mut self, slice: &str, variant: &str, scores: &Scores, ppl: f64) -> Result<()> {
        let (slice, variant) = (slice.to_string(), variant.to_string());
        self.append(&Entry { slice: slice.clone(), variant: variant.clone(), ppl, nll: scores.nll.clone() })?;
        self.known.insert((slice, variant), scores.clone());
        Ok(())
    }

    fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let text = serde_json::to_string(line).map_err(|e| Error::io(path, "write")(e.into()))?;
        file.write_all(format!("{text}\n").as_bytes()).map_err(Error::io(path, "write"))?;
        file.sync_data().map_err(Error::io(path, "sync"))
    }
}

/// What two headers disagree about.
fn difference(found: &Header, wanted: &Header) -> String {
    let fields = [
        ("model", found.model == wanted.model),
        ("records", found.records == wanted.records),
        ("arithmetic", found.arithmetic == wanted.arithmetic),
    ];
    let differing: Vec<&str> = fields.iter().filter(|(_, same)| !same).map(|(name, _)| *name).collect();
    format!("holds results of another run (it differs in {}); give another name", differing.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Record> {
        vec![Record { id: "a".into(), token_ids: vec![2, 3, 4], scored: 1..3 }]
    }

    fn of(records: Vec<Record>) -> Header {
        let slice = |name: &str, records| Slice { name: name.into(), records };
        Header::new("m".into(), &[&slice("a", records), &slice("b", vec![])], "f32".into())
    }

    fn header() -> Header {
        of(records())
    }

    fn scores(nll: &[f64]) -> Scores {
        Scores { nll: nll.to_vec() }
    }

    /// A journal with two results.
    fn written(path: &Path) -> Vec<u8> {
        let mut journal = Journal::open(path, &header()).unwrap();
        journal.put("a", "-2", &scores(&[703.123456789, 1e-9]), 1.0).unwrap();
        journal.put("b", "-2", &scores(&[7.0]), 1.0).unwrap();
        drop(journal);
        std::fs::read(path).unwrap()
    }

    fn reason(path: &Path, header: &Header) -> String {
        Journal::open(path, header).err().unwrap().to_string()
    }

    #[test]
    fn results_come_back_to_the_bit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let bytes = written(&path);
        let mut journal = Journal::open(&path, &header()).unwrap();
        assert_eq!(journal.len(), 2);
        assert_eq!(journal.get("a", "-2"), Some(&scores(&[703.123456789, 1e-9])));
        assert_eq!(journal.get("b", "-2"), Some(&scores(&[7.0])));
        assert_eq!(journal.get("a", "-3"), None);
        journal.put("a", "-3", &scores(&[1.0, 2.0]), 1.0).unwrap();
        drop(journal);
        assert!(std::fs::read(&path).unwrap().starts_with(&bytes), "only appended to");
        assert_eq!(Journal::open(&path, &header()).unwrap().len(), 3);
    }

    #[test]
    fn a_torn_line_is_cut_off_wherever_it_tore() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let bytes = written(&path);
        let ends: Vec<usize> = (0..bytes.len()).filter(|&i| bytes[i] == b'\n').map(|i| i + 1).collect();
        for cut in 0..bytes.len() {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let known = Journal::open(&path, &header()).unwrap().len();
            let whole = ends.iter().copied().rfind(|&e| e <= cut).unwrap_or(0);
            assert_eq!(known, ends.iter().filter(|&&e| e <= cut).count().saturating_sub(1), "cut at {cut}");
            // Two results are appended to what was whole.
            let results = bytes.len() - ends[0];
            assert_eq!(written(&path).len(), whole.max(ends[0]) + results, "cut at {cut}");
        }
    }

    #[test]
    fn other_numbers_are_refused_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let bytes = written(&path);
        let mut other = records();
        other[0].token_ids[2] = 5;
        let changed = |h: Header| reason(&path, &h);
        assert!(changed(Header { model: "n".into(), ..header() }).contains("differs in model)"));
        let both = Header { arithmetic: "avx2".into(), ..of(other) };
        assert!(changed(both).contains("differs in records, arithmetic)"));
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "left as it was");
    }

    #[test]
    fn what_is_no_journal_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        for text in ["hello", "{\"id\": 1}\n", "{\"chiku_sensitivity\":1,\"x\":2}\n", "\n"] {
            std::fs::write(&path, text).unwrap();
            let message = reason(&path, &header());
            assert!(message.contains("no sensitivity journal") || message.contains("no header"), "{text}: {message}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert!(reason(dir.path(), &header()).contains("not a regular file"));
        let bytes = written(&dir.path().join("good"));
        let text = String::from_utf8(bytes).unwrap().replacen("\"slice\":\"a\"", "\"slice\":3", 1);
        std::fs::write(&path, text).unwrap();
        assert!(reason(&path, &header()).contains("line 2"));
    }

    #[test]
    fn two_processes_do_not_share_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let _open = Journal::open(&path, &header()).unwrap();
        assert!(reason(&path, &header()).contains("another process"));
    }
}
