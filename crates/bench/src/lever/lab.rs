//! Where levers are measured: the two subjects, and one setting held against another.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bake::Strategy;
use bake::in_memory::{Quantiser, is_dense, quantise};
use bake::quant::Bits;
use bake::synth::{Shape as Width, SynthOptions};
use ppl::score::{ScoreOptions, score};
use runtime::checkpoint::Checkpoint;
use runtime::drafter::Drafter;
use runtime::generate::{GenerateOptions, greedy};
use runtime::names;
use runtime::speculate::{Acceptance, Shape};
use runtime::speculative::speculative;
use runtime::tokenizer::Tokenizer;
use runtime::{Engine, EngineOptions, Model};
use serde::{Deserialize, Serialize};

use super::Trial;
use super::scripted::Scripted;
use crate::compare::Comparison;
use crate::engine::{EngineTarget, encode};
use crate::error::{Error, Result};
use crate::prompts::PromptSet;
use crate::protocol::{Context, Monotonic, Prompt, Protocol, interleave};
use crate::stats::BootstrapOptions;

/// Layers of the synthetic model.
const LAYERS: usize = 8;
/// Its vocabulary, unless a lever turns it.
pub(super) const VOCAB: usize = 16_384;
/// Tokens of a prompt of the synthetic model; all its prompts are random, below [`SMALL_VOCAB`].
const WIDE_PROMPT: usize = 32;
/// Vocabulary of the synthetic model with a pruned head.
pub(super) const SMALL_VOCAB: usize = 4096;
/// Prompts below which an interval over them is not to be trusted with a verdict.
pub const FEWEST: usize = 6;
/// Prompts, or tokens of one, that nobody waits for.
const MOST: usize = 1 << 16;
/// Records behind a perplexity.
pub(super) const PPL_RECORDS: usize = 32;
/// Drafts a step when acceptance is measured.
const DEEPEST: usize = 11;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Subject {
    /// The trained, embedded model.
    Nano,
    /// Eight random layers at the width of E4B.
    Wide,
}

impl Subject {
    /// Name in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Subject::Nano => "nano",
            Subject::Wide => "E4B width, 8 layers, random weights",
        }
    }
}

/// How much to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabOptions {
    /// Prompts of a trial on nano; at least [`FEWEST`].
    pub prompts: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Prompts of a trial on the wide model, where a token takes a hundred times as long; at least as many.
    pub wide_prompts: usize,
    /// Tokens of each.
    pub wide_tokens: usize,
    /// Threads; 0 for one each core.
    pub threads: usize,
    /// Seed of intervals, random weights and scripted drafts.
    pub seed: u64,
}

/// One side of a trial.
pub(super) struct Side {
    /// Name of the setting.
    pub label: String,
    /// The model.
    pub model: Arc<Model>,
    /// Who drafts, and in which shape.
    pub draft: Option<(Box<dyn Drafter>, Shape)>,
}

impl Side {
    /// Plain decoding.
    pub fn plain(label: &str, model: &Arc<Model>) -> Side {
        Side { label: label.into(), model: model.clone(), draft: None }
    }
}

/// The subjects, loaded when they are first needed. Synthetic checkpoints are written below a folder that its owner removes.
pub struct Lab<'a> {
    options: LabOptions,
    work: PathBuf,
    cancel: &'a AtomicBool,
    say: &'a mut dyn FnMut(&str),
    models: HashMap<String, Arc<Model>>,
    /// Perplexity of nano as it is.
    nano_ppl: Option<f64>,
    acceptance: HashMap<&'static str, Acceptance>,
    /// What the wide model writes after each prompt, long enough for drafts beyond the last token.
    wide_text: Option<Vec<(Vec<u32>, Vec<u32>)>>,
}

impl<'a> Lab<'a> {
    /// A lab that writes below `work`, looks at `cancel`, and tells each trial to `say` before it begins.
    ///
    /// # Errors
    /// Fewer than [`FEWEST`] prompts or 2 tokens, or more than 65536.
    pub fn new(
        options: LabOptions,
        work: &Path,
        cancel: &'a AtomicBool,
        say: &'a mut dyn FnMut(&str),
    ) -> Result<Lab<'a>> {
        for (option, found) in [("prompts", options.prompts), ("wide-prompts", options.wide_prompts)] {
            if !(FEWEST..=MOST).contains(&found) {
                return Err(Error::Option { option, expected: "from 6 to 65536", found: found.to_string() });
            }
        }
        for (option, found) in [("tokens", options.tokens), ("wide-tokens", options.wide_tokens)] {
            if !(2..=MOST).contains(&found) {
                return Err(Error::Option { option, expected: "from 2 to 65536", found: found.to_string() });
            }
        }
        let (models, acceptance) = (HashMap::new(), HashMap::new());
        let work = work.to_path_buf();
        Ok(Lab { options, work, cancel, say, models, nano_ppl: None, acceptance, wide_text: None })
    }

    /// How much is measured.
    pub fn options(&self) -> &LabOptions {
        &self.options
    }

    /// The folder of synthetic checkpoints.
    pub(super) fn work(&self) -> &Path {
        &self.work
    }

    /// Nano as it is.
    pub(super) fn nano(&mut self) -> Result<Arc<Model>> {
        self.model("nano", |_| Ok(Model::load(Checkpoint::open(&runtime::nano::directory()?)?)?))
    }

    /// The synthetic model: bf16, or int4 with this group size.
    pub(super) fn wide(&mut self, vocab: usize, group: Option<usize>) -> Result<Arc<Model>> {
        let name = format!("wide-{vocab}-{}", group.map_or("bf16".into(), |g| format!("int4-g{g}")));
        let seed = self.options.seed;
        self.model(&name.clone(), |work| {
            let dir = work.join(name);
            let options = SynthOptions {
                layers: LAYERS,
                vocab,
                seed,
                int4: group.map(Strategy::Group),
                inert_kv: false,
                ..SynthOptions::new(Width::E4b)
            };
            bake::synth::run(&dir, &options, &bake::Context::quiet())?;
            Ok(Model::load(Checkpoint::open(&dir)?)?)
        })
    }

    /// The model that levers of a subject start from: nano as it is, or the wide one at int4 in groups of 128.
    pub(super) fn base(&mut self, subject: Subject) -> Result<Arc<Model>> {
        match subject {
            Subject::Nano => self.nano(),
            Subject::Wide => self.wide(VOCAB, Some(128)),
        }
    }

    fn model(&mut self, name: &str, make: impl FnOnce(&Path) -> Result<Model>) -> Result<Arc<Model>> {
        if let Some(model) = self.models.get(name) {
            return Ok(model.clone());
        }
        let model = Arc::new(make(&self.work)?);
        self.models.insert(name.to_string(), model.clone());
        Ok(model)
    }

    /// A copy of a dense model with every linear quantised.
    pub(super) fn quantised(&self, model: &Arc<Model>, bits: Bits, group: usize) -> Result<Arc<Model>> {
        let quantiser = Quantiser::new(Default::default(), Strategy::Group(group))?;
        let mut out = Model::clone(model);
        let layers = model.config().layers.len();
        let of_layers = (0..layers).flat_map(|l| names::LAYER_LINEARS.map(|rest| names::layer(l, rest)));
        for module in of_layers.chain([names::PLE_MODEL_PROJECTION.to_string(), names::LM_HEAD.to_string()]) {
            if let Some(weights) = model.weights(&module).filter(|w| is_dense(w)) {
                out.set_weights(&module, quantise(&module, weights, bits, &quantiser)?)?;
            }
        }
        Ok(Arc::new(out))
    }

    /// Perplexity of a variant of nano over that of nano as it is, on the embedded records.
    pub(super) fn ppl(&mut self, variant: &Arc<Model>) -> Result<Option<f64>> {
        let nano = self.nano()?;
        let base = match self.nano_ppl {
            Some(ppl) => Some(ppl),
            None => self.perplexity(&nano)?,
        };
        self.nano_ppl = base;
        Ok(self.perplexity(variant)?.zip(base).map(|(variant, base)| variant / base))
    }

    fn perplexity(&self, model: &Arc<Model>) -> Result<Option<f64>> {
        let path = runtime::nano::directory()?.join("prompts/ppl.jsonl");
        let mut records = ppl::records::read(&path, model.config().vocab_size)?;
        records.truncate(PPL_RECORDS);
        let report = score(&mut self.engine(model)?, &records, &ScoreOptions::default(), self.cancel, |_| ())?;
        // A pruned target has no probability: as bad as can be, not unknown. JSON has no infinity.
        Ok(report.complete.then(|| report.ppl.filter(|_| report.usable()).unwrap_or(f64::MAX)))
    }

    pub(super) fn engine(&self, model: &Arc<Model>) -> Result<Engine> {
        Ok(Engine::new(model.clone(), &EngineOptions { threads: self.options.threads, ..Default::default() })?)
    }

    /// Prompts of a subject, as tokens.
    pub(super) fn prompts(&mut self, subject: Subject) -> Result<Vec<ppl::paths::Prompt>> {
        match subject {
            Subject::Nano => {
                let dir = runtime::nano::directory()?;
                let set = PromptSet::read(&dir.join("prompts/heldout.jsonl"))?.take(self.options.prompts);
                let tokenizer = Tokenizer::open(&dir)?;
                set.encode(|p| encode(p, &tokenizer, None))
            }
            Subject::Wide => {
                let token = |p: usize, i: usize| ((p * WIDE_PROMPT + i) * 7919 % SMALL_VOCAB) as u32;
                let prompt = |p: usize| ppl::paths::Prompt {
                    id: p.to_string(),
                    token_ids: (0..WIDE_PROMPT).map(|i| token(p, i)).collect(),
                };
                Ok((0..self.options.wide_prompts).map(prompt).collect())
            }
        }
    }

    fn tokens(&self, subject: Subject) -> usize {
        match subject {
            Subject::Nano => self.options.tokens,
            Subject::Wide => self.options.wide_tokens,
        }
    }

    /// Holds `changed` against `base` on the subject's prompts, in turn.
    ///
    /// # Errors
    /// [`Error::Refused`] where a side failed or was cancelled.
    pub(super) fn trial(&mut self, subject: Subject, base: Side, changed: Side, ppl: Option<f64>) -> Result<Trial> {
        (self.say)(&format!("{}: {} against {}", subject.as_str(), changed.label, base.label));
        let prompts: Vec<Prompt> = self.prompts(subject)?.iter().map(Prompt::from).collect();
        let protocol = Protocol {
            warmup_prompts: 1,
            warmup_tokens: 8,
            max_tokens: self.tokens(subject),
            ignore_eos: true,
            warmup_limit_ms: 2000,
        };
        let bytes = changed.model.step_device_bytes() as f64 / base.model.step_device_bytes() as f64;
        let names = [base.label.clone(), changed.label.clone()];
        let mut a = self.target(base)?;
        let mut b = self.target(changed)?.on_threads_of(&a);
        let clock = Monotonic::start();
        let context = Context { clock: &clock, cancel: self.cancel, progress: &mut |_| {} };
        let [ra, rb] = interleave(&mut a, &mut b, &prompts, &protocol, context)?;
        if let Some(run) = [&ra, &rb].into_iter().find(|r| !r.complete) {
            let reason = run.failure.clone().unwrap_or_else(|| "cancelled".into());
            return Err(Error::Refused { reason: format!("`{}` was not measured whole: {reason}", run.label) });
        }
        let options = BootstrapOptions { seed: self.options.seed, ..Default::default() };
        Ok(Trial::new(&names[1], &names[0], Comparison::new(&ra, &rb, &options)?, bytes, ppl))
    }

    fn target(&self, side: Side) -> Result<EngineTarget<'a>> {
        let target = EngineTarget::new(&side.label, self.engine(&side.model)?, vec![], self.cancel);
        Ok(match side.draft {
            None => target,
            Some((drafter, shape)) => target.with_drafts(drafter, shape),
        })
    }

    /// How often a drafter of nano hits, depth by depth, on nano's prompts.
    pub(super) fn acceptance(&mut self, name: &'static str, drafter: &mut dyn Drafter) -> Result<Acceptance> {
        if let Some(known) = self.acceptance.get(name) {
            return Ok(known.clone());
        }
        let nano = self.nano()?;
        let mut engine = self.engine(&nano)?;
        let options = GenerateOptions { max_tokens: self.options.tokens, ..Default::default() };
        let mut counted = Acceptance::default();
        for prompt in self.prompts(Subject::Nano)? {
            let shape = Shape::chain(DEEPEST)?;
            let go_on = |_| ControlFlow::Continue(());
            let (_, s) = speculative(&mut engine, drafter, &prompt.token_ids, &shape, &options, go_on)?;
            counted.merge(&s.acceptance);
        }
        self.acceptance.insert(name, counted.clone());
        Ok(counted)
    }

    /// A drafter for the wide model that hits as often as a drafter of nano does, and costs nothing: random weights have no
    /// drafter that could.
    pub(super) fn scripted(&mut self, acceptance: &Acceptance) -> Result<Scripted> {
        if self.wide_text.is_none() {
            let model = self.base(Subject::Wide)?;
            let mut engine = self.engine(&model)?;
            let options = GenerateOptions { max_tokens: self.options.wide_tokens + 16, ..Default::default() };
            let mut text = Vec::new();
            for prompt in self.prompts(Subject::Wide)? {
                let made = greedy(&mut engine, &prompt.token_ids, &options, |_| ControlFlow::Continue(()))?;
                text.push((prompt.token_ids, made.token_ids));
            }
            self.wide_text = Some(text);
        }
        let text = self.wide_text.clone().unwrap_or_default();
        Ok(Scripted::new(text, acceptance, VOCAB as u32, self.options.seed))
    }
}
