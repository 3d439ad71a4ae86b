//! A plan as a recipe that `bake recipe` carries out. Linears are quantised before layers are removed, so that every number in
//! it is one of the unchanged model.

use std::collections::BTreeMap;

use bake::in_memory::Quantiser;
use bake::quantize::Strategy;

use super::held_out::{Finalist, SearchReport};
use super::variant::{Group, Variant};

impl SearchReport {
    /// The recipe of a finalist.
    pub fn recipe(&self, finalist: &Finalist, quantiser: &Quantiser) -> String {
        let description = format!(
            "{:.6} MB a step instead of {:.6}; perplexity {:.4} times that of the unchanged model on the records of the search, \
             {:.4} times on held-out ones; cap {}",
            finalist.step_bytes as f64 / 1e6,
            self.baseline_search.step_bytes as f64 / 1e6,
            finalist.search.ratio,
            finalist.held_out.ratio,
            self.cap
        );
        format!("name = \"searched\"\ndescription = \"{description}\"\n{}", steps(finalist.variant(), quantiser))
    }
}

fn steps(variant: &Variant, quantiser: &Quantiser) -> String {
    let mut out = String::new();
    if !variant.widths.is_empty() {
        let method = quantiser.method().name();
        let scales = match quantiser.strategy() {
            Strategy::Group(size) => format!("group = {size}\n"),
            Strategy::Channel => "channel = true\n".to_string(),
        };
        out += "\n[[step]]\nbake = \"quantize\"\n";
        let mut by_width: BTreeMap<u8, Vec<String>> = BTreeMap::new();
        for (group, &bits) in &variant.widths {
            by_width.entry(bits).or_default().push(format!("\"{}\"", pattern(*group)));
        }
        for (bits, modules) in by_width {
            let modules = modules.join(", ");
            out += &format!("\n[[step.rule]]\nmodules = [{modules}]\nbits = {bits}\n{scales}method = \"{method}\"\n");
        }
        out += "\n# What the plan does not name stays as it is.\n[[step.rule]]\nmodules = \"*\"\nkeep = true\n";
    }
    if !variant.removed.is_empty() {
        let layers: Vec<String> = variant.removed.iter().map(usize::to_string).collect();
        out += &format!("\n[[step]]\nbake = \"drop-layers\"\nlayers = [{}]\n", layers.join(", "));
    }
    out
}

/// The glob that matches the group's modules.
fn pattern(group: Group) -> String {
    match group {
        Group::Kind(name) if Group::is_outside(name) => name.to_string(),
        Group::Kind(name) => format!("layers.*.{name}"),
        Group::Layer(l) => format!("layers.{l}.*"),
        Group::Linear(l, name) => format!("layers.{l}.{name}"),
    }
}

#[cfg(test)]
mod tests {
    use bake::method::Method;

    use super::*;

    #[test]
    fn rules_name_what_is_changed_and_keep_the_rest() {
        let quantiser = Quantiser::new(Method::Mse, Strategy::Group(32)).unwrap();
        let variant = Variant::unchanged()
            .with(Group::Kind("mlp.down_proj"), Some(3))
            .with(Group::Kind("per_layer_model_projection"), Some(8))
            .with(Group::Layer(4), Some(3))
            .without(7)
            .without(2);
        let want = r#"
[[step]]
bake = "quantize"

[[step.rule]]
modules = ["layers.*.mlp.down_proj", "layers.4.*"]
bits = 3
group = 32
method = "mse"

[[step.rule]]
modules = ["per_layer_model_projection"]
bits = 8
group = 32
method = "mse"

# What the plan does not name stays as it is.
[[step.rule]]
modules = "*"
keep = true

[[step]]
bake = "drop-layers"
layers = [2, 7]
"#;
        assert_eq!(steps(&variant, &quantiser), want);
        assert_eq!(
            steps(&Variant::unchanged().without(3), &quantiser),
            "\n[[step]]\nbake = \"drop-layers\"\nlayers = [3]\n"
        );
    }
}
