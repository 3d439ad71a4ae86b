//! Times loaded models and makes records of it, for every command that measures.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use bench::compare::Comparison;
use bench::configuration::Configuration;
use bench::engine::EngineTarget;
use bench::environment::{Binary, CheckpointHash, Conditions, Environment};
use bench::journal::Journal;
use bench::prompts::PromptSet;
use bench::protocol::{self, Monotonic, Output, PromptSample, Protocol, Run};
use bench::record::{Discarded, Figure, Kind, Record, Setup, TargetInfo};
use bench::stats::BootstrapOptions;
use clap::ValueEnum;
use ppl::paths::Prompt;
use runtime::{Model, Precision};

use crate::args::{Backend, EngineArgs, ModelArgs, PrecisionArg};
use crate::draft::DraftArgs;
use crate::interrupt;
use crate::output::{Unit, bar};

/// A loaded model to be timed.
pub struct Side {
    /// Name in reports.
    pub label: String,
    /// The model.
    pub model: Arc<Model>,
    /// How to run it.
    pub engine: EngineArgs,
    /// Who drafts for it.
    pub draft: Option<DraftArgs>,
    /// What it was loaded from, as on the command line; `None`: the record cannot be run again by name.
    pub source: Option<String>,
}

impl Side {
    /// Loads a model under the name of its directory.
    pub fn load(model: &str, engine: &EngineArgs, draft: Option<DraftArgs>) -> Result<Side> {
        let source = ModelArgs { model: model.into(), engine: engine.clone() };
        let label = model.trim_end_matches('/').rsplit('/').next().unwrap_or(model).to_string();
        Ok(Side { label, model: source.load()?, engine: engine.clone(), draft, source: Some(model.into()) })
    }

    /// What a configuration says.
    pub fn configured(c: &Configuration) -> Result<Side> {
        let precision = match &c.precision {
            None => PrecisionArg::Native,
            Some(text) => match PrecisionArg::from_str(text, false) {
                Ok(precision) => precision,
                Err(_) => bail!("precision: `{text}` is none of f32, native, int8"),
            },
        };
        let threads = crate::args::threads(&c.threads.unwrap_or(0).to_string()).map_err(anyhow::Error::msg)?;
        let engine = EngineArgs { backend: Backend::Auto, precision, threads, context: c.context };
        let mut side = Side::load(&c.model, &engine, Some(DraftArgs::configured(c)?))?;
        side.label = c.label.clone().unwrap_or(side.label);
        Ok(side)
    }

    fn configuration(&self) -> Option<Configuration> {
        let mut c = Configuration { model: self.source.clone()?, ..Default::default() };
        c.label = Some(self.label.clone());
        if let Some(draft) = &self.draft {
            draft.describe(&mut c);
        }
        c.precision = Some(Precision::from(self.engine.precision).as_str().to_string());
        c.threads = Some(self.engine.threads).filter(|&n| n > 0);
        c.context = self.engine.context;
        Some(c)
    }
}

/// What surrounds a measurement.
pub struct Measuring<'a> {
    /// How.
    pub protocol: &'a Protocol,
    /// Seed of the intervals.
    pub seed: u64,
    /// Runs that were thrown away before.
    pub discarded: &'a [Discarded],
    /// No progress bar.
    pub quiet: bool,
    /// Results file that the records will go to: finished requests are kept in a journal beside it until they are there.
    pub results: Option<&'a Path>,
    /// Take a step apart by op after the run, too.
    pub profile: bool,
}

/// Records, and what each of their samples wrote.
pub struct Measured {
    /// One a side; the last holds the comparison.
    pub records: Vec<Record>,
    /// Outputs of each side.
    pub outputs: Vec<Vec<Output>>,
    /// To be finished once the records are written.
    pub journal: Option<Journal>,
}

/// Times one or two models. Two are run alternately; the second record then holds the comparison with the first.
pub fn measure(sides: &[Side], (set, prompts): &(PromptSet, Vec<Prompt>), how: &Measuring) -> Result<Measured> {
    let cancel = interrupt::flag()?;
    let environment = environment();
    let mut targets: Vec<EngineTarget> = Vec::new();
    let mut infos: Vec<(TargetInfo, CheckpointHash, Option<CheckpointHash>)> = Vec::new();
    for side in sides {
        let stop_ids = side.model.checkpoint().generation().stop_ids.clone();
        let mut target = EngineTarget::new(&side.label, side.engine.engine(&side.model)?, stop_ids, cancel);
        if let Some(first) = targets.first() {
            target = target.on_threads_of(first);
        }
        let mut flags = vec![format!("isa={}", target.engine().isa())];
        let mut drafter = None;
        if let Some(draft) = &side.draft
            && let Some(drafting) = draft.drafting(&side.model)?
        {
            flags.extend(draft.flags(&drafting));
            drafter = draft.checkpoint()?;
            target = target.with_drafts(drafting.drafter, drafting.shape);
        }
        let info = TargetInfo {
            label: side.label.clone(),
            backend: "cpu".into(),
            precision: Precision::from(side.engine.precision).as_str().into(),
            threads: target.engine().threads(),
            flags,
        };
        infos.push((info, CheckpointHash::of(&side.label, side.model.checkpoint())?, drafter));
        targets.push(target);
    }

    let setups: Vec<Setup> = infos
        .into_iter()
        .zip(sides)
        .map(|((target, checkpoint, drafter), side)| Setup {
            binary: binary(),
            environment: environment.clone(),
            after: Conditions::default(),
            target,
            configuration: side.configuration(),
            checkpoint,
            drafter,
            prompts: set.clone(),
            protocol: how.protocol.clone(),
            discarded: how.discarded.to_vec(),
        })
        .collect();
    let options = BootstrapOptions { seed: how.seed, ..Default::default() };
    let mut journal = how.results.map(|results| begin(results, &setups, prompts.len(), &options)).transpose()?;

    let progress = bar("measuring", (prompts.len() * sides.len()) as u64, Unit::Count, how.quiet);
    let mut kept = Ok(());
    let mut show = |p: protocol::Progress<'_>| {
        if let Some(sample) = p.sample {
            progress.set_position(p.done as u64);
            keep(&mut journal, &mut kept, p.label, sample);
        }
    };
    let context = protocol::Context { clock: &Monotonic::start(), cancel, progress: &mut show };
    let inputs: Vec<protocol::Prompt> = prompts.iter().map(protocol::Prompt::from).collect();
    let runs: Vec<Run> = match &mut targets[..] {
        [one] => vec![protocol::run(one, &inputs, how.protocol, context)?],
        [a, b] => protocol::interleave(a, b, &inputs, how.protocol, context)?.into(),
        _ => bail!("one or two models can be measured, not {}", sides.len()),
    };
    progress.finish_and_clear();
    warn(kept);

    let comparison = match &runs[..] {
        [a, b] if a.samples.len().min(b.samples.len()) >= 2 => Some(Comparison::new(a, b, &options)?),
        _ => None,
    };
    let after = Conditions::capture();
    let mut measured = Measured { records: Vec::new(), outputs: Vec::new(), journal };
    for ((mut run, side), setup) in runs.into_iter().zip(sides).zip(setups) {
        measured.outputs.push(std::mem::take(&mut run.outputs));
        let mut record = Record::measured(run, Setup { after: after.clone(), ..setup }, &options)?;
        if let Some(result) = &mut record.result {
            result.bytes_per_step = Some(Figure {
                kind: Kind::Projected,
                value: side.model.step_weight_bytes() as f64,
                source: "sum of the sizes of all matrices that a step multiplies with, each read once".into(),
            });
        }
        measured.records.push(record);
    }
    if how.profile {
        drop(targets);
        if let Err(e) = super::profile::attach(&mut measured.records, sides, prompts, how) {
            crate::errln!("warning: the step was not taken apart: {e:#}");
        }
    }
    if let Some(last) = measured.records.last_mut() {
        last.comparison = comparison;
    }
    Ok(measured)
}

/// A journal beside the results file, with all that is known of the records before the run.
pub fn begin(results: &Path, setups: &[Setup], planned: usize, options: &BootstrapOptions) -> Result<Journal> {
    let head = |setup: &Setup| Record::measured(Run::new(&setup.target.label, planned), setup.clone(), options);
    let mut heads = setups.iter().map(head).collect::<bench::Result<Vec<Record>>>()?;
    // What ended the run is only known at its end.
    heads.iter_mut().zip(setups).for_each(|(head, setup)| head.discarded.clone_from(&setup.discarded));
    Ok(Journal::begin(results, &heads)?)
}

/// Keeps a finished request. A journal that cannot be written does not end the run: its first error is told afterwards.
pub fn keep(journal: &mut Option<Journal>, kept: &mut bench::Result<()>, label: &str, sample: &PromptSample) {
    if kept.is_ok()
        && let Some(journal) = journal
    {
        *kept = journal.keep(label, sample);
    }
}

/// Tells why a journal was not kept.
pub fn warn(kept: bench::Result<()>) {
    if let Err(e) = kept {
        crate::errln!("warning: finished requests were not kept for the case of a kill: {e}");
    }
}

/// What runs that were killed had finished goes into the results file, and is told.
pub fn recover(path: &Path) -> Result<()> {
    for r in bench::journal::recover(path)? {
        let (done, planned, label) = (r.samples.len(), r.planned, &r.target.label);
        crate::errln!(
            "warning: {}: a run of `{label}` was killed; the {done} of {planned} requests that it had finished are now a record, \
             marked incomplete",
            path.display()
        );
    }
    Ok(())
}

/// The machine as it is now, with a warning where others keep it busy.
pub fn environment() -> Environment {
    let environment = Environment::capture();
    if let (Some(load), Some(cpus)) = (environment.conditions.load_1m, environment.cpus)
        && load > cpus as f64
    {
        crate::errln!(
            "warning: the load is {load:.1} on {cpus} processors: times will say more about the neighbours than about this program"
        );
    }
    environment
}

/// This program, for records.
pub fn binary() -> Binary {
    let planted = if cfg!(feature = "planted-slow-step") { "-planted-slow-step" } else { "" };
    let commit = Some(env!("CHIKU_BUILD_COMMIT").to_string()).filter(|c| !c.is_empty());
    let lock = include_bytes!(concat!(env!("OUT_DIR"), "/flake.lock"));
    Binary::running(env!("CARGO_PKG_VERSION"), commit.map(|c| c + planted), lock)
}

/// Appends records to a results file; a torn line that it ended with is told. Then their journal has done its part.
pub fn append(path: &Path, records: &[Record], journal: Option<Journal>) -> Result<()> {
    for record in records {
        if let Some(torn) = bench::log::append(path, record)? {
            crate::errln!("warning: {}: line {} is torn and was closed: {}", path.display(), torn.line, torn.reason);
        }
    }
    journal.map(Journal::finish).transpose()?;
    Ok(())
}
