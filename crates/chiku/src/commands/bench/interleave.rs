//! `chiku bench run --interleave A B`: two configurations, each a TOML file or `base`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bench::configuration::{Configuration, last_good};
use bench::environment::{CheckpointHash, Environment};
use ppl::paths::Prompt;

use super::measure::Side;
use super::prompts::PromptArgs;

/// Loads both. `out` is the results file of this run, where `base` is looked for beside `results/`.
pub fn sides(names: &[String], out: &Path) -> Result<Vec<Side>> {
    let mut sides = names.iter().map(|name| side(name, out)).collect::<Result<Vec<Side>>>()?;
    if let [a, b] = &mut sides[..]
        && a.label == b.label
    {
        // Two files of one name, or a base that was called as the file is.
        a.label += "-a";
        b.label += "-b";
    }
    Ok(sides)
}

fn side(name: &str, out: &Path) -> Result<Side> {
    if name != "base" {
        let configuration = Configuration::read(Path::new(name))?;
        return Side::configured(&configuration).with_context(|| name.to_string());
    }
    let machine = Environment::capture().machine();
    let record = last_good(&results(&machine, out)?, &machine)?;
    let Some(configuration) = record.configuration else { bail!("base: the record holds no configuration") };
    let mut side = Side::configured(&configuration)
        .with_context(|| format!("base: the configuration of the record of {}", record.time))?;
    let found = CheckpointHash::of(&side.label, side.model.checkpoint())?.blake3;
    if found != record.checkpoint.blake3 {
        bail!(
            "base: `{}` is another checkpoint now (blake3 {found}) than in the record of {} ({})",
            configuration.model,
            record.time,
            record.checkpoint.blake3
        );
    }
    side.label = "base".into();
    Ok(side)
}

/// Results files of a machine: `results/*/MACHINE-*.jsonl`, and the one that is written to.
fn results(machine: &str, out: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for year in std::fs::read_dir("results").into_iter().flatten() {
        for file in std::fs::read_dir(year?.path()).into_iter().flatten() {
            let path = file?.path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            if name.strip_prefix(machine).is_some_and(|rest| rest.starts_with('-')) && name.ends_with(".jsonl") {
                files.push(path);
            }
        }
    }
    if out.is_file() && !files.iter().any(|f| f == out) {
        files.push(out.to_path_buf());
    }
    files.sort();
    Ok(files)
}

/// The prompts as tokens, which must be the same to both.
pub fn prompts(args: &PromptArgs, sides: &[Side], limit: usize) -> Result<(bench::prompts::PromptSet, Vec<Prompt>)> {
    let first = args.read(&sides[0].model, limit)?;
    for other in &sides[1..] {
        let second = args.read(&other.model, limit)?;
        if let Some((a, _)) = first.1.iter().zip(&second.1).find(|(a, b)| a.token_ids != b.token_ids) {
            bail!("prompt `{}`: `{}` and `{}` make other tokens of it", a.id, sides[0].label, other.label);
        }
    }
    Ok(first)
}
