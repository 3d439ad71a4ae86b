//! `chiku verify`: the gate. Perplexity under a cap, and greedy identity between different computational paths.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::Args;
use ppl::identity::{Comparison, compare_files};
use ppl::paths::{Drafted, Generator, OneRow, Prompt, Rescore, VERIFIER_ROWS};
use ppl::score::ScoreOptions;
use ppl::verify::{IdentityReport, PathOptions, PplCap, VerifyReport, compare_paths};
use runtime::Model;
use runtime::drafter::NgramDrafter;
use runtime::generate::PREFILL_CHUNK;
use runtime::speculate::Shape;

use super::bench::PromptArgs;
use super::ppl::{read_records, score_with_bar};
use crate::args::{EngineArgs, ModelArgs};
use crate::draft::DraftArgs;
use crate::exit::{GATE_FAILED, INTERRUPTED, Interrupted};
use crate::interrupt;
use crate::output::{Unit, bar};

#[derive(Args)]
#[command(
    after_help = "The paths that must agree: `one-row` (plain decoding, the reference), `rescore-8` (the same tokens judged in \
8-row passes, as a speculative verifier does), `generator` (what `generate` runs), speculative decoding with n-gram drafts, and with the \
drafter of --drafter (a chain, and a star where --tree asks for one).

Examples:
  chiku verify --model nano --cap 34
  chiku verify --model nano-int4 --reference nano --drafter nano
  chiku verify --compare reference.jsonl candidate.jsonl     exit 0 identical, 1 divergent, 2 incomparable"
)]
pub struct VerifyArgs {
    /// A checkpoint directory in Hugging Face layout, or `nano` for the embedded model.
    #[arg(long, value_name = "DIR|nano", required_unless_present = "compare")]
    pub model: Option<String>,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Largest perplexity that passes. One of this, --reference-ppl and --reference there must be.
    #[arg(long, value_name = "PPL")]
    pub cap: Option<f64>,
    /// Perplexity of the model that this one is derived from; the cap is then 1.05 times that, unless --cap says another.
    #[arg(long, value_name = "PPL", conflicts_with = "reference")]
    pub reference_ppl: Option<f64>,
    /// The model that this one is derived from; its perplexity is computed first.
    #[arg(long, value_name = "DIR|nano")]
    pub reference: Option<String>,
    /// Records to score: a JSONL file [default: the embedded ones, for models with nano's tokenizer].
    #[arg(long, value_name = "FILE")]
    pub records: Option<String>,
    /// Score only the first N records.
    #[arg(long, value_name = "N")]
    pub records_limit: Option<usize>,
    #[command(flatten)]
    pub prompts: PromptArgs,
    /// Prompts to compare paths on, from the start of the set.
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub limit: usize,
    /// Tokens a prompt, running through end-of-text.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub tokens: usize,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Compare two files of generations instead (`id` or `prompt_sha256`, `completion_token_ids`), id by id.
    #[arg(long, num_args = 2, value_names = ["REFERENCE", "CANDIDATE"], conflicts_with_all = ["model", "cap", "reference", "reference_ppl"])]
    pub compare: Option<Vec<PathBuf>>,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &VerifyArgs, quiet: bool) -> Result<ExitCode> {
    if let Some(files) = &args.compare {
        return compare(files, args.json);
    }
    let Some(name) = &args.model else { bail!("give a --model, or two files with --compare") };
    let source = |model: &str| ModelArgs { model: model.to_string(), engine: args.engine.clone() };
    let model = source(name).load()?;
    if args.cap.is_none() && args.reference_ppl.is_none() && args.reference.is_none() {
        bail!(
            "give a perplexity cap: --cap PPL, --reference-ppl PPL, or --reference with the model this one comes from"
        );
    }
    // What can be wrong with the input shows before minutes are spent on a part of it.
    let prompts = args.prompts.read(&model, args.limit)?.1;
    let records = read_records(args.records.as_deref(), &model, args.records_limit)?;
    args.draft.drafting(&model)?;
    let (longest, context) =
        (prompts.iter().map(|p| p.token_ids.len()).max().unwrap_or(0), args.engine.engine(&model)?.context());
    if longest.saturating_add(args.tokens) > context {
        bail!("--tokens {}: the longest prompt has {longest} tokens, and the context is {context}", args.tokens);
    }
    let reference_ppl = match &args.reference {
        None => args.reference_ppl,
        Some(reference) => {
            let reference = source(reference).load()?;
            let records = read_records(args.records.as_deref(), &reference, args.records_limit)?;
            let report =
                score_with_bar(&mut args.engine.engine(&reference)?, &records, &ScoreOptions::default(), quiet)?;
            if !report.complete {
                return Err(Interrupted.into());
            }
            report.ppl
        }
    };
    let cap = PplCap::new(args.cap, reference_ppl)?;
    let identity = identity(&model, &args.engine, &args.draft, &prompts, args.tokens, quiet)?;
    let ppl = score_with_bar(&mut args.engine.engine(&model)?, &records, &ScoreOptions::default(), quiet)?;
    let report = VerifyReport::new(identity, &ppl, cap);
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print(&report);
    }
    Ok(match (report.passed, interrupt::pressed()) {
        (true, _) => ExitCode::SUCCESS,
        (false, true) => ExitCode::from(INTERRUPTED),
        (false, false) => ExitCode::from(GATE_FAILED),
    })
}

/// Holds every path against plain one-row decoding, each on an engine of its own.
pub fn identity(
    model: &Arc<Model>,
    engine: &EngineArgs,
    draft: &DraftArgs,
    prompts: &[Prompt],
    tokens: usize,
    quiet: bool,
) -> Result<IdentityReport> {
    let mut paths: Vec<Box<dyn ppl::paths::Path>> = vec![
        Box::new(Rescore::new(engine.engine(model)?, VERIFIER_ROWS)),
        Box::new(Generator::new(engine.engine(model)?, PREFILL_CHUNK)),
        Box::new(Drafted::new(engine.engine(model)?, Box::new(NgramDrafter), Shape::chain(VERIFIER_ROWS - 1)?)),
    ];
    if let Some(d) = draft.drafting(model)? {
        let chain = Shape::chain(d.shape.depth())?;
        let star = !d.shape.is_chain();
        paths.push(Box::new(Drafted::new(engine.engine(model)?, d.drafter, d.shape)));
        if let Some(again) = draft.drafting(model)?.filter(|_| star) {
            paths.push(Box::new(Drafted::new(engine.engine(model)?, again.drafter, chain)));
        }
    }
    // n-gram drafts are always among the paths; naming them again would run them twice.
    let mut names = std::collections::HashSet::new();
    paths.retain(|p| names.insert(p.name().to_string()));
    let mut candidates: Vec<&mut dyn ppl::paths::Path> = Vec::new();
    for path in &mut paths {
        candidates.push(&mut **path);
    }
    let progress = bar("identity", prompts.len() as u64, Unit::Count, quiet);
    let report = compare_paths(
        &mut OneRow::new(engine.engine(model)?),
        &mut candidates,
        prompts,
        &PathOptions { tokens, logits: true },
        interrupt::flag()?,
        |p| progress.set_position(p.prompts as u64),
    )?;
    progress.finish_and_clear();
    Ok(report)
}

fn print(r: &VerifyReport) {
    let i = &r.identity;
    crate::outln!("identity   {}: {} prompts, {} tokens", i.status.as_str(), i.prompts, i.tokens);
    for p in &i.paths {
        let delta = match p.max_logit_delta {
            None => String::new(),
            Some(0.0) => ", every logit bit for bit".into(),
            Some(d) => format!(", logits differ by up to {d:e}"),
        };
        crate::outln!(
            "  {} against {}: {} of {} prompts identical{delta}",
            p.path,
            i.reference,
            p.identical_prompts,
            i.prompts
        );
    }
    let ppl = r.ppl.map_or_else(|| "none".into(), |p| format!("{p:.4}"));
    let reference = r.reference_ppl.map_or_else(String::new, |p| format!(" (reference {p:.4})"));
    crate::outln!("perplexity {ppl}, cap {:.4}{reference}, {} tokens", r.ppl_cap, r.ppl_tokens);
    r.failures.iter().for_each(|f| crate::outln!("failed     {f}"));
    crate::outln!("{}", if r.passed { "PASSED" } else { "FAILED" });
}

fn compare(files: &[PathBuf], json: bool) -> Result<ExitCode> {
    let comparison = compare_files(&files[0], &files[1])?;
    if json {
        crate::outln!("{}", serde_json::to_string_pretty(&comparison)?);
    } else {
        crate::outln!("{}", comparison.status.as_str());
        print_comparison(&comparison);
    }
    Ok(ExitCode::from(comparison.status.exit_code()))
}

fn print_comparison(c: &Comparison) {
    crate::outln!("{} prompts in both, {} diverge", c.prompts, c.divergences.len());
    for d in c.divergences.iter().take(20) {
        crate::outln!("  {}: first at token {}, {} in all", d.key, d.index, d.num_divergent);
    }
}
