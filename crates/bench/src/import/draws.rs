//! Draws: repeated runs of configurations, a CSV with the columns `group`, `tps` and `trajectory_cluster` (which text the run wrote;
//! empty where nobody knows).

use std::path::Path;

use super::table::Table;
use crate::error::Result;
use crate::luck::Draw;

/// The draws of a file by group, in the file's order.
///
/// # Errors
/// A missing column, no row, a rate that is no positive number, a row without group.
pub fn read(path: &Path) -> Result<Vec<(String, Vec<Draw>)>> {
    let table = Table::read(path, &["group", "tps", "trajectory_cluster"])?;
    let mut groups: Vec<(String, Vec<Draw>)> = Vec::new();
    for row in table.rows() {
        let group = row.required("group")?.to_string();
        row.required("tps")?;
        let Some(tps) = row.positive("tps")? else { continue };
        let class = Some(row.text("trajectory_cluster").to_string()).filter(|c| !c.is_empty());
        let draw = Draw { tps, class };
        match groups.iter_mut().find(|(name, _)| *name == group) {
            Some((_, draws)) => draws.push(draw),
            None => groups.push((group, vec![draw])),
        }
    }
    Ok(groups)
}
