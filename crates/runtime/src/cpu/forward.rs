//! One pass: rows of tokens in, final hidden states and logits out.
//!
//! The text follows the specification section by section: inputs (3), layer (4), attention (5), head (6).

use std::ops::Range;

use kernels::cpu::{Isa, attend};

use super::block::multiply;
use super::kv::KvCache;
use super::ops;
use crate::config::{LayerConfig, LayerKind, ModelConfig};
use crate::model::{LayerWeights, Model};

/// A point of the computation, for who looks at intermediate values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Scaled embedding, `[rows, hidden]`.
    Embed,
    /// Combined per-layer inputs, `[rows, layers, ple]`.
    Ple,
    /// The residual stream after this layer, `[rows, hidden]`. Rows without wanted logits are gone from the first KV-shared
    /// layer on.
    Layer(usize),
    /// After the final norm, `[wanted rows, hidden]`.
    FinalNorm,
}

/// Called with the values at each stage.
pub type Observer<'a> = dyn FnMut(Stage, &[f32]) + 'a;

/// What a pass computes for the wanted rows.
pub(crate) struct Pass {
    /// Final hidden states after the last norm, `[wanted rows, hidden]`.
    pub hidden: Vec<f32>,
    /// Logits after the softcap, `[wanted rows, head rows]`.
    pub logits: Vec<f32>,
}

/// The rows of a pass. A row is a token at a position; what it attends to besides itself are the positions before it in the
/// sequence, chain rows of the same pass included.
pub(crate) struct Batch<'a> {
    /// Continues the sequence, one position after the other.
    pub chain: &'a [u32],
    /// Branches: (position, token), each in a side slot. A branch at position p replaces the chain's token there.
    pub side: &'a [(usize, u32)],
    /// Rows whose logits are computed: indices into the chain, the side rows counted on.
    pub wanted: Range<usize>,
}

/// The rows that are still being computed: their residual streams, per-layer inputs and places.
struct Rows {
    /// `[rows, hidden]`.
    x: Vec<f32>,
    /// `[rows, layers * ple]`.
    ple: Vec<f32>,
    places: Vec<Place>,
}

/// Where a row stands.
#[derive(Clone, Copy)]
struct Place {
    position: usize,
    /// Side slot that holds its key and value; `None` for a row of the sequence.
    slot: Option<usize>,
}

/// Appends the chain of `batch` to the sequence in `kv`, puts its side rows into side slots, and computes the wanted logits.
///
/// The caller has checked that ids are in the vocabulary, that side rows stand inside the chain, and that `wanted` exists.
pub(crate) fn forward(isa: Isa, model: &Model, kv: &mut KvCache, batch: Batch, observe: &mut Observer) -> Pass {
    let config = model.config();
    let pass = Computation { isa, model, config };
    let (begin, wanted) = (kv.len(), batch.wanted.clone());
    let mut rows = pass.inputs(&batch, begin);
    observe(Stage::Embed, &rows.x);
    observe(Stage::Ple, &rows.ple);
    for (l, weights) in model.layers.iter().enumerate() {
        if l == config.first_kv_shared() {
            // From here on no layer stores keys or values, so only the wanted rows matter.
            rows.keep(wanted.clone(), config);
        }
        pass.layer(l, weights, &mut rows, kv, batch.chain.len());
        observe(Stage::Layer(l), &rows.x);
    }
    if config.num_kv_shared_layers == 0 {
        rows.keep(wanted, config);
    }
    kv.commit(begin + batch.chain.len());
    let hidden = ops::normed(&rows.x, &model.final_norm, config.rms_norm_eps);
    observe(Stage::FinalNorm, &hidden);
    let mut logits = multiply(isa, model.head(), &hidden);
    if let Some(cap) = config.final_logit_softcapping {
        ops::each_row(&mut logits, model.head().rows(), 50, |_, row| ops::softcap(row, cap));
    }
    Pass { hidden, logits }
}

impl Rows {
    fn keep(&mut self, wanted: Range<usize>, config: &ModelConfig) {
        let width = config.hidden_size;
        self.x = self.x[wanted.start * width..wanted.end * width].to_vec();
        let width = config.layers.len() * config.ple_size;
        self.ple = self.ple[wanted.start * width..wanted.end * width].to_vec();
        self.places = self.places[wanted].to_vec();
    }
}

struct Computation<'a> {
    isa: Isa,
    model: &'a Model,
    config: &'a ModelConfig,
}

impl Computation<'_> {
    /// Section 3: scaled embeddings and per-layer inputs.
    fn inputs(&self, batch: &Batch, begin: usize) -> Rows {
        let (config, hidden) = (self.config, self.config.hidden_size);
        let tokens: Vec<u32> = batch.chain.iter().copied().chain(batch.side.iter().map(|s| s.1)).collect();
        let chain = (0..batch.chain.len()).map(|i| Place { position: begin + i, slot: None });
        let side = batch.side.iter().enumerate().map(|(i, s)| Place { position: s.0, slot: Some(i) });
        let scale = (hidden as f32).sqrt();
        let mut x = Vec::with_capacity(tokens.len() * hidden);
        for &t in &tokens {
            x.extend(self.model.embed.row(t as usize).iter().map(|e| e * scale));
        }
        let ple = match &self.model.ple {
            None => Vec::new(),
            Some(tables) => {
                // (rms(M e / sqrt(H)) + sqrt(P) T[token]) / sqrt(2), layer by layer.
                let (size, eps) = (config.ple_size, config.rms_norm_eps);
                let width = config.layers.len() * size;
                let (projected, looked_up) = ((hidden as f32).sqrt().recip(), (size as f32).sqrt());
                let mut ple = multiply(self.isa, &tables.projection, &x);
                ops::each_row(&mut ple, width, 4, |r, row| {
                    let embedded = tables.look_up(tokens[r], size);
                    for (context, token) in row.chunks_exact_mut(size).zip(embedded.chunks_exact(size)) {
                        context.iter_mut().for_each(|c| *c *= projected);
                        ops::rms_norm(context, Some(&tables.norm), eps);
                        for (c, t) in context.iter_mut().zip(token) {
                            *c = (*c + t * looked_up) * std::f32::consts::FRAC_1_SQRT_2;
                        }
                    }
                });
                ple
            }
        };
        Rows { x, ple, places: chain.chain(side).collect() }
    }

    /// Section 4: attention, MLP and per-layer input, each added to the residual stream after a norm of its own.
    fn layer(&self, l: usize, w: &LayerWeights, rows: &mut Rows, kv: &mut KvCache, chain: usize) {
        let (isa, eps) = (self.isa, self.config.rms_norm_eps);
        let attended = self.attention(l, w, rows, kv, chain);
        w.block.add_attention(isa, &mut rows.x, &attended, eps);
        w.block.add_mlp(isa, &mut rows.x, eps);
        if let Some(ple) = &w.ple {
            let (size, layers) = (self.config.ple_size, self.config.layers.len());
            let mut gate = multiply(isa, &ple.gate, &rows.x);
            let inputs: Vec<f32> =
                rows.ple.chunks_exact(layers * size).flat_map(|row| &row[l * size..][..size]).copied().collect();
            ops::gelu_times(&mut gate, &inputs);
            let projected = multiply(isa, &ple.projection, &gate);
            ops::add(&mut rows.x, &ops::normed(&projected, &ple.post_norm, eps));
        }
        w.block.scale(&mut rows.x);
    }

    /// Section 5. The new keys and values are stored first, so that a row's own are the stored ones.
    fn attention(&self, l: usize, w: &LayerWeights, rows: &Rows, kv: &mut KvCache, chain: usize) -> Vec<f32> {
        let (isa, config, layer) = (self.isa, self.config, &self.config.layers[l]);
        let (heads, dim, eps) = (config.num_attention_heads, layer.head_dim, config.rms_norm_eps);
        let y = ops::normed(&rows.x, &w.block.input_norm, eps);
        let positions: Vec<usize> = rows.places.iter().map(|p| p.position).collect();
        let rotations = w.block.rotations(&positions);

        if let Some(own) = &w.kv {
            let (mut k, mut v) = (multiply(isa, &own.k_proj, &y), multiply(isa, &own.v_proj, &y));
            for (row, rotation) in k.chunks_exact_mut(layer.kv_heads * dim).zip(&rotations) {
                for head in row.chunks_exact_mut(dim) {
                    ops::rms_norm(head, Some(&own.k_norm), eps);
                    rotation.apply(head);
                }
            }
            v.chunks_exact_mut(dim).for_each(|head| ops::rms_norm(head, None, eps));
            kv.append(l, &k, &v, chain);
        }

        let q = w.block.queries(isa, &y, &rotations, eps);
        let source = config.kv_layer(l);
        let (cached, side) = (kv.view(source), kv.side(source));
        let queries_per_kv = heads / layer.kv_heads;
        let longest = positions.iter().max().map_or(0, |&p| visible(layer, config, p).len());
        let mut out = vec![0.0; q.len()];
        ops::each_row(&mut out, dim, longest + 1, |i, out| {
            let (place, head) = (rows.places[i / heads], i % heads / queries_per_kv);
            let own = match place.slot {
                None => cached.pair(place.position, head),
                Some(slot) => side.pair(slot, head),
            };
            let visible = visible(layer, config, place.position);
            attend(isa, &q[i * dim..][..dim], cached, head, visible, Some(own), out);
        });
        out
    }
}

/// Cached positions that a row sees besides itself: all earlier ones, or the last `sliding_window - 1` of them.
fn visible(layer: &LayerConfig, config: &ModelConfig, position: usize) -> Range<usize> {
    match layer.kind {
        LayerKind::Full => 0..position,
        LayerKind::Sliding => (position + 1).saturating_sub(config.sliding_window)..position,
    }
}
