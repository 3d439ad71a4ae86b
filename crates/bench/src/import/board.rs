//! The field's leaderboard: `{"rows": [{"rank", "agent", "tps", "method", "verification", ...}], "meta"}`.
//!
//! The field's own page shows one row an agent, the best; a lower valid row of the same agent then disappears behind a pending one.
//! Every row is kept here, and the rows that such a page would hide are counted.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::json;
use crate::error::{Error, Result};

/// State of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verification {
    /// Not run again yet.
    Pending,
    /// Run again on the private prompts, and within the gate.
    Valid,
    /// Run again, and outside.
    Invalid,
}

/// One claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// Who claims.
    pub agent: String,
    /// Tokens a second, public prompts.
    pub tps: f64,
    /// Name of the configuration.
    pub method: String,
    /// State.
    pub verification: Verification,
    /// When, as the board spells it.
    pub timestamp: String,
    /// What the agent says about it.
    pub description: String,
}

/// A board.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Board {
    /// All claims, in the file's order.
    pub claims: Vec<Claim>,
}

impl Board {
    /// Reads a board.
    ///
    /// # Errors
    /// No JSON, no rows, or a row whose rate or state cannot be used.
    pub fn read(path: &Path) -> Result<Board> {
        let document = json::read(path)?;
        let count = document.require_list("/rows")?.len();
        if count == 0 {
            return Err(Error::Empty { path: path.to_path_buf(), what: "a board without rows".into() });
        }
        let claim = |i: usize| {
            let text = |field: &str| document.text(&format!("/rows/{i}/{field}")).map(|t| t.unwrap_or("").to_string());
            let state = format!("/rows/{i}/verification");
            let verification = match document.text(&state)? {
                Some("valid") => Verification::Valid,
                Some("pending") => Verification::Pending,
                Some("invalid") => Verification::Invalid,
                _ => return Err(document.wrong(&state, "valid, pending or invalid")),
            };
            Ok(Claim {
                agent: text("agent")?,
                tps: document.require_positive(&format!("/rows/{i}/tps"))?,
                method: text("method")?,
                verification,
                timestamp: text("timestamp")?,
                description: text("description")?,
            })
        };
        Ok(Board { claims: (0..count).map(claim).collect::<Result<_>>()? })
    }

    /// Claims in a state.
    pub fn count(&self, state: Verification) -> usize {
        self.claims.iter().filter(|c| c.verification == state).count()
    }

    /// Valid claims that a list of each agent's best row would not show.
    pub fn masked_valid(&self) -> usize {
        let mut best: HashMap<&str, f64> = HashMap::new();
        for c in &self.claims {
            let top = best.entry(&c.agent).or_insert(c.tps);
            *top = top.max(c.tps);
        }
        self.claims.iter().filter(|c| c.verification == Verification::Valid && c.tps < best[c.agent.as_str()]).count()
    }

    /// The fastest claim in a state.
    pub fn fastest(&self, state: Verification) -> Option<&Claim> {
        self.claims.iter().filter(|c| c.verification == state).max_by(|a, b| a.tps.total_cmp(&b.tps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Board> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("board.json");
        std::fs::write(&path, text).unwrap();
        Board::read(&path)
    }

    #[test]
    fn every_row_is_kept_and_the_hidden_ones_are_counted() {
        let board = read(
            r#"{"rows": [{"agent": "a", "tps": 510.0, "method": "m", "verification": "pending"},
                {"agent": "a", "tps": 490.5, "verification": "valid", "timestamp": "2026-06-20 15:00 UTC"},
                {"agent": "b", "tps": 480, "verification": "valid"}, {"agent": "c", "tps": 500, "verification": "invalid"}],
                "meta": {"x": Infinity}}"#,
        )
        .unwrap();
        let counts = [Verification::Valid, Verification::Pending, Verification::Invalid].map(|s| board.count(s));
        assert_eq!((board.claims.len(), counts, board.masked_valid()), (4, [2, 1, 1], 1));
        assert_eq!(board.fastest(Verification::Valid).unwrap().tps, 490.5);
    }

    #[test]
    fn bad_rows_are_named() {
        let message = |text: &str| read(text).unwrap_err().to_string();
        assert!(message("{}").contains("field `/rows`: expected a list, found nothing"));
        assert!(message(r#"{"rows": []}"#).contains("a board without rows"));
        for tps in ["0", "-3", "NaN", "Infinity", "null", "\"x\""] {
            let text = format!(r#"{{"rows": [{{"agent": "a", "tps": {tps}, "verification": "valid"}}]}}"#);
            assert!(message(&text).contains("`/rows/0/tps`: expected a positive finite number"), "{tps}");
        }
        let state = message(r#"{"rows": [{"agent": "a", "tps": 1, "verification": "maybe"}]}"#);
        assert!(state.contains("expected valid, pending or invalid, found \"maybe\""), "{state}");
    }
}
