//! `quantization_config`: the part of `compressed-tensors` that this program reads.
//!
//! Only weights are quantised (no activations): symmetric integers in `pack-quantized` order, one scale a group of inputs or
//! one an output channel. Which tensors are packed is seen from their names; how, from the config group that targets the
//! module, to which the shapes are held.

use std::fmt;

use fancy_regex::Regex;
use kernels::packing::Bits;

use super::Fields;
use crate::error::Result;

/// Class of every linear of the model, as config groups name it.
const LINEAR_CLASS: &str = "Linear";

/// An entry of `targets` or `ignore`: a module's name, the class of modules `Linear`, or `re:` and a regular expression that must
/// match from the name's first character on, not to its last (the `re.match` of the library).
#[derive(Clone)]
pub struct ModulePattern {
    text: String,
    regex: Option<Regex>,
}

impl ModulePattern {
    /// Reads an entry; the error says what is wrong with the expression.
    pub fn new(text: &str) -> std::result::Result<ModulePattern, String> {
        let regex = match text.strip_prefix("re:") {
            Some(pattern) => Some(Regex::new(&format!("\\A(?:{pattern})")).map_err(|e| e.to_string())?),
            None => None,
        };
        Ok(ModulePattern { text: text.to_string(), regex })
    }

    /// The entry as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether it is a regular expression.
    pub fn is_expression(&self) -> bool {
        self.regex.is_some()
    }

    /// Whether it names this module by name or expression. An expression that takes more than a million steps matches nothing.
    pub fn names(&self, module: &str) -> bool {
        match &self.regex {
            Some(regex) => regex.is_match(module).unwrap_or(false),
            None => self.text == module,
        }
    }

    fn is_class(&self) -> bool {
        self.regex.is_none() && self.text == LINEAR_CLASS
    }
}

impl PartialEq for ModulePattern {
    fn eq(&self, other: &ModulePattern) -> bool {
        self.text == other.text
    }
}

impl fmt::Debug for ModulePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

/// How the weights of one config group are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// One scale for each run of this many inputs.
    Group(usize),
    /// One scale an output row.
    Channel,
}

/// One entry of `config_groups`.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightScheme {
    /// Name of the group in the file.
    pub name: String,
    /// Modules it applies to.
    pub targets: Vec<ModulePattern>,
    /// Width of a weight.
    pub bits: Bits,
    /// Scale layout.
    pub strategy: Strategy,
}

/// How one linear is packed, and what that makes of its tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Packing<'a> {
    /// The config group that says so.
    pub scheme: &'a WeightScheme,
    /// Inputs that share a scale.
    pub group: usize,
    /// Words of a row of `weight_packed`, I32 `[out, words]`.
    pub words: usize,
    /// Scales of a row of `weight_scale`, `[out, groups]`.
    pub groups: usize,
}

impl fmt::Display for Packing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let WeightScheme { name, bits, strategy, .. } = self.scheme;
        write!(f, "{bits}, {strategy} in config group `{name}`")
    }
}

/// A checked `quantization_config`.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantization {
    /// The config groups, in file order.
    pub schemes: Vec<WeightScheme>,
    /// Modules that are left alone.
    pub ignore: Vec<ModulePattern>,
}

impl Quantization {
    pub(super) fn from_json(root: &Fields) -> Result<Option<Quantization>> {
        let Some(q) = root.optional_object("quantization_config")? else {
            return Ok(None);
        };
        for (field, want) in [("quant_method", "compressed-tensors"), ("format", "pack-quantized")] {
            let found = q.string(field, "")?;
            if found != want {
                return Err(q.wrong(field, &format!("\"{want}\""), format!("\"{found}\"")));
            }
        }
        if q.optional_object("kv_cache_scheme")?.is_some() {
            return Err(q.unsupported("kv_cache_scheme", "a quantised KV cache in the checkpoint"));
        }
        let groups = q.object("config_groups")?;
        let mut schemes = Vec::new();
        for name in groups.keys() {
            let group = groups.object(name)?;
            let weights = group.object("weights")?;
            if group.optional_object("input_activations")?.is_some() {
                return Err(group.unsupported("input_activations", "quantised activations"));
            }
            if !weights.boolean("symmetric", true)? {
                return Err(weights.unsupported("symmetric", "weights with a zero point"));
            }
            let kind = weights.string("type", "int")?;
            if kind != "int" {
                return Err(weights.wrong("type", "\"int\"", format!("\"{kind}\"")));
            }
            if !weights.string("actorder", "")?.is_empty() {
                return Err(weights.unsupported("actorder", "weights in another order than their inputs"));
            }
            let bits = weights.dimension("num_bits")?;
            let bits = Bits::new(bits).ok_or_else(|| weights.wrong("num_bits", "2, 3, 4 or 8", bits.to_string()))?;
            let strategy = match weights.string("strategy", "")?.as_str() {
                "group" => Strategy::Group(weights.dimension("group_size")?),
                "channel" => Strategy::Channel,
                other => return Err(weights.wrong("strategy", "\"group\" or \"channel\"", format!("\"{other}\""))),
            };
            schemes.push(WeightScheme { name: name.clone(), targets: patterns(&group, "targets")?, bits, strategy });
        }
        let ignore = patterns(&q, "ignore")?;
        Ok(Some(Quantization { schemes, ignore }))
    }

    /// Whether a linear, by its full name in the file, is left alone.
    pub fn ignores(&self, module: &str) -> bool {
        self.ignore.iter().any(|p| p.names(module) || p.is_class())
    }

    /// How a linear, by its full name in the file, is packed; `None` where no config group targets it. As in the library, its
    /// own name counts before expressions, those (in alphabetical order) before its class, and the last config group that
    /// lists an entry owns it.
    pub fn scheme(&self, module: &str) -> Option<&WeightScheme> {
        let rank = |p: &ModulePattern| match &p.regex {
            None if p.text == module => Some((0, String::new())),
            Some(_) if p.names(module) => Some((1, p.text.clone())),
            _ if p.is_class() => Some((2, String::new())),
            _ => None,
        };
        let ranked = self.schemes.iter().rev().filter_map(|s| Some((s.targets.iter().filter_map(rank).min()?, s)));
        // The first of equals is the last in the file.
        ranked.min_by(|(a, _), (b, _)| a.cmp(b)).map(|(_, scheme)| scheme)
    }

    /// How a packed linear of `inputs` inputs is stored, or why it cannot be.
    pub fn packing(&self, module: &str, inputs: usize) -> std::result::Result<Packing<'_>, String> {
        if self.ignores(module) {
            return Err("is packed, but the ignore list of quantization_config names the module".into());
        }
        let Some(scheme) = self.scheme(module) else {
            return Err("is packed, but no config group of quantization_config targets the module".into());
        };
        let group = match scheme.strategy {
            Strategy::Channel => inputs,
            Strategy::Group(size) => size,
        };
        let words = scheme.bits.words(inputs);
        let packing = Packing { scheme, group, words, groups: inputs.checked_div(group).unwrap_or(1) };
        match packing.groups * group == inputs {
            true => Ok(packing),
            false => Err(format!("cannot be {packing}: the group does not divide its {inputs} inputs")),
        }
    }
}

fn patterns(object: &Fields, field: &str) -> Result<Vec<ModulePattern>> {
    let read = |text: String| {
        ModulePattern::new(&text)
            .map_err(|e| object.wrong(field, "regular expressions after `re:`", format!("{text}: {e}")))
    };
    object.strings(field)?.into_iter().map(read).collect()
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Strategy::Group(size) => write!(f, "group {size}"),
            Strategy::Channel => f.write_str("channel"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheme(name: &str, targets: &[&str]) -> WeightScheme {
        let targets = targets.iter().map(|t| ModulePattern::new(t).unwrap()).collect();
        WeightScheme { name: name.into(), targets, bits: Bits::Four, strategy: Strategy::Channel }
    }

    #[test]
    fn names_come_before_expressions_and_those_before_the_class() {
        let q = Quantization {
            schemes: vec![
                scheme("class", &["Linear"]),
                scheme("b", &["re:.*up_proj$"]),
                scheme("a", &["re:.*layers\\.1\\..*", "other"]),
                scheme("name", &["m.layers.1.mlp.up_proj"]),
                scheme("again", &["re:.*up_proj$"]),
            ],
            ignore: vec![ModulePattern::new("re:.*tower").unwrap(), ModulePattern::new("lm_head").unwrap()],
        };
        for (module, want) in [
            ("m.layers.1.mlp.up_proj", "name"),
            ("m.layers.1.mlp.down_proj", "a"),
            // Of two expressions, the one that sorts first.
            ("x.layers.1.mlp.up_proj", "a"),
            // The library keeps groups by target, so the later one replaces the earlier.
            ("m.layers.2.mlp.up_proj", "again"),
            ("m.layers.2.mlp.down_proj", "class"),
        ] {
            assert_eq!(q.scheme(module).unwrap().name, want, "{module}");
        }
        assert!(q.ignores("model.vision_tower.x") && q.ignores("lm_head") && !q.ignores("m.lm_head"));
    }

    #[test]
    fn expressions_match_from_the_beginning_and_may_look_ahead() {
        let matches = |text: &str, module: &str| ModulePattern::new(text).unwrap().names(module);
        assert!(matches("re:lm", "lm_head") && !matches("re:head", "lm_head") && !matches("re:a|b", "xb"));
        assert!(matches("re:(?!.*tower).*q_proj", "layers.0.q_proj"));
        assert!(!matches("re:(?!.*tower).*q_proj", "tower.0.q_proj"));
        assert!(ModulePattern::new("re:(").is_err());
    }

    #[test]
    fn a_module_that_nothing_names_has_no_scheme() {
        let q = Quantization { schemes: vec![scheme("a", &["re:.*mlp.*"])], ignore: vec![] };
        assert!(q.scheme("layers.0.self_attn.q_proj").is_none());
    }
}
