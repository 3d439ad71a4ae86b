//! Results as text.

use ppl::sensitivity::held_out::{Finalist, SearchReport};
use ppl::sensitivity::measure::{Baseline, Report};
use ppl::sensitivity::paired::Change;

use crate::output::megabytes;

/// One change at a time, the least harmful first.
pub fn measured(r: &Report) -> String {
    let width = r.rows.iter().map(|row| row.item.len()).max().unwrap_or(0).max(4);
    let mut out = format!("unchanged: {}\n\n", baseline(&r.baseline));
    let errors = "+- standard error over records";
    out += &format!("{:<width$}  bits  {:>12}  {:<20}  {:<20}\n", "", "a step", "perplexity ratio", "difference");
    for row in &r.rows {
        let bits = row.bits.map_or_else(String::new, |b| b.to_string());
        out +=
            &format!("{:<width$}  {bits:>4}  {:>12}  {}\n", row.item, megabytes(row.step_bytes), change(&row.change));
    }
    out += &format!("({errors})");
    for fixed in &r.fixed {
        out += &format!("\nlayer {} stays: {}", fixed.layer, fixed.reason);
    }
    out
}

/// What a search found.
pub fn found(r: &SearchReport) -> String {
    let mut out = format!("search slice:   {}\n", baseline(&r.baseline_search));
    out += &format!("held-out slice: {}\n\n", baseline(&r.baseline_held_out));
    for (i, finalist) in r.finalists.iter().enumerate() {
        let verdict = match (r.chosen == Some(i), finalist.holds) {
            (true, _) => "chosen: holds the cap on both slices",
            (false, true) => "holds the cap on both slices",
            (false, false) => "over the cap on the held-out slice",
        };
        out += &format!("{}\n  {verdict}\n", plan(finalist));
    }
    out += &format!("\nleast sensitive layers at one width, for comparison:\n{}\n", plan(&r.least_sensitive));
    let end = if r.exhausted { "stopped there; more may find more" } else { "nothing more was found" };
    out + &format!("{} variants evaluated, cap {}: {end}", r.evaluations, r.cap)
}

fn plan(f: &Finalist) -> String {
    let layers = f.layers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let mut out = format!("{} a step", megabytes(f.step_bytes));
    out += &if f.layers.is_empty() { ", no layer removed".into() } else { format!(", without layers {layers}") };
    for bits in ppl::sensitivity::subject::WIDTHS {
        let groups: Vec<&str> = f.widths.iter().filter(|(_, b)| **b == bits).map(|(g, _)| g.as_str()).collect();
        if !groups.is_empty() {
            out += &format!("\n  int{bits}: {}", groups.join(", "));
        }
    }
    out + &format!("\n  search {}\n  held out {}", change(&f.search), change(&f.held_out))
}

fn baseline(b: &Baseline) -> String {
    format!(
        "perplexity {:.4} over {} tokens of {} records, {} a step",
        b.ppl,
        b.tokens,
        b.records,
        megabytes(b.step_bytes)
    )
}

fn change(c: &Change) -> String {
    let error = |e: Option<f64>| e.map_or_else(|| "?".into(), |e| format!("{e:.4}"));
    let ratio = format!("{:.4} +- {}", c.ratio, error(c.ratio_error));
    let delta = format!("{:+.4} +- {}", c.delta, error(c.delta_error));
    format!("{ratio:<20}  {delta:<20}").trim_end().to_string()
}
