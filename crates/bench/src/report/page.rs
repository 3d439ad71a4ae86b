//! What a page consists of, and the page.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Value, context};
use serde::Serialize;

use super::inputs::Inputs;
use super::{Config, kind_name};
use crate::error::{Error, Result};
use crate::record::Kind;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// A part of the page that answers one question.
#[derive(Serialize)]
pub(super) struct Section {
    /// Its address on the page.
    pub id: &'static str,
    /// Its name.
    pub title: &'static str,
    /// The question, and how to read what follows.
    pub lead: &'static str,
    /// Pictures with their tables.
    pub figures: Vec<Figure>,
    /// What is not shown, and what would fill it.
    pub missing: Vec<String>,
}

/// A picture and its table.
#[derive(Serialize)]
pub(super) struct Figure {
    /// Its address on the page.
    pub id: String,
    /// What it shows.
    pub title: String,
    /// Where its numbers come from.
    pub kind: &'static str,
    /// What it says, in a sentence or two.
    pub note: String,
    /// The drawing; safe markup. `None` for a table alone.
    pub svg: Option<Value>,
    /// What marks and lines mean.
    pub legend: Vec<Key>,
    /// States that can be chosen by a checkbox; empty for none.
    pub states: Vec<String>,
    /// A field filters marks and rows by their text.
    pub filter: bool,
    /// The drawing can be enlarged and moved.
    pub zoom: bool,
    /// The same numbers.
    pub table: Table,
}

/// An entry of a legend.
#[derive(Serialize)]
pub(super) struct Key {
    /// Class of a mark or line.
    pub class: String,
    /// Its meaning.
    pub text: String,
}

/// A table.
#[derive(Serialize)]
pub(super) struct Table {
    /// What its rows are.
    pub caption: String,
    /// Its columns.
    pub columns: Vec<Column>,
    /// Its rows, a cell for each column.
    pub rows: Vec<Row>,
}

/// A column.
#[derive(Serialize)]
pub(super) struct Column {
    /// Its heading, with the unit.
    pub head: String,
    /// Where its numbers come from; empty for names.
    pub kind: &'static str,
    /// Its cells are numbers.
    pub number: bool,
}

/// A row.
#[derive(Serialize)]
pub(super) struct Row {
    /// The state that a checkbox chooses it by.
    pub state: String,
    /// Its cells.
    pub cells: Vec<String>,
}

impl From<Vec<String>> for Row {
    fn from(cells: Vec<String>) -> Row {
        Row { state: String::new(), cells }
    }
}

/// A column of names.
pub(super) fn names(head: &str) -> Column {
    Column { head: head.into(), kind: "", number: false }
}

/// A column of numbers that come from somewhere.
pub(super) fn numbers(head: &str, kind: Kind) -> Column {
    Column { head: head.into(), kind: kind_name(kind), number: true }
}

/// A column of counts.
pub(super) fn counts(head: &str) -> Column {
    Column { head: head.into(), kind: "", number: true }
}

impl Key {
    pub fn new(class: &str, text: impl Into<String>) -> Key {
        Key { class: class.into(), text: text.into() }
    }
}

impl Figure {
    /// A figure without controls.
    pub fn plain(
        id: impl Into<String>,
        kind: &'static str,
        title: &str,
        note: String,
        svg: Option<String>,
        table: Table,
    ) -> Figure {
        Figure {
            id: id.into(),
            title: title.into(),
            kind,
            note,
            svg: svg.map(Value::from_safe_string),
            legend: Vec::new(),
            states: Vec::new(),
            filter: false,
            zoom: false,
            table,
        }
    }
}

/// A source of the page.
#[derive(Serialize)]
struct Source {
    name: String,
    what: String,
    skipped: Vec<String>,
}

/// The page as text.
///
/// # Errors
/// None with the templates of this program.
pub(super) fn render(inputs: &Inputs, configs: &[Config], sections: Vec<Section>) -> Result<String> {
    let failed = |e: minijinja::Error| Error::Refused { reason: format!("the page cannot be rendered: {e:#}") };
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?);
    env.add_template("page.html", PAGE).map_err(failed)?;
    let page = env.get_template("page.html").map_err(failed)?;
    let records = inputs.files.iter().map(|f| f.log.records.len()).sum::<usize>();
    page.render(context! {
        version => env!("CARGO_PKG_VERSION"),
        style => Value::from_safe_string(STYLE.trim().to_string()),
        script => Value::from_safe_string(SCRIPT.trim().to_string()),
        facts => Serde(facts(inputs, configs, records)),
        sections => Serde(sections),
        configs => Serde(list(configs)),
        sources => Serde(sources(inputs)),
    })
    .map(|text| text + "\n")
    .map_err(failed)
}

/// A number of the head of the page, with what it is.
#[derive(Serialize)]
struct Fact {
    value: String,
    what: String,
    kind: &'static str,
}

fn facts(inputs: &Inputs, configs: &[Config], records: usize) -> Vec<Fact> {
    let mut out = Vec::new();
    let fact = |value: String, what: String, kind| Fact { value, what, kind };
    if records > 0 {
        let finished: usize = configs.iter().map(|c| c.runs.len()).sum();
        let of = format!("records of {} configurations, {finished} of them finished runs", configs.len());
        out.push(fact(records.to_string(), of, "measured"));
    }
    if let Some((_, board)) = &inputs.board {
        use crate::import::board::Verification::{Pending, Valid};
        let said = |state, word: &str| {
            board
                .fastest(state)
                .map(|c| fact(format!("{:.2}", c.tps), format!("tokens/s, the fastest {word} claim"), "published"))
        };
        out.extend(said(Valid, "verified"));
        out.extend(said(Pending, "pending"));
        let masked = board.masked_valid();
        let hidden = if masked == 0 {
            String::new()
        } else {
            format!(", {masked} of them behind a faster row of the same agent")
        };
        let what = format!("claims on the board, {} verified{hidden}", board.count(Valid));
        out.push(fact(board.claims.len().to_string(), what, "published"));
    }
    if let Some(report) = inputs.pairs.as_ref().and_then(|(_, p)| p.report(0.95).ok()) {
        out.push(fact(
            format!("{:.2} %", report.mean_delta_pct),
            format!("lost from public to private, mean of {} pairs", report.pairs),
            "published",
        ));
    }
    out
}

/// A configuration in the list at the end.
#[derive(Serialize)]
struct Listed {
    name: String,
    kind: &'static str,
    describe: String,
    runs: usize,
    left_out: usize,
    commits: String,
}

fn list(configs: &[Config]) -> Vec<Listed> {
    let of = |c: &Config| {
        let mut commits: Vec<&str> = c.runs.iter().filter_map(|r| r.binary.commit.as_deref()).collect();
        commits.dedup();
        let ends = match commits[..] {
            [] => "no commit known".to_string(),
            [one] => commit(Some(one)),
            [first, .., last] => format!("{} to {}", commit(Some(first)), commit(Some(last))),
        };
        Listed {
            name: c.name.clone(),
            kind: kind_name(c.kind),
            describe: c.configuration.describe(),
            runs: c.runs.len(),
            left_out: c.left_out,
            commits: ends,
        }
    };
    configs.iter().map(of).collect()
}

/// A commit as it is shown: its start, and whether the tree was dirty.
pub(super) fn commit(commit: Option<&str>) -> String {
    let Some(commit) = commit else { return "unknown".into() };
    let start = commit.get(..9).unwrap_or(commit);
    if commit.ends_with("-dirty") && !start.ends_with("-dirty") { format!("{start}-dirty") } else { start.to_string() }
}

fn sources(inputs: &Inputs) -> Vec<Source> {
    let mut out: Vec<Source> = inputs
        .files
        .iter()
        .map(|f| Source {
            name: f.name.clone(),
            what: format!("results file: {} records", f.log.records.len()),
            skipped: f.log.skipped.iter().map(|s| format!("line {} is left out: {}", s.line, s.reason)).collect(),
        })
        .collect();
    let mut add = |name: &str, what: String| out.push(Source { name: name.into(), what, skipped: Vec::new() });
    if let Some((name, board)) = &inputs.board {
        add(name, format!("board: {} claims, all shown", board.claims.len()));
    }
    if let Some((name, groups)) = &inputs.draws {
        add(
            name,
            format!("draws: {} runs in {} groups", groups.iter().map(|g| g.1.len()).sum::<usize>(), groups.len()),
        );
    }
    if let Some((name, p)) = &inputs.pairs {
        let what = "public and private results";
        add(
            name,
            format!(
                "{what}: {} exact pairs, {} rounded and {} one-sided rows left out",
                p.exact.len(),
                p.rounded,
                p.one_sided
            ),
        );
    }
    if let Some((name, t)) = &inputs.steptime {
        add(name, format!("step times: {} passes", t.n));
    }
    for (name, report) in &inputs.acceptance {
        add(name, format!("acceptance: {} steps of {} prompts", report.all.steps, report.prompts));
    }
    for (name, profile) in &inputs.profiles {
        add(name, format!("profile: {} steps", profile.steps));
    }
    out
}
