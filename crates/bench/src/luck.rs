//! Draws of one configuration, and what their spread is made of.
//!
//! A speculative decoder's speed depends on the text that it happens to write, and a stack whose numerics differ from start to start writes
//! one of a few texts. What looks like luck with nodes is then the class of the *trajectory*: runs of a class agree to a fraction of
//! a percent. How much of the variance the classes explain is the share of squares between them (the one-way layout, eta squared).
//!
//! Many classes explain much by chance alone: with k classes of n draws, (k - 1) / (n - 1) on average. So the adjusted share and the F test
//! stand beside it.
//!
//! Source: Fisher, *Statistical Methods for Research Workers*, 1925, on the analysis of variance; Kelley, *An Unbiased Correlation Ratio
//! Measure*, PNAS 21, 1935, for the adjusted share.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, FisherSnedecor};

use crate::error::{Error, Result};
use crate::stats::{mean, sd};

/// Rates, in tokens a second, that nobody measures: squares and sums of what is below stay finite.
pub(crate) const MOST_RATE: f64 = 1e15;

/// One run of a configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Draw {
    /// Tokens a second.
    pub tps: f64,
    /// Which text it wrote; `None` where that is not known.
    pub class: Option<String>,
}

/// The draws of a configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Draws.
    pub n: usize,
    /// Their mean.
    pub mean: f64,
    /// Their standard deviation; `None` of one draw.
    pub sd: Option<f64>,
    /// Classes among the draws whose class is known.
    pub classes: usize,
    /// Share of the variance that the classes explain, 0 to 1; `None` where no class holds two draws or nothing varies.
    pub explained: Option<f64>,
    /// The same less what as many classes would explain by chance; may be negative.
    pub explained_adjusted: Option<f64>,
    /// Probability of an F as large where classes mean nothing; `None` with one class.
    pub p: Option<f64>,
    /// Pooled standard deviation within the classes, in percent of the mean; `None` where no class holds two draws.
    pub within_sd_pct: Option<f64>,
    /// Each class: draws and mean, slowest first.
    pub by_class: Vec<Class>,
}

/// Runs that wrote the same text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Class {
    /// The text's hash, or part of it.
    pub class: String,
    /// Draws.
    pub n: usize,
    /// Their mean.
    pub mean: f64,
}

impl Group {
    /// Describes draws.
    ///
    /// # Errors
    /// No draw, or one whose rate is not positive.
    pub fn new(draws: &[Draw]) -> Result<Group> {
        let all: Vec<f64> = draws.iter().map(|d| d.tps).collect();
        if let Some(index) = all.iter().position(|v| !(*v > 0.0 && *v < MOST_RATE)) {
            return Err(Error::Sample { index, reason: format!("a rate of {} tokens/s", all[index]) });
        }
        let Some(center) = mean(&all) else {
            return Err(Error::TooFew { what: "a group of draws", needed: 1, found: 0 });
        };
        let mut classes: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for draw in draws {
            if let Some(class) = &draw.class {
                classes.entry(class).or_default().push(draw.tps);
            }
        }
        let layout = Layout::new(classes.values());
        let mut by_class: Vec<Class> = classes
            .iter()
            .map(|(class, v)| Class { class: class.to_string(), n: v.len(), mean: mean(v).unwrap_or(center) })
            .collect();
        by_class.sort_by(|a, b| a.mean.total_cmp(&b.mean));
        Ok(Group {
            n: draws.len(),
            mean: center,
            sd: sd(&all),
            classes: classes.len(),
            explained: layout.as_ref().and_then(Layout::explained),
            explained_adjusted: layout.as_ref().and_then(Layout::adjusted),
            p: layout.as_ref().and_then(Layout::p),
            within_sd_pct: layout.as_ref().map(|l| l.within_sd() / center * 100.0),
            by_class,
        })
    }
}

/// The one-way layout.
struct Layout {
    between: f64,
    within: f64,
    df_between: f64,
    df_within: f64,
}

impl Layout {
    /// `None` where no class holds two values.
    fn new<'a>(classes: impl Iterator<Item = &'a Vec<f64>> + Clone) -> Option<Layout> {
        let all: Vec<f64> = classes.clone().flatten().copied().collect();
        let center = mean(&all)?;
        let (mut between, mut within, mut count) = (0.0, 0.0, 0);
        for class in classes {
            let own = mean(class)?;
            between += class.len() as f64 * (own - center).powi(2);
            within += class.iter().map(|v| (v - own).powi(2)).sum::<f64>();
            count += 1;
        }
        let df_within = all.len() - count;
        let layout = Layout { between, within, df_between: count as f64 - 1.0, df_within: df_within as f64 };
        (df_within > 0).then_some(layout)
    }

    fn within_sd(&self) -> f64 {
        (self.within / self.df_within).sqrt()
    }

    fn explained(&self) -> Option<f64> {
        Some(self.between / (self.between + self.within)).filter(|e| e.is_finite())
    }

    /// Epsilon squared.
    fn adjusted(&self) -> Option<f64> {
        let total = (self.between + self.within) / (self.df_between + self.df_within);
        Some(1.0 - self.within / self.df_within / total).filter(|e| e.is_finite())
    }

    fn p(&self) -> Option<f64> {
        let f = (self.between / self.df_between) / (self.within / self.df_within);
        if !f.is_finite() {
            // Nothing varies within the classes: no F is larger. Nothing varies at all, or there is one class: no F.
            return f.is_infinite().then_some(0.0);
        }
        FisherSnedecor::new(self.df_between, self.df_within).ok().map(|d| d.sf(f)).filter(|p| p.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(values: &[(f64, &str)]) -> Vec<Draw> {
        let class = |c: &str| Some(c.to_string()).filter(|c| !c.is_empty());
        values.iter().map(|&(tps, c)| Draw { tps, class: class(c) }).collect()
    }

    #[test]
    fn a_published_one_way_layout_is_reproduced() {
        // NIST/SEMATECH e-Handbook, 7.4.3.3: three levels of five, SS treatments 27.897, SS error 17.452, F 9.59, p 0.00325.
        let levels =
            [("1", [6.9, 5.4, 5.8, 4.6, 4.0]), ("2", [8.3, 6.8, 7.8, 9.2, 6.5]), ("3", [8.0, 10.5, 8.1, 6.9, 9.3])];
        let values: Vec<(f64, &str)> = levels.iter().flat_map(|(c, v)| v.iter().map(move |&v| (v, *c))).collect();
        let g = Group::new(&draws(&values)).unwrap();
        assert_eq!((g.n, g.classes), (15, 3));
        assert!((g.explained.unwrap() - 27.897 / (27.897 + 17.452)).abs() < 1e-4, "{g:?}");
        assert!((g.p.unwrap() - 0.00325).abs() < 5e-6, "{g:?}");
        assert!((g.within_sd_pct.unwrap() - (17.452f64 / 12.0).sqrt() / g.mean * 100.0).abs() < 1e-3, "{g:?}");
    }

    #[test]
    fn what_cannot_be_said_is_not_said() {
        let one = Group::new(&draws(&[(500.0, "a")])).unwrap();
        assert_eq!((one.n, one.classes, one.sd, one.explained, one.within_sd_pct), (1, 1, None, None, None));
        // Each draw its own class explains everything and nothing.
        let own = Group::new(&draws(&[(1.0, "a"), (2.0, "b")])).unwrap();
        assert_eq!((own.classes, own.explained, own.p), (2, None, None));
        let unknown = Group::new(&draws(&[(1.0, ""), (2.0, ""), (3.0, "")])).unwrap();
        assert_eq!((unknown.classes, unknown.explained, unknown.sd), (0, None, Some(1.0)));
        let same = Group::new(&draws(&[(2.0, "a"), (2.0, "a"), (2.0, "b")])).unwrap();
        assert_eq!((same.explained, same.within_sd_pct), (None, Some(0.0)));
        assert!(Group::new(&[]).is_err());
        assert!(Group::new(&draws(&[(1.0, ""), (f64::NAN, "")])).unwrap_err().to_string().starts_with("sample 1"));
        assert!(Group::new(&draws(&[(-1.0, "")])).is_err());
    }

    #[test]
    fn chance_is_taken_off() {
        // Classes that mean nothing: 2 of 4 draws each, the same values in both.
        let g = Group::new(&draws(&[(1.0, "a"), (3.0, "a"), (1.0, "b"), (3.0, "b")])).unwrap();
        assert_eq!(g.explained, Some(0.0));
        assert!((g.explained_adjusted.unwrap() - -0.5).abs() < 1e-12 && g.p.unwrap() > 0.99);
    }
}
