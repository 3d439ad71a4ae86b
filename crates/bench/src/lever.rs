//! Levers: one knob at a time, with what was predicted of it, what was measured, why, and whether it *converts*: makes whole requests
//! faster, by at least 1 % with the interval on one side, at a perplexity of at most 1.05 times the original's.
//!
//! Measured levers are measured twice, on nano, whose text means something, and at the width of E4B (8 synthetic layers), whose times mean
//! something. A lever converts where some setting of it does on both. Adding one is a file that implements [`Lever`] and a line of [`ALL`].
//! What does not convert is kept, too: the same idea comes back otherwise.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::compare::{Comparison, MIN_EFFECT};
use crate::environment::{Binary, Environment};
use crate::error::{Error, Result};
use crate::record::Kind;
use crate::stats::Estimate;
use crate::stats::paired::Shift;

mod best_of_n;
mod bits;
mod centroids;
mod drafter_bits;
mod group;
mod k;
mod lab;
mod layers;
mod ngram;
mod scripted;
mod split;
mod synthetic_drafter;
mod tree;
mod vocabulary;
mod window;

pub use lab::{FEWEST, Lab, LabOptions, Subject};

/// Version of a lever's record.
pub const SCHEMA: u32 = 1;

/// Largest perplexity that a lever may cost, relative to the original: the field's rule.
const PPL_TOLERANCE: f64 = ppl::verify::PPL_TOLERANCE;

/// A knob.
pub trait Lever: Sync {
    /// Name on the command line.
    fn name(&self) -> &'static str;

    /// What is turned.
    fn what(&self) -> &'static str;

    /// What was expected before it was measured, and from where.
    fn prediction(&self) -> &'static str;

    /// Why it does what it does.
    fn mechanism(&self) -> &'static str;

    /// Measures it.
    ///
    /// # Errors
    /// Those of the measurement.
    fn measure(&self, lab: &mut Lab) -> Result<Evidence>;
}

/// Every lever, in the order of the list.
pub const ALL: [&dyn Lever; 12] = [
    &window::Window,
    &layers::Layers,
    &ngram::Ngram,
    &k::Depth,
    &centroids::Centroids,
    &tree::Tree,
    &split::Split,
    &bits::Width,
    &vocabulary::Vocabulary,
    &group::Group,
    &drafter_bits::DrafterBits,
    &best_of_n::BestOfN,
];

/// The lever of that name.
///
/// # Errors
/// None has it; the message names those that there are.
pub fn named(name: &str) -> Result<&'static dyn Lever> {
    ALL.into_iter().find(|l| l.name() == name).ok_or_else(|| Error::Option {
        option: "lever",
        expected: "window, layers, ngram, k, centroids, tree, split, bits, vocabulary, group, drafter-bits, best-of-n, list or all",
        found: name.to_string(),
    })
}

/// What there is to judge a lever by.
pub enum Evidence {
    /// Both subjects, each with its trials.
    Trials(Vec<(Subject, Vec<Trial>)>),
    /// A calculation: whether it converts, and the numbers.
    Projected(bool, serde_json::Value),
    /// Why this machine cannot tell.
    NeedsGpu(&'static str),
}

/// One setting held against the base, request by request, in turn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The setting.
    pub setting: String,
    /// What it is held against.
    pub base: String,
    /// Tokens a second of the setting over those of the base, with the interval over prompts.
    pub speedup: Estimate,
    /// The same of the typical prompt, which one stalled request does not move: what the verdict rests on. `None` in older records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub typical: Option<Shift>,
    /// The same for steps a second.
    pub step_rate: Option<Estimate>,
    /// The same for tokens a step.
    pub tokens_per_step: Option<Estimate>,
    /// Prompts.
    pub prompts: usize,
    /// Prompts on which the two wrote different text.
    pub different_outputs: usize,
    /// Bytes of weights of a step over those of the base.
    pub bytes: f64,
    /// Perplexity over that of the original; `None` where weights are random or nothing of the model is changed, and a number beyond 1e300 where
    /// it is infinite: some target's token was pruned.
    pub ppl: Option<f64>,
    /// Faster, and good enough.
    pub converts: bool,
}

impl Trial {
    fn new(setting: &str, base: &str, c: Comparison, bytes: f64, ppl: Option<f64>) -> Trial {
        let faster = c.typical.is_some_and(|t| t.low > 1.0 && t.value >= 1.0 + MIN_EFFECT);
        Trial {
            setting: setting.into(),
            base: base.into(),
            speedup: c.speedup,
            typical: c.typical,
            step_rate: c.step_rate,
            tokens_per_step: c.tokens_per_step,
            prompts: c.pairs,
            different_outputs: c.different_outputs,
            bytes,
            ppl,
            converts: faster && ppl.is_none_or(|p| p <= PPL_TOLERANCE),
        }
    }
}

/// What a lever comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Whole requests are faster.
    Converts,
    /// They are not, or the model is not the same any more.
    DoesNotConvert,
    /// This machine cannot tell.
    NeedsGpu,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Verdict::Converts => "converts",
            Verdict::DoesNotConvert => "does not convert",
            Verdict::NeedsGpu => "needs a GPU",
        })
    }
}

/// The trials of one subject.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OnSubject {
    /// Which.
    pub subject: String,
    /// Whether any setting converts on it.
    pub verdict: Verdict,
    /// Each setting.
    pub trials: Vec<Trial>,
}

/// A lever as it is recorded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// When: RFC 3339, UTC.
    pub time: String,
    /// Its name.
    pub lever: String,
    /// What is turned.
    pub what: String,
    /// What was expected.
    pub prediction: String,
    /// Why it does what it does.
    pub mechanism: String,
    /// What it comes to.
    pub verdict: Verdict,
    /// Where the numbers come from; `None` where there are none.
    pub kind: Option<Kind>,
    /// Why there are none.
    pub reason: Option<String>,
    /// The measurements.
    pub subjects: Vec<OnSubject>,
    /// The calculation, where it is one.
    pub projection: Option<serde_json::Value>,
    /// Prompts and tokens of a trial.
    pub protocol: LabOptions,
    /// The program.
    pub binary: Binary,
    /// The machine.
    pub environment: Environment,
}

/// Measures a lever and judges it.
///
/// # Errors
/// Those of the measurement.
pub fn run(lever: &dyn Lever, lab: &mut Lab, binary: &Binary) -> Result<Report> {
    let environment = Environment::capture();
    let evidence = lever.measure(lab)?;
    let convert = |yes: bool| if yes { Verdict::Converts } else { Verdict::DoesNotConvert };
    let mut report = Report {
        schema: SCHEMA,
        time: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        lever: lever.name().into(),
        what: lever.what().into(),
        prediction: lever.prediction().into(),
        mechanism: lever.mechanism().into(),
        verdict: Verdict::NeedsGpu,
        kind: None,
        reason: None,
        subjects: Vec::new(),
        projection: None,
        protocol: *lab.options(),
        binary: binary.clone(),
        environment,
    };
    match evidence {
        Evidence::NeedsGpu(reason) => report.reason = Some(reason.into()),
        Evidence::Projected(converts, value) => {
            (report.kind, report.verdict) = (Some(Kind::Projected), convert(converts));
            report.projection = Some(value);
        }
        Evidence::Trials(subjects) => {
            report.kind = Some(Kind::Measured);
            report.subjects = subjects
                .into_iter()
                .map(|(subject, trials)| OnSubject {
                    subject: subject.as_str().into(),
                    verdict: convert(trials.iter().any(|t| t.converts)),
                    trials,
                })
                .collect();
            let all = report.subjects.iter().all(|s| s.verdict == Verdict::Converts);
            report.verdict = convert(all && !report.subjects.is_empty());
        }
    }
    Ok(report)
}

/// Appends a report to `DIR/LEVER.jsonl`, under the same lock and with the same care as a record.
///
/// # Errors
/// Those of [`crate::log::append`].
pub fn append(dir: &Path, report: &Report) -> Result<std::path::PathBuf> {
    fs::create_dir_all(dir).map_err(Error::io(dir, "create the directory"))?;
    let path = dir.join(format!("{}.jsonl", report.lever));
    let line = serde_json::to_string(report).map_err(|source| Error::Encode { source })?;
    crate::log::append_line(&path, &line)?;
    Ok(path)
}

#[cfg(test)]
mod tests;
