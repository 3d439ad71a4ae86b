//! Public and private results of the same runs: a CSV with the columns `config`, `public_tps`, `private_tps` and `verdict`.
//!
//! A value without decimals was rounded by whoever wrote it down; at 500 tokens/s that is up to 0.1 % of error, so such a pair is left out
//! and counted.

use std::path::Path;

use super::table::Table;
use crate::error::Result;
use crate::gap::pairs::{Pair, Pairs, Verdict};

/// Reads the pairs of a file.
///
/// # Errors
/// A missing column, no row, a rate that is no positive number, a verdict that is neither valid nor invalid.
pub fn read(path: &Path) -> Result<Pairs> {
    let table = Table::read(path, &["config", "public_tps", "private_tps", "verdict"])?;
    let mut pairs = Pairs { exact: Vec::new(), rounded: 0, one_sided: 0 };
    for row in table.rows() {
        let (public, private) = (row.positive("public_tps")?, row.positive("private_tps")?);
        let verdict = match row.text("verdict") {
            "valid" => Some(Verdict::Valid),
            "invalid" => Some(Verdict::Invalid),
            "" | "pending" => None,
            other => return Err(row.wrong("verdict", "valid, invalid or pending", other)),
        };
        let exact = |column: &str| row.text(column).contains('.');
        match (public, private) {
            (Some(public), Some(private)) if exact("public_tps") && exact("private_tps") => {
                pairs.exact.push(Pair { config: row.text("config").to_string(), public, private, verdict });
            }
            (Some(_), Some(_)) => pairs.rounded += 1,
            _ => pairs.one_sided += 1,
        }
    }
    Ok(pairs)
}
