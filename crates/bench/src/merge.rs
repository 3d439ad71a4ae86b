//! Records of many machines brought into one results file.
//!
//! Each node of a fan-out writes a file of its own. Merging reads all of them before it writes anything, appends what the results
//! file does not hold yet, and can be repeated: a record that is there already is not added again.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{Error, Result};
use crate::log::{Skipped, append, check, read};
use crate::record::Record;

/// What a merge did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Merged {
    /// Records that were added.
    pub added: usize,
    /// Records that the results file already held, or that two files share.
    pub known: usize,
    /// Different nodes among all records that were read.
    pub nodes: usize,
    /// Lines that are no record, by file.
    pub skipped: Vec<(PathBuf, Skipped)>,
}

/// Appends the records of `files` to `out`, in the order given.
///
/// # Errors
/// A file that cannot be read or holds no record, before anything is written; `out` among the files; those of [`append`], after which
/// what was added stays and the merge can be repeated.
pub fn merge(files: &[PathBuf], out: &Path) -> Result<Merged> {
    let same =
        |file: &Path| file == out || matches!((file.canonicalize(), out.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if let Some(file) = files.iter().find(|f| same(f)) {
        let (option, expected) = ("out", "another file than those that are merged");
        return Err(Error::Option { option, expected, found: file.display().to_string() });
    }
    let mut records = Vec::new();
    let mut skipped = Vec::new();
    for file in files {
        let log = read(file)?;
        if log.records.is_empty() {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidData, "it holds no records");
            return Err(Error::Io { path: file.clone(), action: "merge", source });
        }
        records.extend(log.records);
        skipped.extend(log.skipped.into_iter().map(|s| (file.clone(), s)));
    }
    check(out)?;
    let held = if out.is_file() { read(out)?.records } else { Vec::new() };
    let mut lines = held.iter().map(line).collect::<Result<HashSet<String>>>()?;
    let nodes = records.iter().filter_map(|r| r.node.as_deref()).collect::<HashSet<&str>>().len();
    let (mut added, mut known) = (0, 0);
    for record in &records {
        if !lines.insert(line(record)?) {
            known += 1;
            continue;
        }
        if let Some(torn) = append(out, record)? {
            skipped.push((out.to_path_buf(), torn));
        }
        added += 1;
    }
    Ok(Merged { added, known, nodes, skipped })
}

fn line(record: &Record) -> Result<String> {
    serde_json::to_string(record).map_err(|source| Error::Encode { source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::run;
    use crate::record::tests::setup;
    use crate::stats::BootstrapOptions;

    fn record(node: &str, wall_ms: f64) -> Record {
        let run = run("plain", &[wall_ms, wall_ms]);
        let mut record = Record::measured(run, setup(), &BootstrapOptions::default()).unwrap();
        record.node = Some(node.into());
        record
    }

    #[test]
    fn nodes_are_brought_together_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        append(&path("a"), &record("n1", 100.0)).unwrap();
        append(&path("a"), &record("n1", 110.0)).unwrap();
        append(&path("b"), &record("n2", 120.0)).unwrap();
        std::fs::write(path("b"), std::fs::read_to_string(path("b")).unwrap() + "{\"schema\":1,\"ki").unwrap();
        let files = [path("a"), path("b")];
        let merged = merge(&files, &path("all")).unwrap();
        assert_eq!((merged.added, merged.known, merged.nodes), (3, 0, 2));
        assert_eq!(merged.skipped.len(), 1);
        assert_eq!((merged.skipped[0].0.clone(), merged.skipped[0].1.line), (path("b"), 2));
        let all = read(&path("all")).unwrap();
        assert!(all.skipped.is_empty());
        let nodes: Vec<&str> = all.records.iter().map(|r| r.node.as_deref().unwrap()).collect();
        assert_eq!(nodes, ["n1", "n1", "n2"]);

        append(&path("c"), &record("n3", 90.0)).unwrap();
        let again = merge(&[path("a"), path("c"), path("b")], &path("all")).unwrap();
        assert_eq!((again.added, again.known), (1, 3));
        assert_eq!(read(&path("all")).unwrap().records.len(), 4);
    }

    #[test]
    fn nothing_is_written_where_a_file_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        append(&path("a"), &record("n1", 100.0)).unwrap();
        std::fs::write(path("empty"), "").unwrap();
        std::fs::write(path("text"), "no record\n").unwrap();
        for wrong in ["absent", "empty", "text"] {
            let message = merge(&[path("a"), path(wrong)], &path("all")).unwrap_err().to_string();
            assert!(message.contains(wrong), "{message}");
            assert!(!path("all").exists(), "{wrong}");
        }
        let before = std::fs::read(path("a")).unwrap();
        assert!(merge(&[path("a")], &path("a")).unwrap_err().to_string().starts_with("out: "));
        assert_eq!(std::fs::read(path("a")).unwrap(), before);
    }
}
