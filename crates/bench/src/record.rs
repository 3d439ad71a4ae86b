//! A record: one run with all that is needed to judge it, as one line of JSON.
//!
//! What always holds of a record: its [`Kind`] says where its numbers come from; the raw samples are in it, so that every number
//! of its result can be computed again; a number of another kind than the record's is a [`Figure`], which carries its own.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::compare::Comparison;
use crate::configuration::Configuration;
use crate::environment::{Binary, CheckpointHash, Conditions, Environment};
use crate::error::{Error, Result};
use crate::pooled::Level;
use crate::profile::Profile;
use crate::prompts::PromptSet;
use crate::protocol::{PromptSample, Protocol, Run, Warmup};
use crate::stats::hierarchy::{Hierarchy, HierarchyOptions, Prompts};
use crate::stats::{BootstrapOptions, Interval, Throughput, median};
use ppl::identity::sha256_hex;
use ppl::verify::VerifyReport;

/// Version of the record's schema. A change that a reader of the old one would misread gets a new number.
pub const SCHEMA: u32 = 1;

/// Where a number comes from. Numbers of different kinds are never compared without saying so, and never share a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// By this program, on the machine of the record.
    Measured,
    /// By a formula whose inputs are shown.
    Projected,
    /// By somebody else, who is named.
    Published,
}

/// A number with its own origin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Figure {
    /// Where it comes from.
    pub kind: Kind,
    /// The number, in the unit that its field documents.
    pub value: f64,
    /// The formula, the source, or how it was measured.
    pub source: String,
}

/// What was timed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TargetInfo {
    /// Name of the configuration.
    pub label: String,
    /// `cpu`, `cuda`, `emulated`, or the kind of a server.
    pub backend: String,
    /// `native` or `f32`.
    pub precision: String,
    /// Threads.
    pub threads: usize,
    /// Whatever else was set, as given on the command line.
    pub flags: Vec<String>,
}

/// Numbers of a run, all computed from its samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunResult {
    /// All completion tokens over all wall time.
    pub tokens_per_s: f64,
    /// Interval of it over prompts, the highest level that one process has several of; `None` where fewer than 2 are finished. What
    /// another process or node would give is in [`crate::pooled`].
    pub interval: Option<Interval>,
    /// What the interval is over: prompts. The luck of a process and of a machine is not in it.
    #[serde(default)]
    pub interval_over: Level,
    /// Finished requests.
    pub prompts: usize,
    /// Tokens of their prompts.
    pub prompt_tokens: usize,
    /// Tokens of their completions.
    pub completion_tokens: usize,
    /// Their wall time in seconds.
    pub wall_s: f64,
    /// Median time to the first token in ms.
    pub prefill_ms: Option<f64>,
    /// Median time of a step in ms.
    pub step_ms: Option<f64>,
    /// Tokens that a step yields on average, those of prefill left out.
    pub tokens_per_step: Option<f64>,
    /// SHA-256 of the samples' `token_sha256`, joined by newlines: two runs with the same one wrote the same text.
    pub trajectory: String,
    /// Bytes that a decode step reads.
    pub bytes_per_step: Option<Figure>,
}

impl RunResult {
    /// Of the finished requests of a run; `None` where there are none.
    ///
    /// # Errors
    /// Samples that no measurement can give; options out of range.
    pub fn new(run: &Run, options: &BootstrapOptions) -> Result<Option<RunResult>> {
        let samples = &run.samples;
        let pairs: Vec<Throughput> = samples.iter().map(Throughput::from).collect();
        let over = HierarchyOptions { bootstrap: *options, prompts: Prompts::Random, ..Default::default() };
        let estimate = match pairs.len() {
            0 => None,
            _ => match Hierarchy::new(vec![vec![pairs]])?.tokens_per_s(&over) {
                Ok(estimate) => Some(estimate),
                Err(Error::TooFew { .. }) => None,
                Err(e) => return Err(e),
            },
        };
        let (rate, interval) = (run.tokens_per_s(), estimate.map(|e| e.interval));
        let Some(tokens_per_s) = rate else { return Ok(None) };
        let prefills: Vec<f64> = samples.iter().map(|s| s.prefill_ms).collect();
        let steps: Vec<f64> = samples.iter().flat_map(|s| s.step_ms.iter().copied()).collect();
        let decoded: usize = samples.iter().map(|s| s.completion_tokens.saturating_sub(1)).sum();
        let hashes: Vec<&str> = samples.iter().map(|s| s.token_sha256.as_str()).collect();
        Ok(Some(RunResult {
            tokens_per_s,
            interval,
            interval_over: Level::Prompts,
            prompts: samples.len(),
            prompt_tokens: samples.iter().map(|s| s.prompt_tokens).sum(),
            completion_tokens: run.completion_tokens(),
            wall_s: run.wall_s(),
            prefill_ms: median(&prefills),
            step_ms: median(&steps),
            tokens_per_step: Some(decoded as f64 / steps.len() as f64).filter(|_| !steps.is_empty()),
            trajectory: sha256_hex(hashes.join("\n").as_bytes()),
            bytes_per_step: None,
        }))
    }
}

/// A run that was thrown away, so that nobody can pick the best of many and say that it was one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Discarded {
    /// What: warm-up requests, a request that was cut short, a whole run.
    pub what: String,
    /// Why.
    pub reason: String,
}

/// What a record says about a run besides its samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Setup {
    /// The program.
    pub binary: Binary,
    /// The machine, as it was before the run.
    pub environment: Environment,
    /// Its state after it.
    pub after: Conditions,
    /// What was timed.
    pub target: TargetInfo,
    /// The same as a TOML file would say it; `None` for a server.
    pub configuration: Option<Configuration>,
    /// Of which checkpoint.
    pub checkpoint: CheckpointHash,
    /// Who drafted.
    pub drafter: Option<CheckpointHash>,
    /// On which prompts.
    pub prompts: PromptSet,
    /// How.
    pub protocol: Protocol,
    /// Runs that were thrown away before this one.
    pub discarded: Vec<Discarded>,
}

/// One line of a results file. `S` is what is read of a request: all of it, or the sums that an analysis needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Record<S = PromptSample> {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Where the numbers come from.
    pub kind: Kind,
    /// When the record was made: RFC 3339, UTC.
    pub time: String,
    /// The program.
    pub binary: Binary,
    /// The machine, as it was before the run.
    pub environment: Environment,
    /// Its state after the run: clocks that fell or a load that rose in between are in the samples.
    #[serde(default)]
    pub after: Option<Conditions>,
    /// Which of many like machines, as whoever ran it calls it: two records with the same one are draws of one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// What was timed.
    pub target: TargetInfo,
    /// The same as a TOML file would say it, to be run again; `None` for a server and in older records.
    #[serde(default)]
    pub configuration: Option<Configuration>,
    /// Of which checkpoint.
    pub checkpoint: CheckpointHash,
    /// Who drafted; `None` for plain decoding, look-up, and in older records.
    #[serde(default)]
    pub drafter: Option<CheckpointHash>,
    /// On which prompts: name, hash and number, not the texts.
    pub prompts: PromptSet,
    /// How.
    pub protocol: Protocol,
    /// Seed of the interval.
    pub seed: u64,
    /// What was run untimed before.
    #[serde(default)]
    pub warmup: Option<Warmup>,
    /// What was thrown away, and why: warm-ups, a request that was cut short, earlier runs.
    #[serde(default)]
    pub discarded: Vec<Discarded>,
    /// Requests that were planned.
    pub planned: usize,
    /// All of them were finished.
    pub complete: bool,
    /// Why not, unless it was a cancel.
    pub failure: Option<String>,
    /// The numbers; `None` where no request was finished.
    pub result: Option<RunResult>,
    /// The other target of an interleaved run, and how the two compare.
    pub comparison: Option<Comparison>,
    /// Is it still the same model? Speed without this is half a claim.
    pub gate: Option<VerifyReport>,
    /// What a step is made of, taken after the run on some of its prompts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
    /// The finished requests, in order.
    pub samples: Vec<S>,
}

/// The schema of a record, JSON Schema 2020-12: what a line of a results file looks like.
///
/// # Errors
/// None that can happen: a schema is JSON.
pub fn json_schema() -> Result<String> {
    let mut schema = schemars::schema_for!(Record).to_value();
    schema["title"] = format!("chiku bench record, schema {SCHEMA}").into();
    schema["properties"]["schema"]["const"] = SCHEMA.into();
    Ok(serde_json::to_string_pretty(&schema).map_err(|source| Error::Encode { source })? + "\n")
}

impl Record {
    /// A record of a run that this program made, now.
    ///
    /// # Errors
    /// Those of [`RunResult::new`].
    pub fn measured(run: Run, setup: Setup, options: &BootstrapOptions) -> Result<Record> {
        let result = RunResult::new(&run, options)?;
        let Setup { binary, environment, after, target, configuration, checkpoint, drafter, prompts, protocol, .. } =
            setup;
        let Run { samples, planned, complete, failure, warmup, .. } = run;
        let mut discarded = setup.discarded;
        if warmup.requests > 0 {
            let what = format!("{} warm-up requests of {} steps", warmup.requests, warmup.steps);
            discarded
                .push(Discarded { what, reason: "before the machine is warm, times are of something else".into() });
        }
        if !complete {
            let reason = failure.clone().unwrap_or_else(|| "cancelled".into());
            discarded.push(Discarded { what: "the request in progress".into(), reason });
        }
        Ok(Record {
            schema: SCHEMA,
            kind: Kind::Measured,
            time: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            binary,
            environment,
            after: Some(after),
            node: None,
            target,
            configuration: configuration.map(Configuration::without_places),
            checkpoint,
            drafter,
            prompts,
            protocol,
            seed: options.seed,
            warmup: Some(warmup),
            discarded,
            planned,
            complete,
            failure,
            result,
            comparison: None,
            gate: None,
            profile: None,
            samples,
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::compare::tests::run;

    pub(crate) fn setup() -> Setup {
        Setup {
            binary: Binary { version: "0.1.0".into(), commit: Some("abc".into()), blake3: None, flake_lock: None },
            environment: Environment::capture(),
            after: Conditions::default(),
            target: TargetInfo {
                label: "plain".into(),
                backend: "cpu".into(),
                precision: "native".into(),
                threads: 2,
                flags: vec![],
            },
            configuration: None,
            checkpoint: CheckpointHash {
                name: "nano".into(),
                blake3: "00".into(),
                files: Default::default(),
                ancestors: vec![],
            },
            drafter: None,
            prompts: PromptSet {
                name: "public.jsonl".into(),
                private: false,
                blake3: "11".into(),
                count: 160,
                prompts: vec![],
            },
            protocol: Protocol::default(),
            discarded: vec![],
        }
    }

    fn record(wall_ms: &[f64]) -> Record {
        Record::measured(run("plain", wall_ms), setup(), &BootstrapOptions::default()).unwrap()
    }

    #[test]
    fn a_result_is_computed_from_the_samples() {
        let r = record(&[100.0, 300.0, 200.0]).result.unwrap();
        assert!((r.tokens_per_s - 500.0).abs() < 1e-9);
        assert_eq!((r.prompts, r.prompt_tokens, r.completion_tokens), (3, 63, 300));
        assert!((r.wall_s - 0.6).abs() < 1e-12);
        assert_eq!((r.prefill_ms, r.tokens_per_step), (Some(1.0), Some(1.0)));
        assert!((r.step_ms.unwrap() - 199.0 / 99.0).abs() < 1e-12);
        let interval = r.interval.unwrap();
        assert!(interval.low < 500.0 && 500.0 < interval.high, "{interval:?}");
        let hashes = [0, 1, 2].map(|i| ppl::identity::token_sha256(&[i])).join("\n");
        assert_eq!(r.trajectory, sha256_hex(hashes.as_bytes()));
    }

    #[test]
    fn speculative_steps_yield_more_than_a_token() {
        let mut run = run("spec", &[100.0, 100.0]);
        run.samples.iter_mut().for_each(|s| s.step_ms = vec![3.0; 33]);
        let r = RunResult::new(&run, &BootstrapOptions::default()).unwrap().unwrap();
        assert_eq!((r.tokens_per_step, r.step_ms), (Some(3.0), Some(3.0)));
    }

    #[test]
    fn a_run_of_one_or_no_prompt_has_no_interval() {
        let one = record(&[200.0]).result.unwrap();
        assert_eq!((one.tokens_per_s, one.interval), (500.0, None));
        let mut none = run("plain", &[]);
        (none.complete, none.failure) = (false, Some("request `p0`: no".into()));
        let none = Record::measured(none, setup(), &BootstrapOptions::default()).unwrap();
        assert_eq!((none.result, none.failure.as_deref()), (None, Some("request `p0`: no")));
    }

    #[test]
    fn the_line_has_the_documented_fields_and_reads_back() {
        let record = record(&[128.0, 256.0]);
        let json = serde_json::to_string(&record).unwrap();
        assert!(json.starts_with(r#"{"schema":1,"kind":"measured","time":"20"#), "{json}");
        assert!(!json.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["samples"][1]["wall_ms"], 256.0);
        assert_eq!(
            value["prompts"],
            serde_json::json!({"name": "public.jsonl", "private": false, "blake3": "11", "count": 160})
        );
        assert_eq!(value["result"]["interval"]["method"], "bca");
        assert_eq!(value["result"]["interval_over"], "prompts");
        let time: jiff::Timestamp = record.time.parse().unwrap();
        assert!(time <= jiff::Timestamp::now());
        let back: Record = serde_json::from_str(&json).unwrap();
        assert_eq!((back.samples.len(), &back.target, back.seed), (2, &record.target, record.seed));
    }

    #[test]
    fn what_was_thrown_away_is_told_with_the_reason() {
        let mut cut = run("plain", &[100.0]);
        (cut.complete, cut.failure) = (false, Some("request `p1`: no".into()));
        cut.warmup = Warmup { requests: 4, steps: 20, steady: Some(true) };
        let earlier = Discarded { what: "a run".into(), reason: "the clocks fell".into() };
        let with = Setup { discarded: vec![earlier.clone()], ..setup() };
        let r = Record::measured(cut, with, &BootstrapOptions::default()).unwrap();
        assert_eq!((r.discarded.len(), &r.discarded[0]), (3, &earlier));
        assert_eq!(r.discarded[1].what, "4 warm-up requests of 20 steps");
        assert_eq!(r.discarded[2].reason, "request `p1`: no");
    }

    #[test]
    fn the_published_schema_is_current_and_names_every_field() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results/schema-1.json");
        let (published, now) = (std::fs::read_to_string(path).unwrap(), json_schema().unwrap());
        assert!(published == now, "write it again: chiku bench schema > results/schema-1.json");
        let schema: serde_json::Value = serde_json::from_str(&now).unwrap();
        let record = serde_json::to_value(record(&[100.0, 200.0])).unwrap();
        for field in record.as_object().unwrap().keys() {
            assert!(schema["properties"][field].is_object(), "{field}");
        }
        assert_eq!(schema["properties"]["schema"]["const"], SCHEMA);
    }

    #[test]
    fn kinds_are_spelled_out() {
        let figure = Figure { kind: Kind::Projected, value: 2.0, source: "weights / bandwidth".into() };
        let json = serde_json::to_value(&figure).unwrap();
        assert_eq!(json["kind"], "projected");
        assert!(serde_json::from_str::<Figure>(r#"{"value": 2, "source": "x"}"#).is_err(), "a figure without a kind");
    }
}
