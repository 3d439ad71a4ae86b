//! Which linear gets how many bits: a plan of rules, read from a TOML file.
//!
//! ```toml
//! [[rule]]
//! modules = "layers.*.mlp.{gate,up}_proj"
//! bits = 3
//! group = 32
//! method = "mse"
//!
//! [[rule]]
//! modules = ["lm_head", "layers.0.*"]
//! keep = true
//! ```
//!
//! `modules` is a glob or a list of them over module names without the checkpoint's prefix: `layers.3.self_attn.q_proj`,
//! `per_layer_model_projection`, `lm_head`. `*` also crosses dots. The first rule that matches a linear decides; what a rule
//! leaves out, and linears that none matches, follow the command's options. `channel = true` stands in place of `group`;
//! `keep = true` alone leaves a linear dense. A pattern that matches no linear is an error, so that a misspelt one cannot pass.

use std::path::{Path, PathBuf};

use globset::{Glob, GlobMatcher};
use runtime::config::{Bits, Strategy};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::method::Method;

/// What becomes of one linear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Treatment {
    /// It stays dense.
    Keep,
    /// It is packed.
    Pack(Choice),
}

/// How one linear is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Width and scales.
    pub scheme: Scheme,
    /// Who chooses scales and integers.
    pub method: Method,
}

/// A width and a layout of scales: what a config group says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheme {
    /// Width of a weight.
    pub bits: Bits,
    /// Layout of scales.
    pub strategy: Strategy,
}

impl Scheme {
    /// Inputs that share a scale in a row of `inputs`.
    pub fn group(self, inputs: usize) -> usize {
        match self.strategy {
            Strategy::Group(size) => size,
            Strategy::Channel => inputs,
        }
    }
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} {}", self.bits, self.strategy)
    }
}

/// A list of rules.
#[derive(Debug, Clone, Default)]
pub struct PrecisionPlan {
    path: PathBuf,
    rules: Vec<Rule>,
}

/// Largest file of rules.
const FILE_LIMIT: u64 = 1 << 20;
/// Longest pattern of a rule, in bytes.
const LONGEST_PATTERN: usize = 1024;

#[derive(Debug, Clone)]
struct Rule {
    text: RuleText,
    modules: Vec<GlobMatcher>,
    keep: bool,
    bits: Option<Bits>,
    strategy: Option<Strategy>,
    method: Option<Method>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    rule: Vec<RuleText>,
}

/// A rule as it is written.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleText {
    modules: OneOrMany,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    keep: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    bits: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<usize>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    channel: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<Method>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl PrecisionPlan {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Runtime`] where it cannot be read, [`Error::PrecisionPlan`] with the rule where it is not a plan.
    pub fn read(path: &Path) -> Result<PrecisionPlan> {
        PrecisionPlan::parse(&runtime::files::read_text(path, FILE_LIMIT)?, path)
    }

    /// Reads a file's text; `path` is for messages.
    pub fn parse(text: &str, path: &Path) -> Result<PrecisionPlan> {
        let wrong = |reason: String| Error::PrecisionPlan { path: path.to_path_buf(), reason };
        let file: FileText = toml::from_str(text).map_err(|e| wrong(e.to_string().trim_end().to_string()))?;
        if file.rule.is_empty() {
            return Err(wrong("there is no [[rule]]".into()));
        }
        PrecisionPlan::new(file.rule, path)
    }

    /// A plan of these rules, which may be none; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::PrecisionPlan`] for a rule that contradicts itself or says nothing.
    pub fn new(rules: Vec<RuleText>, path: &Path) -> Result<PrecisionPlan> {
        let wrong =
            |i, reason| Error::PrecisionPlan { path: path.to_path_buf(), reason: format!("rule {}: {reason}", i + 1) };
        let rules =
            rules.into_iter().enumerate().map(|(i, text)| Rule::new(text).map_err(|reason: String| wrong(i, reason)));
        Ok(PrecisionPlan { path: path.to_path_buf(), rules: rules.collect::<Result<_>>()? })
    }

    /// What becomes of each of `modules` (without prefix), which `default` packs where no rule says otherwise.
    ///
    /// # Errors
    /// [`Error::PrecisionPlan`] for a pattern that matches none of them.
    pub fn apply(&self, modules: &[String], default: impl Fn(&str) -> Choice) -> Result<Vec<Treatment>> {
        for (i, rule) in self.rules.iter().enumerate() {
            if let Some(idle) = rule.modules.iter().find(|g| !modules.iter().any(|m| g.is_match(m))) {
                return Err(Error::PrecisionPlan {
                    path: self.path.clone(),
                    reason: format!(
                        "rule {}: `{}` matches no linear of this checkpoint; names look like `{}`",
                        i + 1,
                        idle.glob(),
                        modules.first().map_or("layers.0.self_attn.q_proj", String::as_str)
                    ),
                });
            }
        }
        let treat = |module: &String| {
            let choice = default(module);
            match self.rules.iter().find(|r| r.modules.iter().any(|g| g.is_match(module))) {
                None => Treatment::Pack(choice),
                Some(rule) if rule.keep => Treatment::Keep,
                Some(rule) => Treatment::Pack(Choice {
                    scheme: Scheme {
                        bits: rule.bits.unwrap_or(choice.scheme.bits),
                        strategy: rule.strategy.unwrap_or(choice.scheme.strategy),
                    },
                    method: rule.method.unwrap_or(choice.method),
                }),
            }
        };
        Ok(modules.iter().map(treat).collect())
    }

    /// The rules as JSON; null without rules.
    pub fn to_json(&self) -> Value {
        match &self.rules[..] {
            [] => Value::Null,
            rules => json!(rules.iter().map(|r| &r.text).collect::<Vec<_>>()),
        }
    }

    /// All group sizes that rules name.
    pub fn strategies(&self) -> impl Iterator<Item = Strategy> + '_ {
        self.rules.iter().filter_map(|r| r.strategy)
    }
}

impl Rule {
    fn new(text: RuleText) -> std::result::Result<Rule, String> {
        let patterns = match &text.modules {
            OneOrMany::One(one) => std::slice::from_ref(one),
            OneOrMany::Many(many) => many,
        };
        if patterns.is_empty() {
            return Err("`modules` is empty".into());
        }
        // A module's name is shorter; a matcher for a pattern of any length may not fit in memory.
        if let Some(long) = patterns.iter().find(|p| p.len() > LONGEST_PATTERN) {
            return Err(format!("a pattern of {} bytes; the longest is {LONGEST_PATTERN}", long.len()));
        }
        let modules = patterns.iter().map(|p| Ok(Glob::new(p).map_err(|e| e.to_string())?.compile_matcher()));
        let modules = modules.collect::<std::result::Result<Vec<_>, String>>()?;
        let strategy = match (text.group, text.channel) {
            (Some(_), true) => return Err("`group` and `channel` exclude each other".into()),
            (Some(size), false) => Some(Strategy::Group(size)),
            (None, true) => Some(Strategy::Channel),
            (None, false) => None,
        };
        let bits = match text.bits {
            None => None,
            Some(n) => Some(Bits::new(n).ok_or_else(|| format!("bits: expected 8, 4, 3 or 2, found {n}"))?),
        };
        let says_more = bits.is_some() || strategy.is_some() || text.method.is_some();
        match (text.keep, says_more) {
            (true, true) => Err("`keep` excludes bits, group, channel and method".into()),
            (false, false) => Err("it says nothing: give keep, bits, group, channel or method".into()),
            _ => Ok(Rule { modules, keep: text.keep, bits, strategy, method: text.method, text }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<PrecisionPlan> {
        PrecisionPlan::parse(text, Path::new("plan.toml"))
    }

    fn choice(bits: Bits, strategy: Strategy, method: Method) -> Choice {
        Choice { scheme: Scheme { bits, strategy }, method }
    }

    fn modules() -> Vec<String> {
        let names = ["layers.0.mlp.gate_proj", "layers.0.mlp.down_proj", "layers.10.mlp.up_proj", "lm_head"];
        names.map(String::from).to_vec()
    }

    fn default(_: &str) -> Choice {
        choice(Bits::Four, Strategy::Group(128), Method::Rtn)
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let plan = parse(
            r#"
            [[rule]]
            modules = "layers.0.mlp.gate*"
            keep = true
            [[rule]]
            modules = ["*.mlp.{gate,up}_proj", "lm_head"]
            bits = 3
            channel = true
            method = "mse"
            "#,
        );
        let got = plan.unwrap().apply(&modules(), default).unwrap();
        let third = Treatment::Pack(choice(Bits::Three, Strategy::Channel, Method::Mse));
        assert_eq!(got, [Treatment::Keep, Treatment::Pack(default("")), third, third]);
    }

    #[test]
    fn what_a_rule_leaves_out_follows_the_options() {
        let plan = parse("[[rule]]\nmodules = '*down*'\ngroup = 32\n").unwrap();
        let got = plan.apply(&modules(), default).unwrap();
        assert_eq!(got[1], Treatment::Pack(choice(Bits::Four, Strategy::Group(32), Method::Rtn)));
        assert_eq!(got[0], Treatment::Pack(default("")));
    }

    #[test]
    fn a_pattern_that_matches_nothing_is_an_error() {
        let plan = parse("[[rule]]\nmodules = ['*.mlp.*', '*.mpl.*']\nbits = 8\n").unwrap();
        let error = plan.apply(&modules(), default).unwrap_err().to_string();
        for want in ["plan.toml", "rule 1", "`*.mpl.*`", "layers.0.mlp.gate_proj"] {
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn malformed_plans_are_refused_with_the_rule() {
        let rule = |rest: &str| parse(&format!("[[rule]]\nmodules = '*'\nbits = 4\n[[rule]]\n{rest}"));
        for (rest, want) in [
            ("modules = '*'", "rule 2: it says nothing"),
            ("modules = '*'\nkeep = false", "rule 2: it says nothing"),
            ("modules = []\nbits = 4", "rule 2: `modules` is empty"),
            (&format!("modules = '{}'\nbits = 4", "?".repeat(200_000)), "rule 2: a pattern of 200000 bytes"),
            ("modules = '*'\nbits = 5", "rule 2: bits: expected 8, 4, 3 or 2, found 5"),
            ("modules = '*'\nkeep = true\nbits = 4", "rule 2: `keep` excludes"),
            ("modules = '*'\ngroup = 32\nchannel = true", "rule 2: `group` and `channel`"),
            ("modules = '{'\nbits = 4", "rule 2: "),
            ("modules = '*'\nbit = 4", "unknown field `bit`"),
            ("modules = '*'\nmethod = 'best'", "unknown variant `best`"),
            ("bits = 4", "missing field `modules`"),
        ] {
            let error = rule(rest).unwrap_err().to_string();
            assert!(error.contains(want) && error.contains("plan.toml"), "{rest}: {error}");
        }
        assert!(parse("").unwrap_err().to_string().contains("rule"));
    }
}
