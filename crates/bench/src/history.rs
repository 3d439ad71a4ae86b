//! Speed over commits: the runs of each configuration in the order of their time, and where their level changes.
//!
//! Only runs of one configuration form a series: the same machine, checkpoint, prompts, protocol and settings. A change point says where to
//! look, not what is to blame: it is advisory ([`changepoint`](crate::stats::changepoint)), and `bench compare` decides. Tokens a second
//! also change where a run wrote another text; such a change says so, and what the time of a step did stands beside it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::profile::OpRoofline;
use crate::record::{Kind, Record};
use crate::stats::changepoint::change_points;
use crate::stats::mean;

/// What all runs of a series share.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Configuration {
    /// Name of the configuration.
    pub label: String,
    /// Processor and threads of the machine.
    pub machine: String,
    /// `cpu`, `cuda`, `emulated`, or the kind of a server.
    pub backend: String,
    /// `native` or `f32`.
    pub precision: String,
    /// Threads.
    pub threads: usize,
    /// Whatever else was set.
    pub flags: Vec<String>,
    /// Checkpoint, by name.
    pub checkpoint: String,
    /// The same, by hash.
    pub checkpoint_blake3: String,
    /// Prompts, by name.
    pub prompts: String,
    /// The same, by hash.
    pub prompts_blake3: String,
    /// Requests of a run.
    pub requests: usize,
    /// Tokens of a request.
    pub max_tokens: usize,
    /// Completions run through the end of their text.
    pub ignore_eos: bool,
}

impl Configuration {
    /// Of a record.
    pub fn of<S>(r: &Record<S>) -> Configuration {
        Configuration {
            label: r.target.label.clone(),
            machine: r.environment.machine(),
            backend: r.target.backend.clone(),
            precision: r.target.precision.clone(),
            threads: r.target.threads,
            flags: r.target.flags.clone(),
            checkpoint: r.checkpoint.name.clone(),
            checkpoint_blake3: r.checkpoint.blake3.clone(),
            prompts: r.prompts.name.clone(),
            prompts_blake3: r.prompts.blake3.clone(),
            requests: r.planned,
            max_tokens: r.protocol.max_tokens,
            ignore_eos: r.protocol.ignore_eos,
        }
    }

    /// Everything that tells it from others, in a line.
    pub fn describe(&self) -> String {
        let flags = if self.flags.is_empty() { String::new() } else { format!(", {}", self.flags.join(" ")) };
        let start = |hash: &str| hash.get(..8).unwrap_or(hash).to_string();
        format!(
            "{} {} on {}, {} threads{flags}; checkpoint {} ({}); {} requests of {} tokens from {} ({}){}",
            self.backend,
            self.precision,
            self.machine,
            self.threads,
            self.checkpoint,
            start(&self.checkpoint_blake3),
            self.requests,
            self.max_tokens,
            self.prompts,
            start(&self.prompts_blake3),
            if self.ignore_eos { "" } else { ", to the end of the text" }
        )
    }
}

/// One run of a series.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// When.
    pub time: String,
    /// Commit of the program; `None` where it did not know.
    pub commit: Option<String>,
    /// All completion tokens over all wall time.
    pub tokens_per_s: f64,
    /// Interval over prompts: lower end.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
    /// Median step in ms.
    pub step_ms: Option<f64>,
    /// Mean tokens a step.
    pub tokens_per_step: Option<f64>,
    /// Bytes of a step (projected) over its median time (measured), in 10^9 bytes a second; `None` where a run does not say both.
    pub gb_per_s: Option<f64>,
    /// Hash of what was written.
    pub trajectory: String,
    /// What each op takes of the roofline; `None` where the run was not taken apart.
    pub roofline: Option<OpRoofline>,
}

/// The runs of one commit, one after the other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CommitLevel {
    /// The commit.
    pub commit: Option<String>,
    /// Its runs.
    pub runs: usize,
    /// Mean of their tokens a second.
    pub tokens_per_s: f64,
}

/// A new level.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// First run of the new level, an index of the series.
    pub at: usize,
    /// Its time.
    pub time: String,
    /// Its commit.
    pub commit: Option<String>,
    /// Mean tokens a second of the level before.
    pub before: f64,
    /// And of the new one.
    pub after: f64,
    /// What that is in percent.
    pub change_pct: f64,
    /// What the speed of a step did, in percent; `None` where a run has no step.
    pub step_speed_pct: Option<f64>,
    /// The runs on both sides did not all write the same text, so that tokens a second compare texts too.
    pub other_text: bool,
}

/// The runs of a configuration, in the order of their time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// What they share.
    pub configuration: Configuration,
    /// Where the numbers come from.
    pub kind: Kind,
    /// Each run.
    pub points: Vec<Point>,
    /// Each stretch of runs of one commit.
    pub commits: Vec<CommitLevel>,
    /// Where the level changes.
    pub changes: Vec<Change>,
}

/// All series.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// In the order of their first run.
    pub series: Vec<Series>,
    /// Records left out: cut short, or without a result.
    pub left_out: usize,
}

impl History {
    /// Of records in any order.
    ///
    /// # Errors
    /// A rate that no measurement can give.
    pub fn new<S>(records: &[&Record<S>]) -> Result<History> {
        let mut groups: BTreeMap<(Configuration, &str), Vec<&Record<S>>> = BTreeMap::new();
        let mut left_out = 0;
        for r in records {
            match r.complete && r.result.is_some() {
                true => groups.entry((Configuration::of(r), kind_name(r.kind))).or_default().push(r),
                false => left_out += 1,
            }
        }
        let of = |((configuration, _), mut runs): ((Configuration, &str), Vec<&Record<S>>)| {
            // RFC 3339 in UTC sorts as text; runs of one second keep their order.
            runs.sort_by(|a, b| a.time.cmp(&b.time));
            Series::new(configuration, &runs)
        };
        let mut series = groups.into_iter().map(of).collect::<Result<Vec<Series>>>()?;
        series.sort_by(|a, b| a.points[0].time.cmp(&b.points[0].time));
        Ok(History { series, left_out })
    }
}

/// A name for a kind, as records spell it.
pub fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Measured => "measured",
        Kind::Projected => "projected",
        Kind::Published => "published",
    }
}

impl Series {
    fn new<S>(configuration: Configuration, runs: &[&Record<S>]) -> Result<Series> {
        let kind = runs.first().map_or(Kind::Measured, |r| r.kind);
        let points: Vec<Point> = runs.iter().filter_map(|r| Point::new(r)).collect();
        let logs: Vec<f64> = points.iter().map(|p| p.tokens_per_s.ln()).collect();
        let starts = change_points(&logs)?;
        let mut commits: Vec<CommitLevel> = Vec::new();
        for stretch in points.chunk_by(|a, b| a.commit == b.commit) {
            commits.push(CommitLevel {
                commit: stretch[0].commit.clone(),
                runs: stretch.len(),
                tokens_per_s: average(stretch, |p| Some(p.tokens_per_s)).unwrap_or(0.0),
            });
        }
        let level = |i: usize| {
            let from = if i == 0 { 0 } else { starts[i - 1] };
            &points[from..starts.get(i).copied().unwrap_or(points.len())]
        };
        let change = |(i, &at): (usize, &usize)| {
            let (old, new) = (level(i), level(i + 1));
            let rate = |side: &[Point]| average(side, |p| Some(p.tokens_per_s)).unwrap_or(0.0);
            let (before, after) = (rate(old), rate(new));
            let steps = average(old, |p| p.step_ms).zip(average(new, |p| p.step_ms));
            Change {
                at,
                time: points[at].time.clone(),
                commit: points[at].commit.clone(),
                before,
                after,
                change_pct: (after / before - 1.0) * 100.0,
                step_speed_pct: steps.map(|(a, b)| (a / b - 1.0) * 100.0),
                other_text: old.iter().chain(new).any(|p| p.trajectory != old[0].trajectory),
            }
        };
        let changes = starts.iter().enumerate().map(change).collect();
        Ok(Series { configuration, kind, commits, changes, points })
    }
}

fn average(points: &[Point], of: impl Fn(&Point) -> Option<f64>) -> Option<f64> {
    let values: Option<Vec<f64>> = points.iter().map(of).collect();
    values.and_then(|v| mean(&v))
}

impl Point {
    fn new<S>(r: &Record<S>) -> Option<Point> {
        let result = r.result.as_ref()?;
        let bytes = result.bytes_per_step.as_ref().map(|f| f.value);
        Some(Point {
            time: r.time.clone(),
            commit: r.binary.commit.clone(),
            tokens_per_s: result.tokens_per_s,
            low: result.interval.map(|i| i.low),
            high: result.interval.map(|i| i.high),
            step_ms: result.step_ms,
            tokens_per_step: result.tokens_per_step,
            gb_per_s: bytes.zip(result.step_ms).map(|(bytes, ms)| bytes / ms / 1e6).filter(|v| v.is_finite()),
            trajectory: result.trajectory.clone(),
            roofline: r.profile.as_ref().and_then(|p| p.roofline.clone()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::run;
    use crate::record::tests::setup;
    use crate::record::{Figure, Record};
    use crate::stats::{BootstrapOptions, Draws};

    /// A run at a minute, of a commit, with a time for each of two requests.
    fn record(minute: usize, commit: &str, wall_ms: f64) -> Record {
        let options = BootstrapOptions { resamples: 100, ..Default::default() };
        let mut r = Record::measured(run("plain", &[wall_ms, wall_ms]), setup(), &options).unwrap();
        r.time = format!("2026-01-01T{:02}:{:02}:00Z", minute / 60, minute % 60);
        r.binary.commit = Some(commit.into());
        r
    }

    fn history(records: &[Record]) -> History {
        History::new(&records.iter().collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_slower_commit_is_found_whatever_the_order_of_the_records() {
        let mut draws = Draws::new(5);
        let mut noisy = |ms: f64| ms * (1.0 + 0.004 * draws.normal());
        let mut records: Vec<Record> = (0..12).map(|i| record(i, "old", noisy(200.0))).collect();
        records.extend((12..24).map(|i| record(i, "new", noisy(220.0))));
        records.reverse();
        let h = history(&records);
        assert_eq!((h.series.len(), h.left_out, h.series[0].points.len()), (1, 0, 24));
        let s = &h.series[0];
        let commits: Vec<(&str, usize)> = s.commits.iter().map(|c| (c.commit.as_deref().unwrap(), c.runs)).collect();
        assert_eq!(commits, [("old", 12), ("new", 12)]);
        let [change] = &s.changes[..] else { panic!("{:?}", s.changes) };
        assert_eq!((change.at, change.commit.as_deref(), change.other_text), (12, Some("new"), false));
        assert!(
            (change.change_pct + 9.1).abs() < 0.5 && (change.step_speed_pct.unwrap() + 9.1).abs() < 0.5,
            "{change:?}"
        );
    }

    #[test]
    fn another_text_is_told_from_another_speed() {
        let mut draws = Draws::new(6);
        let mut records: Vec<Record> = (0..20).map(|i| record(i, "c", 200.0 + 0.1 * draws.normal())).collect();
        for r in &mut records[10..] {
            let result = r.result.as_mut().unwrap();
            (result.tokens_per_s, result.trajectory) = (result.tokens_per_s * 1.2, "other".into());
        }
        let change = &history(&records).series[0].changes[0];
        assert!((change.change_pct - 20.0).abs() < 0.2 && change.at == 10 && change.other_text, "{change:?}");
        assert!(change.step_speed_pct.unwrap().abs() < 0.1, "{change:?}");
    }

    #[test]
    fn configurations_are_kept_apart_and_cut_runs_left_out() {
        let mut records: Vec<Record> = (0..5).map(|i| record(i, "c", 200.0)).collect();
        records[1].target.threads = 7;
        records[2].checkpoint.blake3 = "another".into();
        records[3].complete = false;
        records[4].result = None;
        let h = history(&records);
        assert_eq!((h.series.len(), h.left_out), (3, 2));
        assert!(h.series[1].configuration.describe().contains("7 threads"));
        assert!(History::new::<crate::protocol::PromptSample>(&[]).unwrap().series.is_empty());
    }

    #[test]
    fn bytes_over_time_is_a_rate() {
        let mut r = record(0, "c", 100.0);
        let result = r.result.as_mut().unwrap();
        result.step_ms = Some(4.0);
        result.bytes_per_step = Some(Figure { kind: Kind::Projected, value: 2e9, source: "sizes".into() });
        assert_eq!(history(&[r]).series[0].points[0].gb_per_s, Some(500.0));
    }
}
