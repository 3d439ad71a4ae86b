//! The report for people. MB are 10^6 bytes.

use std::fmt;

use super::{Inspection, TensorRow};

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
                for g in &q.groups {
                    let size = g.group_size.map_or_else(String::new, |s| format!(" {s}"));
                    writeln!(f, "    {:<18} int{} {}{size}: {}", g.name, g.bits, g.strategy, g.targets.join(" "))?;
                }
            }
        }
        if let Some(by) = &self.baked_by {
            writeln!(f, "  baked by      {by}")?;
        }
        let c = &self.components;
        writeln!(f, "\n  {:<14}{:>16}  {:>16}", "", "in the files", "read a step")?;
        let s = &self.bytes_per_step;
        for (name, bytes, step) in [
            ("embedding", c.embed, s.embed_row),
            ("ple embedding", c.ple_embed, s.ple_row),
            ("body", c.body, s.body),
            ("ple linears", c.ple_linears, s.ple_linears),
            ("head", c.head, s.head),
            ("norms", c.norms, s.norms),
            ("inert k/v", c.inert_kv, 0),
            ("towers", c.towers, 0),
            ("total", c.total(), s.total),
        ] {
            writeln!(f, "  {name:<14}{:>16}  {:>16}", mb(bytes), mb(step))?;
        }
        writeln!(f)?;
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

impl Inspection {
    /// The tensor table, one line a tensor.
    pub fn table(&self) -> String {
        let width = self.tensors.iter().map(|t| t.name.len()).max().unwrap_or(0);
        let line = |t: &TensorRow| {
            format!("{:<width$}  {:<5} {:>12}  {:<20} {}\n", t.name, t.dtype, t.bytes, format!("{:?}", t.shape), t.file)
        };
        self.tensors.iter().map(line).collect()
    }
}
