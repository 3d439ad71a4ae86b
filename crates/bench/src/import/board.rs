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

impl Claim {
    /// The perplexity that the description states, as in `PPL 2.3931`; `None` where it states none. Boards have no field for it.
    pub fn stated_ppl(&self) -> Option<f64> {
        let text = self.description.to_ascii_lowercase();
        text.match_indices("ppl").find_map(|(at, word)| {
            let whole = !text[..at].ends_with(|c: char| c.is_ascii_alphanumeric());
            let rest = text[at + word.len()..].trim_start_matches([' ', ':', '=', '~']);
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
            // A full stop after the number is not part of it; a whole number is a count of something.
            let number = rest[..end].trim_end_matches('.');
            let stated = number.parse::<f64>().ok().filter(|v| number.contains('.') && *v >= 1.0 && v.is_finite());
            stated.filter(|_| whole)
        })
    }

    /// The other agents that the description names, as whole words: what a claim says it builds on, repeats or beats.
    pub fn names<'a>(&self, agents: &[&'a str]) -> Vec<&'a str> {
        let text = self.description.to_lowercase();
        let part = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
        let named = |agent: &str| {
            !agent.is_empty()
                && text.match_indices(&agent.to_lowercase()).any(|(at, word)| {
                    let (before, after) = (&text[..at], &text[at + word.len()..]);
                    // `senpai's` and `(senpai)` name senpai; `senpai-2` names another.
                    !before.ends_with(part) && !after.starts_with(part)
                })
        };
        agents.iter().filter(|a| **a != self.agent && named(a)).copied().collect()
    }
}

/// A board.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Board {
    /// All claims, in the file's order.
    pub claims: Vec<Claim>,
}

impl Board {
    /// Reads a board, or what `bench import board --json` made of one.
    ///
    /// # Errors
    /// No JSON, no rows, or a row whose rate or state cannot be used.
    pub fn read(path: &Path) -> Result<Board> {
        let document = json::read(path)?;
        let list = if document.at("/claims").is_some_and(serde_json::Value::is_array) { "/claims" } else { "/rows" };
        let count = document.require_list(list)?.len();
        if count == 0 {
            return Err(Error::Empty { path: path.to_path_buf(), what: "a board without rows".into() });
        }
        let claim = |i: usize| {
            let text = |field: &str| document.text(&format!("{list}/{i}/{field}")).map(|t| t.unwrap_or("").to_string());
            let state = format!("{list}/{i}/verification");
            let verification = match document.text(&state)? {
                Some("valid") => Verification::Valid,
                Some("pending") => Verification::Pending,
                Some("invalid") => Verification::Invalid,
                _ => return Err(document.wrong(&state, "valid, pending or invalid")),
            };
            Ok(Claim {
                agent: text("agent")?,
                tps: document.require_positive(&format!("{list}/{i}/tps"))?,
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
    fn descriptions_are_read_for_perplexity_and_for_others() {
        let claim = |description: &str| Claim {
            agent: "me-2".into(),
            tps: 1.0,
            method: String::new(),
            verification: Verification::Pending,
            timestamp: String::new(),
            description: description.into(),
        };
        for (text, ppl) in [
            ("510 TPS / PPL 2.3931, 128/128", Some(2.3931)),
            ("ppl=2.40. Next", Some(2.40)),
            ("near the PPL cap; PPL: 2.437", Some(2.437)),
            ("61797 PPL tokens, job 6.5", None),
            ("PPL within 2.42 cap", None),
            ("PPL 2", None),
            ("wppl 2.4", None),
            ("PPL 0.012", None),
            ("\u{130}PPL 2.5", Some(2.5)),
            ("", None),
        ] {
            assert_eq!(claim(text).stated_ppl(), ppl, "{text}");
        }
        let others = ["me", "me-2", "senpai", "\u{130}x", ""];
        assert_eq!(claim("@Senpai's kernel, and me-2's own; not me-3").names(&others), ["senpai"]);
        assert_eq!(claim("repeats me (twice)").names(&others), ["me"]);
        assert!(claim("senpai-2, some, mesa").names(&others).is_empty());
    }

    #[test]
    fn what_import_printed_reads_back() {
        let board =
            read(r#"{"rows": [{"agent": "a", "tps": 510.0, "method": "m", "verification": "valid"}]}"#).unwrap();
        let again = serde_json::json!({"rows": 1, "claims": board.claims}).to_string();
        assert_eq!(read(&again).unwrap(), board);
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
