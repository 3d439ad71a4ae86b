//! A run as a directory of the field: `benchmark.jsonl`, `decode_outputs.jsonl` and `summary.json` in its schema, so that its tools read
//! ours. [`crate::import::field_run`] reads it back: the same rate, the same trajectory.
//!
//! What the field's files hold and a record never does are the prompts, so such a directory is as private as they are. Its
//! requests are not streamed, so what it calls time to first token is the time of a request; ours is the lap, and the laps add up to the
//! duration.

use std::path::{Path, PathBuf};

use ppl::identity::{sha256_hex, token_sha256};
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::prompts::{Form, PromptSet};
use crate::protocol::{Output, PromptSample, Protocol};
use crate::stats::{mean, median};

/// What is written.
pub struct FieldRun<'a> {
    /// Name of the model.
    pub model: &'a str,
    /// The prompts; the samples are of the first ones.
    pub prompts: &'a PromptSet,
    /// Token ids of each prompt; `None` for a server's.
    pub prompt_ids: Option<&'a [ppl::paths::Prompt]>,
    /// How it was run.
    pub protocol: &'a Protocol,
    /// Requests that were planned.
    pub planned: usize,
    /// The finished ones.
    pub samples: &'a [PromptSample],
    /// What each of them wrote.
    pub outputs: &'a [Output],
    /// The same as text.
    pub texts: &'a [String],
}

/// Fails where [`FieldRun::write`] would: before a run, so that nothing is measured for a place that cannot be written.
///
/// # Errors
/// The directory is there already and holds something, or is no directory.
pub fn check(dir: &Path) -> Result<()> {
    let refuse = |what| {
        let source = std::io::Error::new(std::io::ErrorKind::AlreadyExists, what);
        Err(Error::Io { path: dir.to_path_buf(), action: "write a run of the field to", source })
    };
    if !dir.exists() {
        return Ok(());
    }
    if !dir.is_dir() {
        return refuse("it exists and is no directory");
    }
    match std::fs::read_dir(dir).map_err(Error::io(dir, "list"))?.next() {
        None => Ok(()),
        Some(_) => refuse("it exists and is not empty; give another one"),
    }
}

impl FieldRun<'_> {
    /// Writes the directory; it has its name only when it is whole.
    ///
    /// # Errors
    /// No finished request; those of [`check`]; [`Error::Io`].
    pub fn write(&self, dir: &Path) -> Result<()> {
        if self.samples.is_empty() {
            return Err(Error::TooFew { what: "a run of the field", needed: 1, found: 0 });
        }
        check(dir)?;
        let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(Error::io(parent, "create the directory"))?;
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let partial: PathBuf = parent.join(format!(".{name}.partial-{}", std::process::id()));
        std::fs::create_dir(&partial).map_err(Error::io(&partial, "create the directory"))?;
        let written = self.fill(&partial).and_then(|()| {
            if dir.exists() {
                std::fs::remove_dir(dir).map_err(Error::io(dir, "replace the empty directory"))?;
            }
            std::fs::rename(&partial, dir).map_err(Error::io(dir, "give the directory its name"))
        });
        if written.is_err() {
            // What failed is reported; what is left of the attempt goes, if it can.
            let _ = std::fs::remove_dir_all(&partial);
        }
        written
    }

    fn fill(&self, dir: &Path) -> Result<()> {
        let file = |name: &str, text: String| {
            let path = dir.join(name);
            std::fs::write(&path, text).map_err(Error::io(&path, "write"))
        };
        let encode = |source| Error::Encode { source };
        let decoded = self.decode_outputs()?;
        // JSON has no infinity; the field's files have one all the same.
        let benchmark = serde_json::to_string(&self.benchmark()).map_err(encode)?;
        file("benchmark.jsonl", benchmark.replacen("\"request_rate\":null", "\"request_rate\":Infinity", 1) + "\n")?;
        file("summary.json", serde_json::to_string_pretty(&self.summary(decoded.len())).map_err(encode)? + "\n")?;
        if !decoded.is_empty() {
            let lines = decoded.iter().map(serde_json::to_string).collect::<serde_json::Result<Vec<String>>>();
            file("decode_outputs.jsonl", lines.map_err(encode)?.join("\n") + "\n")?;
        }
        Ok(())
    }

    fn duration_s(&self) -> f64 {
        self.samples.iter().map(|s| s.wall_ms).sum::<f64>() / 1e3
    }

    fn tokens(&self) -> (usize, usize) {
        let sum = |of: fn(&PromptSample) -> usize| self.samples.iter().map(of).sum();
        (sum(|s| s.prompt_tokens), sum(|s| s.completion_tokens))
    }

    fn benchmark(&self) -> Value {
        let (seconds, (input, output)) = (self.duration_s(), self.tokens());
        let n = self.samples.len();
        let walls: Vec<f64> = self.samples.iter().map(|s| s.wall_ms).collect();
        let mut fields = Map::new();
        let mut put = |name: &str, value: Value| {
            fields.insert(name.to_string(), value);
        };
        put("backend", json!("chiku"));
        put("dataset_name", json!("sharegpt"));
        put("request_rate", Value::Null);
        put("max_concurrency", json!(1));
        put("sharegpt_output_len", json!(self.protocol.max_tokens));
        for name in ["random_input_len", "random_output_len", "random_range_ratio"] {
            put(name, Value::Null);
        }
        put("duration", json!(seconds));
        put("completed", json!(n));
        put("total_input_tokens", json!(input));
        put("total_output_tokens", json!(output));
        // The field counts the text again by a tokenizer of its own.
        put("total_output_tokens_retokenized", Value::Null);
        put("request_throughput", json!(n as f64 / seconds));
        put("input_throughput", json!(input as f64 / seconds));
        put("output_throughput", json!(output as f64 / seconds));
        for what in ["e2e_latency", "ttft"] {
            put(&format!("mean_{what}_ms"), json!(mean(&walls)));
            put(&format!("median_{what}_ms"), json!(median(&walls)));
            put(&format!("std_{what}_ms"), json!(population_sd(&walls)));
            put(&format!("p99_{what}_ms"), json!(quantile(&walls, 0.99)));
        }
        for name in ["mean_tpot", "median_tpot", "std_tpot", "p99_tpot", "mean_itl", "median_itl", "std_itl", "p95_itl"]
        {
            put(&format!("{name}_ms"), json!(0.0));
        }
        put("p99_itl_ms", json!(0.0));
        put("concurrency", json!(walls.iter().sum::<f64>() / 1e3 / seconds));
        put("accept_length", Value::Null);
        put("input_lens", self.samples.iter().map(|s| s.prompt_tokens).collect());
        put("output_lens", self.samples.iter().map(|s| s.completion_tokens).collect());
        put("ttfts", walls.iter().map(|ms| ms / 1e3).collect());
        put("itls", self.samples.iter().map(|_| json!([])).collect());
        put("generated_texts", self.texts.iter().map(String::as_str).collect());
        put("errors", self.samples.iter().map(|_| "").collect());
        Value::Object(fields)
    }

    fn summary(&self, decoded: usize) -> Value {
        let (seconds, (input, output)) = (self.duration_s(), self.tokens());
        let walls: Vec<f64> = self.samples.iter().map(|s| s.wall_ms).collect();
        let rate = output as f64 / seconds;
        json!({
            "base_url": null,
            "benchmark_dependencies": [],
            "benchmark_jsonl": "benchmark.jsonl",
            "completed": self.samples.len(),
            "decode_num_completion_tokens": if decoded > 0 { output } else { 0 },
            "decode_num_records": decoded,
            "decode_summary_file": null,
            "decode_token_ids_required": decoded > 0,
            "decode_outputs_file": if decoded > 0 { Some("decode_outputs.jsonl") } else { None },
            "duration_s": seconds,
            "job_id": null,
            "max_concurrency": 1,
            "mean_e2e_latency_ms": mean(&walls),
            "model": self.model,
            "num_prompts": self.planned,
            "output_len": self.protocol.max_tokens,
            "ppl": null,
            "output_tps": rate,
            "p99_e2e_latency_ms": quantile(&walls, 0.99),
            "request_throughput_req_s": self.samples.len() as f64 / seconds,
            "server_dependencies": [],
            "total_tps": (input + output) as f64 / seconds,
            "tps": rate,
        })
    }

    /// One object a prompt; none at all where the ids of a completion are not known.
    fn decode_outputs(&self) -> Result<Vec<Value>> {
        let mut lines = Vec::new();
        for (i, (sample, output)) in self.samples.iter().zip(self.outputs).enumerate() {
            let (Some(ids), Some(prompt), Some(text)) = (output.ids(), self.prompts.prompts.get(i), self.texts.get(i))
            else {
                return Ok(vec![]);
            };
            let prompt_ids = self.prompt_ids.and_then(|p| p.get(i)).map(|p| p.token_ids.as_slice());
            lines.push(json!({
                "completion_token_ids": ids,
                "completion_token_sha256": sample.token_sha256,
                "dataset_index": i,
                "generated_text": text,
                "id": prompt.id,
                "index": i,
                "num_completion_tokens": ids.len(),
                "num_prompt_tokens": sample.prompt_tokens,
                "prompt_sha256": sha256_hex(prompt.text.as_bytes()),
                "prompt_text": prompt.text,
                "prompt_token_ids": prompt_ids,
                "prompt_token_sha256": prompt_ids.map(token_sha256),
                "request": {
                    "add_special_tokens": prompt.form == Form::Raw,
                    "ignore_eos": self.protocol.ignore_eos,
                    "max_tokens": self.protocol.max_tokens,
                    "model": self.model,
                    "return_token_ids": true,
                    "stream": false,
                    "temperature": 0.0,
                },
                "token_id_source": "choices[0].token_ids",
                "token_id_source_kind": "completion",
            }));
        }
        Ok(lines)
    }
}

/// With divisor n, as the field's tool computes it.
fn population_sd(values: &[f64]) -> Option<f64> {
    let mean = mean(values)?;
    Some((values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt())
}

/// Linear between the two nearest order statistics, as the field's tool computes it (Hyndman and Fan's type 7).
fn quantile(values: &[f64], p: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = p * (sorted.len().checked_sub(1)?) as f64;
    let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    Some(low + (high - low) * place.fract())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::run;
    use crate::import::field_run;
    use crate::prompts::Prompt;
    use crate::record::RunResult;
    use crate::stats::BootstrapOptions;

    const OPTIONS: BootstrapOptions =
        BootstrapOptions { resamples: 100, level: 0.95, method: crate::stats::Method::Bca, seed: 1 };

    fn set(n: usize) -> PromptSet {
        let prompt = |i| Prompt { id: format!("secret-{i}"), text: format!("Request {i}"), form: Form::Chat };
        let prompts = (0..n).map(prompt).collect();
        PromptSet { name: "private".into(), private: true, blake3: "00".into(), count: n, prompts }
    }

    #[test]
    fn what_is_written_reads_back_with_the_same_rate_and_trajectory() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("field");
        // 100 tokens each, as the run says; one id each, as its outputs hold.
        let mut run = run("a", &[200.0, 400.0, 600.0]);
        run.outputs = (0..3).map(|i| Output::Ids((0..100).map(|t| t * 7 + i).collect())).collect();
        run.samples.iter_mut().zip(&run.outputs).for_each(|(s, o)| s.token_sha256 = o.sha256());
        let texts: Vec<String> = ["a", "request_rate\":null", "\u{e9}\n"].map(String::from).into();
        let protocol = Protocol { max_tokens: 100, ..Default::default() };
        let set = set(3);
        let field = FieldRun {
            model: "nano",
            prompts: &set,
            prompt_ids: None,
            protocol: &protocol,
            planned: 3,
            samples: &run.samples,
            outputs: &run.outputs,
            texts: &texts,
        };
        field.write(&out).unwrap();
        let back = field_run::FieldRun::read(&out, &OPTIONS).unwrap();
        let ours = RunResult::new(&run, &OPTIONS).unwrap().unwrap();
        assert!((back.tps / ours.tokens_per_s - 1.0).abs() < 1e-12, "{} {}", back.tps, ours.tokens_per_s);
        assert_eq!((back.trajectory, back.prompts), (Some(ours.trajectory), 3));
        assert_eq!(back.samples[1].seconds, 0.4);
        let text = std::fs::read_to_string(out.join("benchmark.jsonl")).unwrap();
        assert!(text.contains("\"request_rate\":Infinity") && text.lines().count() == 1, "{text}");
        let outputs = std::fs::read_to_string(out.join("decode_outputs.jsonl")).unwrap();
        let first: Value = serde_json::from_str(outputs.lines().next().unwrap()).unwrap();
        let keys: Vec<&String> = first.as_object().unwrap().keys().collect();
        assert!(keys.is_sorted() && keys.len() == 15, "{keys:?}");
        assert_eq!(first["prompt_sha256"], sha256_hex(b"Request 0"));
        // Only whole, and never over something else.
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(field.write(&out).unwrap_err().to_string().contains("is not empty"));
        let text = FieldRun { outputs: &vec![Output::Text { text: "a".into(), tokens: 100 }; 3], ..field };
        let bare = dir.path().join("bare");
        text.write(&bare).unwrap();
        let back = field_run::FieldRun::read(&bare, &OPTIONS).unwrap();
        assert!(back.trajectory_missing.unwrap().contains("no decode_outputs.jsonl"));
        let none = FieldRun { samples: &[], ..text };
        assert!(none.write(&dir.path().join("none")).unwrap_err().to_string().contains("at least 1"));
    }

    #[test]
    fn quantiles_are_the_field_s() {
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 0.5), Some(2.0));
        assert!((quantile(&[1.0, 2.0], 0.99).unwrap() - 1.99).abs() < 1e-12);
        assert_eq!((quantile(&[], 0.5), quantile(&[4.0], 0.99)), (None, Some(4.0)));
        assert_eq!(population_sd(&[1.0, 3.0]), Some(1.0));
    }
}
