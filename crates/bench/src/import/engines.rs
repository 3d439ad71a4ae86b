//! Results of other benchmarks, one row a measurement: llama-bench (`-o json`), vLLM (`bench serve`, `bench throughput`), hyperfine
//! (`--export-json`).

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::json::{self, Document};
use crate::error::{Error, Result};
use crate::record::Kind;
use crate::stats::{mean, sd};

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    /// Tokens a second.
    #[serde(rename = "tokens/s")]
    TokensPerSecond,
    /// Seconds of a whole command.
    #[serde(rename = "s")]
    Seconds,
}

/// A measurement by another tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Always `published`.
    pub kind: Kind,
    /// The tool.
    pub tool: String,
    /// What it measured, in its own words.
    pub name: String,
    /// Unit of the numbers.
    pub unit: Unit,
    /// Mean.
    pub mean: f64,
    /// Standard deviation, where the tool gives it or the samples do.
    pub sd: Option<f64>,
    /// Samples, where the tool keeps them.
    pub samples: Vec<f64>,
    /// Mean tokens a speculative step, where the tool says.
    pub acceptance_length: Option<f64>,
}

/// A format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// `llama-bench -o json`.
    LlamaBench,
    /// `vllm bench serve --save-result`.
    Vllm,
    /// `hyperfine --export-json`.
    Hyperfine,
}

/// Reads a file of a tool.
///
/// # Errors
/// Another format, no measurement, a number that no measurement gives.
pub fn read(path: &Path, tool: Tool) -> Result<Vec<Measurement>> {
    let d = json::read(path)?;
    let rows = match tool {
        Tool::LlamaBench => {
            let count = d.require_list("")?.len();
            (0..count).map(|i| llama_bench(&d, &format!("/{i}"))).collect::<Result<Vec<Measurement>>>()?
        }
        Tool::Vllm => vec![vllm(&d)?],
        Tool::Hyperfine => {
            let count = d.require_list("/results")?.len();
            (0..count).map(|i| hyperfine(&d, &format!("/results/{i}"))).collect::<Result<Vec<Measurement>>>()?
        }
    };
    match rows.is_empty() {
        true => Err(Error::Empty { path: path.to_path_buf(), what: "no measurement".into() }),
        false => Ok(rows),
    }
}

fn measurement(
    tool: &str,
    name: String,
    unit: Unit,
    given: (Option<f64>, Option<f64>),
    samples: Vec<f64>,
) -> Option<Measurement> {
    Some(Measurement {
        kind: Kind::Published,
        tool: tool.into(),
        name,
        unit,
        mean: given.0.or_else(|| mean(&samples))?,
        sd: given.1.or_else(|| sd(&samples)),
        samples,
        acceptance_length: None,
    })
}

/// A standard deviation that may be absent or 0.
fn spread(d: &Document, pointer: &str) -> Result<Option<f64>> {
    match d.at(pointer).map(|v| v.as_f64()) {
        None => Ok(None),
        Some(Some(v)) if v.is_finite() && v >= 0.0 => Ok(Some(v)),
        Some(_) => Err(d.wrong(pointer, "a finite number of 0 or more")),
    }
}

fn llama_bench(d: &Document, at: &str) -> Result<Measurement> {
    let count = |field: &str| d.at(&format!("{at}/{field}")).and_then(|v| v.as_u64()).unwrap_or(0);
    let model = d.text(&format!("{at}/model_type"))?.or(d.text(&format!("{at}/model_filename"))?).unwrap_or("model");
    let test = match (count("n_prompt"), count("n_gen")) {
        (p, 0) => format!("pp{p}"),
        (0, g) => format!("tg{g}"),
        (p, g) => format!("pp{p}+tg{g}"),
    };
    let samples = d.positives(&format!("{at}/samples_ts"))?.unwrap_or_default();
    let given = (Some(d.require_positive(&format!("{at}/avg_ts"))?), spread(d, &format!("{at}/stddev_ts"))?);
    let row = measurement("llama-bench", format!("{model} {test}"), Unit::TokensPerSecond, given, samples);
    row.ok_or_else(|| d.wrong(at, "a measurement"))
}

fn vllm(d: &Document) -> Result<Measurement> {
    let rate = match d.at("/output_throughput").is_some() {
        true => d.require_positive("/output_throughput")?,
        // `bench throughput` calls it so.
        false => d.require_positive("/tokens_per_second")?,
    };
    let name = d.text("/model_id")?.or(d.text("/model")?).unwrap_or("model").to_string();
    let row = measurement("vllm", name, Unit::TokensPerSecond, (Some(rate), None), Vec::new());
    let mut row = row.ok_or_else(|| d.wrong("", "a measurement"))?;
    row.acceptance_length = d.positive("/spec_decode_acceptance_length")?;
    Ok(row)
}

fn hyperfine(d: &Document, at: &str) -> Result<Measurement> {
    let name = d.text(&format!("{at}/command"))?.unwrap_or("command").to_string();
    let samples = d.positives(&format!("{at}/times"))?.unwrap_or_default();
    let given = (Some(d.require_positive(&format!("{at}/mean"))?), spread(d, &format!("{at}/stddev"))?);
    measurement("hyperfine", name, Unit::Seconds, given, samples).ok_or_else(|| d.wrong(at, "a measurement"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tool: Tool, text: &str) -> Result<Vec<Measurement>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        std::fs::write(&path, text).unwrap();
        read(&path, tool)
    }

    #[test]
    fn each_tool_is_read() {
        let llama = r#"[{"model_type": "gemma4 E4B Q4_0", "n_prompt": 512, "n_gen": 0, "avg_ts": 800.5, "stddev_ts": 2.0,
            "samples_ts": [799.0, 802.0]}, {"model_filename": "m.gguf", "n_prompt": 0, "n_gen": 128, "avg_ts": 97.2, "stddev_ts": 0}]"#;
        let rows = of(Tool::LlamaBench, llama).unwrap();
        assert_eq!((rows[0].name.as_str(), rows[0].mean, rows[0].sd), ("gemma4 E4B Q4_0 pp512", 800.5, Some(2.0)));
        assert_eq!(
            (rows[1].name.as_str(), rows[1].sd, rows[1].unit),
            ("m.gguf tg128", Some(0.0), Unit::TokensPerSecond)
        );
        let vllm = r#"{"model_id": "m", "request_rate": Infinity, "output_throughput": 491.2, "spec_decode_acceptance_length": 3.8}"#;
        let row = &of(Tool::Vllm, vllm).unwrap()[0];
        assert_eq!((row.mean, row.acceptance_length, row.kind), (491.2, Some(3.8), Kind::Published));
        let fine = r#"{"results": [{"command": "sleep 1", "mean": 1.5, "stddev": null, "times": [1.0, 2.0]}]}"#;
        let row = &of(Tool::Hyperfine, fine).unwrap()[0];
        assert_eq!((row.unit, row.mean, row.samples.len()), (Unit::Seconds, 1.5, 2));
        assert!((row.sd.unwrap() - 0.5f64.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn other_files_and_impossible_numbers_are_named() {
        let message = |tool, text: &str| of(tool, text).unwrap_err().to_string();
        assert!(message(Tool::LlamaBench, "{}").contains("expected a list"));
        assert!(message(Tool::LlamaBench, "[]").contains("no measurement"));
        assert!(message(Tool::Vllm, "{}").contains("`/tokens_per_second`"));
        assert!(message(Tool::Hyperfine, r#"{"results": []}"#).contains("no measurement"));
        for bad in ["0", "-1", "NaN", "Infinity", "\"x\""] {
            assert!(
                message(Tool::Vllm, &format!(r#"{{"output_throughput": {bad}}}"#)).contains("a positive finite number")
            );
            let text = format!(r#"{{"results": [{{"mean": 1, "times": [1, {bad}]}}]}}"#);
            assert!(message(Tool::Hyperfine, &text).contains("`/results/0/times/1`"), "{bad}");
        }
    }
}
