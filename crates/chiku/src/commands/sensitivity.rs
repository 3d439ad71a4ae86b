//! `chiku sensitivity`: what a model can do without.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use bake::Strategy;
use bake::in_memory::Quantiser;
use bake::method::Method;
use bench::environment::CheckpointHash;
use clap::{Args, Subcommand, ValueEnum};
use ppl::records::Record;
use ppl::score::ScoreOptions;
use ppl::sensitivity::journal::{Header, Journal};
use ppl::sensitivity::measure::{self, Study};
use ppl::sensitivity::subject::Subject;
use ppl::sensitivity::trials::{self, Progress, Slice, TrialOptions, Trials};
use ppl::sensitivity::variant::By;
use runtime::{EngineOptions, Model};

use super::ppl::read_records;
use crate::args::ModelArgs;
use crate::interrupt;
use crate::output::{Unit, bar};

mod search;
mod table;

const HELP: &str = "Nothing is written but the results: variants are made in memory. With --out FILE every result is kept as \
it is found, and the same command continues where it was ended. One file may serve layers, tensors and bits on the same model \
and records.";

#[derive(Subcommand)]
#[command(after_help = HELP)]
pub enum SensitivityCommand {
    /// Perplexity with each layer removed.
    Layers(LayersArgs),
    /// Perplexity with each group of linears quantised to one width.
    Tensors(TensorsArgs),
    /// Perplexity with each group of linears at each width.
    Bits(BitsArgs),
    /// The removals and widths with the fewest bytes a step under a perplexity cap.
    Search(Box<search::SearchArgs>),
}

/// Which model, on which records.
#[derive(Args)]
pub struct StudyArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Records to score: a JSONL file [default: the embedded ones, for models with nano's tokenizer].
    #[arg(long, value_name = "FILE")]
    pub records: Option<String>,
    /// Only the first N records.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Only as many records as it takes for N scored tokens.
    #[arg(long, value_name = "N")]
    pub limit_tokens: Option<usize>,
    /// Rows of one pass. Changes speed, never a bit.
    #[arg(long, default_value_t = 64, value_name = "ROWS")]
    pub chunk: usize,
    /// Keep results in this JSONL file, and continue from it.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// How linears are quantised.
#[derive(Args)]
pub struct QuantiserArgs {
    /// What gets one width: a kind of linear in all layers, all linears of a layer, or each linear.
    #[arg(long, value_enum, default_value = "kind")]
    pub by: ByArg,
    /// How scales are chosen: by the largest magnitude (rtn), or by least squared error (mse).
    #[arg(long, value_enum, default_value = "rtn")]
    pub method: MethodArg,
    /// Inputs that share a scale: 32, 64, 128 or any other multiple of 8.
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub group: usize,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum ByArg {
    Kind,
    Layer,
    Linear,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum MethodArg {
    Rtn,
    Mse,
}

#[derive(Args)]
#[command(after_help = "Examples:
  chiku sensitivity layers --model nano --limit 32
  chiku sensitivity layers --model ./e4b --records tokens.jsonl --limit-tokens 20000 --out e4b.jsonl")]
pub struct LayersArgs {
    #[command(flatten)]
    pub study: StudyArgs,
}

#[derive(Args)]
#[command(after_help = "Examples:
  chiku sensitivity tensors --model nano --group 32 --bits 3 --limit 32
  chiku sensitivity tensors --model nano --group 32 --bits 2 --by layer --method mse --json")]
pub struct TensorsArgs {
    #[command(flatten)]
    pub study: StudyArgs,
    #[command(flatten)]
    pub quantiser: QuantiserArgs,
    /// Bits: 8, 4, 3 or 2.
    #[arg(long, default_value_t = 4, value_parser = width)]
    pub bits: u8,
}

#[derive(Args)]
#[command(after_help = "Examples:
  chiku sensitivity bits --model nano --group 32 --limit 32
  chiku sensitivity bits --model nano --group 32 --widths 4,3 --by linear --out nano.jsonl")]
pub struct BitsArgs {
    #[command(flatten)]
    pub study: StudyArgs,
    #[command(flatten)]
    pub quantiser: QuantiserArgs,
    /// Widths to try, comma-separated.
    #[arg(long, default_value = "8,4,3,2", value_delimiter = ',', value_parser = width, value_name = "BITS")]
    pub widths: Vec<u8>,
}

/// A width that there is.
fn width(text: &str) -> Result<u8, String> {
    let widths = ppl::sensitivity::subject::WIDTHS;
    text.trim().parse().ok().filter(|w| widths.contains(w)).ok_or_else(|| "8, 4, 3 or 2 is needed".into())
}

impl SensitivityCommand {
    pub fn json(&self) -> bool {
        match self {
            SensitivityCommand::Layers(a) => a.study.json,
            SensitivityCommand::Tensors(a) => a.study.json,
            SensitivityCommand::Bits(a) => a.study.json,
            SensitivityCommand::Search(a) => a.study.json,
        }
    }
}

pub fn run(command: &SensitivityCommand, quiet: bool) -> Result<ExitCode> {
    match command {
        SensitivityCommand::Layers(a) => measured(&a.study, None, Study::Layers, quiet),
        SensitivityCommand::Tensors(a) => {
            let study = Study::Widths { by: a.quantiser.by(), widths: vec![a.bits] };
            measured(&a.study, Some(&a.quantiser), study, quiet)
        }
        SensitivityCommand::Bits(a) => {
            let study = Study::Widths { by: a.quantiser.by(), widths: a.widths.clone() };
            measured(&a.study, Some(&a.quantiser), study, quiet)
        }
        SensitivityCommand::Search(a) => search::run(a, quiet),
    }
}

impl QuantiserArgs {
    fn by(&self) -> By {
        match self.by {
            ByArg::Kind => By::Kind,
            ByArg::Layer => By::Layer,
            ByArg::Linear => By::Linear,
        }
    }

    fn quantiser(&self) -> Result<Quantiser> {
        let method = match self.method {
            MethodArg::Rtn => Method::Rtn,
            MethodArg::Mse => Method::Mse,
        };
        Ok(Quantiser::new(method, Strategy::Group(self.group))?)
    }
}

impl StudyArgs {
    /// The records, cut to the limits.
    fn records(&self, model: &Model) -> Result<Vec<Record>> {
        Ok(self.cut(read_records(self.records.as_deref(), model, None)?))
    }

    fn cut(&self, mut records: Vec<Record>) -> Vec<Record> {
        records.truncate(self.limit.unwrap_or(usize::MAX));
        match self.limit_tokens {
            Some(tokens) => trials::first_tokens(records, tokens),
            None => records,
        }
    }

    /// Runs `work` on trials of the model, under a progress bar and Ctrl-C.
    fn with_trials<T>(
        &self,
        subject: Subject,
        slices: &[&Slice],
        quiet: bool,
        work: impl FnOnce(&mut Trials) -> ppl::Result<T>,
    ) -> Result<T> {
        let engine = &self.model.engine;
        let options =
            EngineOptions { precision: engine.precision.into(), threads: engine.threads, context: engine.context };
        let arithmetic = engine.engine(subject.model())?.isa();
        let journal = match &self.out {
            None => Journal::in_memory(),
            Some(path) => {
                let model = CheckpointHash::of(&self.model.model, subject.model().checkpoint())?.blake3;
                Journal::open(path, &Header::new(model, slices, arithmetic.into()))?
            }
        };
        let bar = bar("variants", 0, Unit::Count, quiet);
        let mut show = |p: Progress| {
            bar.set_length(p.variants_total as u64);
            bar.set_position(p.variants as u64);
            bar.set_message(format!("{} {}/{} tokens", p.variant, p.tokens, p.tokens_total));
        };
        let score = ScoreOptions { chunk_rows: self.chunk };
        let options = TrialOptions { engine: options, score, cancel: interrupt::flag()?, progress: &mut show };
        let done = work(&mut Trials::new(subject, journal, options));
        bar.finish_and_clear();
        match (done, &self.out) {
            (Err(e @ ppl::Error::Cancelled), Some(path)) => {
                let kept = format!("what was measured is in {}; the same command continues", path.display());
                Err(e).context(kept)
            }
            (done, _) => Ok(done?),
        }
    }
}

fn measured(args: &StudyArgs, quantiser: Option<&QuantiserArgs>, study: Study, quiet: bool) -> Result<ExitCode> {
    let model = args.model.load()?;
    let slice = Slice { name: "all".into(), records: args.records(&model)? };
    let quantiser = quantiser.map(QuantiserArgs::quantiser).transpose()?.unwrap_or_default();
    let subject = Subject::new(model, quantiser);
    let report = args.with_trials(subject, &[&slice], quiet, |trials| measure::run(trials, &slice, &study))?;
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        crate::outln!("{}", table::measured(&report));
    }
    Ok(ExitCode::SUCCESS)
}
