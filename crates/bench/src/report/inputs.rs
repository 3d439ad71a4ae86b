//! What a report is made of: results files, and what others published.

use std::path::{Path, PathBuf};

use serde::de::{DeserializeOwned, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::Run;
use crate::acceptance::AcceptanceReport;
use crate::error::{Error, Result};
use crate::gap::pairs::Pairs;
use crate::import::board::Board;
use crate::import::steptime::StepTimes;
use crate::import::{board, draws, pairs, steptime};
use crate::log;
use crate::luck::Draw;
use crate::profile::Profile;

/// A timed request without its single steps; a field that a record lacks is 0.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Sums {
    /// Tokens of the completion.
    pub completion_tokens: usize,
    /// From the end of the previous request to the end of this one.
    pub wall_ms: f64,
    /// Time to the first token.
    pub prefill_ms: f64,
    /// Time of all steps after it.
    pub decode_ms: f64,
    /// How many these are.
    #[serde(rename = "step_ms", deserialize_with = "length")]
    pub steps: usize,
}

/// The length of a list, whatever it holds.
fn length<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<usize, D::Error> {
    struct Length;
    impl<'de> Visitor<'de> for Length {
        type Value = usize;
        fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
            f.write_str("a list")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> std::result::Result<usize, A::Error> {
            let mut count = 0;
            while items.next_element::<IgnoredAny>()?.is_some() {
                count += 1;
            }
            Ok(count)
        }
    }
    deserializer.deserialize_seq(Length)
}

/// Where to read.
#[derive(Debug, Clone, Default)]
pub struct Paths {
    /// Folder of results files.
    pub results: Option<PathBuf>,
    /// A leaderboard.
    pub board: Option<PathBuf>,
    /// Repeated runs (CSV).
    pub draws: Option<PathBuf>,
    /// Public and private results (CSV).
    pub pairs: Option<PathBuf>,
    /// A server's step-time log.
    pub steptime: Option<PathBuf>,
    /// What `bench acceptance --json` printed.
    pub acceptance: Vec<PathBuf>,
    /// What `bench profile --json` printed.
    pub profiles: Vec<PathBuf>,
}

/// A results file.
#[derive(Debug, Clone, PartialEq)]
pub struct File {
    /// Its path below the folder of results.
    pub name: String,
    /// What it holds.
    pub log: log::Log<Run>,
}

/// Repeated runs by group, in the order of their file.
pub type Groups = Vec<(String, Vec<Draw>)>;

/// All that was read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Inputs {
    /// Results files.
    pub files: Vec<File>,
    /// A board, by its file's name.
    pub board: Option<(String, Board)>,
    /// Repeated runs by group.
    pub draws: Option<(String, Groups)>,
    /// Public and private results.
    pub pairs: Option<(String, Pairs)>,
    /// Times of a step.
    pub steptime: Option<(String, StepTimes)>,
    /// Acceptance by depth, by the file's name without its ending.
    pub acceptance: Vec<(String, AcceptanceReport)>,
    /// Steps taken apart, likewise.
    pub profiles: Vec<(String, Profile)>,
}

impl Inputs {
    /// Reads everything.
    ///
    /// # Errors
    /// A file that cannot be read or is not of its kind; records of another schema; nothing at all to show.
    pub fn read(paths: &Paths) -> Result<Inputs> {
        let mut inputs = Inputs::default();
        if let Some(results) = &paths.results {
            for path in log::files(results)? {
                let name = path.strip_prefix(results).unwrap_or(&path).display().to_string();
                inputs.files.push(File { name, log: log::read_uniform_as(&path)? });
            }
        }
        inputs.board = named(&paths.board, board::Board::read)?;
        inputs.draws = named(&paths.draws, draws::read)?;
        inputs.pairs = named(&paths.pairs, pairs::read)?;
        inputs.steptime = named(&paths.steptime, steptime::read)?;
        inputs.acceptance = paths.acceptance.iter().map(|p| json(p)).collect::<Result<_>>()?;
        inputs.profiles = paths.profiles.iter().map(|p| json(p)).collect::<Result<_>>()?;
        if let Some((path, (_, p))) =
            paths.profiles.iter().zip(&inputs.profiles).find(|(_, (_, p))| p.ms_per_step <= 0.0)
        {
            let what =
                format!("a profile of steps that take {} ms; make it again with `chiku bench profile`", p.ms_per_step);
            return Err(Error::Empty { path: path.clone(), what });
        }
        let records: usize = inputs.files.iter().map(|f| f.log.records.len()).sum();
        let others = [&paths.board, &paths.draws, &paths.pairs, &paths.steptime].iter().any(|p| p.is_some());
        if records == 0 && !others && inputs.acceptance.is_empty() && inputs.profiles.is_empty() {
            let path = paths.results.clone().unwrap_or_else(|| "results".into());
            let what =
                "no records to report; make some with `chiku bench run`, name another folder, or give a board".into();
            return Err(Error::Empty { path, what });
        }
        Ok(inputs)
    }

    /// Every record, file by file.
    pub(crate) fn runs(&self) -> Vec<&Run> {
        self.files.iter().flat_map(|f| &f.log.records).collect()
    }
}

/// A file's name, without its folder, and what it holds.
fn named<T>(path: &Option<PathBuf>, read: impl Fn(&Path) -> Result<T>) -> Result<Option<(String, T)>> {
    let of = |path: &PathBuf| {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        Ok((name, read(path)?))
    };
    path.as_ref().map(of).transpose()
}

/// What a command printed as JSON, by the file's name without its ending.
fn json<T: DeserializeOwned>(path: &Path) -> Result<(String, T)> {
    let name = path.file_stem().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let text = ppl::jsonl::read_text(path)?;
    let value = serde_json::from_str(&text).map_err(|source| Error::Json { path: path.to_path_buf(), source })?;
    Ok((name, value))
}
