//! The field's step-time log: lines of a server with `[steptime] raw i=... kind=exec|draft gap= cpu= gpu=` for single calls, and
//! `[steptime] agg n=... kind=... | gpu p50=... p90=...` for all calls so far. The last aggregate of a kind speaks for the whole run; a log
//! without one is summarised by the medians of its single calls.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::stats::median;

/// Where the figures of a [`StepTimes`] are from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// The log's own last aggregate.
    Aggregate,
    /// The median of the single calls that it lists.
    Raw,
}

/// What a log says about a step. Times in ms.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    /// Median GPU time of the target's pass.
    pub exec_ms_p50: f64,
    /// Median GPU time of drafting; `None` where nothing was drafted.
    pub draft_ms_p50: Option<f64>,
    /// Passes behind the medians.
    pub n: u64,
    /// Where the figures are from.
    pub basis: Basis,
    /// 90 % quantile of the pass, where the log has it.
    pub exec_ms_p90: Option<f64>,
    /// Median time on the host inside the pass.
    pub exec_cpu_ms_p50: Option<f64>,
    /// Median time on the host between two passes.
    pub gap_ms_p50: Option<f64>,
}

#[derive(Default)]
struct Calls {
    aggregate: Option<Aggregate>,
    gpu: Vec<f64>,
}

#[derive(Clone, Copy)]
struct Aggregate {
    n: u64,
    gpu: (f64, f64),
    cpu: f64,
    gap: f64,
}

/// Reads a log.
///
/// # Errors
/// A step-time line that cannot be read, or no call of the target.
pub fn read(path: &Path) -> Result<StepTimes> {
    parse(path, &ppl::jsonl::read_text(path)?)
}

fn parse(path: &Path, text: &str) -> Result<StepTimes> {
    let (mut exec, mut draft) = (Calls::default(), Calls::default());
    for (index, line) in text.lines().enumerate() {
        let Some((_, entry)) = line.split_once("[steptime] ") else { continue };
        let wrong = |what: &str| {
            let reason = format!("a step-time entry without {what}: `{}`", entry.trim_end());
            Error::Line { path: path.to_path_buf(), line: index as u64 + 1, reason }
        };
        // Other remarks of the same logger ("finders registered") hold no times.
        let Some((form, fields)) = entry.split_once(' ').filter(|(form, _)| ["raw", "agg"].contains(form)) else {
            continue;
        };
        let calls = match value(fields, "kind=") {
            Some("exec") => &mut exec,
            Some("draft") => &mut draft,
            _ => return Err(wrong("`kind=exec` or `kind=draft`")),
        };
        if form == "raw" {
            calls.gpu.push(time(fields, "gpu=").ok_or_else(|| wrong("a time `gpu=`"))?);
            continue;
        }
        let part = |name: &str| fields.split_once(name).map(|(_, rest)| rest);
        let quantile = |name: &str, q: &str| part(name).and_then(|rest| time(rest, q));
        let n = value(fields, "n=").and_then(|n| n.parse().ok()).filter(|&n| n > 0).ok_or_else(|| wrong("`n=`"))?;
        let found = (|| {
            let gpu = (quantile("| gpu ", "p50=")?, quantile("| gpu ", "p90=")?);
            Some(Aggregate { n, gpu, cpu: quantile("| cpu ", "p50=")?, gap: quantile("gap ", "p50=")? })
        })();
        calls.aggregate = Some(found.ok_or_else(|| wrong("the quantiles of gap, cpu and gpu"))?);
    }
    summarise(path, &exec, &draft)
}

fn summarise(path: &Path, exec: &Calls, draft: &Calls) -> Result<StepTimes> {
    if let Some(a) = exec.aggregate {
        return Ok(StepTimes {
            exec_ms_p50: a.gpu.0,
            draft_ms_p50: draft.aggregate.map(|d| d.gpu.0).or_else(|| median(&draft.gpu)),
            n: a.n,
            basis: Basis::Aggregate,
            exec_ms_p90: Some(a.gpu.1),
            exec_cpu_ms_p50: Some(a.cpu),
            gap_ms_p50: Some(a.gap),
        });
    }
    let Some(exec_ms_p50) = median(&exec.gpu) else {
        let what =
            "no step-time entry of the target (`[steptime] agg ... kind=exec` or `[steptime] raw ... kind=exec`)";
        return Err(Error::Empty { path: path.to_path_buf(), what: what.into() });
    };
    Ok(StepTimes {
        exec_ms_p50,
        draft_ms_p50: median(&draft.gpu),
        n: exec.gpu.len() as u64,
        basis: Basis::Raw,
        exec_ms_p90: None,
        exec_cpu_ms_p50: None,
        gap_ms_p50: None,
    })
}

/// The word after `key`, which stands at the beginning or after a space.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.split_whitespace().find_map(|word| word.strip_prefix(key))
}

fn time(text: &str, key: &str) -> Option<f64> {
    value(text, key)?.parse().ok().filter(|t: &f64| t.is_finite() && *t >= 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: &str = "[s] [steptime] finders registered\n\
        [s] (E pid=9) [steptime] raw i=1 kind=exec gap=4.4 cpu=24.3 gpu=5.0 dcpu=0.000 dgpu=0.000\n\
        [s] (E pid=9) [steptime] raw i=2 kind=draft gap=0.0 cpu=0.3 gpu=1.5 dcpu=0.000 dgpu=0.000\n\
        [s] (E pid=9) [steptime] raw i=2 kind=exec gap=1.1 cpu=0.1 gpu=7.0 dcpu=0.000 dgpu=0.000\n";
    const AGG: &str = "[steptime] agg n=977 kind=draft gap p50=0.000 p90=0.000 mean=0.000 | cpu p50=0.274 p90=0.355 mean=0.292 | gpu p50=1.418 p90=1.508 mean=1.440 | dcpu p50=0.000 p90=0.000 mean=0.000 | dgpu p50=0.1\n\
        [steptime] agg n=1071 kind=exec gap p50=1.601 p90=1.812 mean=14.266 | cpu p50=6.348 p90=6.465 mean=7.068 | gpu p50=6.400 p90=6.592 mean=7.321 | dcpu p50=0.0\n\
        [steptime] agg n=2100 kind=exec gap p50=1.595 p90=1.704 mean=8.106 | cpu p50=6.340 p90=6.442 mean=6.742 | gpu p50=6.468 p90=6.547 mean=6.984 | dcpu p50=0.0\n";

    fn of(text: &str) -> Result<StepTimes> {
        parse(Path::new("log"), text)
    }

    #[test]
    fn the_last_aggregate_speaks_for_the_run() {
        let t = of(&format!("{RAW}{AGG}")).unwrap();
        assert_eq!((t.exec_ms_p50, t.draft_ms_p50, t.n, t.basis), (6.468, Some(1.418), 2100, Basis::Aggregate));
        assert_eq!((t.exec_ms_p90, t.exec_cpu_ms_p50, t.gap_ms_p50), (Some(6.547), Some(6.34), Some(1.595)));
    }

    #[test]
    fn single_calls_are_summarised_by_their_median() {
        let t = of(RAW).unwrap();
        assert_eq!((t.exec_ms_p50, t.draft_ms_p50, t.n, t.basis), (6.0, Some(1.5), 2, Basis::Raw));
    }

    #[test]
    fn logs_without_times_and_torn_entries_are_named() {
        assert!(of("hello\n").unwrap_err().to_string().starts_with("log: no step-time entry"));
        let torn = format!("{RAW}[steptime] agg n=5 kind=exec gap p50=1.0\n");
        assert!(of(&torn).unwrap_err().to_string().starts_with("log:5: a step-time entry without the quantiles"));
        assert!(of("[steptime] raw i=1 kind=exec gpu=-1\n").unwrap_err().to_string().contains("log:1:"));
        assert!(of("[steptime] raw i=1 kind=exec gpu=NaN\n").is_err());
        assert!(of("[steptime] raw i=1 gpu=1\n").unwrap_err().to_string().contains("kind=exec"));
    }
}
