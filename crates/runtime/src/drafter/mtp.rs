//! The Gemma 4 assistant ("MTP drafter"): a small stack that attends to the target's keys and values with a query of its own
//! (`tests/oracle/gemma4-assistant.md`).
//!
//! It has no cache. Within a round the position and the keys it sees are frozen, and its own output state is fed back. Which target
//! layers it reads is worked out from both configurations, so it also holds after layers were removed.

use std::path::{Path, PathBuf};

use kernels::cpu::{Isa, KvView, attend};
use safetensors::Dtype;

use super::{Draft, DraftContext, Drafter};
use crate::checkpoint::TensorFiles;
use crate::config::assistant::AssistantConfig;
use crate::config::{LayerConfig, LayerKind};
use crate::cpu::block::multiply;
use crate::cpu::ops;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::model::{BlockWeights, Loader, Model, Weights};
use crate::names;
use crate::op_clock::Marks;
use crate::speculate::{MAX_BRANCHES, Shape};

/// Where the query stands and how much a sliding layer sees. Both are lossless; acceptance may differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Convention {
    /// transformers: the query is at the newest token's position, sliding layers see window + 1 keys.
    #[default]
    Hf,
    /// vLLM: the query is at the hidden state's position, sliding layers see window keys.
    Vllm,
}

/// How to run a drafter.
#[derive(Debug, Clone, Copy, Default)]
pub struct MtpOptions {
    /// Position and window.
    pub convention: Convention,
    /// Clusters of the head to look into; `None` for the checkpoint's own number, `Some(0)` for the full head.
    pub centroids: Option<usize>,
}

/// A head that first picks clusters of tokens, then scores the tokens in them.
struct Clusters {
    /// `[clusters, hidden]`.
    centroids: Weights,
    /// Token ids in cluster order, `[vocab]`.
    order: Vec<u32>,
    /// Clusters that are looked into.
    top_k: usize,
}

/// One layer and the target layer whose keys and values it reads.
struct Layer {
    block: BlockWeights,
    config: LayerConfig,
    source: usize,
}

/// A loaded drafter, bound to one target.
pub struct MtpDrafter {
    config: AssistantConfig,
    convention: Convention,
    pre_projection: Weights,
    post_projection: Weights,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    /// `[vocab, hidden]`: used as the head only.
    head: Weights,
    clusters: Option<Clusters>,
}

/// Scores of the head: those of the clusters' tokens, or of all.
#[derive(Debug, Clone)]
pub struct HeadLogits {
    /// Token ids, ascending.
    pub tokens: Vec<u32>,
    /// Their logits.
    pub values: Vec<f32>,
}

impl HeadLogits {
    /// The `count` tokens with the largest logits, best first; among equals the lowest id.
    pub fn best(&self, count: usize) -> Vec<u32> {
        let mut order: Vec<usize> = (0..self.tokens.len()).collect();
        order.sort_by(|&a, &b| self.values[b].total_cmp(&self.values[a]).then(self.tokens[a].cmp(&self.tokens[b])));
        order[..count.min(order.len())].iter().map(|&i| self.tokens[i]).collect()
    }
}

/// One step of a round.
#[derive(Debug, Clone)]
pub struct Proposal {
    /// Scores of the next token.
    pub logits: HeadLogits,
    /// State that the next step takes, `[target hidden]`.
    pub state: Vec<f32>,
}

impl MtpDrafter {
    /// Loads a drafter's directory and binds it to `target`.
    pub fn load(dir: &Path, target: &Model, options: MtpOptions) -> Result<MtpDrafter> {
        let config = AssistantConfig::read(dir)?;
        let sources = bind(dir, &config, target)?;
        let files = TensorFiles::open(dir)?;
        let loader = Loader { files: &files, quantization: None };
        let (hidden, backbone) = (config.hidden_size, config.backbone_hidden_size);
        let layers = config.layers.iter().zip(sources).enumerate().map(|(l, (layer, source))| {
            let block = loader.block(l, layer, hidden, config.num_attention_heads)?;
            Ok(Layer { block, config: layer.clone(), source })
        });
        Ok(MtpDrafter {
            pre_projection: loader.linear(names::PRE_PROJECTION, hidden, 2 * backbone)?,
            post_projection: loader.linear(names::POST_PROJECTION, backbone, hidden)?,
            layers: layers.collect::<Result<_>>()?,
            final_norm: loader.vector(names::FINAL_NORM, hidden)?,
            head: loader.table(names::EMBED, config.vocab_size, hidden)?,
            clusters: clusters(dir, &config, &files, &loader, options.centroids)?,
            convention: options.convention,
            config,
        })
    }

    /// Clusters that the head looks into; `None` where it scores every token.
    pub fn centroids(&self) -> Option<usize> {
        self.clusters.as_ref().map(|c| c.top_k)
    }

    /// Drafts `steps` tokens after the newest one. `hidden` is the target's state at the position before it. Position and keys stay
    /// frozen; each step takes the best token and the state of the one before.
    pub fn round(&self, engine: &Engine, newest: u32, hidden: &[f32], steps: usize) -> Vec<Proposal> {
        engine.on_threads(|| {
            let mut proposals: Vec<Proposal> = Vec::with_capacity(steps);
            for _ in 0..steps {
                let proposal = match proposals.last() {
                    None => self.step(engine, newest, hidden),
                    Some(last) => match last.logits.best(1).first() {
                        Some(&token) => self.step(engine, token, &last.state),
                        None => break,
                    },
                };
                proposals.push(proposal);
            }
            proposals
        })
    }

    fn step(&self, engine: &Engine, token: u32, state: &[f32]) -> Proposal {
        let (isa, eps) = (engine.instruction_set(), self.config.rms_norm_eps);
        let scale = (self.config.backbone_hidden_size as f32).sqrt();
        let mut input: Vec<f32> = engine.model().embed.row(token as usize).iter().map(|e| e * scale).collect();
        input.extend_from_slice(state);
        let mut x = multiply(isa, &self.pre_projection, &input);
        for layer in &self.layers {
            let attended = self.attention(layer, isa, &x, engine);
            layer.block.add_attention(isa, &mut x, &attended, eps, Marks::default());
            let y = ops::normed(&x, &layer.block.pre_feedforward_norm, eps);
            let product = layer.block.mlp_product(isa, &y);
            layer.block.add_mlp(isa, &mut x, &product, eps, Marks::default());
            layer.block.scale(&mut x);
        }
        let out = ops::normed(&x, &self.final_norm, eps);
        Proposal { state: multiply(isa, &self.post_projection, &out), logits: self.score(isa, &out) }
    }

    fn attention(&self, layer: &Layer, isa: Isa, x: &[f32], engine: &Engine) -> Vec<f32> {
        let (dim, eps) = (layer.config.head_dim, self.config.rms_norm_eps);
        // The target's cache ends with the position before the newest token.
        let last = engine.len().saturating_sub(1);
        let (position, window) = match self.convention {
            Convention::Hf => (last + 1, self.config.sliding_window + 1),
            Convention::Vllm => (last, self.config.sliding_window),
        };
        let begin = match layer.config.kind {
            LayerKind::Full => 0,
            LayerKind::Sliding => engine.len().saturating_sub(window),
        };
        let y = ops::normed(x, &layer.block.input_norm, eps);
        let q = layer.block.queries(isa, &y, &layer.block.rotations(&[position]), eps, Marks::default());
        let kv: KvView = engine.kv_view(layer.source);
        let queries_per_kv = self.config.num_attention_heads / layer.config.kv_heads;
        let mut out = vec![0.0; q.len()];
        for (h, (query, out)) in q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
            attend(isa, query, kv, h / queries_per_kv, begin..engine.len(), None, out);
        }
        out
    }

    fn score(&self, isa: Isa, out: &[f32]) -> HeadLogits {
        let Some(clusters) = &self.clusters else {
            let values = multiply(isa, &self.head, out);
            return HeadLogits { tokens: (0..values.len() as u32).collect(), values };
        };
        let scores = multiply(isa, &clusters.centroids, out);
        let mut by_score: Vec<usize> = (0..scores.len()).collect();
        by_score.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        let size = clusters.order.len() / scores.len();
        let chosen = &by_score[..clusters.top_k];
        let mut tokens: Vec<u32> =
            chosen.iter().flat_map(|&c| &clusters.order[c * size..(c + 1) * size]).copied().collect();
        tokens.sort_unstable();
        let values = tokens.iter().map(|&t| isa.dot(&self.head.row(t as usize), out)).collect();
        HeadLogits { tokens, values }
    }
}

impl Drafter for MtpDrafter {
    fn name(&self) -> &'static str {
        "mtp"
    }

    fn draft(&mut self, context: &DraftContext, shape: &Shape) -> Result<Draft> {
        let Some(&newest) = context.tokens.last() else { return Ok(Draft::default()) };
        let proposals = self.round(context.engine, newest, context.hidden, shape.depth());
        Ok(Draft { ranked: proposals.iter().map(|p| p.logits.best(1 + MAX_BRANCHES)).collect() })
    }
}

/// The target layer that each drafter layer reads, or why the two do not fit.
fn bind(dir: &Path, config: &AssistantConfig, target: &Model) -> Result<Vec<usize>> {
    let t = target.config();
    let misfit =
        |what: String, drafter: String, target: String| Error::Drafter { path: dir.into(), what, drafter, target };
    let sizes = |what: &str, a: usize, b: usize| match a == b {
        true => Ok(()),
        false => Err(misfit(what.into(), a.to_string(), b.to_string())),
    };
    sizes("hidden size of the target (backbone_hidden_size)", config.backbone_hidden_size, t.hidden_size)?;
    sizes("vocab_size", config.vocab_size, t.vocab_size)?;
    let own = &t.layers[..t.first_kv_shared()];
    let bind_layer = |(l, layer): (usize, &LayerConfig)| {
        let kind = layer.kind.as_str();
        let Some(source) = own.iter().rposition(|o| o.kind == layer.kind) else {
            let none = format!("no {kind} layer has keys and values of its own");
            return Err(misfit(format!("layer {l}"), kind.to_string(), none));
        };
        sizes(&format!("head size of {kind} layers"), layer.head_dim, own[source].head_dim)?;
        sizes(&format!("key/value heads of {kind} layers"), layer.kv_heads, own[source].kv_heads)?;
        Ok(source)
    };
    config.layers.iter().enumerate().map(bind_layer).collect()
}

fn clusters(
    dir: &Path,
    config: &AssistantConfig,
    files: &TensorFiles,
    loader: &Loader,
    wanted: Option<usize>,
) -> Result<Option<Clusters>> {
    // Fields for centroids may stand in a configuration whose checkpoint has none: the tensors decide.
    let has = files.has(names::TOKEN_ORDERING);
    let path: PathBuf = dir.join("config.json");
    let refuse = |expected: String| {
        Err(Error::Field {
            path: path.clone(),
            field: "--centroids".into(),
            expected,
            found: wanted.unwrap_or(0).to_string(),
        })
    };
    let sizes = match (config.centroids, has, wanted) {
        (_, _, Some(0)) => return Ok(None),
        (Some(sizes), true, _) => sizes,
        (_, _, None) => return Ok(None),
        (_, _, Some(_)) => return refuse("0, since this drafter has no clustered head".into()),
    };
    let top_k = wanted.unwrap_or(sizes.top_k);
    if top_k > sizes.count {
        return refuse(format!("at most {}, the number of clusters", sizes.count));
    }
    let vocab = config.vocab_size;
    let tensor = files.require(names::TOKEN_ORDERING, || format!("I64 [{vocab}]"))?;
    tensor.expect_shape(&[vocab])?;
    if tensor.dtype != Dtype::I64 {
        return Err(tensor.mismatch("I64"));
    }
    let mut seen = vec![false; vocab];
    let mut order = Vec::with_capacity(vocab);
    for (i, id) in tensor.bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).enumerate() {
        let slot = usize::try_from(id).ok().and_then(|id| seen.get_mut(id));
        match slot {
            Some(seen) if !*seen => *seen = true,
            _ => {
                let reason = format!("entry {i} is {id}; the tensor must hold every token id once");
                return Err(loader.inconsistent(names::TOKEN_ORDERING, &reason));
            }
        }
        order.push(id as u32);
    }
    let centroids = loader.linear(names::CENTROIDS, sizes.count, config.hidden_size)?;
    Ok(Some(Clusters { centroids, order, top_k }))
}
