//! `chiku demo`: the whole story on the embedded model. Look at it, cut bytes under a perplexity cap, let it answer, prove that
//! it is still the same model, measure it against where it started, and print one table.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result};
use bake::inspect::{InspectOptions, Inspection};
use bench::protocol::Protocol;
use bench::record::Record;
use clap::Args;
use ppl::verify::VerifyReport;
use runtime::Model;
use runtime::checkpoint::Checkpoint;
use runtime::generate::{GenerateOptions, greedy};
use runtime::tokenizer::Tokenizer;
use serde::Serialize;

use super::bench::{Measuring, PromptArgs, Side, measure};
use super::verify::identity;
use crate::args::{Backend, EngineArgs, PrecisionArg};
use crate::draft::DraftArgs;
use crate::exit::{GATE_FAILED, Interrupted};
use crate::interrupt;

mod cuts;
mod table;

use cuts::{Bake, Cutter};

#[derive(Args)]
#[command(
    after_help = "Exit code 1 if the result fails its own gate.\n\nExamples:\n  chiku demo\n  chiku demo --json --out demo-files"
)]
pub struct DemoArgs {
    /// Directory for the baked checkpoints and the record [default: `demo` in the model cache].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Threads; 0 for one each core.
    #[arg(long, default_value_t = 0, value_parser = crate::args::threads, value_name = "N")]
    pub threads: usize,
    /// Print one JSON object at the end instead of the story.
    #[arg(long)]
    pub json: bool,
}

/// Prompts and tokens of the identity check.
const IDENTITY: (usize, usize) = (16, 64);
/// Prompts and tokens of the measurement.
const MEASURED: (usize, usize) = (48, 96);

/// What the story is told with.
struct Stage {
    out: PathBuf,
    engine: EngineArgs,
    quiet: bool,
    json: bool,
}

impl Stage {
    /// A line of the story.
    fn say(&self, line: &str) {
        if !self.json {
            crate::outln!("{line}");
        }
    }

    /// Ends the demo after Ctrl-C.
    fn go_on(&self) -> Result<()> {
        if interrupt::pressed() { Err(Interrupted.into()) } else { Ok(()) }
    }
}

#[derive(Serialize)]
struct Answer {
    prompt: String,
    text: String,
}

#[derive(Serialize)]
struct Report {
    inspect: Inspection,
    bake: Bake,
    answer: Answer,
    verify: VerifyReport,
    /// The records without their samples, which are in the file.
    bench: Bench,
    seconds: f64,
}

#[derive(Serialize)]
struct Bench {
    /// JSONL file with the records.
    record: PathBuf,
    baseline: Record,
    /// Holds the comparison with the baseline.
    baked: Record,
}

pub fn run(args: &DemoArgs, quiet: bool) -> Result<ExitCode> {
    let started = Instant::now();
    let stage = Stage {
        out: match &args.out {
            Some(dir) => dir.clone(),
            None => runtime::nano::cache_root()?.join("demo"),
        },
        engine: EngineArgs {
            backend: Backend::Auto,
            precision: PrecisionArg::Native,
            threads: args.threads,
            context: None,
        },
        quiet,
        json: args.json,
    };
    std::fs::create_dir_all(&stage.out).with_context(|| format!("{}: cannot create it", stage.out.display()))?;
    interrupt::flag()?;

    let nano = runtime::nano::directory()?;
    stage.say("chiku demo: a trained 2.2 M-parameter model with Gemma 4's architecture, on this machine's processor\n");
    stage.say("1. Look at it");
    let baseline = Arc::new(Model::load(Checkpoint::open(&nano)?)?);
    let inspect = bake::inspect::run(baseline.checkpoint(), &InspectOptions::default(), &bake::Context::quiet())?;
    stage.say(&table::overview(&inspect));

    stage.say("2. Cut bytes, one cut at a time, each under a perplexity cap of 1.05 times the original");
    let (bake, baked, ppl, cap) = Cutter::new(&stage, &baseline)?.bake()?;

    stage.say("3. Let it answer");
    let answer = answer(&stage, &baked)?;

    stage.say("4. Prove that it is intact");
    let public = PromptArgs { prompts: "public".into(), chat: false, raw: false };
    let prompts = public.read(&baked, IDENTITY.0)?.1;
    let draft = DraftArgs::nano();
    let identity = identity(&baked, &stage.engine, &draft, &prompts, IDENTITY.1, stage.quiet || stage.json)?;
    stage.go_on()?;
    let verify = VerifyReport::new(identity, &ppl, cap);
    stage.say(&table::verdict(&verify));

    stage.say("5. Measure it: both checkpoints on the same prompts, in turn");
    let sides = [("nano", &baseline), ("baked", &baked)].map(|(label, model)| Side {
        label: label.into(),
        model: model.clone(),
        engine: stage.engine.clone(),
        draft: None,
        source: None,
    });
    let prompts = public.read(&baked, MEASURED.0)?;
    // A demonstration does not wait long for a steady machine.
    let protocol = Protocol { max_tokens: MEASURED.1, warmup_limit_ms: 1000, ..Default::default() };
    let quiet = stage.quiet || stage.json;
    let how = Measuring { protocol: &protocol, seed: 1, discarded: &[], quiet, results: None, profile: false };
    let mut records = measure(&sides, &prompts, &how)?.records;
    stage.go_on()?;
    let record = stage.out.join("record.jsonl");
    for r in &mut records {
        bench::log::append(&record, r)?;
        r.samples.clear();
    }
    let [first, second] = <[Record; 2]>::try_from(records)
        .map_err(|r| anyhow::anyhow!("{} records of two measured checkpoints", r.len()))?;
    let bench = Bench { record, baseline: first, baked: second };

    let seconds = started.elapsed().as_secs_f64();
    let passed = verify.passed;
    let report = Report { inspect, bake, answer, verify, bench, seconds };
    if stage.json {
        crate::outln!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        crate::outln!("{}", table::summary(&report));
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::from(GATE_FAILED) })
}

/// Streams the baked model's continuation of the first public prompt.
fn answer(stage: &Stage, baked: &Arc<Model>) -> Result<Answer> {
    const TOKENS: usize = 48;
    let dir = baked.checkpoint().dir();
    let tokenizer = Tokenizer::open(dir)?;
    let set = bench::prompts::PromptSet::read(&runtime::nano::directory()?.join("prompts/public.jsonl"))?;
    let prompt = set.prompts[0].text.clone();
    let mut engine = stage.engine.engine(baked)?;
    let stop_ids = baked.checkpoint().generation().stop_ids.clone();
    let options = GenerateOptions { max_tokens: TOKENS, stop_ids, ..Default::default() };
    let show = |text: &str| {
        if !stage.json {
            crate::out!("{text}");
        }
    };
    show(&format!("   {prompt} \u{2192}"));
    let mut stream = tokenizer.stream();
    let mut text = String::new();
    let mut failure = None;
    greedy(&mut engine, &tokenizer.encode(&prompt)?, &options, |id| match stream.push(id) {
        Ok(piece) => {
            show(&piece);
            text += &piece;
            if interrupt::pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
        Err(e) => {
            failure = Some(e);
            ControlFlow::Break(())
        }
    })?;
    if let Some(e) = failure {
        return Err(e.into());
    }
    text += &stream.finish();
    show("\n\n");
    stage.go_on()?;
    Ok(Answer { prompt, text })
}
