//! A pass over one sequence that stops at every stage, so that weights can be replaced while it runs.
//!
//! This is what layer-by-layer quantisation needs: every calibration sequence stands at the same stage, the linears that read
//! its values are quantised and replaced ([`Model::set_weights`]), and all sequences go on through the replaced ones. The whole
//! calibration costs one forward pass. The computation is the engine's own, so every stage has the bits that
//! [`crate::Engine::extend_observed`] shows.
//!
//! A sequence holds, for each token, its residual stream, its per-layer inputs, the values of the stage, and keys and values
//! of the layers that a later layer still reads: about 110 KB a token at the width of E4B.

use kernels::cpu::Isa;

use crate::config::ModelConfig;
use crate::cpu::kv::KvCache;
use crate::cpu::{Batch, Computation, Rows, Stage};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::op_clock::Marks;

/// One sequence, all rows of it, at a stage.
pub struct StagedPass {
    isa: Isa,
    rows: Rows,
    kv: KvCache,
    stage: Stage,
}

impl StagedPass {
    /// The sequence at [`Stage::Embed`], computed by the fastest code for this machine.
    ///
    /// # Errors
    /// [`Error::TokenId`] for a token outside the vocabulary, [`Error::ContextFull`] for more tokens than the model takes.
    pub fn new(model: &Model, tokens: &[u32]) -> Result<StagedPass> {
        let config = model.config();
        let (vocab, limit) = (config.vocab_size, config.max_position_embeddings);
        if let Some((index, &id)) = tokens.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
            return Err(Error::TokenId { id, index, vocab });
        }
        if tokens.len() > limit {
            return Err(Error::ContextFull { wanted: tokens.len(), limit, model_limit: limit });
        }
        let isa = Isa::best();
        let batch = Batch { chain: tokens, side: &[], wanted: 0..tokens.len() };
        let rows = Computation { isa, model, config, marks: Marks::default() }.rows(&batch, 0);
        Ok(StagedPass { isa, rows, kv: KvCache::new(config), stage: Stage::Embed })
    }

    /// Where it stands.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The values of its stage, every row of the sequence.
    pub fn values(&self) -> &[f32] {
        self.rows.values(self.stage)
    }

    /// Computes to the next stage; stays at [`Stage::FinalNorm`]. Runs on the threads of the current rayon pool; the bits do not
    /// depend on their number.
    ///
    /// `model` is the one that it was made with, or a variant of it with other weights.
    pub fn advance(&mut self, model: &Model) {
        let config = model.config();
        let pass = Computation { isa: self.isa, model, config, marks: Marks::default() };
        self.stage = pass.advance(self.stage, &mut self.rows, &mut self.kv);
        if let Stage::Layer(l) = self.stage {
            self.forget_cache(config, l);
        }
    }

    /// Drops the keys and values that no layer after `l` reads.
    fn forget_cache(&mut self, config: &ModelConfig, l: usize) {
        let read = |source: usize| config.layers[l + 1..].iter().any(|later| later.kv_source == Some(source));
        (0..=l).filter(|&source| !read(source)).for_each(|source| self.kv.clear(source));
    }
}

impl Stage {
    /// The linears that read the values of this stage, as modules of [`Model::weights`]. Some may be absent from a model: keys
    /// and values of a KV-shared layer.
    pub fn modules(self) -> Vec<String> {
        use crate::names;
        match self {
            Stage::Embed => vec![names::PLE_MODEL_PROJECTION.to_string()],
            Stage::Input(l, input) => input.linears().iter().map(|rest| names::layer(l, rest)).collect(),
            Stage::FinalNorm => vec![names::LM_HEAD.to_string()],
            Stage::Ple | Stage::Layer(_) => vec![],
        }
    }
}
