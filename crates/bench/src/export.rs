//! Records for other tools: JSON, JSONL, CSV, Markdown, Prometheus text, github-action-benchmark, Bencher's BMF.
//!
//! The first four show every record with a result; the others know one value a series and get each configuration's last. Raw samples
//! stay in the results file. A record without a result says nothing that these formats can hold and is counted by the caller.

use std::fmt::Write;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::record::{Kind, Record};

pub mod field;

/// A format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A list of rows.
    Json,
    /// A row a line.
    Jsonl,
    /// A header and rows.
    Csv,
    /// A table.
    Markdown,
    /// Gauges in Prometheus' text format, version 0.0.4.
    Prometheus,
    /// `customBiggerIsBetter` of github-action-benchmark.
    GithubActionBenchmark,
    /// Bencher Metric Format.
    Bencher,
}

/// A record without what only it needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// When.
    pub time: String,
    /// Where the numbers come from.
    pub kind: Kind,
    /// Configuration.
    pub label: String,
    /// Checkpoint.
    pub checkpoint: String,
    /// Backend.
    pub backend: String,
    /// Machine.
    pub machine: String,
    /// Which of many like machines, where the record says.
    pub node: Option<String>,
    /// Commit of the program.
    pub commit: Option<String>,
    /// All completion tokens over all wall time.
    pub tokens_per_s: f64,
    /// Lower end of its interval.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
    /// Finished requests.
    pub prompts: usize,
    /// Median step in ms.
    pub step_ms: Option<f64>,
    /// Mean tokens a step.
    pub tokens_per_step: Option<f64>,
    /// Median prefill in ms.
    pub prefill_ms: Option<f64>,
    /// Everything planned was done.
    pub complete: bool,
    /// Hash of what was written.
    pub trajectory: String,
}

impl Row {
    /// Of a record; `None` where it has no result.
    pub fn new(r: &Record) -> Option<Row> {
        let result = r.result.as_ref()?;
        Some(Row {
            time: r.time.clone(),
            kind: r.kind,
            label: r.target.label.clone(),
            checkpoint: r.checkpoint.name.clone(),
            backend: r.target.backend.clone(),
            machine: r.environment.machine(),
            node: r.node.clone(),
            commit: r.binary.commit.clone(),
            tokens_per_s: result.tokens_per_s,
            low: result.interval.map(|i| i.low),
            high: result.interval.map(|i| i.high),
            prompts: result.prompts,
            step_ms: result.step_ms,
            tokens_per_step: result.tokens_per_step,
            prefill_ms: result.prefill_ms,
            complete: r.complete,
            trajectory: result.trajectory.clone(),
        })
    }

    /// What is the same in all runs of a configuration on a machine, or on one of its nodes where they are told apart.
    fn series(&self) -> String {
        let node = self.node.as_ref().map_or_else(String::new, |n| format!(", node {n}"));
        format!("{} ({}, {}{node})", self.label, self.backend, self.machine)
    }
}

/// Writes records in a format; ends with a newline.
///
/// # Errors
/// No record with a result.
pub fn export(records: &[Record], format: Format) -> Result<String> {
    let rows: Vec<Row> = records.iter().filter_map(Row::new).collect();
    if rows.is_empty() {
        return Err(Error::TooFew { what: "an export (records with a result)", needed: 1, found: 0 });
    }
    let encode = |source| Error::Encode { source };
    match format {
        Format::Json => Ok(serde_json::to_string_pretty(&rows).map_err(encode)? + "\n"),
        Format::Jsonl => {
            let lines = rows.iter().map(serde_json::to_string).collect::<serde_json::Result<Vec<String>>>();
            Ok(lines.map_err(encode)?.join("\n") + "\n")
        }
        Format::Csv => csv(&rows),
        Format::Markdown => Ok(markdown(&rows)),
        Format::Prometheus => Ok(prometheus(&latest(&rows))),
        Format::GithubActionBenchmark => Ok(github(&latest(&rows)).map_err(encode)? + "\n"),
        Format::Bencher => Ok(bencher(&latest(&rows)).map_err(encode)? + "\n"),
    }
}

/// The last row of each series, in the order in which the series first appear.
fn latest(rows: &[Row]) -> Vec<&Row> {
    let mut out: Vec<&Row> = Vec::new();
    for row in rows {
        match out.iter_mut().find(|o| o.series() == row.series()) {
            Some(place) => *place = row,
            None => out.push(row),
        }
    }
    out
}

fn csv(rows: &[Row]) -> Result<String> {
    let failed = |e: csv::Error| Error::Refused { reason: format!("a row cannot be written as CSV: {e}") };
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(row).map_err(failed)?;
    }
    let bytes = writer.into_inner().map_err(|e| failed(e.into_error().into()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(String::new, |v| format!("{v:.digits$}"))
}

fn markdown(rows: &[Row]) -> String {
    let mut out = String::from(
        "| time | configuration | kind | tokens/s | interval over prompts | ms/step | tokens/step | prompts | trajectory |\n\
         |---|---|---|--:|---|--:|--:|--:|---|\n",
    );
    for r in rows {
        let interval = match (r.low, r.high) {
            (Some(low), Some(high)) => format!("{low:.1} to {high:.1}"),
            _ => String::new(),
        };
        let kind = format!("{:?}", r.kind).to_lowercase();
        let incomplete = if r.complete { "" } else { " (incomplete)" };
        let series = r.series().replace('|', "\\|").replace('\n', " ");
        let (step, tokens) = (number(r.step_ms, 3), number(r.tokens_per_step, 3));
        let trajectory: String = r.trajectory.chars().take(8).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "| {} | {series}{incomplete} | {kind} | {:.1} | {interval} | {step} | {tokens} | {} | {trajectory} |",
            r.time, r.tokens_per_s, r.prompts
        );
    }
    out
}

fn prometheus(rows: &[&Row]) -> String {
    type Get = fn(&Row) -> Option<f64>;
    let gauges: [(&str, &str, Get); 4] = [
        ("chiku_bench_tokens_per_second", "All completion tokens over all wall time.", |r| Some(r.tokens_per_s)),
        ("chiku_bench_step_seconds", "Median time of a decode step.", |r| r.step_ms.map(|ms| ms / 1e3)),
        ("chiku_bench_tokens_per_step", "Mean tokens of a decode step.", |r| r.tokens_per_step),
        ("chiku_bench_prefill_seconds", "Median time to the first token.", |r| r.prefill_ms.map(|ms| ms / 1e3)),
    ];
    let escaped = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut out = String::new();
    for (name, help, get) in gauges {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
        for r in rows {
            if let Some(value) = get(r) {
                let kind = format!("{:?}", r.kind).to_lowercase();
                let node = r.node.as_deref().map(|n| ("node", n));
                let labels =
                    [("label", r.label.as_str()), ("backend", &r.backend), ("machine", &r.machine), ("kind", &kind)];
                let labels = labels.into_iter().chain(node);
                let labels: Vec<String> = labels.map(|(k, v)| format!("{k}=\"{}\"", escaped(v))).collect();
                let _ = writeln!(out, "{name}{{{}}} {value}", labels.join(","));
            }
        }
    }
    out
}

fn github(rows: &[&Row]) -> serde_json::Result<String> {
    let entry = |r: &&Row| {
        let mut entry = json!({"name": r.series(), "unit": "tokens/s", "value": r.tokens_per_s});
        if let (Some(low), Some(high)) = (r.low, r.high) {
            entry["range"] = json!(format!("{:.2}", (high - low) / 2.0));
        }
        entry["extra"] = json!(format!("time: {}\ntrajectory: {}", r.time, r.trajectory));
        entry
    };
    serde_json::to_string_pretty(&rows.iter().map(entry).collect::<Vec<Value>>())
}

fn bencher(rows: &[&Row]) -> serde_json::Result<String> {
    let mut out = Map::new();
    for r in rows {
        let mut throughput = json!({"value": r.tokens_per_s});
        if let (Some(low), Some(high)) = (r.low, r.high) {
            (throughput["lower_value"], throughput["upper_value"]) = (json!(low), json!(high));
        }
        let mut measures = json!({"throughput": throughput});
        // Bencher's latency is in nanoseconds.
        if let Some(ms) = r.step_ms {
            measures["latency"] = json!({"value": ms * 1e6});
        }
        out.insert(r.series(), measures);
    }
    serde_json::to_string_pretty(&out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::run;
    use crate::record::tests::setup;
    use crate::stats::BootstrapOptions;

    fn record(label: &str, wall_ms: &[f64]) -> Record {
        let mut setup = setup();
        setup.target.label = label.into();
        Record::measured(run(label, wall_ms), setup, &BootstrapOptions::default()).unwrap()
    }

    fn of(format: Format) -> String {
        // The second run of `a|b` is the later one; the last record has no result.
        let records = [("a|b", &[100.0, 100.0][..]), ("a|b", &[200.0, 200.0]), ("c\"d", &[400.0]), ("e", &[])];
        export(&records.map(|(label, times)| record(label, times)), format).unwrap()
    }

    #[test]
    fn tables_show_every_record_with_a_result() {
        let json: Value = serde_json::from_str(&of(Format::Json)).unwrap();
        let lines = of(Format::Jsonl);
        let parsed: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(json.as_array().unwrap(), &parsed);
        assert_eq!((parsed.len(), &parsed[0]["tokens_per_s"], &parsed[2]["low"]), (3, &json!(1000.0), &Value::Null));
        let text = of(Format::Csv);
        let mut csv = csv::Reader::from_reader(text.as_bytes());
        let rows: Vec<Row> = csv.deserialize().map(|row| row.unwrap()).collect();
        assert_eq!((rows.len(), rows[2].label.as_str(), rows[2].low), (3, "c\"d", None));
        let table = of(Format::Markdown);
        assert_eq!(table.lines().count(), 5);
        assert!(
            table.contains("| a\\|b (cpu, ") && table.contains("| measured | 1000.0 | 1000.0 to 1000.0 |"),
            "{table}"
        );
    }

    #[test]
    fn series_have_one_value_the_last() {
        let text = of(Format::Prometheus);
        let rates: Vec<&str> = text.lines().filter(|l| l.starts_with("chiku_bench_tokens_per_second{")).collect();
        assert_eq!(rates.len(), 2, "{text}");
        assert!(rates[0].ends_with(" 500") && rates[1].contains(r#"label="c\"d""#), "{text}");
        assert_eq!(text.lines().filter(|l| l.starts_with("# TYPE")).count(), 4);
        let github: Value = serde_json::from_str(&of(Format::GithubActionBenchmark)).unwrap();
        assert_eq!((github.as_array().unwrap().len(), &github[0]["value"]), (2, &json!(500.0)));
        assert_eq!((&github[0]["unit"], &github[0]["range"]), (&json!("tokens/s"), &json!("0.00")));
        let bencher: Value = serde_json::from_str(&of(Format::Bencher)).unwrap();
        let (name, first) = bencher.as_object().unwrap().iter().next().unwrap();
        assert!(name.starts_with("a|b (cpu, "));
        assert_eq!(
            (&first["throughput"]["value"], &first["throughput"]["lower_value"]),
            (&json!(500.0), &json!(500.0))
        );
        assert!(first["latency"]["value"].as_f64().unwrap() > 1e6);
    }

    #[test]
    fn nodes_are_told_apart() {
        let mut records = [("a", 100.0), ("a", 200.0)].map(|(label, ms)| record(label, &[ms, ms]));
        (records[0].node, records[1].node) = (Some("n|1".into()), Some("n\"2".into()));
        let json: Value = serde_json::from_str(&export(&records, Format::Json).unwrap()).unwrap();
        assert_eq!((&json[0]["node"], &json[1]["node"]), (&json!("n|1"), &json!("n\"2")));
        let csv = export(&records, Format::Csv).unwrap();
        assert!(csv.starts_with("time,kind,label,checkpoint,backend,machine,node,commit,"), "{csv}");
        assert!(export(&records, Format::Markdown).unwrap().contains(", node n\\|1)"));
        let text = export(&records, Format::Prometheus).unwrap();
        assert_eq!(text.lines().filter(|l| l.starts_with("chiku_bench_tokens_per_second{")).count(), 2, "{text}");
        assert!(text.contains(r#"node="n\"2""#), "{text}");
    }

    #[test]
    fn nothing_to_export_is_an_error() {
        assert!(export(&[], Format::Csv).is_err());
        assert!(export(&[record("a", &[])], Format::Json).unwrap_err().to_string().contains("there are 0"));
    }
}
