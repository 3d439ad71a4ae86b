//! Two samples against each other: paired log-ratios, the Hodges-Lehmann shift, ranks, equivalence.
//!
//! Sources: Hodges and Lehmann, Ann. Math. Statist. 34, 1963; Hollander and Wolfe, *Nonparametric Statistical Methods*, 2nd edition, 1999,
//! sections 3.2, 3.3, 4.2, 4.3; Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987. Mann-Whitney is that of `statrs`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};
use statrs::stats_tests::Alternative;
use statrs::stats_tests::mannwhitneyu::{MannWhitneyUMethod, mannwhitneyu};

use super::summary::{finite, mean, median, sd};
use crate::error::{Error, Result};

/// Pairs up to which the distribution of the signed ranks is computed exactly.
const EXACT: usize = 60;

/// `ln(b / a)` of each pair: the sign says which is larger, and effects of factors add up.
///
/// # Errors
/// Samples of different sizes, or a value that is not positive.
pub fn log_ratios(a: &[f64], b: &[f64]) -> Result<Vec<f64>> {
    if a.len() != b.len() {
        let found = format!("{} and {}", a.len(), b.len());
        return Err(Error::Option { option: "paired samples", expected: "as many of one as of the other", found });
    }
    let bad = |v: f64| !(v.is_finite() && v > 0.0);
    if let Some(index) = (0..a.len()).find(|&i| bad(a[i]) || bad(b[i])) {
        let reason = format!("a pair of {} and {}, where both must be positive", a[index], b[index]);
        return Err(Error::Sample { index, reason });
    }
    Ok(a.iter().zip(b).map(|(a, b)| (b / a).ln()).collect())
}

/// A shift with its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Shift {
    /// The estimate.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Probability that the interval covers. Ranks are discrete: it is the smallest that reaches what was asked for, or, with too few
    /// values, the largest that there is.
    pub level: f64,
}

impl Shift {
    /// Of logarithms of ratios, the ratio.
    pub fn exp(self) -> Shift {
        Shift { value: self.value.exp(), low: self.low.exp(), high: self.high.exp(), level: self.level }
    }
}

/// Centre of a symmetric distribution: the median of all averages of two values, with the interval of the signed-rank test.
///
/// # Errors
/// Fewer than 2 values, one that is not finite, a level outside (0, 1).
pub fn hodges_lehmann(values: &[f64], level: f64) -> Result<Shift> {
    check("a Hodges-Lehmann estimate", values.len(), values, level)?;
    let n = values.len();
    let averages = (0..n).flat_map(|i| (i..n).map(move |j| (values[i] + values[j]) / 2.0)).collect();
    let tail = |below: usize| signed_rank_cdf(n, below);
    Ok(ordered(averages, level, tail))
}

/// Shift of `b` against `a`: the median of all differences, with the interval of the rank-sum test.
///
/// # Errors
/// Fewer than 2 values on a side, one that is not finite, a level outside (0, 1).
pub fn hodges_lehmann_shift(a: &[f64], b: &[f64], level: f64) -> Result<Shift> {
    check("a Hodges-Lehmann shift", a.len().min(b.len()), &[a, b].concat(), level)?;
    let differences = b.iter().flat_map(|b| a.iter().map(move |a| b - a)).collect();
    let counts = rank_sum_counts(a.len(), b.len());
    let tail = |below: usize| match &counts {
        Some(cumulated) => cumulated[below.min(cumulated.len() - 1)],
        None => rank_sum_normal(a.len() as f64, b.len() as f64, below as f64),
    };
    Ok(ordered(differences, level, tail))
}

fn check(what: &'static str, found: usize, values: &[f64], level: f64) -> Result<()> {
    if found < 2 {
        return Err(Error::TooFew { what, needed: 2, found });
    }
    finite(values)?;
    if !(level > 0.0 && level < 1.0) {
        let found = level.to_string();
        return Err(Error::Option { option: "level", expected: "a probability between 0 and 1", found });
    }
    Ok(())
}

/// Median of the values, and the interval between the order statistics whose outside has the wanted probability. `tail(c)` is the
/// probability that the rank statistic is at most `c`.
fn ordered(mut values: Vec<f64>, level: f64, tail: impl Fn(usize) -> f64) -> Shift {
    values.sort_by(f64::total_cmp);
    let value = median(&values).unwrap_or(f64::NAN);
    let half = (1.0 - level) / 2.0;
    // The largest count that may lie outside on each side.
    let outside = (0..values.len() / 2).take_while(|&c| tail(c) <= half).count();
    let reached = if outside == 0 { 1.0 - 2.0 * tail(0) } else { 1.0 - 2.0 * tail(outside - 1) };
    let skipped = outside.saturating_sub(usize::from(outside > 0));
    Shift { value, low: values[skipped], high: values[values.len() - 1 - skipped], level: reached }
}

/// P(T+ <= t) of the signed ranks of `n` values.
fn signed_rank_cdf(n: usize, t: usize) -> f64 {
    if n > EXACT {
        let n = n as f64;
        let (mean, variance) = (n * (n + 1.0) / 4.0, n * (n + 1.0) * (2.0 * n + 1.0) / 24.0);
        return Normal::standard().cdf((t as f64 + 0.5 - mean) / variance.sqrt());
    }
    // Ways to choose ranks that sum to each value, as probabilities.
    let mut p = vec![0.0; t + 1];
    p[0] = 1.0;
    for rank in 1..=n {
        for sum in (0..=t).rev() {
            p[sum] = (p[sum] + if sum >= rank { p[sum - rank] } else { 0.0 }) / 2.0;
        }
    }
    p.iter().sum()
}

/// P(U <= u) for each u of two samples without ties; `None` where they are too many to count.
fn rank_sum_counts(n: usize, m: usize) -> Option<Vec<f64>> {
    if n.max(m) > EXACT {
        return None;
    }
    // ways[i][u]: arrangements of i of the first and j of the second with statistic u, for growing j.
    let top = n * m;
    let mut ways = vec![vec![0.0; top + 1]; n + 1];
    ways.iter_mut().for_each(|w| w[0] = 1.0);
    for j in 1..=m {
        for i in 1..=n {
            for u in (0..=top).rev() {
                // The largest value is of the second sample (ways[i] for j - 1, u less by i) or of the first (ways[i - 1] for j).
                let second = if u >= i { ways[i][u - i] } else { 0.0 };
                let (i_f, j_f) = (i as f64, j as f64);
                ways[i][u] = second * j_f / (i_f + j_f) + ways[i - 1][u] * i_f / (i_f + j_f);
            }
        }
    }
    let mut sum = 0.0;
    let add = |p: &f64| {
        sum += p;
        sum
    };
    Some(ways[n].iter().map(add).collect())
}

fn rank_sum_normal(n: f64, m: f64, u: f64) -> f64 {
    let variance = n * m * (n + m + 1.0) / 12.0;
    Normal::standard().cdf((u + 0.5 - n * m / 2.0) / variance.sqrt())
}

/// A rank-sum test.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RankSum {
    /// Pairs in which the value of `a` is the larger, ties counting half.
    pub u: f64,
    /// Two-sided probability of a U as far from the middle, where both come from one distribution.
    pub p: f64,
}

/// Mann-Whitney: exact for small samples without ties, else normal with continuity correction.
///
/// # Errors
/// No value on a side, or one that is not finite.
pub fn mann_whitney(a: &[f64], b: &[f64]) -> Result<RankSum> {
    let found = a.len().min(b.len());
    if found == 0 {
        return Err(Error::TooFew { what: "a rank-sum test", needed: 1, found });
    }
    finite(&[a, b].concat())?;
    let (u, p) = mannwhitneyu(a, b, MannWhitneyUMethod::Automatic, Alternative::TwoSided)
        .map_err(|e| Error::Sample { index: 0, reason: e.to_string() })?;
    // All values equal: the variance of U is 0 and nothing speaks for a difference.
    Ok(RankSum { u, p: if p.is_nan() { 1.0 } else { p.clamp(0.0, 1.0) } })
}

/// Two one-sided tests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Equivalence {
    /// Mean of the differences.
    pub mean: f64,
    /// The larger of the two p-values: small means that the mean lies inside the margin.
    pub p: f64,
}

/// Does the mean of paired differences lie within `margin` of 0? Schuirmann's two one-sided t tests.
///
/// # Errors
/// Fewer than 2 differences, one that is not finite, a margin that is not positive.
pub fn tost(differences: &[f64], margin: f64) -> Result<Equivalence> {
    finite(differences)?;
    if !(margin > 0.0 && margin.is_finite()) {
        return Err(Error::Option { option: "margin", expected: "a positive number", found: margin.to_string() });
    }
    let n = differences.len() as f64;
    let (Some(mean), Some(sd)) = (mean(differences), sd(differences)) else {
        return Err(Error::TooFew { what: "an equivalence test", needed: 2, found: differences.len() });
    };
    if sd == 0.0 {
        return Ok(Equivalence { mean, p: if mean.abs() < margin { 0.0 } else { 1.0 } });
    }
    let distance = (margin - mean.abs()) / (sd / n.sqrt());
    let p = StudentsT::new(0.0, 1.0, n - 1.0).map_or(1.0, |t| t.sf(distance));
    Ok(Equivalence { mean, p })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{Draws, t_interval};

    #[test]
    #[expect(clippy::approx_constant, reason = "3.14 is a patient's score")]
    fn the_published_signed_rank_example_is_reproduced() {
        // Hollander and Wolfe, table 3.1 (depression scale of 9 patients): estimate -0.46, 96 % interval (-0.786, -0.010).
        let before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30];
        let after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29];
        let d: Vec<f64> = before.iter().zip(after).map(|(b, a)| a - b).collect();
        let shift = hodges_lehmann(&d, 0.96).unwrap();
        assert!((shift.value - -0.46).abs() < 1e-9, "{shift:?}");
        assert!((shift.low - -0.786).abs() < 5e-4 && (shift.high - -0.010).abs() < 5e-4, "{shift:?}");
        assert!((shift.level - 0.961).abs() < 5e-4);
        // T+ = 5 for these differences; P(T+ <= 5) = 0.0195 for 9 pairs (their table A.4).
        assert!((signed_rank_cdf(9, 5) - 0.0195).abs() < 5e-5);
    }

    #[test]
    fn the_published_rank_sum_example_is_reproduced() {
        // Hollander and Wolfe, table 4.1 (permeability of membranes): U 35, two-sided p 0.2544; shift 0.305, interval (-0.15, 0.76).
        let x = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46];
        let y = [1.15, 0.88, 0.90, 0.74, 1.21];
        let test = mann_whitney(&x, &y).unwrap();
        assert_eq!(test.u, 35.0);
        assert!((test.p - 0.2544).abs() < 5e-5, "{test:?}");
        let shift = hodges_lehmann_shift(&y, &x, 0.95).unwrap();
        assert!((shift.value - 0.305).abs() < 1e-9, "{shift:?}");
        assert!((shift.low - -0.15).abs() < 1e-9 && (shift.high - 0.76).abs() < 1e-9, "{shift:?}");
        let cumulated = rank_sum_counts(10, 5).unwrap();
        assert!((cumulated[50] - 1.0).abs() < 1e-12 && (cumulated[15] - 0.1272).abs() < 5e-5, "{}", cumulated[15]);
    }

    #[test]
    fn the_published_t_interval_bounds_the_equivalence_test() {
        // Student's sleep data, Biometrika 6, 1908: mean 1.58, 95 % interval (0.7001, 2.4599). At a margin of its upper end the
        // one-sided p is 2.5 % by definition.
        let d = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4];
        let e = t_interval(&d, 0.95).unwrap();
        assert!((e.interval.low - 0.7001).abs() < 5e-5 && (e.interval.high - 2.4599).abs() < 5e-5, "{e:?}");
        assert!((tost(&d, 2.4599).unwrap().p - 0.025).abs() < 1e-4);
        assert!(tost(&d, 1.0).unwrap().p > 0.5 && tost(&d, 10.0).unwrap().p < 1e-6);
        assert_eq!(tost(&[0.1, 0.1], 0.2).unwrap().p, 0.0);
        assert_eq!(tost(&[0.3, 0.3], 0.2).unwrap().p, 1.0);
    }

    #[test]
    fn simulated_intervals_cover_and_tests_keep_their_level() {
        let mut draws = Draws::new(17);
        let (mut one, mut two, mut alarms, mut same) = (0, 0, 0, 0);
        for _ in 0..2000 {
            // Heavy tails, symmetric.
            let mut value = || draws.normal() / draws.uniform().sqrt();
            let a: Vec<f64> = (0..20).map(|_| value()).collect();
            let b: Vec<f64> = (0..20).map(|_| value() + 1.0).collect();
            let s = hodges_lehmann(&a, 0.95).unwrap();
            one += usize::from(s.low <= 0.0 && 0.0 <= s.high);
            let s = hodges_lehmann_shift(&a, &b, 0.95).unwrap();
            two += usize::from(s.low <= 1.0 && 1.0 <= s.high);
            let c: Vec<f64> = b.iter().map(|b| b - 1.0).collect();
            alarms += usize::from(mann_whitney(&a, &c).unwrap().p < 0.05);
            // The mean is exactly on the margin: equivalence may be claimed in 5 %.
            let normal: Vec<f64> = (0..20).map(|_| 0.5 + draws.normal()).collect();
            same += usize::from(tost(&normal, 0.5).unwrap().p < 0.05);
        }
        let share = |n: usize| n as f64 / 2000.0;
        assert!((0.93..=0.97).contains(&share(one)), "{}", share(one));
        assert!((0.93..=0.97).contains(&share(two)), "{}", share(two));
        assert!((0.03..=0.07).contains(&share(alarms)), "{}", share(alarms));
        assert!((0.03..=0.07).contains(&share(same)), "{}", share(same));
    }

    #[test]
    fn large_samples_use_the_normal_and_small_ones_what_there_is() {
        let exact: f64 = signed_rank_cdf(60, 700);
        let n = 60.0f64;
        let normal =
            Normal::standard().cdf((700.5 - n * (n + 1.0) / 4.0) / (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt());
        assert!((exact - normal).abs() < 1e-3, "{exact} {normal}");
        let values: Vec<f64> = (0..200).map(f64::from).collect();
        let s = hodges_lehmann(&values, 0.95).unwrap();
        assert!((s.value - 99.5).abs() < 1e-9 && s.low < 95.0 && s.high > 104.0, "{s:?}");
        // Of two values the widest interval that there is covers half.
        let s = hodges_lehmann(&[1.0, 3.0], 0.95).unwrap();
        assert_eq!((s.value, s.low, s.high, s.level), (2.0, 1.0, 3.0, 0.5));
    }

    #[test]
    fn impossible_samples_are_refused() {
        assert!(log_ratios(&[1.0], &[1.0, 2.0]).is_err());
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(log_ratios(&[1.0, 1.0], &[1.0, bad]).unwrap_err().to_string().starts_with("sample 1"));
        }
        assert_eq!(log_ratios(&[2.0], &[4.0]).unwrap(), [2.0f64.ln()]);
        assert!(hodges_lehmann(&[1.0], 0.95).is_err() && hodges_lehmann(&[1.0, f64::NAN], 0.95).is_err());
        assert!(hodges_lehmann_shift(&[1.0, 2.0], &[1.0], 0.95).is_err());
        assert!(hodges_lehmann(&[1.0, 2.0], 1.0).is_err());
        assert!(mann_whitney(&[], &[1.0]).is_err() && mann_whitney(&[f64::NAN], &[1.0]).is_err());
        assert_eq!(mann_whitney(&[1.0, 1.0], &[1.0, 1.0]).unwrap().p, 1.0);
        assert!(tost(&[1.0], 1.0).is_err() && tost(&[1.0, 2.0], 0.0).is_err() && tost(&[1.0, f64::NAN], 1.0).is_err());
    }
}
