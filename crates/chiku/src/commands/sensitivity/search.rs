//! `chiku sensitivity search`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use ppl::sensitivity::held_out::{self, Finalist, SearchReport};
use ppl::sensitivity::search::{SearchOptions, Space};
use ppl::sensitivity::subject::Subject;
use ppl::sensitivity::trials::{self, Slice};
use runtime::Model;

use super::{QuantiserArgs, StudyArgs, table, width};
use crate::commands::ppl::read_records;
use crate::exit::GATE_FAILED;
use crate::output::PartialFile;

#[derive(Args)]
#[command(
    after_help = "The search sees slice a only; what it proposes is scored on slice b as well, and the smallest plan that holds \
the cap on both is chosen. Exit code 1 if none does, or if that is the unchanged model.

Examples:
  chiku sensitivity search --model nano --group 32 --limit 32 --recipe nano-cut.toml
  chiku sensitivity search --model ./e4b --slice-a a.jsonl --slice-b b.jsonl --out e4b-search.jsonl --cap 1.05
  chiku sensitivity search --model nano --only layers --cap 1.2"
)]
pub struct SearchArgs {
    #[command(flatten)]
    pub study: StudyArgs,
    #[command(flatten)]
    pub quantiser: QuantiserArgs,
    /// Largest perplexity, as a multiple of the unchanged model's.
    #[arg(long, default_value_t = 1.05)]
    pub cap: f64,
    /// Widths to choose from, comma-separated.
    #[arg(long, default_value = "8,4,3,2", value_delimiter = ',', value_parser = width, value_name = "BITS")]
    pub widths: Vec<u8>,
    /// Remove layers only, or choose widths only.
    #[arg(long, value_enum)]
    pub only: Option<Only>,
    /// Records that the search sees [default: half of --records, by a hash of the ids].
    #[arg(long, value_name = "FILE", requires = "slice_b", conflicts_with = "records")]
    pub slice_a: Option<String>,
    /// Records for the verdict [default: the other half].
    #[arg(long, value_name = "FILE", requires = "slice_a", conflicts_with = "records")]
    pub slice_b: Option<String>,
    /// Plans kept from round to round.
    #[arg(long, default_value_t = SearchOptions::default().beam, value_name = "N")]
    pub beam: usize,
    /// Plans evaluated a round, for each plan kept.
    #[arg(long, default_value_t = SearchOptions::default().branch, value_name = "N")]
    pub branch: usize,
    /// Rounds without gain after which to stop.
    #[arg(long, default_value_t = SearchOptions::default().patience, value_name = "N")]
    pub patience: usize,
    /// Variants evaluated at most.
    #[arg(long, default_value_t = SearchOptions::default().evaluations, value_name = "N")]
    pub evaluations: usize,
    /// Plans that may be looked at on the held-out slice.
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub finalists: usize,
    /// Write the chosen plan to this file, as a recipe for `chiku bake recipe`.
    #[arg(long, value_name = "FILE")]
    pub recipe: Option<PathBuf>,
}

#[derive(Clone, Copy, clap::ValueEnum, PartialEq)]
pub enum Only {
    Layers,
    Widths,
}

pub fn run(args: &SearchArgs, quiet: bool) -> Result<ExitCode> {
    let model = args.study.model.load()?;
    let [a, b] = slices(args, &model)?;
    let inputs = [&args.study.records, &args.slice_a, &args.slice_b].into_iter().flatten().map(PathBuf::from);
    let inputs: Vec<PathBuf> = inputs.chain(args.study.out.clone()).collect();
    let recipe = args.recipe.as_ref().map(|path| PartialFile::create(path, &inputs)).transpose()?;
    let quantiser = args.quantiser.quantiser()?;
    let layers = model.config().layers.len();
    let subject = Subject::new(model, quantiser);
    let space = Space {
        layers: if args.only == Some(Only::Widths) { vec![] } else { (0..layers).collect() },
        groups: match args.only {
            Some(Only::Layers) => vec![],
            // A tied head is no tensor that a bake could quantise.
            _ => subject.groups(args.quantiser.by(), false),
        },
        widths: args.widths.clone(),
    };
    let options = SearchOptions {
        cap: args.cap,
        beam: args.beam,
        branch: args.branch,
        patience: args.patience,
        evaluations: args.evaluations,
    };
    let report = args.study.with_trials(subject, &[&a, &b], quiet, |trials| {
        held_out::run(trials, [&a, &b], &space, &options, args.finalists)
    })?;
    if args.study.json {
        crate::outln!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        crate::outln!("{}", table::found(&report));
    }
    let Some(chosen) = useful(&report) else {
        crate::errln!("no plan saves anything under a cap of {}", args.cap);
        return Ok(ExitCode::from(GATE_FAILED));
    };
    if let Some(mut recipe) = recipe {
        write!(recipe.file(), "{}", report.recipe(chosen, &quantiser)).context("cannot write the recipe")?;
        recipe.finish()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The chosen plan, if it saves anything.
fn useful(report: &SearchReport) -> Option<&Finalist> {
    report.chosen.map(|i| &report.finalists[i]).filter(|f| f.step_bytes < report.baseline_search.step_bytes)
}

/// The records of the search and those of the verdict.
fn slices(args: &SearchArgs, model: &Model) -> Result<[Slice; 2]> {
    let study = &args.study;
    let records = match (&args.slice_a, &args.slice_b) {
        (Some(a), Some(b)) => [read_records(Some(a), model, None)?, read_records(Some(b), model, None)?],
        _ => trials::halves(read_records(study.records.as_deref(), model, None)?),
    };
    let [a, b] = records;
    // The limits are for each slice.
    Ok([Slice { name: "a".into(), records: study.cut(a) }, Slice { name: "b".into(), records: study.cut(b) }])
}
