//! `chiku bench run --interleave A B`: two configurations, each a TOML file or `base`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bench::configuration::{Configuration, last_good};
use bench::environment::{CheckpointHash, Environment};
use ppl::paths::Prompt;
use runtime::checkpoint::Checkpoint;

use super::measure::Side;
use super::prompts::PromptArgs;
use crate::args::model_dir;

/// Loads both. `out` is the results file of this run, where `base` is looked for beside `results/`.
pub fn sides(names: &[String], out: &Path) -> Result<Vec<Side>> {
    let mut sides = Vec::new();
    for (name, (configuration, hash)) in names.iter().zip(configurations(names, out)?) {
        let mut side = Side::configured(&configuration).with_context(|| name.to_string())?;
        same(&configuration, side.model.checkpoint(), hash)?;
        side.label = configuration.label.unwrap_or(side.label);
        sides.push(side);
    }
    Ok(sides)
}

/// Both configurations where one of them names a program; `None` where this program runs both.
pub fn of_programs(names: &[String], out: &Path) -> Result<Option<Vec<Configuration>>> {
    let both = configurations(names, out)?;
    if both.iter().all(|(c, _)| c.binary.is_none()) {
        return Ok(None);
    }
    for (c, hash) in &both {
        same(c, &Checkpoint::open(&model_dir(&c.model)?)?, hash.clone())?;
    }
    Ok(Some(both.into_iter().map(|(c, _)| c).collect()))
}

/// Fails where the checkpoint of a configuration is not the one that was recorded with it.
fn same(configuration: &Configuration, checkpoint: &Checkpoint, recorded: Option<String>) -> Result<()> {
    let Some(recorded) = recorded else { return Ok(()) };
    let found = CheckpointHash::of(&configuration.model, checkpoint)?.blake3;
    if found != recorded {
        bail!(
            "base: `{}` is another checkpoint now (blake3 {found}) than in the last good record ({recorded})",
            configuration.model
        );
    }
    Ok(())
}

/// What the files say, each under a label of its own; of `base`, also the hash of the checkpoint that was recorded.
fn configurations(names: &[String], out: &Path) -> Result<Vec<(Configuration, Option<String>)>> {
    let mut both = names.iter().map(|name| configuration(name, out)).collect::<Result<Vec<_>>>()?;
    if let [(a, _), (b, _)] = &mut both[..]
        && a.label == b.label
    {
        // Two files of one name, or a base that was called as the file is.
        for (side, end) in [(a, "-a"), (b, "-b")] {
            side.label = side.label.take().map(|label| label + end);
        }
    }
    Ok(both)
}

fn configuration(name: &str, out: &Path) -> Result<(Configuration, Option<String>)> {
    if name != "base" {
        return Ok((Configuration::read(Path::new(name))?, None));
    }
    let machine = Environment::capture().machine();
    let record = last_good(&results(&machine, out)?, &machine)?;
    let Some(configuration) = record.configuration else { bail!("base: the record holds no configuration") };
    Ok((Configuration { label: Some("base".into()), ..configuration }, Some(record.checkpoint.blake3)))
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
