//! The report: one HTML file that shows what was measured, what is projected from it, and what others published.
//!
//! What always holds: numbers of different [`Kind`]s share neither a column nor an axis; a picture has its table; a section without data says
//! what would fill it; every run and every claim that was read is on the page; the same input gives the same bytes; the page loads
//! nothing from anywhere. Text from records and boards is data and never becomes markup.
//!
//! | module | section |
//! |---|---|
//! | `landscape` | tokens a second against perplexity: our configurations, a board's claims |
//! | `claims` | repeated runs and their luck; what a best of N is worth |
//! | `gap` | public against private prompts |
//! | `anatomy` | where the time of a request goes |
//! | `acceptance` | tokens a step, and acceptance by depth |
//! | `history` | speed over commits; the frontier of a board |
//! | `roofline` | bytes of a step against its time |
//!
//! `plot` draws, `page` holds what a page consists of and renders it; `inputs` reads.

use crate::error::Result;
use crate::history::{Configuration, kind_name};
use crate::record::{Kind, Record};

mod acceptance;
mod anatomy;
mod claims;
mod gap;
mod history;
mod inputs;
mod landscape;
mod op_share;
mod page;
mod plot;
mod roofline;
#[cfg(test)]
mod tests;

pub use inputs::{File, Groups, Inputs, Paths, Sums};

/// A record without what only it needs.
pub(crate) type Run = Record<Sums>;

/// The page.
///
/// # Errors
/// Rates that no measurement can give.
pub fn render(inputs: &Inputs) -> Result<String> {
    let runs = inputs.runs();
    let configs = Config::all(&runs);
    let sections = vec![
        landscape::section(inputs, &configs),
        claims::section(inputs, &configs)?,
        gap::section(inputs, &configs)?,
        anatomy::section(inputs, &configs),
        acceptance::section(inputs, &configs),
        history::section(inputs, &runs)?,
        roofline::section(&configs),
    ];
    page::render(inputs, &configs, sections)
}

/// A configuration with its runs, in the order of their time.
pub(crate) struct Config<'a> {
    /// What its runs share.
    pub configuration: Configuration,
    /// Where its numbers come from.
    pub kind: Kind,
    /// A short name, unique on the page.
    pub name: String,
    /// Finished runs with a result.
    pub runs: Vec<&'a Run>,
    /// Records that were cut short or have no result.
    pub left_out: usize,
}

impl<'a> Config<'a> {
    /// The configurations of all runs, in the order of their first one.
    fn all(runs: &[&'a Run]) -> Vec<Config<'a>> {
        let mut order: Vec<&'a Run> = runs.to_vec();
        order.sort_by(|a, b| a.time.cmp(&b.time));
        let mut at = std::collections::BTreeMap::new();
        let mut out: Vec<Config<'a>> = Vec::new();
        for r in order {
            let key = (Configuration::of(r), kind_name(r.kind));
            let index = *at.entry(key).or_insert_with_key(|(configuration, _)| {
                let name = configuration.label.clone();
                let configuration = configuration.clone();
                out.push(Config { configuration, kind: r.kind, name, runs: Vec::new(), left_out: 0 });
                out.len() - 1
            });
            match r.complete && r.result.is_some() {
                true => out[index].runs.push(r),
                false => out[index].left_out += 1,
            }
        }
        name(&mut out);
        out
    }

    /// The last finished run.
    fn last(&self) -> Option<&'a Run> {
        self.runs.last().copied()
    }

    /// Tokens a second of the finished runs.
    fn rates(&self) -> Vec<f64> {
        self.runs.iter().filter_map(|r| r.result.as_ref()).map(|r| r.tokens_per_s).collect()
    }
}

/// Labels, and for those that several share what tells them apart: the machine, the prompts, or a number.
fn name(configs: &mut [Config]) {
    let parts: [fn(&Configuration) -> String; 3] = [
        |c| c.label.clone(),
        |c| format!("{}, {}", c.label, c.machine),
        |c| format!("{}, {}, {}", c.label, c.machine, c.prompts),
    ];
    for part in &parts[1..] {
        let names: Vec<String> = configs.iter().map(|c| c.name.clone()).collect();
        for c in configs.iter_mut().filter(|c| names.iter().filter(|n| **n == c.name).count() > 1) {
            c.name = part(&c.configuration);
        }
    }
    let mut seen: std::collections::HashMap<String, usize> = std::collections::HashMap::new();
    for c in configs {
        let n = seen.entry(c.name.clone()).or_insert(0);
        *n += 1;
        if *n > 1 {
            c.name = format!("{} ({n})", c.name);
        }
    }
}

/// Configurations by where their numbers come from; kinds without one are left out.
fn by_kind<'a, 'b>(configs: &'b [Config<'a>]) -> Vec<(Kind, Vec<&'b Config<'a>>)> {
    let of = |kind| (kind, configs.iter().filter(|c| c.kind == kind).collect::<Vec<_>>());
    [Kind::Measured, Kind::Projected, Kind::Published].map(of).into_iter().filter(|(_, c)| !c.is_empty()).collect()
}
