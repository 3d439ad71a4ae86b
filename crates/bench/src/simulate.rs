//! Synthetic nodes with a known truth: for power analysis, and for tests of the statistics.
//!
//! The logarithm of a request's rate is the sum of normal effects of its node, its process, its trajectory, its prompt and of a repeat; seconds
//! follow from tokens. So the rate of a large fleet is known in closed form: a lognormal's mean.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::luck::Draw;
use crate::stats::hierarchy::{Hierarchy, HierarchyOptions, Prompts};
use crate::stats::{BootstrapOptions, Draws, Estimate, Throughput};

/// What is simulated. Standard deviations are of the logarithm of the rate: 0.01 is 1 %.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scenario {
    /// Nodes.
    pub nodes: usize,
    /// Processes of each node.
    pub processes: usize,
    /// Prompts of each run, the same for all.
    pub prompts: usize,
    /// Tokens of each request.
    pub tokens: f64,
    /// Median rate in tokens/s.
    pub rate: f64,
    /// Between nodes.
    pub node_sd: f64,
    /// Between processes of a node.
    pub process_sd: f64,
    /// Between trajectories, of which each process takes one at random.
    pub trajectory_sd: f64,
    /// Trajectories that there are.
    pub trajectories: usize,
    /// Between prompts.
    pub prompt_sd: f64,
    /// Between repeats of a request.
    pub repeat_sd: f64,
}

impl Default for Scenario {
    /// 20 nodes of one process; nodes and processes spread by 1 %, prompts by 5 %, repeats by 1 %, one trajectory.
    fn default() -> Self {
        Scenario {
            nodes: 20,
            processes: 1,
            prompts: 16,
            tokens: 512.0,
            rate: 500.0,
            node_sd: 0.01,
            process_sd: 0.01,
            trajectory_sd: 0.0,
            trajectories: 1,
            prompt_sd: 0.05,
            repeat_sd: 0.01,
        }
    }
}

/// One simulated experiment.
pub struct Experiment {
    /// Its requests.
    pub nodes: Vec<Vec<Vec<Throughput>>>,
    /// The trajectory of each process.
    pub trajectories: Vec<Vec<usize>>,
    /// Logarithmic effect of each prompt.
    prompt_effects: Vec<f64>,
    trajectory_effects: Vec<f64>,
}

/// Most requests of one experiment, which are held in memory together.
const MOST_REQUESTS: u64 = 1 << 24;

impl Scenario {
    /// Refuses what cannot be simulated.
    ///
    /// # Errors
    /// A count of 0, more than 2^24 requests, a rate or number of tokens that is not positive, a standard deviation that is negative or above 1.
    pub fn check(&self) -> Result<()> {
        let counts = [("nodes", self.nodes), ("processes", self.processes), ("prompts", self.prompts)];
        for (option, n) in counts.into_iter().chain([("trajectories", self.trajectories)]) {
            if n == 0 || n > 1 << 16 {
                return Err(Error::Option { option, expected: "from 1 to 65536", found: n.to_string() });
            }
        }
        let requests = self.nodes as u64 * self.processes as u64 * self.prompts as u64;
        if requests > MOST_REQUESTS {
            let (option, expected) = ("nodes x processes x prompts", "at most 16777216 requests");
            return Err(Error::Option { option, expected, found: requests.to_string() });
        }
        for (option, v) in [("rate", self.rate), ("tokens", self.tokens)] {
            if !(v > 0.0 && v.is_finite()) {
                return Err(Error::Option { option, expected: "a positive number", found: v.to_string() });
            }
        }
        let sds = [("node-sd", self.node_sd), ("process-sd", self.process_sd), ("prompt-sd", self.prompt_sd)];
        for (option, v) in sds.into_iter().chain([("trajectory-sd", self.trajectory_sd), ("repeat-sd", self.repeat_sd)])
        {
            if !(0.0..=1.0).contains(&v) {
                return Err(Error::Option { option, expected: "from 0 to 1 (1 is 100 %)", found: v.to_string() });
            }
        }
        Ok(())
    }

    /// Draws an experiment.
    pub fn experiment(&self, draws: &mut Draws) -> Experiment {
        let effects =
            |n: usize, sd: f64, draws: &mut Draws| -> Vec<f64> { (0..n).map(|_| sd * draws.normal()).collect() };
        let trajectory_effects = effects(self.trajectories, self.trajectory_sd, draws);
        let prompt_effects = effects(self.prompts, self.prompt_sd, draws);
        let mut trajectories = Vec::with_capacity(self.nodes);
        let mut nodes = Vec::with_capacity(self.nodes);
        for _ in 0..self.nodes {
            let node = self.node_sd * draws.normal();
            let (mut taken, mut processes) = (Vec::new(), Vec::new());
            for _ in 0..self.processes {
                let trajectory = draws.index(self.trajectories);
                let process = node + self.process_sd * draws.normal() + trajectory_effects[trajectory];
                let mut request = |prompt: &f64| {
                    let log_rate = process + prompt + self.repeat_sd * draws.normal();
                    Throughput { tokens: self.tokens, seconds: self.tokens / (self.rate * log_rate.exp()) }
                };
                processes.push(prompt_effects.iter().map(&mut request).collect());
                taken.push(trajectory);
            }
            trajectories.push(taken);
            nodes.push(processes);
        }
        Experiment { nodes, trajectories, prompt_effects, trajectory_effects }
    }

    /// Draws an experiment as a hierarchy.
    ///
    /// # Errors
    /// Those of [`Scenario::check`].
    pub fn hierarchy(&self, draws: &mut Draws) -> Result<Hierarchy> {
        self.check()?;
        Hierarchy::new(self.experiment(draws).nodes)
    }

    /// One draw a process: its rate over all prompts, classed by trajectory.
    ///
    /// # Errors
    /// Those of [`Scenario::check`].
    pub fn draws(&self, draws: &mut Draws) -> Result<Vec<Draw>> {
        self.check()?;
        let e = self.experiment(draws);
        let runs = e.nodes.iter().flatten().zip(e.trajectories.iter().flatten());
        Ok(runs
            .map(|(run, class)| {
                let (t, s) = run.iter().fold((0.0, 0.0), |(t, s), x| (t + x.tokens, s + x.seconds));
                Draw { tps: t / s, class: Some(format!("t{class}")) }
            })
            .collect())
    }

    /// The rate of endlessly many nodes with the prompts (and trajectories) of an experiment, or with endlessly many of those too.
    pub fn truth(&self, experiment: &Experiment, prompts: Prompts) -> f64 {
        // Seconds a token are lognormal: their mean is exp(variance / 2) above 1 / rate.
        let slow = |effects: &[f64]| effects.iter().map(|e| (-e).exp()).sum::<f64>() / effects.len() as f64;
        let noise = (self.node_sd.powi(2) + self.process_sd.powi(2) + self.repeat_sd.powi(2)) / 2.0;
        let of_prompts = match prompts {
            Prompts::Fixed => slow(&experiment.prompt_effects),
            Prompts::Random => (self.prompt_sd.powi(2) / 2.0).exp(),
        };
        self.rate / (noise.exp() * of_prompts * slow(&experiment.trajectory_effects))
    }
}

/// How often intervals were right.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Coverage {
    /// Experiments.
    pub experiments: usize,
    /// Share of them whose interval holds the truth.
    pub covered: f64,
    /// Standard error of that share.
    pub standard_error: f64,
    /// Mean half width of the intervals, in percent of the truth.
    pub half_width_pct: f64,
    /// What the intervals promise.
    pub level: f64,
}

/// Simulates experiments and asks how often the interval of [`Hierarchy::tokens_per_s`] holds the truth.
///
/// # Errors
/// Those of [`Scenario::check`] and of the interval; no experiment.
pub fn coverage(scenario: &Scenario, experiments: usize, seed: u64, options: &HierarchyOptions) -> Result<Coverage> {
    scenario.check()?;
    if experiments == 0 {
        return Err(Error::TooFew { what: "a simulation", needed: 1, found: 0 });
    }
    let mut draws = Draws::new(seed);
    let (mut hits, mut widths) = (0, 0.0);
    for _ in 0..experiments {
        let mut experiment = scenario.experiment(&mut draws);
        let nodes = std::mem::take(&mut experiment.nodes);
        let bootstrap = BootstrapOptions { seed: draws.bits(), ..options.bootstrap };
        let Estimate { interval, .. } =
            Hierarchy::new(nodes)?.tokens_per_s(&HierarchyOptions { bootstrap, ..*options })?;
        let truth = scenario.truth(&experiment, options.prompts);
        hits += usize::from(interval.low <= truth && truth <= interval.high);
        widths += (interval.high - interval.low) / 2.0 / truth;
    }
    let covered = hits as f64 / experiments as f64;
    Ok(Coverage {
        experiments,
        covered,
        standard_error: (covered * (1.0 - covered) / experiments as f64).sqrt(),
        half_width_pct: widths / experiments as f64 * 100.0,
        level: options.bootstrap.level,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::luck::Group;

    #[test]
    fn the_truth_is_what_many_nodes_give() {
        let scenario = Scenario { nodes: 4000, prompts: 8, ..Scenario::default() };
        let mut draws = Draws::new(2);
        let experiment = scenario.experiment(&mut draws);
        let (tokens, seconds) =
            experiment.nodes.iter().flatten().flatten().fold((0.0, 0.0), |(t, s), x| (t + x.tokens, s + x.seconds));
        let truth = scenario.truth(&experiment, Prompts::Fixed);
        assert!((tokens / seconds / truth - 1.0).abs() < 1e-3, "{} {truth}", tokens / seconds);
        assert!((scenario.truth(&experiment, Prompts::Random) / truth - 1.0).abs() < 0.06);
    }

    #[test]
    fn a_lottery_of_trajectories_is_found_and_its_absence_too() {
        let lottery = Scenario {
            nodes: 18,
            trajectory_sd: 0.01,
            trajectories: 8,
            node_sd: 0.0,
            process_sd: 0.0015,
            repeat_sd: 0.0,
            ..Scenario::default()
        };
        let g = Group::new(&lottery.draws(&mut Draws::new(6)).unwrap()).unwrap();
        assert!(g.explained.unwrap() > 0.95 && g.p.unwrap() < 1e-4, "{g:?}");
        assert!((g.within_sd_pct.unwrap() - 0.15).abs() < 0.1, "{g:?}");
        // Classes that do not matter: p is uniform over experiments.
        let none = Scenario { trajectory_sd: 0.0, process_sd: 0.01, prompts: 1, ..lottery };
        let mut draws = Draws::new(7);
        let found =
            (0..2000).filter(|_| Group::new(&none.draws(&mut draws).unwrap()).unwrap().p.is_some_and(|p| p < 0.05));
        let share = found.count() as f64 / 2000.0;
        assert!((0.035..=0.065).contains(&share), "{share}");
    }

    #[test]
    fn seeds_are_kept_and_nonsense_is_refused() {
        let s = Scenario { nodes: 3, ..Scenario::default() };
        assert_eq!(s.draws(&mut Draws::new(5)).unwrap(), s.draws(&mut Draws::new(5)).unwrap());
        assert_ne!(s.draws(&mut Draws::new(5)).unwrap(), s.draws(&mut Draws::new(6)).unwrap());
        let bad = |s: Scenario| s.check().unwrap_err().to_string();
        assert!(bad(Scenario { nodes: 0, ..s.clone() }).starts_with("nodes: "));
        assert!(bad(Scenario { rate: f64::NAN, ..s.clone() }).starts_with("rate: "));
        assert!(bad(Scenario { node_sd: -0.1, ..s.clone() }).starts_with("node-sd: "));
        assert!(coverage(&s, 0, 1, &HierarchyOptions::default()).is_err());
    }
}
