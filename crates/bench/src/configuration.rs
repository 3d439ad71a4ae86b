//! A configuration to be measured, as a TOML file says it and as a record keeps it: the program, the checkpoint and how it is run, nothing
//! of how it is measured.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::log;
use crate::record::Record;

/// What the command line of a run says about the target. Fields are named as the options are.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Configuration {
    /// Name in reports; the file's, where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The program to run it with, a `chiku`; this one where there is none. Not in a record, which has the hash of the one that ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub binary: Option<String>,
    /// A checkpoint directory, or `nano`. In a record: no more of it than its last component, unless it was relative.
    pub model: String,
    /// `mtp`, `ngram` or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<String>,
    /// Directory of the drafter, or `nano`. In a record: as for `model`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafter: Option<String>,
    /// Drafts a step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub k: Option<usize>,
    /// Branches at each depth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree: Option<Vec<usize>>,
    /// Clusters of the drafter's head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub centroids: Option<usize>,
    /// `hf` or `vllm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_convention: Option<String>,
    /// `native`, `f32` or `int8`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<String>,
    /// Threads; 0 for one each core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Most positions of a sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
}

/// Largest configuration.
const FILE_LIMIT: u64 = 1 << 20;

impl Configuration {
    /// Reads a TOML file.
    ///
    /// # Errors
    /// Names the file, and the line where it is not TOML or a field is unknown or of the wrong type.
    pub fn read(path: &Path) -> Result<Configuration> {
        let text = runtime::files::read_text(path, FILE_LIMIT)?;
        let mut read: Configuration = toml::from_str(&text).map_err(|e| {
            let line = e.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count() as u64);
            Error::Line { path: path.to_path_buf(), line, reason: e.message().to_string() }
        })?;
        if read.label.is_none() {
            read.label = path.file_stem().map(|s| s.to_string_lossy().into_owned());
        }
        Ok(read)
    }

    /// For a record, which names no directory of a machine.
    pub fn without_places(mut self) -> Configuration {
        self.model = place(&self.model);
        self.drafter = self.drafter.as_deref().map(place);
        self.binary = None;
        self
    }
}

/// A relative directory as it is, of an absolute one the last component.
fn place(dir: &str) -> String {
    match Path::new(dir) {
        path if path.is_absolute() => path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned()),
        _ => dir.to_string(),
    }
}

/// The last good record of a machine: complete, with a result, and its gate not failed. Looks into `files`, the newest first by the time
/// that the records tell.
///
/// # Errors
/// A file that cannot be read; [`Error::Refused`] where there is no such record with a configuration.
pub fn last_good(files: &[PathBuf], machine: &str) -> Result<Record> {
    let mut best: Option<Record> = None;
    for file in files {
        for record in log::read(file)?.records {
            let good = record.complete
                && record.result.is_some()
                && record.configuration.is_some()
                && record.gate.as_ref().is_none_or(|gate| gate.passed)
                && record.environment.machine() == machine;
            // Times are RFC 3339 in UTC, so text sorts as they do.
            if good && best.as_ref().is_none_or(|b| b.time <= record.time) {
                best = Some(record);
            }
        }
    }
    best.ok_or_else(|| {
        let names: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
        let place = if names.is_empty() { "no results file".to_string() } else { names.join(", ") };
        Error::Refused {
            reason: format!(
                "`base` is the configuration of this machine's last good record, and there is none ({place}); make one with \
                 `chiku bench run`, or name a TOML file"
            ),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::run;
    use crate::record::tests::setup;
    use crate::stats::BootstrapOptions;

    fn toml(text: &str) -> Result<Configuration> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep.toml");
        std::fs::write(&path, text).unwrap();
        Configuration::read(&path)
    }

    #[test]
    fn a_file_says_what_the_options_say() {
        let c =
            toml("model = \"nano\"\ndrafter = \"nano\"\nk = 5\ntree = [1, 1]\ndraft-convention = \"vllm\"\n").unwrap();
        assert_eq!((c.label.as_deref(), c.k, c.tree), (Some("deep"), Some(5), Some(vec![1, 1])));
        assert_eq!(c.draft_convention.as_deref(), Some("vllm"));
        let bad = |text: &str| toml(text).unwrap_err().to_string();
        assert!(
            bad("model = \"nano\"\ndepth = 3\n").contains("deep.toml:2: unknown field `depth`"),
            "{}",
            bad("depth = 3")
        );
        assert!(bad("k = 3\n").contains("missing field `model`"));
        assert!(bad("model = 3\n").contains("deep.toml:1: invalid type"));
        assert!(bad("model = \n").contains("deep.toml:1: "));
    }

    #[test]
    fn a_record_names_no_directory_of_a_machine() {
        let (model, drafter) = ("/home/somebody/models/e4b".to_string(), Some("target/draft".to_string()));
        let binary = Some("/home/somebody/chiku".to_string());
        let kept = Configuration { model, drafter, binary, ..Default::default() }.without_places();
        assert_eq!((kept.model.as_str(), kept.drafter.as_deref(), kept.binary), ("e4b", Some("target/draft"), None));
    }

    #[test]
    fn the_last_good_record_is_whole_and_of_this_machine() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.jsonl");
        let machine = setup().environment.machine();
        let write = |time: &str, change: &dyn Fn(&mut Record)| {
            let options = BootstrapOptions { resamples: 100, ..Default::default() };
            let mut r = Record::measured(run("a", &[1.0, 2.0]), setup(), &options).unwrap();
            (r.time, r.configuration) = (time.into(), Some(Configuration { model: time.into(), ..Default::default() }));
            change(&mut r);
            log::append(&path, &r).unwrap();
        };
        let files = [path.clone()];
        write("2026-01-03", &|r| r.complete = false);
        write("2026-01-04", &|r| r.configuration = None);
        write("2026-01-05", &|r| r.environment.cpu = Some("another".into()));
        write("2026-01-06", &|r| r.result = None);
        let none = last_good(&files, &machine).unwrap_err().to_string();
        assert!(none.contains("there is none") && none.contains("r.jsonl"), "{none}");
        write("2026-01-02", &|_| ());
        write("2026-01-01", &|_| ());
        assert_eq!(last_good(&files, &machine).unwrap().configuration.unwrap().model, "2026-01-02");
    }
}
