//! Statistics of speed: intervals that cover, tests that say what they test, and the size of the luck.
//!
//! | module | concept | source |
//! |---|---|---|
//! | [`bootstrap`](mod@bootstrap) | percentile and BCa intervals over exchangeable units | Efron and Tibshirani 1993 |
//! | [`throughput`] | tokens a second as a ratio of sums, alone and paired | Cochran 1977 |
//! | [`hierarchy`] | runs on nodes, in processes, over prompts: bootstrap, and t below 20 nodes | Davison and Hinkley 1997; Owen 2007 |
//! | [`components`] | variance of node, process, trajectory, prompt and repeat | Searle, Casella and McCulloch 1992 |
//! | [`paired`] | log-ratios, Hodges-Lehmann, Mann-Whitney, equivalence | Hodges and Lehmann 1963; Schuirmann 1987 |
//! | [`maximum`] | the expected best of n draws | David and Nagaraja 2003 |
//! | [`multiple`] | many comparisons at once | Benjamini and Hochberg 1995 |
//! | [`changepoint`] | where a series jumps | Killick, Fearnhead and Eckley 2012 |
//! | [`power`] | how many draws an effect needs | Cohen 1988 |
//! | [`summary`] | mean, median, t interval, outliers by MAD | Iglewicz and Hoaglin 1993 |
//!
//! Each has a published check value among its tests, and the intervals a simulation with a known truth.

pub mod bootstrap;
pub mod changepoint;
pub mod components;
pub mod hierarchy;
pub mod maximum;
pub mod multiple;
pub mod paired;
pub mod power;
pub mod summary;
pub mod throughput;

pub use bootstrap::{BootstrapOptions, Draws, Estimate, Interval, Method, bootstrap};
pub use summary::{mad_outliers, mean, median, sd, t_interval};
pub use throughput::{Throughput, ratio_se, speedup, tokens_per_s};

#[cfg(test)]
mod tests;
