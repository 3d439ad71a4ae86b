//! Greedy identity of two sets of generations: the same prompts, the same tokens, index by index.
//!
//! The rules are those of the speed challenge's community verifier: no tolerance for ties, no special case for
//! end-of-sequence; a shorter output diverges by the tokens it lacks. Two sets can also be *incomparable*: other keys, other
//! prompts under the same key, or a stored hash that does not fit its tokens. That takes precedence over any divergence,
//! since a comparison of the wrong files proves nothing.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::jsonl::{self, Line};

/// Outcome of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Status {
    /// Every token of every prompt is the same.
    GreedyIdentical,
    /// At least one token differs.
    Divergent,
    /// The two sets are not about the same prompts, or a stored hash is wrong.
    Incomparable,
}

impl Status {
    /// Exit code of a program that reports this status: 0, 1 or 2.
    pub fn exit_code(self) -> u8 {
        match self {
            Status::GreedyIdentical => 0,
            Status::Divergent => 1,
            Status::Incomparable => 2,
        }
    }

    /// Spelling in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::GreedyIdentical => "GREEDY_IDENTICAL",
            Status::Divergent => "DIVERGENT",
            Status::Incomparable => "INCOMPARABLE",
        }
    }
}

/// Lower-case hexadecimal SHA-256.
pub fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// SHA-256 of token ids as the field stores it: of the decimal ids joined by commas, without spaces.
pub fn token_sha256(ids: &[u32]) -> String {
    let text: Vec<String> = ids.iter().map(u32::to_string).collect();
    sha256_hex(text.join(",").as_bytes())
}

/// One output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// `id`, or `prompt_sha256` where there is none.
    pub key: String,
    /// The tokens.
    pub completion_token_ids: Vec<u32>,
    /// What the file says about the prompt: `prompt_token_sha256` and `prompt_sha256`, where present.
    pub prompt_hashes: [Option<String>; 2],
    /// Stored hashes that do not fit what they are stored with.
    pub bad_hashes: Vec<BadHash>,
}

/// A stored hash that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadHash {
    /// Key of the generation.
    pub key: String,
    /// Name of the field.
    pub field: String,
    /// What the file says.
    pub stored: String,
    /// What its contents give.
    pub computed: String,
}

/// Reads a file of generations (`decode_outputs.jsonl` of the field): `id` or `prompt_sha256`, `completion_token_ids`, and,
/// checked where present, `completion_token_sha256`, `prompt_token_sha256` with `prompt_token_ids`, and `prompt_sha256` with
/// `prompt_text`.
///
/// # Errors
/// An empty file, a duplicate key, a line without key or tokens, an id that is not an integer. A wrong hash is no error here: it
/// makes a comparison [`Status::Incomparable`].
pub fn read(path: &Path) -> Result<Vec<Generation>> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut generations = Vec::new();
    for line in jsonl::read(path)? {
        let generation = parse(&line)?;
        if let Some(first) = seen.insert(generation.key.clone(), line.number) {
            return Err(line.duplicate(&generation.key, first));
        }
        generations.push(generation);
    }
    Ok(generations)
}

fn parse(line: &Line) -> Result<Generation> {
    let key = match line.key("id")? {
        Some(id) => id,
        None => {
            line.key("prompt_sha256")?.ok_or_else(|| line.bad("id", "a key (`id`, or `prompt_sha256`)", "nothing"))?
        }
    };
    let completion_token_ids = line.require_token_ids("completion_token_ids", None)?;
    let mut bad_hashes = Vec::new();
    let mut check = |field: &str, computed: Option<String>| -> Result<Option<String>> {
        let stored = line.text(field)?.map(str::to_ascii_lowercase);
        if let (Some(stored), Some(computed)) = (stored.clone(), computed)
            && stored != computed
        {
            bad_hashes.push(BadHash { key: key.clone(), field: field.into(), stored, computed });
        }
        Ok(stored)
    };
    check("completion_token_sha256", Some(token_sha256(&completion_token_ids)))?;
    let of_ids = check("prompt_token_sha256", line.token_ids("prompt_token_ids", None)?.as_deref().map(token_sha256))?;
    let of_text = check("prompt_sha256", line.text("prompt_text")?.map(|t| sha256_hex(t.as_bytes())))?;
    Ok(Generation { key, completion_token_ids, prompt_hashes: [of_ids, of_text], bad_hashes })
}

/// First index at which two outputs differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Divergence {
    /// Key of the prompt.
    pub key: String,
    /// Index in the outputs.
    pub index: usize,
    /// Token of the reference; `None` where it has ended.
    pub expected: Option<u32>,
    /// Token of the candidate; `None` where it has ended.
    pub found: Option<u32>,
    /// Indices that differ, with those that only one of the two has.
    pub num_divergent: usize,
}

/// Compares two outputs index by index; `None` where they are the same.
pub fn divergence(key: &str, reference: &[u32], candidate: &[u32]) -> Option<Divergence> {
    let differing = reference.iter().zip(candidate).filter(|(a, b)| a != b).count();
    let num_divergent = differing + reference.len().abs_diff(candidate.len());
    if num_divergent == 0 {
        return None;
    }
    let common = reference.len().min(candidate.len());
    let index = (0..common).find(|&i| reference[i] != candidate[i]).unwrap_or(common);
    let (expected, found) = (reference.get(index).copied(), candidate.get(index).copied());
    Some(Divergence { key: key.to_string(), index, expected, found, num_divergent })
}

/// Result of comparing two sets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// The verdict.
    pub status: Status,
    /// Prompts that are in both sets.
    pub prompts: usize,
    /// Prompts whose outputs are the same.
    pub identical_prompts: usize,
    /// Tokens of the reference over the common prompts.
    pub tokens: usize,
    /// Indices that differ, over the common prompts.
    pub divergent_tokens: usize,
    /// Each prompt that diverges, in the order of the reference.
    pub divergences: Vec<Divergence>,
    /// Keys that only the reference has, sorted.
    pub only_in_reference: Vec<String>,
    /// Keys that only the candidate has, sorted.
    pub only_in_candidate: Vec<String>,
    /// Keys under which the two sets store hashes of different prompts.
    pub different_prompts: Vec<String>,
    /// Wrong hashes of either set.
    pub bad_hashes: Vec<BadHash>,
}

/// Compares a candidate with a reference.
pub fn compare(reference: &[Generation], candidate: &[Generation]) -> Comparison {
    let ours: BTreeMap<&str, &Generation> = reference.iter().map(|g| (g.key.as_str(), g)).collect();
    let theirs: BTreeMap<&str, &Generation> = candidate.iter().map(|g| (g.key.as_str(), g)).collect();
    let only = |a: &BTreeMap<&str, _>, b: &BTreeMap<&str, _>| -> Vec<String> {
        a.keys().filter(|k| !b.contains_key(*k)).map(|k| k.to_string()).collect()
    };
    let mut out = Comparison {
        status: Status::GreedyIdentical,
        prompts: 0,
        identical_prompts: 0,
        tokens: 0,
        divergent_tokens: 0,
        divergences: Vec::new(),
        only_in_reference: only(&ours, &theirs),
        only_in_candidate: only(&theirs, &ours),
        different_prompts: Vec::new(),
        bad_hashes: reference.iter().chain(candidate).flat_map(|g| g.bad_hashes.clone()).collect(),
    };
    for a in reference {
        let Some(b) = theirs.get(a.key.as_str()) else { continue };
        out.prompts += 1;
        out.tokens += a.completion_token_ids.len();
        let differ = |(x, y): (&Option<String>, &Option<String>)| matches!((x, y), (Some(x), Some(y)) if x != y);
        if a.prompt_hashes.iter().zip(&b.prompt_hashes).any(differ) {
            out.different_prompts.push(a.key.clone());
        }
        match divergence(&a.key, &a.completion_token_ids, &b.completion_token_ids) {
            None => out.identical_prompts += 1,
            Some(d) => {
                out.divergent_tokens += d.num_divergent;
                out.divergences.push(d);
            }
        }
    }
    let comparable = out.bad_hashes.is_empty()
        && out.different_prompts.is_empty()
        && out.only_in_reference.is_empty()
        && out.only_in_candidate.is_empty()
        && out.prompts > 0;
    out.status = match (comparable, out.divergences.is_empty()) {
        (false, _) => Status::Incomparable,
        (true, false) => Status::Divergent,
        (true, true) => Status::GreedyIdentical,
    };
    out
}

/// [`compare`] of two files.
///
/// # Errors
/// Those of [`read`], for either file.
pub fn compare_files(reference: &Path, candidate: &Path) -> Result<Comparison> {
    Ok(compare(&read(reference)?, &read(candidate)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::jsonl::tests::file;

    fn parse_text(text: &str) -> Result<Vec<Generation>> {
        let (_dir, path) = file(text);
        read(&path)
    }

    fn set(outputs: &[(&str, &[u32])]) -> Vec<Generation> {
        let make = |&(key, ids): &(&str, &[u32])| Generation {
            key: key.into(),
            completion_token_ids: ids.to_vec(),
            prompt_hashes: [None, None],
            bad_hashes: Vec::new(),
        };
        outputs.iter().map(make).collect()
    }

    #[test]
    fn hashes_are_those_of_the_field() {
        // sha256 of "1,22,333" and of nothing, from coreutils.
        assert_eq!(token_sha256(&[1, 22, 333]), "8915516745284e69425d3f566025a855f5a5718d6d44f09451fb19d0f61fc185");
        assert_eq!(sha256_hex(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }

    #[test]
    fn the_same_tokens_in_another_order_of_lines_are_identical() {
        let c = compare(&set(&[("a", &[1, 2]), ("b", &[3])]), &set(&[("b", &[3]), ("a", &[1, 2])]));
        assert_eq!((c.status, c.prompts, c.identical_prompts, c.tokens), (Status::GreedyIdentical, 2, 2, 3));
        assert_eq!(c.status.exit_code(), 0);
    }

    #[test]
    fn differences_and_missing_tokens_are_counted() {
        let c = compare(
            &set(&[("a", &[1, 2, 3, 4]), ("b", &[5, 6]), ("c", &[7])]),
            &set(&[("a", &[1, 9, 3, 8]), ("b", &[5, 6, 7, 8]), ("c", &[7])]),
        );
        assert_eq!(
            (c.status, c.status.exit_code(), c.divergent_tokens, c.identical_prompts),
            (Status::Divergent, 1, 4, 1)
        );
        let first = Divergence { key: "a".into(), index: 1, expected: Some(2), found: Some(9), num_divergent: 2 };
        let longer = Divergence { key: "b".into(), index: 2, expected: None, found: Some(7), num_divergent: 2 };
        assert_eq!(c.divergences, [first, longer]);
        // An early end is a divergence at the shorter length, whichever side it is on.
        let d = divergence("b", &[5, 6, 7], &[5]).unwrap();
        assert_eq!((d.index, d.expected, d.found, d.num_divergent), (1, Some(6), None, 2));
    }

    #[test]
    fn other_prompts_are_incomparable_even_where_the_common_ones_diverge() {
        let c = compare(&set(&[("a", &[1]), ("b", &[2])]), &set(&[("a", &[9]), ("c", &[2])]));
        assert_eq!((c.status, c.status.exit_code()), (Status::Incomparable, 2));
        assert_eq!((c.only_in_reference, c.only_in_candidate), (vec!["b".to_string()], vec!["c".to_string()]));
        // A set that only lacks or only adds prompts is another set too.
        let (less, more) = (set(&[("a", &[1])]), set(&[("a", &[1]), ("b", &[2])]));
        assert_eq!(compare(&less, &more).status, Status::Incomparable);
        assert_eq!(compare(&more, &less).status, Status::Incomparable);
        assert_eq!(compare(&[], &[]).status, Status::Incomparable);
    }

    #[test]
    fn a_wrong_hash_is_incomparable() {
        let hash = token_sha256(&[1, 2]);
        let good = parse_text(&format!(
            r#"{{"id": "a", "completion_token_ids": [1, 2], "completion_token_sha256": "{hash}"}}"#
        ))
        .unwrap();
        let bad = parse_text(&format!(
            r#"{{"id": "a", "completion_token_ids": [1, 3], "completion_token_sha256": "{hash}"}}"#
        ))
        .unwrap();
        assert_eq!(compare(&good, &good).status, Status::GreedyIdentical);
        for (a, b) in [(&good, &bad), (&bad, &good), (&bad, &bad)] {
            let c = compare(a, b);
            assert_eq!(c.status, Status::Incomparable);
            assert_eq!((c.bad_hashes[0].field.as_str(), &c.bad_hashes[0].stored), ("completion_token_sha256", &hash));
        }
        let prompt = r#"{"id": "a", "completion_token_ids": [], "prompt_token_ids": [5], "prompt_token_sha256": "00"}"#;
        assert_eq!(parse_text(prompt).unwrap()[0].bad_hashes[0].field, "prompt_token_sha256");
        let text = r#"{"id": "a", "completion_token_ids": [], "prompt_text": "x", "prompt_sha256": "00"}"#;
        assert_eq!(parse_text(text).unwrap()[0].bad_hashes[0].field, "prompt_sha256");
    }

    #[test]
    fn another_prompt_under_the_same_key_is_incomparable() {
        let line = |hash: &str| {
            parse_text(&format!(r#"{{"id": "a", "completion_token_ids": [1], "prompt_sha256": "{hash}"}}"#)).unwrap()
        };
        assert_eq!(compare(&line("aa"), &line("AA")).status, Status::GreedyIdentical);
        let c = compare(&line("aa"), &line("bb"));
        assert_eq!((c.status, c.different_prompts), (Status::Incomparable, vec!["a".to_string()]));
    }

    #[test]
    fn keys_are_ids_as_text_or_the_prompt_hash() {
        let g = parse_text(
            "{\"id\": 7, \"completion_token_ids\": [1]}\n{\"prompt_sha256\": \"ab\", \"completion_token_ids\": []}",
        )
        .unwrap();
        assert_eq!(g.iter().map(|g| g.key.as_str()).collect::<Vec<_>>(), ["7", "ab"]);
        let twice =
            parse_text("{\"id\": 7, \"completion_token_ids\": [1]}\n{\"id\": \"7\", \"completion_token_ids\": [1]}");
        assert!(matches!(twice, Err(Error::Duplicate { line: 2, first_line: 1, .. })));
    }

    #[test]
    fn bad_files_are_errors() {
        assert!(matches!(parse_text(""), Err(Error::Empty { .. })));
        let message = |text: &str| parse_text(text).unwrap_err().to_string();
        assert!(message(r#"{"completion_token_ids": [1]}"#).contains("`prompt_sha256`"));
        assert!(
            message(r#"{"id": "a"}"#).contains("`completion_token_ids`: expected a list of token ids, found nothing")
        );
        assert!(message(r#"{"id": "a", "completion_token_ids": [true]}"#).contains("found true"));
        assert!(message(r#"{"id": "a", "completion_token_ids": [1.0]}"#).contains("found 1.0"));
    }

    #[test]
    fn statuses_are_spelled_the_same_in_json_and_text() {
        for status in [Status::GreedyIdentical, Status::Divergent, Status::Incomparable] {
            assert_eq!(serde_json::to_value(status).unwrap(), status.as_str());
        }
    }
}
