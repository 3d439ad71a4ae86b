//! The engine: a model, a cache and a thread pool. It holds one sequence and extends it.

use std::ops::Range;
use std::sync::Arc;

use kernels::cpu::{Isa, KvView};

use crate::cpu::kv::KvCache;
use crate::cpu::{Batch, Observer, Stage, forward};
use crate::error::{Error, Result};
use crate::logits::Logits;
use crate::model::Model;
use crate::op_clock::OpClock;
use crate::speculate::Branch;

/// Arithmetic of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Plain f32 code, short enough to check by reading.
    F32,
    /// The fastest code for this machine: packed weights, f32 activations and cache, AVX2 where there is some.
    #[default]
    Native,
    /// [`Precision::Native`] with activations rounded to int8 where they meet packed weights ([`kernels::cpu`]): the fastest for several
    /// rows at a time, the same bits on every processor's products, and another rounding than the GPU's.
    Int8,
}

impl Precision {
    /// All there are.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Native, Precision::Int8];

    /// Name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Native => "native",
            Precision::Int8 => "int8",
        }
    }

    fn isa(self) -> Isa {
        match self {
            Precision::F32 => Isa::portable(),
            Precision::Native => Isa::best(),
            Precision::Int8 => Isa::best().with_int8_activations(),
        }
    }
}

/// How to run a model.
#[derive(Debug, Clone, Default)]
pub struct EngineOptions {
    /// Arithmetic.
    pub precision: Precision,
    /// Threads; 0 means one for each core.
    pub threads: usize,
    /// Most positions of a sequence; `None` means the model's own limit.
    pub context: Option<usize>,
}

/// One sequence on the CPU.
pub struct Engine {
    model: Arc<Model>,
    isa: Isa,
    pool: Arc<rayon::ThreadPool>,
    kv: KvCache,
    context: usize,
    clock: Option<Arc<OpClock>>,
}

impl Engine {
    /// An engine with an empty sequence.
    pub fn new(model: Arc<Model>, options: &EngineOptions) -> Result<Engine> {
        Engine::with_isa(model, options, options.precision.isa())
    }

    /// An engine on a given instruction set, for tests that compare them.
    pub fn with_isa(model: Arc<Model>, options: &EngineOptions, isa: Isa) -> Result<Engine> {
        let limit = model.config().max_position_embeddings;
        let context = options.context.unwrap_or(limit);
        if context > limit || context == 0 {
            return Err(Error::Context { asked: context, limit });
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads).build();
        let pool = pool.map_err(|e| Error::Threads { threads: options.threads, message: e.to_string() })?;
        let kv = KvCache::new(model.config());
        Ok(Engine { model, isa, pool: Arc::new(pool), kv, context, clock: None })
    }

    /// Takes the threads of another engine instead of its own, where it has as many. Engines that are timed in turn should: whichever core
    /// a thread lies on, and whatever else runs there, then meets both alike.
    pub fn share_threads(&mut self, other: &Engine) {
        if self.threads() == other.threads() {
            self.pool = other.pool.clone();
        }
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Name of the instruction set in use.
    pub fn isa(&self) -> &'static str {
        self.isa.name()
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Most positions of a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// From now on the time of every pass is added to `clock`, op by op.
    pub fn set_clock(&mut self, clock: Option<Arc<OpClock>>) {
        self.clock = clock;
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.kv.len()
    }

    /// Whether the sequence is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.kv.truncate(0);
    }

    /// Forgets positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.kv.truncate(len);
    }

    /// Appends tokens to the sequence and returns logits for those in `wanted` (indices into `tokens`; may be empty).
    ///
    /// The logits of a row have the same bits however the sequence was cut into calls.
    pub fn extend(&mut self, tokens: &[u32], wanted: Range<usize>) -> Result<Logits> {
        self.extend_observed(tokens, wanted, &mut |_, _| {})
    }

    /// [`Engine::extend`] that shows intermediate values on the way.
    pub fn extend_observed(
        &mut self,
        tokens: &[u32],
        wanted: Range<usize>,
        observe: &mut (impl FnMut(Stage, &[f32]) + Send),
    ) -> Result<Logits> {
        self.pass(Batch { chain: tokens, side: &[], wanted }, observe)
    }

    /// Runs a draft: appends the rows of `chain` to the sequence and computes the branches beside it, each in place of the chain's
    /// token at its depth (1 is the first after `chain[0]`). Logits of all rows come back, chain first. [`Engine::settle`] then
    /// says what stays.
    pub fn verify(&mut self, chain: &[u32], branches: &[Branch]) -> Result<Logits> {
        let begin = self.len();
        if let Some((row, b)) = branches.iter().enumerate().find(|(_, b)| b.depth == 0 || b.depth >= chain.len()) {
            let (row, position, expected) = (chain.len() + row, begin + b.depth, begin + chain.len() - 1);
            return Err(Error::Rows { row, position, expected });
        }
        let side: Vec<(usize, u32)> = branches.iter().map(|b| (begin + b.depth, b.token)).collect();
        let wanted = 0..chain.len() + side.len();
        self.pass(Batch { chain, side: &side, wanted }, &mut |_, _| {})
    }

    /// Keeps the sequence up to `len` positions and, where a branch was accepted, makes that branch of the last
    /// [`Engine::verify`] the position after them.
    pub fn settle(&mut self, len: usize, branch: Option<usize>) {
        match branch {
            Some(slot) => self.kv.adopt(len, slot),
            None => self.kv.truncate(len),
        }
    }

    fn pass(&mut self, batch: Batch, observe: &mut (impl FnMut(Stage, &[f32]) + Send)) -> Result<Logits> {
        let config = self.model.config();
        let begin = self.kv.len();
        let ids = batch.chain.iter().chain(batch.side.iter().map(|s| &s.1));
        if let Some((index, &id)) = ids.enumerate().find(|(_, id)| **id as usize >= config.vocab_size) {
            return Err(Error::TokenId { id, index, vocab: config.vocab_size });
        }
        let end = begin + batch.chain.len();
        if end > self.context {
            let model_limit = config.max_position_embeddings;
            return Err(Error::ContextFull { wanted: end, limit: self.context, model_limit });
        }
        let rows = batch.chain.len() + batch.side.len();
        if batch.wanted.start > batch.wanted.end || batch.wanted.end > rows {
            let (row, expected) = (batch.wanted.end, begin + rows);
            return Err(Error::Rows { row, position: begin + row, expected });
        }
        let chain = (0..batch.chain.len()).map(|i| begin + i);
        let positions = chain.chain(batch.side.iter().map(|s| s.0)).collect::<Vec<_>>()[batch.wanted.clone()].to_vec();
        let (isa, model, kv) = (self.isa, &*self.model, &mut self.kv);
        let observe: &mut (dyn FnMut(Stage, &[f32]) + Send) = observe;
        #[cfg(feature = "planted-slow-step")]
        let begun = std::time::Instant::now();
        let clock = self.clock.as_deref();
        let pass = self.pool.install(move || {
            let observe: &mut Observer = observe;
            forward(isa, model, kv, batch, clock, observe)
        });
        #[cfg(feature = "planted-slow-step")]
        wait_until(begun, begun.elapsed() * 3 / 2);
        Ok(Logits {
            values: pass.logits,
            hidden: pass.hidden,
            head: self.model.head_rows().clone(),
            positions,
            hidden_size: self.model.config().hidden_size,
        })
    }

    /// Runs work that calls the engine many times on the engine's own threads. From any other thread, every call wakes one of them and
    /// sleeps until it answers, which for a small model takes longer than the pass.
    pub fn on_its_threads<T: Send>(&mut self, work: impl FnOnce(&mut Engine) -> T + Send) -> T {
        let pool = self.pool.clone();
        pool.install(|| work(self))
    }

    /// Runs `work` on this engine's threads.
    pub(crate) fn on_threads<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.pool.install(work)
    }

    /// The instruction set, for a drafter that runs beside this engine.
    pub(crate) fn instruction_set(&self) -> Isa {
        self.isa
    }

    /// The cache of a layer that owns keys and values.
    pub(crate) fn kv_view(&self, layer: usize) -> KvView<'_> {
        self.kv.view(layer)
    }

    /// Cached keys and values of the layer whose cache `layer` reads, `[positions, kv_heads, head_dim]` each.
    pub fn cache(&self, layer: usize) -> (&[f32], &[f32]) {
        let view = self.kv.view(self.model.config().kv_layer(layer));
        (view.keys, view.values)
    }
}

/// Keeps the processor busy, as a slower pass would.
#[cfg(feature = "planted-slow-step")]
fn wait_until(begun: std::time::Instant, elapsed: std::time::Duration) {
    while begun.elapsed() < elapsed {
        std::hint::spin_loop();
    }
}
