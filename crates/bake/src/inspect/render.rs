//! The report for people. MB are 10^6 bytes.

use std::collections::HashMap;
use std::fmt;

use super::{Group, Inspection, TensorRow, rows};

fn mb(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "{}", self.name)?;
        write!(f, "  layers        {}", self.layers)?;
        if self.kv_shared > 0 {
            let sources: Vec<String> = self.sources.iter().map(|(kind, l)| format!("{kind} from layer {l}")).collect();
            write!(f, ", the last {} share keys and values ({})", self.kv_shared, sources.join(", "))?;
        }
        writeln!(f, "\n  head rows     {}", self.head_rows)?;
        match &self.quantization {
            None => writeln!(f, "  weights       dense")?,
            Some(q) => {
                writeln!(
                    f,
                    "  weights       {} linears packed, {} dense, {:.3} bits a packed weight",
                    q.packed, q.dense, q.bits_per_weight
                )?;
                q.groups.iter().try_for_each(|g| writeln!(f, "    {g}"))?;
            }
        }
        if let Some(by) = &self.baked_by {
            writeln!(f, "  baked by      {by}")?;
        }
        writeln!(f, "\n  {:<14}{:>16}  {:>16}", "", "in the files", "read a step")?;
        for (name, bytes, step) in rows(&self.components, &self.bytes_per_step) {
            writeln!(f, "  {name:<14}{:>16}  {:>16}", mb(bytes), mb(step))?;
        }
        if !self.chiku_only.is_empty() {
            writeln!(f, "\n  chiku-only: other programs do not run it as it is")?;
            self.chiku_only.iter().try_for_each(|reason| writeln!(f, "    {reason}"))?;
        }
        writeln!(f, "\n{}", self.kinds())?;
        match (&self.problems[..], self.strict) {
            ([], true) => writeln!(f, "  no problems found")?,
            ([], false) => writeln!(f, "  contents not checked (use --strict)")?,
            (problems, _) => {
                writeln!(f, "  {} problem{}:", problems.len(), if problems.len() == 1 { "" } else { "s" })?;
                for p in problems {
                    writeln!(f, "    {p}")?;
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let size = self.group_size.map_or_else(String::new, |s| format!(" {s}"));
        write!(f, "{:<18} int{} {}{size}: {}", self.name, self.bits, self.strategy, self.targets.join(" "))
    }
}

/// Tensors of one kind: all layers that have it with one type and shape.
struct Kind<'a> {
    /// With `*` for the number of the layer.
    name: String,
    like: &'a TensorRow,
    layers: Vec<usize>,
    bytes: u64,
}

/// `layers.12.rest` with `*` for the number, and the number. Towers are numbered the same way, under `layers` or `blocks`.
fn starred(name: &str) -> (String, Option<usize>) {
    let parts: Vec<&str> = name.split('.').collect();
    match parts.iter().position(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit())) {
        None => (name.to_string(), None),
        Some(i) => ([&parts[..i], &["*"], &parts[i + 1..]].concat().join("."), parts[i].parse().ok()),
    }
}

/// `0-4, 7`.
fn ranges(mut numbers: Vec<usize>) -> String {
    numbers.sort_unstable();
    let mut out: Vec<(usize, usize)> = Vec::new();
    for n in numbers {
        match out.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => out.push((n, n)),
        }
    }
    let text = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    out.iter().map(text).collect::<Vec<_>>().join(", ")
}

impl Inspection {
    /// The tensor table with one line for all layers that have a tensor of the same type and shape.
    fn kinds(&self) -> String {
        let mut kinds: Vec<Kind> = Vec::new();
        let mut places = HashMap::new();
        for t in &self.tensors {
            let (name, layer) = starred(&t.name);
            let place = *places.entry((name.clone(), &t.dtype, &t.shape)).or_insert_with(|| {
                kinds.push(Kind { name, like: t, layers: vec![], bytes: 0 });
                kinds.len() - 1
            });
            kinds[place].layers.extend(layer);
            kinds[place].bytes += t.bytes;
        }
        let width = kinds.iter().map(|k| k.name.len()).max().unwrap_or(0);
        let mut out = String::new();
        for k in kinds {
            let shape = format!("{:?}", k.like.shape);
            let at = if k.layers.is_empty() {
                String::new()
            } else {
                format!("  {} x: {}", k.layers.len(), ranges(k.layers))
            };
            out += &format!("  {:<width$}  {:<5} {:>14}  {shape:<16}{at}\n", k.name, k.like.dtype, mb(k.bytes));
        }
        out
    }

    /// The tensor table, one line a tensor.
    pub fn table(&self) -> String {
        let width = self.tensors.iter().map(|t| t.name.len()).max().unwrap_or(0);
        let line = |t: &TensorRow| {
            format!("{:<width$}  {:<5} {:>12}  {:<20} {}\n", t.name, t.dtype, t.bytes, format!("{:?}", t.shape), t.file)
        };
        self.tensors.iter().map(line).collect()
    }
}
