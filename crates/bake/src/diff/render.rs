//! The report for people.

use std::fmt;

use serde_json::Value;

use super::{Change, Difference, TensorDifference};

/// Lines of a list before it is cut: what is left out is counted, and `--json` has all.
const SHOWN: usize = 60;

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "a: {}\nb: {}", self.a, self.b)?;
        if !self.seen_through.is_empty() {
            writeln!(f, "a is seen {}", self.seen_through.join(", "))?;
        }
        let of = |change| self.tensors.iter().filter(|t| t.change == change).count();
        writeln!(
            f,
            "{} tensors equal, {} with other values, {} of another type, {} of another shape, {} only in a, {} only in b",
            self.equal,
            of(Change::Values),
            of(Change::Type),
            of(Change::Shape),
            of(Change::Removed),
            of(Change::Added)
        )?;
        let width = self.tensors.iter().take(SHOWN).map(|t| t.name.len()).max().unwrap_or(0);
        for t in self.tensors.iter().take(SHOWN) {
            writeln!(f, "  {:<width$}  {}", t.name, line(t))?;
        }
        if self.tensors.len() > SHOWN {
            writeln!(f, "  ... and {} more (--json lists all)", self.tensors.len() - SHOWN)?;
        }
        for c in &self.config {
            writeln!(f, "  config.json {}: {} -> {}", c.field, short(c.a.as_ref()), short(c.b.as_ref()))?;
        }
        Ok(())
    }
}

fn line(t: &TensorDifference) -> String {
    let (a, b) = (t.a.as_deref().unwrap_or(""), t.b.as_deref().unwrap_or(""));
    let what = match t.change {
        Change::Removed => format!("only in a: {a}"),
        Change::Added => format!("only in b: {b}"),
        Change::Values => a.to_string(),
        Change::Shape | Change::Type => format!("{a} -> {b}"),
    };
    match &t.error {
        None => what,
        Some(e) => format!(
            "relative rms {:.5}, largest {:.3e}, {} of {} elements; {what}",
            e.relative_rms, e.max_abs, e.differing, e.elements
        ),
    }
}

/// A value: whole if short, its kind if long.
fn short(value: Option<&Value>) -> String {
    const LONGEST: usize = 60;
    match value {
        None => "nothing".into(),
        Some(v) => match v.to_string() {
            text if text.chars().count() <= LONGEST => text,
            _ if v.is_array() => format!("a list of {}", v.as_array().map_or(0, Vec::len)),
            _ => "an object".into(),
        },
    }
}
