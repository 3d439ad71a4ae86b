//! What the variance of speed is made of: node, process, trajectory, prompt, repeat.
//!
//! The model is additive in the logarithm of the rate, every effect random; factors may be nested, crossed and unbalanced. The
//! estimator is MIVQUE(0): the squares summed over the levels of each factor, set equal to what the model expects of them. For
//! balanced data that is the analysis of variance. It is unbiased, so a component that is not there comes out negative as often as positive;
//! such a value is reported as 0, with the raw one beside it.
//!
//! Two factors that split the observations alike (one process a node) cannot be told apart: the later one is reported as confounded and
//! its variance is in the earlier one.
//!
//! Sources: Rao, J. Multivariate Anal. 1, 1971; Searle, Casella and McCulloch, *Variance Components*, 1992, section 11.3.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::summary::{finite, mean};
use crate::error::{Error, Result};

/// A named way to split observations.
#[derive(Debug, Clone, PartialEq)]
pub struct Factor {
    /// Name.
    pub name: &'static str,
    /// Level of each observation.
    pub levels: Vec<usize>,
}

/// The variance of one factor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Component {
    /// The factor; `repeat` is what is left.
    pub name: String,
    /// Levels that were observed.
    pub levels: usize,
    /// Its variance, 0 where the estimate is negative; `None` where it cannot be told.
    pub variance: Option<f64>,
    /// Its share of the sum of all variances.
    pub share: Option<f64>,
    /// The estimate before it was cut at 0.
    pub raw: Option<f64>,
    /// Why it cannot be told.
    pub confounded: Option<String>,
}

/// Variance components of observations, in the order of the factors, the residual (`repeat`) last.
///
/// # Errors
/// Fewer than 3 observations, one that is not finite, factors of another length, a design from which the components do not follow.
pub fn variance_components(values: &[f64], factors: &[Factor]) -> Result<Vec<Component>> {
    finite(values)?;
    let n = values.len();
    if n < 3 {
        return Err(Error::TooFew { what: "variance components", needed: 3, found: n });
    }
    if let Some(f) = factors.iter().find(|f| f.levels.len() != n) {
        let found = format!("{} for {n} observations", f.levels.len());
        return Err(Error::Option { option: "factors", expected: "a level for each observation", found });
    }
    let repeat = Factor { name: "repeat", levels: (0..n).collect() };
    let mut kept: Vec<Vec<usize>> = Vec::new();
    let mut out: Vec<Component> = Vec::new();
    let mut places: Vec<usize> = Vec::new();
    for factor in factors.iter().chain([&repeat]) {
        let (levels, count) = renumbered(&factor.levels);
        let same = kept.iter().position(|k| *k == levels).map(|k| out[places[k]].name.clone());
        let confounded = match (count, same) {
            (1, _) => Some("one level only".to_string()),
            (_, Some(other)) => Some(format!("splits the observations as `{other}` does; its variance is in there")),
            _ => None,
        };
        if confounded.is_none() {
            places.push(out.len());
            kept.push(levels);
        }
        let name = factor.name.to_string();
        out.push(Component { name, levels: count, variance: None, share: None, raw: None, confounded });
    }
    let center = mean(values).unwrap_or(0.0);
    let deviations: Vec<f64> = values.iter().map(|v| v - center).collect();
    let squares: Vec<f64> = kept.iter().map(|k| by_level(k, &deviations).iter().map(|s| s * s).sum()).collect();
    let expected: Vec<Vec<f64>> = kept.iter().map(|f| kept.iter().map(|g| trace(f, g)).collect()).collect();
    let Some(variances) = solve(expected, squares) else {
        let reason = "the design does not tell the variance components apart; leave a factor out".to_string();
        return Err(Error::Refused { reason });
    };
    let total: f64 = variances.iter().map(|v| v.max(0.0)).sum();
    for (&place, v) in places.iter().zip(variances) {
        out[place].raw = Some(v);
        out[place].variance = Some(v.max(0.0));
        out[place].share = Some(v.max(0.0) / total).filter(|s| s.is_finite());
    }
    Ok(out)
}

/// Levels numbered by first appearance, so that equal splits look equal.
fn renumbered(levels: &[usize]) -> (Vec<usize>, usize) {
    let mut seen = HashMap::new();
    let numbered = levels
        .iter()
        .map(|l| {
            let next = seen.len();
            *seen.entry(l).or_insert(next)
        })
        .collect();
    (numbered, seen.len())
}

fn by_level(levels: &[usize], values: &[f64]) -> Vec<f64> {
    let mut sums = vec![0.0; levels.iter().max().map_or(0, |m| m + 1)];
    levels.iter().zip(values).for_each(|(&l, v)| sums[l] += v);
    sums
}

/// Trace of `M F F' M G G'` with the centring `M`: what the variance of `g` adds to the sum of squares of `f`.
fn trace(f: &[usize], g: &[usize]) -> f64 {
    let n = f.len() as f64;
    let ones = vec![1.0; f.len()];
    let (in_f, in_g) = (by_level(f, &ones), by_level(g, &ones));
    let mut cells: HashMap<(usize, usize), f64> = HashMap::new();
    f.iter().zip(g).for_each(|(&a, &b)| *cells.entry((a, b)).or_default() += 1.0);
    let squares = |counts: &[f64]| counts.iter().map(|c| c * c).sum::<f64>();
    let both: f64 = cells.values().map(|c| c * c).sum();
    let mixed: f64 = f.iter().zip(g).map(|(&a, &b)| in_f[a] * in_g[b]).sum();
    both - 2.0 / n * mixed + squares(&in_f) * squares(&in_g) / (n * n)
}

/// Gaussian elimination with row exchange; `None` where the matrix is singular.
fn solve(mut a: Vec<Vec<f64>>, mut b: Vec<f64>) -> Option<Vec<f64>> {
    let n = b.len();
    let scale = a.iter().flatten().fold(0.0f64, |m, v| m.max(v.abs()));
    for i in 0..n {
        let pivot = (i..n).max_by(|&p, &q| a[p][i].abs().total_cmp(&a[q][i].abs()))?;
        if a[pivot][i].abs() <= 1e-10 * scale {
            return None;
        }
        a.swap(i, pivot);
        b.swap(i, pivot);
        let above = a[i].clone();
        for row in i + 1..n {
            let factor = a[row][i] / above[i];
            a[row].iter_mut().zip(&above).for_each(|(v, u)| *v -= factor * u);
            b[row] -= factor * b[i];
        }
    }
    for i in (0..n).rev() {
        let known: f64 = (i + 1..n).map(|j| a[i][j] * b[j]).sum();
        b[i] = (b[i] - known) / a[i][i];
    }
    Some(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Draws;

    #[test]
    fn the_published_dyestuff_example_is_reproduced() {
        // Davies, *Statistical Methods in Research and Production*, 1947: 6 batches of 5 yields. Between batches 1764, within 2451.25.
        let yields = [
            [1545., 1440., 1440., 1520., 1580.],
            [1540., 1555., 1490., 1560., 1495.],
            [1595., 1550., 1605., 1510., 1560.],
            [1445., 1440., 1595., 1465., 1545.],
            [1595., 1630., 1515., 1635., 1625.],
            [1520., 1455., 1450., 1480., 1445.],
        ];
        let values: Vec<f64> = yields.concat();
        let batch = Factor { name: "node", levels: (0..30).map(|i| i / 5).collect() };
        let c = variance_components(&values, &[batch]).unwrap();
        assert_eq!((c[0].name.as_str(), c[0].levels, c[1].name.as_str()), ("node", 6, "repeat"));
        assert!((c[0].variance.unwrap() - 1764.05).abs() < 0.01, "{c:?}");
        assert!((c[1].variance.unwrap() - 2451.25).abs() < 0.01, "{c:?}");
        assert!((c[0].share.unwrap() + c[1].share.unwrap() - 1.0).abs() < 1e-12);
    }

    /// Nodes x processes x prompts x repeats; the trajectory is a class of the process, crossed with the nodes.
    fn design(nodes: usize, processes: usize, prompts: usize, repeats: usize, draws: &mut Draws) -> Vec<Factor> {
        let mut levels = vec![Vec::new(); 4];
        for i in 0..nodes {
            for j in 0..processes {
                let class = draws.index(4);
                for k in 0..prompts {
                    for _ in 0..repeats {
                        let cell = [i, i * processes + j, class, k];
                        levels.iter_mut().zip(cell).for_each(|(l, c)| l.push(c));
                    }
                }
            }
        }
        let names = ["node", "process", "trajectory", "prompt"];
        names.into_iter().zip(levels).map(|(name, levels)| Factor { name, levels }).collect()
    }

    #[test]
    fn simulated_components_come_back_without_bias() {
        // Standard deviations of node, process, trajectory, prompt and repeat.
        let truth = [1.0, 0.5, 2.0, 3.0, 0.7];
        let mut draws = Draws::new(12);
        let mut sums = [0.0; 5];
        for _ in 0..2000 {
            let factors = design(5, 4, 4, 2, &mut draws);
            let mut values = vec![0.0; factors[0].levels.len()];
            for (f, sd) in factors.iter().zip(truth) {
                let effects: Vec<f64> = (0..64).map(|_| sd * draws.normal()).collect();
                values.iter_mut().zip(&f.levels).for_each(|(v, &l)| *v += effects[l]);
            }
            values.iter_mut().for_each(|v| *v += truth[4] * draws.normal());
            let found = variance_components(&values, &factors).unwrap();
            sums.iter_mut().zip(&found).for_each(|(s, c)| *s += c.raw.unwrap());
        }
        for ((sum, sd), name) in sums.iter().zip(truth).zip(["node", "process", "trajectory", "prompt", "repeat"]) {
            let (mean, variance) = (sum / 2000.0, sd * sd);
            assert!((mean - variance).abs() < 0.08 * variance + 0.05, "{name}: {mean} instead of {variance}");
        }
    }

    #[test]
    fn what_cannot_be_told_apart_is_named() {
        let node = Factor { name: "node", levels: vec![7, 7, 9, 9] };
        let process = Factor { name: "process", levels: vec![0, 0, 1, 1] };
        let prompt = Factor { name: "prompt", levels: vec![3; 4] };
        let c = variance_components(&[1.0, 1.2, 3.0, 3.2], &[node, process, prompt]).unwrap();
        assert!(c[0].variance.unwrap() > 1.0);
        assert_eq!(
            c[1].confounded.as_deref(),
            Some("splits the observations as `node` does; its variance is in there")
        );
        assert_eq!((c[2].confounded.as_deref(), c[2].variance), (Some("one level only"), None));
        assert!((c[3].variance.unwrap() - 0.02).abs() < 1e-9, "{c:?}");
    }

    #[test]
    fn impossible_designs_are_refused() {
        let f = |levels: &[usize]| Factor { name: "node", levels: levels.to_vec() };
        assert!(variance_components(&[1.0, 2.0], &[f(&[0, 1])]).is_err());
        assert!(variance_components(&[1.0, 2.0, f64::NAN], &[f(&[0, 1, 1])]).is_err());
        assert!(variance_components(&[1.0, 2.0, 3.0], &[f(&[0, 1])]).is_err());
        let same = variance_components(&[1.0; 4], &[f(&[0, 0, 1, 1])]).unwrap();
        assert_eq!((same[0].variance, same[0].share), (Some(0.0), None));
    }
}
