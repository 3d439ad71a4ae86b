//! A full run as the field's job leaves it: a directory with `benchmark.jsonl` (the timed stage, one object), `decode_outputs.jsonl` (the
//! ids of each completion) and `summary.json`.
//!
//! The timed stage is authoritative for speed. The trajectory comes from the decode stage and is only given where every prompt has its
//! outputs and no stored hash contradicts its ids.

use std::path::Path;

use ppl::identity;
use serde::{Deserialize, Serialize};

use super::json::{self, Document};
use crate::error::{Error, Result};
use crate::stats::{BootstrapOptions, Interval, Throughput, tokens_per_s};

/// A run of the field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FieldRun {
    /// All completion tokens over the wall time of the timed stage.
    pub tps: f64,
    /// That wall time in ms.
    pub ms_total: f64,
    /// Requests of the timed stage.
    pub prompts: usize,
    /// SHA-256 of the `completion_token_sha256` of each prompt, joined by newlines in the file's order; `None` where not every prompt has
    /// outputs.
    pub trajectory: Option<String>,
    /// Why there is no trajectory.
    pub trajectory_missing: Option<String>,
    /// Interval of the rate over prompts; `None` where the run does not hold the time of each request.
    pub interval: Option<Interval>,
    /// Standard error of the rate in percent of it that comes from the choice of prompts: what a one-shot gate on other prompts feels.
    pub prompt_se_pct: Option<f64>,
    /// Perplexity that the job found.
    pub ppl: Option<f64>,
    /// Each request of the timed stage, in order.
    #[serde(skip)]
    pub samples: Vec<Throughput>,
}

const BENCHMARK: &str = "benchmark.jsonl";
const OUTPUTS: &str = "decode_outputs.jsonl";
const SUMMARY: &str = "summary.json";

impl FieldRun {
    /// Reads a run's directory.
    ///
    /// # Errors
    /// Neither timed stage nor summary; a time or count that cannot be used; two files that contradict each other; outputs whose hash is
    /// not that of their ids; a request that failed.
    pub fn read(dir: &Path, options: &BootstrapOptions) -> Result<FieldRun> {
        let file = |name: &str| Some(dir.join(name)).filter(|p| p.exists());
        let summary = file(SUMMARY).map(|p| json::read(&p)).transpose()?;
        let timed = match file(BENCHMARK) {
            Some(path) => Timed::read(&path)?,
            None => match &summary {
                Some(s) => Timed::of_summary(s)?,
                None => {
                    let what = format!("a run's directory holds {BENCHMARK} or {SUMMARY}; here is neither");
                    return Err(Error::Empty { path: dir.to_path_buf(), what });
                }
            },
        };
        let tps = timed.tokens / timed.seconds;
        if let Some(s) = &summary
            && let Some(said) = s.positive("/tps")?
            && (said / tps - 1.0).abs() > 1e-3
        {
            let found = format!("{said}, where {BENCHMARK} gives {tps:.3}");
            let expected = "the rate of the timed stage";
            return Err(Error::Field { path: s.path.clone(), field: "/tps".into(), expected, found });
        }
        let (trajectory, trajectory_missing) = match file(OUTPUTS) {
            Some(path) => trajectory(&path, timed.prompts)?,
            None => (None, Some(format!("the run holds no {OUTPUTS}"))),
        };
        let interval = match timed.samples.len() {
            0 | 1 => None,
            _ => Some(tokens_per_s(&timed.samples, options)?.interval),
        };
        Ok(FieldRun {
            tps,
            ms_total: timed.seconds * 1e3,
            prompts: timed.prompts,
            trajectory,
            trajectory_missing,
            interval,
            prompt_se_pct: crate::stats::ratio_se(&timed.samples).map(|se| se * 100.0),
            ppl: summary.as_ref().map(|s| s.positive("/ppl")).transpose()?.flatten(),
            samples: timed.samples,
        })
    }
}

struct Timed {
    tokens: f64,
    seconds: f64,
    prompts: usize,
    samples: Vec<Throughput>,
}

impl Timed {
    fn read(path: &Path) -> Result<Timed> {
        let text = ppl::jsonl::read_text(path)?;
        let mut lines = text.lines().filter(|l| !l.trim().is_empty());
        let (first, more) = (lines.next().unwrap_or(""), lines.next());
        if more.is_some() {
            let reason = "a second run; a timed stage is one object on one line".to_string();
            return Err(Error::Line { path: path.to_path_buf(), line: 2, reason });
        }
        let d = json::parse(path, first)?;
        let lengths = d.positives("/output_lens")?;
        // Without streaming, "time to first token" is the time of the whole request.
        let times = match d.at("/itls/0").and_then(|v| v.as_array()).is_none_or(Vec::is_empty) {
            true => d.positives("/ttfts")?,
            false => None,
        };
        if let Some(failed) = d
            .at("/errors")
            .and_then(|e| e.as_array())
            .and_then(|errors| errors.iter().position(|e| e.as_str().is_some_and(|e| !e.is_empty())))
        {
            return Err(d.wrong(&format!("/errors/{failed}"), "no error"));
        }
        let samples = match (&lengths, &times) {
            (Some(n), Some(t)) if n.len() != t.len() => return Err(d.wrong("/ttfts", "as many times as output_lens")),
            (Some(n), Some(t)) => n.iter().zip(t).map(|(&tokens, &seconds)| Throughput { tokens, seconds }).collect(),
            _ => Vec::new(),
        };
        let tokens = d.require_positive("/total_output_tokens")?;
        if let Some(lengths) = &lengths
            && lengths.iter().sum::<f64>() != tokens
        {
            return Err(d.wrong("/total_output_tokens", "the sum of output_lens"));
        }
        let prompts = d.require_positive("/completed")? as usize;
        Ok(Timed { tokens, seconds: d.require_positive("/duration")?, prompts, samples })
    }

    fn of_summary(s: &Document) -> Result<Timed> {
        let seconds = s.require_positive("/duration_s")?;
        let prompts = s.require_positive("/completed")? as usize;
        Ok(Timed { tokens: s.require_positive("/tps")? * seconds, seconds, prompts, samples: Vec::new() })
    }
}

/// The trajectory, or why there is none.
fn trajectory(path: &Path, prompts: usize) -> Result<(Option<String>, Option<String>)> {
    let outputs = identity::read(path)?;
    if let Some(bad) = outputs.iter().flat_map(|g| &g.bad_hashes).next() {
        let field = format!("{} of `{}`", bad.field, bad.key);
        let (expected, found) = ("the hash of what stands beside it", format!("{}, not {}", bad.stored, bad.computed));
        return Err(Error::Field { path: path.to_path_buf(), field, expected, found });
    }
    if outputs.len() != prompts {
        return Ok((None, Some(format!("{OUTPUTS} holds {} of {prompts} prompts", outputs.len()))));
    }
    let hashes: Vec<String> = outputs.iter().map(|g| identity::token_sha256(&g.completion_token_ids)).collect();
    Ok((Some(identity::sha256_hex(hashes.join("\n").as_bytes())), None))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMED: &str = r#"{"request_rate": Infinity, "duration": 4.0, "completed": 2, "total_output_tokens": 8,
        "output_lens": [4, 4], "ttfts": [1.0, 3.0], "itls": [[], []], "errors": ["", ""]}"#;

    fn run(files: &[(&str, &str)]) -> Result<FieldRun> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text.replace('\n', " ").replace("%", "\n")).unwrap();
        }
        FieldRun::read(dir.path(), &BootstrapOptions { resamples: 200, ..Default::default() })
    }

    fn outputs(ids: &[&[u32]]) -> String {
        let line = |(i, ids): (usize, &&[u32])| {
            let sha = identity::token_sha256(ids);
            format!("{{\"id\": \"p{i}\", \"completion_token_ids\": {ids:?}, \"completion_token_sha256\": \"{sha}\"}}%")
        };
        ids.iter().enumerate().map(line).collect()
    }

    fn message(files: &[(&str, &str)]) -> String {
        run(files).unwrap_err().to_string()
    }

    #[test]
    fn speed_is_of_the_timed_stage_and_the_trajectory_of_the_outputs() {
        let out = outputs(&[&[1, 2], &[3]]);
        let r = run(&[(BENCHMARK, TIMED), (OUTPUTS, &out), (SUMMARY, r#"{"tps": 2.0, "ppl": 2.39}"#)]).unwrap();
        assert_eq!((r.tps, r.ms_total, r.prompts, r.ppl), (2.0, 4000.0, 2, Some(2.39)));
        let joined = [identity::token_sha256(&[1, 2]), identity::token_sha256(&[3])].join("\n");
        assert_eq!(r.trajectory, Some(identity::sha256_hex(joined.as_bytes())));
        let i = r.interval.unwrap();
        assert!(i.low < 2.0 && i.high > 2.0, "{i:?}");
        let bare = run(&[(SUMMARY, r#"{"tps": 2.0, "duration_s": 4.0, "completed": 2}"#)]).unwrap();
        assert_eq!((bare.tps, bare.ms_total, bare.interval), (2.0, 4000.0, None));
        assert!(bare.trajectory_missing.unwrap().contains("no decode_outputs.jsonl"));
    }

    #[test]
    fn half_a_run_has_no_trajectory() {
        let r = run(&[(BENCHMARK, TIMED), (OUTPUTS, &outputs(&[&[1, 2]]))]).unwrap();
        assert_eq!(
            (r.trajectory, r.trajectory_missing.unwrap().as_str()),
            (None, "decode_outputs.jsonl holds 1 of 2 prompts")
        );
    }

    #[test]
    fn contradictions_and_impossible_times_are_named() {
        assert!(message(&[]).contains("here is neither"));
        assert!(message(&[(BENCHMARK, TIMED), (SUMMARY, r#"{"tps": 3.0}"#)]).contains("found 3, where"));
        for time in ["0", "-1", "NaN", "Infinity"] {
            let bad = TIMED.replace("4.0", time);
            assert!(message(&[(BENCHMARK, &bad)]).contains("`/duration`: expected a positive finite number"), "{time}");
            let bad = TIMED.replace("3.0", time);
            assert!(message(&[(BENCHMARK, &bad)]).contains("`/ttfts/1`"), "{time}");
        }
        assert!(message(&[(BENCHMARK, &TIMED.replace("[4, 4]", "[4, 3]"))]).contains("the sum of output_lens"));
        assert!(message(&[(BENCHMARK, &TIMED.replace("\"\"]", "\"boom\"]"))]).contains("`/errors/1`"));
        assert!(message(&[(BENCHMARK, &format!("{TIMED}%{TIMED}"))]).contains(":2: a second run"));
        let forged = outputs(&[&[1], &[2]]).replacen("[1]", "[9]", 1);
        assert!(message(&[(BENCHMARK, TIMED), (OUTPUTS, &forged)]).contains("completion_token_sha256 of `p0`"));
    }
}
