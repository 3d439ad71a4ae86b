//! Tokens a second of runs on nodes, in processes, over prompts: an interval for what another node would give.
//!
//! Within-run noise says little about the next node, so whole units are resampled, from the top: nodes; with one node its processes;
//! with one process its prompts. A unit keeps all that is below it: redrawing inside a redrawn unit counts the lower variance
//! twice and covers too much (Davison and Hinkley, *Bootstrap Methods and their Application*, 1997, section 3.8; [`Redraw::Every`] does it
//! all the same, for comparison). Prompts are crossed with runs, since every run has the same ones: where they stand for a population they
//! are resampled once for all runs (Owen, *The Pigeonhole Bootstrap*, Ann. Appl. Stat. 1, 2007).
//!
//! Few units make bootstrap intervals too narrow. Their tails are widened to what Student's t would have (Hesterberg, *What
//! Teachers Should Know About the Bootstrap*, Am. Stat. 69, 2015, section 4.1.1), and below [`FEW`] units a t interval on the units is used
//! instead. With random prompts its variance is that of units and prompts together, with Satterthwaite's degrees of freedom (Biometrics
//! Bulletin 2, 1946).
//!
//! Share of 2000 simulated experiments (seed 1) whose 95 % interval covers the truth: 2 processes a node, 16 prompts a run; sd of nodes,
//! processes and repeats 1 %, of prompts 5 %. The standard error is 0.5 %. `cargo test -p bench --lib coverage_by -- --ignored --nocapture` prints
//! it, and `chiku bench simulate` answers for other experiments.
//!
//! | nodes | interval | fixed prompts | random prompts | fixed, every level redrawn |
//! |--:|---|--:|--:|--:|
//! | 2 | t | 94.6 % | 95.7 % | 94.6 % |
//! | 3 | t | 94.1 % | 95.0 % | 94.1 % |
//! | 5 | t | 94.2 % | 95.4 % | 94.2 % |
//! | 8 | t | 94.8 % | 96.2 % | 94.8 % |
//! | 12 | t | 94.9 % | 95.2 % | 94.9 % |
//! | 19 | t | 94.8 % | 95.0 % | 94.8 % |
//! | 20 | BCa | 94.8 % | 95.2 % | 94.8 % |
//! | 32 | BCa | 95.3 % | 94.2 % | 96.0 % |
//! | 64 | BCa | 95.0 % | 94.7 % | 96.1 % |

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal};

use super::bootstrap::{BootstrapOptions, Draws, Estimate, centred, check, read_off};
use super::summary::{around, t_quantile};
use super::throughput::{Throughput, tokens_per_s};
use crate::error::{Error, Result};

/// Units below which a t interval is used.
pub const FEW: usize = 20;

/// What the prompts of the runs stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Prompts {
    /// Themselves: the interval is for this set.
    Fixed,
    /// All prompts of their kind: the interval is for another set too.
    Random,
}

/// Which levels a resample draws.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Redraw {
    /// The highest that has more than one unit.
    Highest,
    /// Nodes, and inside each drawn node its processes: covers more than it says.
    Every,
}

/// How to form the interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HierarchyOptions {
    /// Resamples, level, method, seed.
    pub bootstrap: BootstrapOptions,
    /// What the prompts stand for.
    pub prompts: Prompts,
    /// Which levels are drawn.
    pub redraw: Redraw,
}

impl Default for HierarchyOptions {
    /// For this prompt set, drawing the highest level.
    fn default() -> Self {
        HierarchyOptions { bootstrap: BootstrapOptions::default(), prompts: Prompts::Fixed, redraw: Redraw::Highest }
    }
}

/// Tokens and seconds of each node's processes over the same prompts.
#[derive(Debug, Clone, PartialEq)]
pub struct Hierarchy {
    /// Processes of each node, as ranges of `rows`.
    nodes: Vec<std::ops::Range<usize>>,
    /// One row a process, one column a prompt.
    rows: Vec<Vec<Throughput>>,
}

impl Hierarchy {
    /// From `nodes[i][j][k]`: prompt `k` of process `j` on node `i`.
    ///
    /// # Errors
    /// No node, a node without process, processes of different numbers of prompts, a time that is not positive.
    pub fn new(nodes: Vec<Vec<Vec<Throughput>>>) -> Result<Hierarchy> {
        let mut ranges = Vec::with_capacity(nodes.len());
        let mut rows: Vec<Vec<Throughput>> = Vec::new();
        for node in nodes {
            let start = rows.len();
            rows.extend(node);
            ranges.push(start..rows.len());
        }
        let prompts = rows.first().map_or(0, Vec::len);
        if prompts == 0 || ranges.iter().any(std::ops::Range::is_empty) {
            return Err(Error::TooFew { what: "each node and process of a hierarchy", needed: 1, found: 0 });
        }
        if let Some(other) = rows.iter().find(|r| r.len() != prompts) {
            let found = format!("{prompts} and {}", other.len());
            let expected = "the same prompts in each run";
            return Err(Error::Option { option: "prompts", expected, found });
        }
        rows.iter().try_for_each(|r| Throughput::checked(r))?;
        Ok(Hierarchy { nodes: ranges, rows })
    }

    /// Nodes.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Prompts of each run.
    pub fn prompts(&self) -> usize {
        self.rows[0].len()
    }

    /// The rows of the highest level with more than one unit: of nodes, or of the processes of the one node.
    fn units(&self) -> Vec<Vec<Throughput>> {
        if self.nodes.len() == 1 {
            return self.rows.clone();
        }
        let sum = |range: &std::ops::Range<usize>| -> Vec<Throughput> {
            let mut total = vec![Throughput { tokens: 0.0, seconds: 0.0 }; self.prompts()];
            for row in &self.rows[range.clone()] {
                total.iter_mut().zip(row).for_each(|(t, x)| {
                    t.tokens += x.tokens;
                    t.seconds += x.seconds;
                });
            }
            total
        };
        self.nodes.iter().map(sum).collect()
    }

    /// Tokens a second of all runs together, with its interval.
    ///
    /// # Errors
    /// A single run of a single prompt; options out of range.
    pub fn tokens_per_s(&self, options: &HierarchyOptions) -> Result<Estimate> {
        let units = self.units();
        if units.len() == 1 {
            return tokens_per_s(&units[0], &options.bootstrap);
        }
        check(units.len(), &options.bootstrap)?;
        if units.len() < FEW {
            return Ok(student(&units, options));
        }
        Ok(self.resampled(&units, options))
    }

    fn resampled(&self, units: &[Vec<Throughput>], options: &HierarchyOptions) -> Estimate {
        let prompts = self.prompts();
        let random = options.prompts == Prompts::Random && prompts > 1;
        // With every level redrawn, rows are processes and a node is a range of them.
        let every = options.redraw == Redraw::Every && self.nodes.len() > 1;
        let matrix = Matrix::new(if every { &self.rows } else { units });
        let mut draws = Draws::new(options.bootstrap.seed);
        let (mut row_weights, mut column_weights) = (vec![0.0; matrix.rows], vec![1.0; prompts]);
        let values = (0..options.bootstrap.resamples).map(|_| {
            row_weights.fill(0.0);
            for _ in 0..units.len() {
                let unit = draws.index(units.len());
                match every.then(|| self.nodes[unit].clone()) {
                    None => row_weights[unit] += 1.0,
                    Some(range) => {
                        range.clone().for_each(|_| row_weights[range.start + draws.index(range.len())] += 1.0);
                    }
                }
            }
            if random {
                column_weights.fill(0.0);
                (0..prompts).for_each(|_| column_weights[draws.index(prompts)] += 1.0);
                return matrix.rate(&row_weights, &column_weights);
            }
            matrix.rate_of_rows(&row_weights)
        });
        let values: Vec<f64> = values.collect();
        let (ones_r, ones_c) = (vec![1.0; matrix.rows], vec![1.0; prompts]);
        let fewest = if random { units.len().min(prompts) } else { units.len() };
        let tail = match options.redraw {
            Redraw::Highest => widened(options.bootstrap.level, fewest),
            Redraw::Every => (1.0 - options.bootstrap.level) / 2.0,
        };
        read_off(matrix.rate(&ones_r, &ones_c), values, tail, &options.bootstrap, || {
            leave_one_out(&Matrix::new(units), random)
        })
    }
}

/// The nominal tail whose quantile lies where that of Student's t with n - 1 degrees of freedom does; also makes up for the
/// bootstrap's divisor n in place of n - 1.
fn widened(level: f64, n: usize) -> f64 {
    let n = n as f64;
    Normal::standard().cdf(-(n / (n - 1.0)).sqrt() * t_quantile(level, n - 1.0))
}

/// Deviations from leaving out each unit and, where they are random, each prompt: the acceleration of several samples sums over both
/// (Davison and Hinkley, equation 5.25).
fn leave_one_out(matrix: &Matrix, random: bool) -> Vec<f64> {
    let (rows, columns) = (vec![1.0; matrix.rows], vec![1.0; matrix.columns]);
    let without = |weights: &[f64], i: usize| {
        let mut weights = weights.to_vec();
        weights[i] = 0.0;
        weights
    };
    let by_row = (0..matrix.rows).map(|i| matrix.rate(&without(&rows, i), &columns)).collect();
    let mut out: Vec<f64> = centred(by_row).collect();
    if random {
        out.extend(centred((0..matrix.columns).map(|k| matrix.rate(&rows, &without(&columns, k))).collect()));
    }
    out
}

/// A t interval from the linearised ratio.
fn student(units: &[Vec<Throughput>], options: &HierarchyOptions) -> Estimate {
    let (n, k) = (units.len() as f64, units[0].len() as f64);
    let all = || units.iter().flatten();
    let (tokens, seconds) = all().fold((0.0, 0.0), |(t, s), x| (t + x.tokens, s + x.seconds));
    let rate = tokens / seconds;
    let mean_seconds = seconds / (n * k);
    let residual = |x: &Throughput| (x.tokens - rate * x.seconds) / mean_seconds;
    let rows: Vec<f64> = units.iter().map(|u| u.iter().map(residual).sum::<f64>() / k).collect();
    let squares = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>();
    // The residuals sum to 0, so that squares are squares around the mean.
    let of_units = squares(&rows) / (n - 1.0) / n;
    let level = options.bootstrap.level;
    if options.prompts == Prompts::Fixed || units[0].len() < 2 {
        return around(rate, t_quantile(level, n - 1.0) * of_units.sqrt(), level);
    }
    let columns: Vec<f64> =
        (0..units[0].len()).map(|c| units.iter().map(|u| residual(&u[c])).sum::<f64>() / n).collect();
    let of_prompts = squares(&columns) / (k - 1.0) / k;
    let cells: f64 = units
        .iter()
        .zip(&rows)
        .flat_map(|(u, row)| u.iter().zip(&columns).map(move |(x, column)| (residual(x) - row - column).powi(2)))
        .sum();
    let of_cells = cells / ((n - 1.0) * (k - 1.0)) / (n * k);
    // Both count the cells' noise; it is in the mean once.
    let variance = (of_units + of_prompts - of_cells).max(of_units.max(of_prompts));
    let df = variance.powi(2) / (of_units.powi(2) / (n - 1.0) + of_prompts.powi(2) / (k - 1.0));
    let df = if df.is_finite() { df.max(1.0) } else { n - 1.0 };
    around(rate, t_quantile(level, df) * variance.sqrt(), level)
}

/// Rows of units, columns of prompts, tokens and seconds apart.
struct Matrix {
    rows: usize,
    columns: usize,
    tokens: Vec<f64>,
    seconds: Vec<f64>,
    row_sums: Vec<(f64, f64)>,
}

impl Matrix {
    fn new(rows: &[Vec<Throughput>]) -> Matrix {
        let sum = |row: &Vec<Throughput>| row.iter().fold((0.0, 0.0), |(t, s), x| (t + x.tokens, s + x.seconds));
        Matrix {
            rows: rows.len(),
            columns: rows[0].len(),
            tokens: rows.iter().flatten().map(|x| x.tokens).collect(),
            seconds: rows.iter().flatten().map(|x| x.seconds).collect(),
            row_sums: rows.iter().map(sum).collect(),
        }
    }

    fn rate_of_rows(&self, weights: &[f64]) -> f64 {
        let (t, s) =
            self.row_sums.iter().zip(weights).fold((0.0, 0.0), |(t, s), (sum, w)| (t + w * sum.0, s + w * sum.1));
        t / s
    }

    fn rate(&self, row_weights: &[f64], column_weights: &[f64]) -> f64 {
        let dot = |values: &[f64]| values.iter().zip(column_weights).map(|(v, w)| v * w).sum::<f64>();
        let (mut tokens, mut seconds) = (0.0, 0.0);
        for (i, &weight) in row_weights.iter().enumerate().filter(|(_, w)| **w > 0.0) {
            let row = i * self.columns..(i + 1) * self.columns;
            tokens += weight * dot(&self.tokens[row.clone()]);
            seconds += weight * dot(&self.seconds[row]);
        }
        tokens / seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::{Scenario, coverage};
    use crate::stats::Method;

    fn options(prompts: Prompts, redraw: Redraw) -> HierarchyOptions {
        HierarchyOptions { bootstrap: BootstrapOptions { resamples: 400, ..Default::default() }, prompts, redraw }
    }

    fn covered(nodes: usize, prompts: Prompts, redraw: Redraw) -> f64 {
        let scenario = Scenario { nodes, processes: 2, prompts: 16, ..Scenario::default() };
        coverage(&scenario, 2000, 1, &options(prompts, redraw)).unwrap().covered
    }

    #[test]
    fn intervals_cover_the_truth() {
        for nodes in [3, 20] {
            for prompts in [Prompts::Fixed, Prompts::Random] {
                let share = covered(nodes, prompts, Redraw::Highest);
                assert!((0.93..=0.97).contains(&share), "{nodes} nodes, {prompts:?}: {share}");
            }
        }
    }

    #[test]
    #[ignore = "prints the table of the documentation; a minute"]
    fn coverage_by_number_of_nodes() {
        for nodes in [2, 3, 5, 8, 12, 19, 20, 32, 64] {
            let share = |prompts, redraw| 100.0 * covered(nodes, prompts, redraw);
            println!(
                "//! | {nodes} | {} | {:.1} % | {:.1} % | {:.1} % |",
                if nodes < FEW { "t" } else { "BCa" },
                share(Prompts::Fixed, Redraw::Highest),
                share(Prompts::Random, Redraw::Highest),
                share(Prompts::Fixed, Redraw::Every)
            );
        }
    }

    fn one(seconds: f64) -> Throughput {
        Throughput { tokens: 100.0, seconds }
    }

    #[test]
    fn the_highest_level_with_more_than_one_unit_is_drawn() {
        let h = |nodes: Vec<Vec<Vec<Throughput>>>| Hierarchy::new(nodes).unwrap();
        // One process: prompts, as for a single run.
        let row = vec![one(1.0), one(3.0)];
        let single = h(vec![vec![row.clone()]]).tokens_per_s(&HierarchyOptions::default()).unwrap();
        assert_eq!(single, tokens_per_s(&row, &BootstrapOptions::default()).unwrap());
        // Two processes on one node: t over processes; 50 and 100 tokens/s have a mean of ratio 66.7.
        let two = h(vec![vec![vec![one(1.0)], vec![one(2.0)]]]).tokens_per_s(&HierarchyOptions::default()).unwrap();
        assert_eq!(two.interval.method, Method::T);
        assert!((two.value - 200.0 / 3.0).abs() < 1e-9);
        // Processes of a node belong together: two nodes that agree leave no width.
        let node = vec![vec![one(1.0)], vec![one(2.0)]];
        let same = h(vec![node.clone(), node]).tokens_per_s(&HierarchyOptions::default()).unwrap();
        assert_eq!((same.interval.low, same.interval.high), (same.value, same.value));
    }

    #[test]
    fn twenty_nodes_are_resampled_reproducibly() {
        let scenario = Scenario { nodes: 20, processes: 1, prompts: 4, ..Scenario::default() };
        let h = scenario.hierarchy(&mut Draws::new(3)).unwrap();
        for prompts in [Prompts::Fixed, Prompts::Random] {
            let o = options(prompts, Redraw::Highest);
            let (a, b) = (h.tokens_per_s(&o).unwrap(), h.tokens_per_s(&o).unwrap());
            assert_eq!(a, b);
            assert_eq!((a.interval.method, a.interval.resamples), (Method::Bca, 400));
            assert!(a.interval.low < a.value && a.value < a.interval.high);
        }
    }

    #[test]
    fn impossible_hierarchies_are_refused() {
        assert!(Hierarchy::new(vec![]).is_err());
        assert!(Hierarchy::new(vec![vec![]]).is_err() && Hierarchy::new(vec![vec![vec![]]]).is_err());
        let uneven = Hierarchy::new(vec![vec![vec![one(1.0)], vec![one(1.0), one(2.0)]]]).unwrap_err().to_string();
        assert!(uneven.contains("the same prompts in each run, found 1 and 2"), "{uneven}");
        for seconds in [0.0, -1.0, f64::NAN] {
            assert!(Hierarchy::new(vec![vec![vec![one(seconds)]]]).is_err());
        }
        let h = Hierarchy::new(vec![vec![vec![one(1.0)]]]).unwrap();
        assert!(matches!(h.tokens_per_s(&HierarchyOptions::default()), Err(Error::TooFew { .. })));
    }
}
