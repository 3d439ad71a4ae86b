//! Runs of one configuration, in several processes and on several nodes, taken together: what another run would give, and what the
//! spread of the runs is made of.
//!
//! The interval of a single record is over its prompts, and says nothing of the next process or node. Here the highest level with more than
//! one unit decides: nodes, else processes, else prompts ([`crate::stats::hierarchy`]).

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::record::Record;
use crate::stats::components::{Component, Factor, variance_components};
use crate::stats::hierarchy::{Hierarchy, HierarchyOptions, Prompts};
use crate::stats::{BootstrapOptions, Estimate, Throughput};

/// What an interval was resampled over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Machines.
    Nodes,
    /// Runs of the program.
    Processes,
    /// Prompts of one run.
    #[default]
    Prompts,
}

impl Level {
    /// As it is said.
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Nodes => "nodes",
            Level::Processes => "processes",
            Level::Prompts => "prompts",
        }
    }
}

/// Runs taken together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pooled {
    /// Name of the configuration.
    pub label: String,
    /// Nodes; records that name none are of one.
    pub nodes: usize,
    /// Runs.
    pub processes: usize,
    /// Prompts of each.
    pub prompts: usize,
    /// Different texts that the runs wrote.
    pub trajectories: usize,
    /// Records that are of another configuration, or were cut short.
    pub left_out: usize,
    /// Tokens a second of all of them.
    pub tokens_per_s: Estimate,
    /// What the interval is over, prompts resampled beside it.
    pub over: Level,
}

/// The runs of the last record's configuration.
struct Runs<'a> {
    records: Vec<&'a Record>,
    /// Index of each record's node.
    nodes: Vec<usize>,
    left_out: usize,
}

impl Runs<'_> {
    fn of(records: &[Record]) -> Result<Runs<'_>> {
        let whole = |r: &&Record| r.complete && r.result.is_some() && !r.samples.is_empty();
        let Some(last) = records.iter().rfind(whole) else {
            return Err(Error::TooFew {
                what: "runs taken together (complete records with samples)",
                needed: 1,
                found: 0,
            });
        };
        let kept: Vec<&Record> = records.iter().filter(whole).filter(|r| setting(r) == setting(last)).collect();
        let mut seen: Vec<Option<&str>> = Vec::new();
        let nodes = kept.iter().map(|r| {
            let node = r.node.as_deref();
            seen.iter().position(|s| *s == node).unwrap_or_else(|| {
                seen.push(node);
                seen.len() - 1
            })
        });
        let nodes = nodes.collect();
        Ok(Runs { left_out: records.len() - kept.len(), records: kept, nodes })
    }

    fn node_count(&self) -> usize {
        self.nodes.iter().max().map_or(0, |n| n + 1)
    }

    fn throughputs(record: &Record) -> Vec<Throughput> {
        record.samples.iter().map(Throughput::from).collect()
    }
}

/// What two records must share to be draws of one configuration.
fn setting(r: &Record) -> impl PartialEq {
    let (t, drafter) = (&r.target, r.drafter.as_ref().map(|d| &d.blake3));
    let model = (&t.label, &t.backend, &t.precision, t.threads, &t.flags, &r.checkpoint.blake3, drafter);
    (model, &r.protocol, &r.prompts.blake3, r.samples.len(), r.environment.cpu.as_deref())
}

/// Tokens a second of the runs of the last record's configuration.
///
/// # Errors
/// No complete record; one run of one prompt; times that no measurement gives.
pub fn pooled(records: &[Record], options: &BootstrapOptions) -> Result<Pooled> {
    let runs = Runs::of(records)?;
    let mut nodes: Vec<Vec<Vec<Throughput>>> = vec![Vec::new(); runs.node_count()];
    for (record, &node) in runs.records.iter().zip(&runs.nodes) {
        nodes[node].push(Runs::throughputs(record));
    }
    let (count, processes) = (nodes.len(), runs.records.len());
    let over = match (count, processes) {
        (2.., _) => Level::Nodes,
        (_, 2..) => Level::Processes,
        _ => Level::Prompts,
    };
    let texts = runs.records.iter().filter_map(|r| r.result.as_ref()).map(|r| (r.trajectory.as_str(), ()));
    let how = HierarchyOptions { bootstrap: *options, prompts: Prompts::Random, ..Default::default() };
    Ok(Pooled {
        label: runs.records[0].target.label.clone(),
        nodes: count,
        processes,
        prompts: runs.records[0].samples.len(),
        trajectories: texts.collect::<HashMap<&str, ()>>().len(),
        left_out: runs.left_out,
        tokens_per_s: Hierarchy::new(nodes)?.tokens_per_s(&how)?,
        over,
    })
}

/// What the variance of the logarithm of each request's rate is made of: node, process, trajectory, prompt, repeat.
///
/// # Errors
/// Fewer than 3 requests, times that no measurement gives, a design from which the components do not follow.
pub fn components(records: &[Record]) -> Result<Vec<Component>> {
    let runs = Runs::of(records)?;
    let mut texts: HashMap<&str, usize> = HashMap::new();
    let (mut values, mut node, mut process, mut trajectory, mut prompt) = (vec![], vec![], vec![], vec![], vec![]);
    for (i, record) in runs.records.iter().enumerate() {
        let text = record.result.as_ref().map_or("", |r| r.trajectory.as_str());
        let next = texts.len();
        let text = *texts.entry(text).or_insert(next);
        for (p, t) in Runs::throughputs(record).iter().enumerate() {
            values.push((t.tokens / t.seconds).ln());
            node.push(runs.nodes[i]);
            process.push(i);
            trajectory.push(text);
            prompt.push(p);
        }
    }
    let factors = [("node", node), ("trajectory", trajectory), ("process", process), ("prompt", prompt)];
    variance_components(&values, &factors.map(|(name, levels)| Factor { name, levels }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::run;
    use crate::record::tests::setup;
    use crate::stats::Draws;

    /// Runs on nodes: their factors, and those of 8 prompts with 2 % of noise.
    fn records(nodes: &[(&str, f64)]) -> Vec<Record> {
        let mut draws = Draws::new(5);
        let options = BootstrapOptions { resamples: 200, ..Default::default() };
        let record = |&(node, factor): &(&str, f64)| {
            let times: Vec<f64> =
                (0..8).map(|p| 100.0 * f64::from(8 + p) / 10.0 * factor * (0.02 * draws.normal()).exp()).collect();
            let mut r = Record::measured(run("a", &times), setup(), &options).unwrap();
            r.node = Some(node.to_string()).filter(|n| !n.is_empty());
            r
        };
        nodes.iter().map(record).collect()
    }

    #[test]
    fn the_highest_level_with_several_units_decides() {
        let options = BootstrapOptions { resamples: 500, ..Default::default() };
        let of = |nodes: &[(&str, f64)]| pooled(&records(nodes), &options).unwrap();
        let one = of(&[("", 1.0)]);
        assert_eq!((one.nodes, one.processes, one.prompts, one.over), (1, 1, 8, Level::Prompts));
        let processes = of(&[("", 1.0), ("", 1.1), ("", 0.9)]);
        assert_eq!((processes.nodes, processes.processes, processes.over), (1, 3, Level::Processes));
        let nodes = of(&[("x", 1.0), ("x", 1.0), ("y", 1.2), ("z", 0.8)]);
        assert_eq!((nodes.nodes, nodes.processes, nodes.over, nodes.trajectories), (3, 4, Level::Nodes, 1));
        // Nodes that differ by 20 % say more of the next node than prompts of one do.
        let width = |p: &Pooled| (p.tokens_per_s.interval.high - p.tokens_per_s.interval.low) / p.tokens_per_s.value;
        assert!(width(&nodes) > width(&of(&[("x", 1.0), ("y", 1.001), ("z", 1.0)])), "{nodes:?}");
    }

    #[test]
    fn other_configurations_and_cut_runs_are_left_out_and_counted() {
        let mut all = records(&[("", 1.0), ("", 1.0), ("", 1.0), ("", 1.0)]);
        all[0].target.flags = vec!["k=9".into()];
        all[1].complete = false;
        let p = pooled(&all, &BootstrapOptions { resamples: 100, ..Default::default() }).unwrap();
        assert_eq!((p.processes, p.left_out), (2, 2));
        assert!(pooled(&[], &BootstrapOptions::default()).unwrap_err().to_string().contains("there are 0"));
    }

    #[test]
    fn variance_is_put_where_it_comes_from() {
        let names = ["a", "b", "c", "d", "e", "f"];
        let factors = [1.0, 1.3, 0.8, 1.1, 0.7, 1.2];
        let nodes: Vec<(&str, f64)> = names.into_iter().zip(factors).flat_map(|n| [n, n]).collect();
        let found = components(&records(&nodes)).unwrap();
        let share = |name: &str| found.iter().find(|c| c.name == name).unwrap().share.unwrap_or(0.0);
        assert!(share("node") > 0.3 && share("prompt") > 0.3, "{found:?}");
        assert!(share("process") < 0.05 && share("repeat") < 0.05, "{found:?}");
        assert!(found.iter().any(|c| c.name == "trajectory" && c.confounded.is_some()), "all wrote the same text");
    }
}
