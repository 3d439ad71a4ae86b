//! Where a series jumps: changes of the mean, exactly optimal under a penalty for each change.
//!
//! The cost of a piece is its squared deviation over the variance of the noise, which is estimated robustly from successive
//! differences, so that jumps do not count as noise. The penalty is `3 ln n`: of the modified BIC of Zhang and Siegmund (Biometrics 63,
//! 2007), and strict enough that a series without a change rarely shows one (tested). Advisory: it finds where to look.
//!
//! Source: Killick, Fearnhead and Eckley, *Optimal Detection of Changepoints With a Linear Computational Cost*, JASA 107, 2012 (PELT).

use super::summary::{finite, median};
use crate::error::Result;

/// Indices at which a new level begins, in order.
///
/// # Errors
/// A value that is not finite.
pub fn change_points(values: &[f64]) -> Result<Vec<usize>> {
    finite(values)?;
    let n = values.len();
    let Some(variance) = noise(values) else { return Ok(Vec::new()) };
    let penalty = 3.0 * (n as f64).ln() * variance;
    // Prefix sums around the first value, so that a large mean does not eat the digits of the squares.
    let (mut sums, mut squares) = (vec![0.0; n + 1], vec![0.0; n + 1]);
    for (i, v) in values.iter().enumerate() {
        let d = v - values[0];
        (sums[i + 1], squares[i + 1]) = (sums[i] + d, squares[i] + d * d);
    }
    let cost = |from: usize, to: usize| {
        let sum = sums[to] - sums[from];
        squares[to] - squares[from] - sum * sum / (to - from) as f64
    };
    let mut best = vec![-penalty; n + 1];
    let mut last = vec![0; n + 1];
    let mut candidates = vec![0];
    for to in 1..=n {
        let total = |from: usize| best[from] + cost(from, to) + penalty;
        let from = candidates.iter().copied().min_by(|&a, &b| total(a).total_cmp(&total(b))).unwrap_or(0);
        let least = total(from);
        candidates.retain(|&c| best[c] + cost(c, to) <= least);
        candidates.push(to);
        (best[to], last[to]) = (least, from);
    }
    let mut found = Vec::new();
    let mut at = last[n];
    while at > 0 {
        found.push(at);
        at = last[at];
    }
    found.reverse();
    Ok(found)
}

/// Variance of the noise from the MAD of successive differences, which have twice the variance; by their mean square where more than
/// half of them are equal. `None` where nothing varies.
fn noise(values: &[f64]) -> Option<f64> {
    let differences: Vec<f64> = values.windows(2).map(|w| w[1] - w[0]).collect();
    let center = median(&differences)?;
    let mad = median(&differences.iter().map(|d| (d - center).abs()).collect::<Vec<f64>>())?;
    let mean_square = || differences.iter().map(|d| d * d).sum::<f64>() / differences.len() as f64;
    let variance = if mad > 0.0 { (mad / 0.6745).powi(2) } else { mean_square() };
    Some(variance / 2.0).filter(|v| *v > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Draws;

    /// Annual flow of the Nile at Aswan, 1871 to 1970 (Cobb, Biometrika 65, 1978).
    const NILE: [f64; 100] = [
        1120., 1160., 963., 1210., 1160., 1160., 813., 1230., 1370., 1140., 995., 935., 1110., 994., 1020., 960.,
        1180., 799., 958., 1140., 1100., 1210., 1150., 1250., 1260., 1220., 1030., 1100., 774., 840., 874., 694., 940.,
        833., 701., 916., 692., 1020., 1050., 969., 831., 726., 456., 824., 702., 1120., 1100., 832., 764., 821., 768.,
        845., 864., 862., 698., 845., 744., 796., 1040., 759., 781., 865., 845., 944., 984., 897., 822., 1010., 771.,
        676., 649., 846., 812., 742., 801., 1040., 860., 874., 848., 890., 744., 749., 838., 1050., 918., 986., 797.,
        923., 975., 815., 1020., 906., 901., 1170., 912., 746., 919., 718., 714., 740.,
    ];

    #[test]
    fn the_published_change_of_the_nile_is_found() {
        // Between 1898 and 1899: the new level begins at index 28.
        assert_eq!(change_points(&NILE).unwrap(), [28]);
    }

    #[test]
    fn quiet_series_stay_quiet_and_jumps_are_found() {
        let mut draws = Draws::new(8);
        let mut series = |jump: f64| -> Vec<f64> {
            (0..60).map(|i| 500.0 + draws.normal() + if i >= 40 { jump } else { 0.0 }).collect()
        };
        let alarms = (0..2000).filter(|_| !change_points(&series(0.0)).unwrap().is_empty()).count();
        assert!(alarms < 100, "{alarms} of 2000 quiet series have a change");
        let near = |found: &[usize]| found.iter().any(|&i| (38..=42).contains(&i));
        let hits = (0..200).filter(|_| near(&change_points(&series(3.0)).unwrap())).count();
        assert!(hits > 190, "{hits} of 200 jumps were found");
    }

    #[test]
    fn short_constant_and_stepped_series() {
        for quiet in [&[][..], &[1.0], &[2.0; 30]] {
            assert_eq!(change_points(quiet).unwrap(), [0usize; 0]);
        }
        let steps: Vec<f64> = [1.0; 20].into_iter().chain([2.0; 20]).collect();
        assert_eq!(change_points(&steps).unwrap(), [20]);
        assert!(change_points(&[1.0, f64::NAN]).is_err());
    }
}
