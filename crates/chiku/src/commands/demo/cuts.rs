//! The cuts of the demo: int4 weights, one layer, the vocabulary.
//!
//! Each goes through the gate on its own, and one that the gate refuses is not in the result. The layer is the one whose removal
//! costs least on the first records. The vocabulary is cut to what the model *writes* on the public prompts, never to what the
//! perplexity records hold; a head that then lacks a target has no perplexity, and a gate passes nothing without one.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use bake::drop_layers::DropLayersOptions;
use bake::prune_vocab::PruneVocabOptions;
use bake::quantize::QuantizeOptions;
use bake::{Context, Strategy};
use ppl::records::Record as PplRecord;
use ppl::score::{PplReport, ScoreOptions};
use ppl::verify::PplCap;
use runtime::Model;
use runtime::checkpoint::{Checkpoint, Keepset};
use runtime::generate::{GenerateOptions, greedy};
use serde::Serialize;

use super::Stage;
use crate::commands::bake::always_kept;
use crate::commands::bench::PromptArgs;
use crate::commands::ppl::{read_records, score_with_bar};
use crate::interrupt;
use crate::output::{Unit, bar, megabytes};

/// Inputs that share a scale: nano's matrices are narrow, so its groups are, too.
const GROUP: usize = 32;
/// Records on which each layer's removal is tried before the best one goes through the gate on all of them.
const SEARCH_RECORDS: usize = 16;
/// Tokens of a generation whose vocabulary is counted.
const COUNTED_TOKENS: usize = 64;

/// What was baked, and why.
#[derive(Serialize)]
pub struct Bake {
    /// The checkpoint that all kept cuts lead to.
    pub path: PathBuf,
    /// Perplexity of the original.
    pub baseline_ppl: Option<f64>,
    /// Each cut, in order.
    pub steps: Vec<Step>,
    /// What the pruned head covers.
    pub vocabulary: Vocabulary,
    /// Relative change of perplexity when one layer is removed, on the first records.
    pub layer_search: Vec<LayerCost>,
}

/// One cut and what the gate said.
#[derive(Serialize)]
pub struct Step {
    /// What was cut.
    pub cut: String,
    /// Directory of the checkpoint.
    pub path: PathBuf,
    /// Weight bytes that a decode step reads.
    pub bytes_per_step: u64,
    /// Perplexity on all records; null where the head lacks a target.
    pub ppl: Option<f64>,
    /// Whether it is part of the result.
    pub kept: bool,
    /// What the gate said.
    pub verdict: String,
}

/// Shares of two token streams that the pruned head can produce.
#[derive(Serialize)]
pub struct Vocabulary {
    /// Rows of the pruned head.
    pub kept: usize,
    /// Rows of the full one.
    pub full: usize,
    /// Of what the model writes on the public prompts, 0 to 1.
    pub coverage_generated: f64,
    /// Of the perplexity records' targets, 0 to 1.
    pub coverage_ppl_records: f64,
}

/// Cost of a removal.
#[derive(Serialize)]
pub struct LayerCost {
    pub layer: usize,
    pub relative_ppl_change: f64,
}

/// A model and its perplexity on all records.
struct Checked {
    model: Arc<Model>,
    ppl: PplReport,
}

pub struct Cutter<'a> {
    stage: &'a Stage,
    baseline: &'a Arc<Model>,
    records: Vec<PplRecord>,
    steps: Vec<Step>,
}

impl<'a> Cutter<'a> {
    pub fn new(stage: &'a Stage, baseline: &'a Arc<Model>) -> Result<Cutter<'a>> {
        let records = read_records(None, baseline, None)?;
        Ok(Cutter { stage, baseline, records, steps: Vec::new() })
    }

    /// Makes all cuts. Returns what was done, the result, its perplexity and the cap.
    pub fn bake(mut self) -> Result<(Bake, Arc<Model>, PplReport, PplCap)> {
        let context = self.context()?;
        let original = self.score(self.baseline, self.records.len())?;
        let cap = PplCap::new(None, original.ppl)?;
        let bytes = megabytes(self.baseline.step_weight_bytes());
        self.stage.say(&format!("   original: {bytes} a step, perplexity {}", ppl_text(&original)));
        let mut best = Checked { model: self.baseline.clone(), ppl: original };

        let path = self.stage.out.join("1-int4");
        let strategy = Strategy::Group(GROUP);
        let write = bake::WriteOptions::force();
        let options = QuantizeOptions { strategy, head: strategy, write, ..Default::default() };
        bake::quantize::run(best.model.checkpoint(), &path, &options, &context)?;
        best = self.gate(format!("int4 weights, groups of {GROUP}"), &path, best, cap)?;

        let layer_search = self.search_layers(&best.model)?;
        if let Some(LayerCost { layer, .. }) = layer_search.first() {
            let path = self.stage.out.join("2-drop-layer");
            let options =
                DropLayersOptions { layers: vec![*layer], write: bake::WriteOptions::force(), ..Default::default() };
            bake::drop_layers::run(best.model.checkpoint(), &path, &options, &context)?;
            best = self.gate(format!("layer {layer} removed"), &path, best, cap)?;
        }

        let path = self.stage.out.join("3-pruned-vocabulary");
        let (keep, vocabulary) = self.keepset(&best.model)?;
        let origin = format!("ids that the model writes on the public prompts, {COUNTED_TOKENS} tokens each");
        let options = PruneVocabOptions { origin, write: bake::WriteOptions::force(), ..Default::default() };
        bake::prune_vocab::run(best.model.checkpoint(), &path, &keep, &options, &context)?;
        best =
            self.gate(format!("vocabulary cut to {} of {} ids", vocabulary.kept, vocabulary.full), &path, best, cap)?;
        self.stage.say(&format!(
            "     (the {} ids cover {:.1} % of what it writes on the public prompts, {:.1} % of the perplexity text)\n",
            vocabulary.kept,
            vocabulary.coverage_generated * 100.0,
            vocabulary.coverage_ppl_records * 100.0
        ));
        let path = best.model.checkpoint().dir().to_path_buf();
        let bake = Bake { path, baseline_ppl: cap.reference, steps: self.steps, vocabulary, layer_search };
        Ok((bake, best.model, best.ppl, cap))
    }

    fn context(&self) -> Result<Context<'static>> {
        Ok(Context { cancel: interrupt::flag()?, progress: &bake::Silent })
    }

    fn quiet(&self) -> bool {
        self.stage.quiet || self.stage.json
    }

    /// Perplexity on the first `count` records.
    fn score(&self, model: &Arc<Model>, count: usize) -> Result<PplReport> {
        let records = &self.records[..count.min(self.records.len())];
        let mut engine = self.stage.engine.engine(model)?;
        let report = score_with_bar(&mut engine, records, &ScoreOptions::default(), self.quiet())?;
        self.stage.go_on()?;
        Ok(report)
    }

    /// Scores a cut and notes what the gate says: the cut if it passes, otherwise what there was before.
    fn gate(&mut self, cut: String, path: &Path, before: Checked, cap: PplCap) -> Result<Checked> {
        let model = load(path)?;
        let ppl = self.score(&model, self.records.len())?;
        let kept = ppl.usable() && cap.passes(ppl.ppl);
        let verdict = match ppl.ppl {
            Some(p) if kept => format!("kept: perplexity {p:.3} is under the cap of {:.3}", cap.cap),
            Some(p) => format!("refused: perplexity {p:.3} is above the cap of {:.3}", cap.cap),
            None => format!("refused: {} target ids have no row, so there is no perplexity", ppl.pruned_targets.len()),
        };
        let bytes_per_step = model.step_weight_bytes();
        self.stage.say(&format!("   {cut}: {} a step; {verdict}", megabytes(bytes_per_step)));
        self.steps.push(Step { cut, path: path.to_path_buf(), bytes_per_step, ppl: ppl.ppl, kept, verdict });
        Ok(if kept { Checked { model, ppl } } else { before })
    }

    /// Tries the removal of every layer that can be removed on the first records; cheapest first.
    fn search_layers(&self, parent: &Arc<Model>) -> Result<Vec<LayerCost>> {
        let full = self.score(parent, SEARCH_RECORDS)?;
        let mut costs = Vec::new();
        for layer in 0..parent.config().layers.len() {
            let trial = match parent.without_layers(&[layer]) {
                Err(runtime::Error::Layers { .. }) => continue,
                trial => Arc::new(trial?),
            };
            let scored = self.score(&trial, SEARCH_RECORDS)?;
            if let (Some(with), Some(without)) = (full.ppl, scored.ppl) {
                costs.push(LayerCost { layer, relative_ppl_change: without / with - 1.0 });
            }
        }
        costs.sort_by(|a, b| a.relative_ppl_change.total_cmp(&b.relative_ppl_change));
        Ok(costs)
    }

    /// The ids that the model writes on the public prompts, with what every vocabulary must hold.
    fn keepset(&self, model: &Arc<Model>) -> Result<(Keepset, Vocabulary)> {
        let public = PromptArgs { prompts: "public".into(), chat: false, raw: false };
        let prompts = public.read(model, usize::MAX)?.1;
        let mut engine = self.stage.engine.engine(model)?;
        let options = GenerateOptions { max_tokens: COUNTED_TOKENS, ..Default::default() };
        let progress = bar("counting ids", prompts.len() as u64, Unit::Count, self.quiet());
        let mut written = Vec::new();
        for prompt in &prompts {
            written.extend(greedy(&mut engine, &prompt.token_ids, &options, |_| ControlFlow::Continue(()))?.token_ids);
            progress.inc(1);
            self.stage.go_on()?;
        }
        progress.finish_and_clear();
        let vocab = model.config().vocab_size;
        let counts = bake::keepset::count(written.iter().copied(), vocab)?;
        let keep = bake::keepset::build(&counts, 1, &always_kept(model.checkpoint())?)?;
        let targets = self.records.iter().flat_map(|r| r.token_ids[r.scored.clone()].iter().copied());
        let vocabulary = Vocabulary {
            kept: keep.ids.len(),
            full: vocab,
            coverage_generated: bake::keepset::coverage(&keep, written).share(),
            coverage_ppl_records: bake::keepset::coverage(&keep, targets).share(),
        };
        Ok((keep, vocabulary))
    }
}

fn load(dir: &Path) -> Result<Arc<Model>> {
    Ok(Arc::new(Model::load(Checkpoint::open(dir)?)?))
}

fn ppl_text(report: &PplReport) -> String {
    report.ppl.map_or_else(|| "none".into(), |p| format!("{p:.3}"))
}
