//! One pass: rows of tokens in, final hidden states and logits out.
//!
//! The text follows the specification section by section: inputs (3), layer (4), attention (5), head (6).

use std::ops::Range;

use kernels::cpu::{Isa, attend, matmul};

use super::kv::KvCache;
use super::ops::{self, Rotation};
use crate::config::{LayerConfig, LayerKind, ModelConfig};
use crate::model::{LayerWeights, Model, Weights};

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

/// The rows that are still being computed: their residual streams, per-layer inputs and positions.
struct Rows {
    /// `[rows, hidden]`.
    x: Vec<f32>,
    /// `[rows, layers * ple]`.
    ple: Vec<f32>,
    positions: Vec<usize>,
}

/// Appends `tokens` to the sequence in `kv` and computes logits for those in `wanted` (indices into `tokens`).
///
/// The caller has checked that the ids are in the vocabulary and that `wanted` lies inside `tokens`.
pub(crate) fn forward(
    isa: Isa,
    model: &Model,
    kv: &mut KvCache,
    tokens: &[u32],
    wanted: Range<usize>,
    observe: &mut Observer,
) -> Pass {
    let config = model.config();
    let pass = Computation { isa, model, config };
    let begin = kv.len();
    let mut rows = pass.inputs(tokens, begin);
    observe(Stage::Embed, &rows.x);
    observe(Stage::Ple, &rows.ple);
    for (l, weights) in model.layers.iter().enumerate() {
        if l == config.first_kv_shared() {
            // From here on no layer stores keys or values, so only the wanted rows matter.
            rows.keep(wanted.clone(), config);
        }
        pass.layer(l, weights, &mut rows, kv);
        observe(Stage::Layer(l), &rows.x);
    }
    if config.num_kv_shared_layers == 0 {
        rows.keep(wanted, config);
    }
    kv.commit(begin + tokens.len());
    let hidden = ops::normed(&rows.x, &model.final_norm, config.rms_norm_eps);
    observe(Stage::FinalNorm, &hidden);
    let mut logits = pass.multiply(model.head(), &hidden);
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
        self.positions = self.positions[wanted].to_vec();
    }
}

struct Computation<'a> {
    isa: Isa,
    model: &'a Model,
    config: &'a ModelConfig,
}

impl Computation<'_> {
    /// `x W^T` for every row of x.
    fn multiply(&self, w: &Weights, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len() / w.cols() * w.rows()];
        matmul(self.isa, &w.view(), x, &mut y);
        y
    }

    /// Section 3: scaled embeddings and per-layer inputs.
    fn inputs(&self, tokens: &[u32], begin: usize) -> Rows {
        let (config, hidden) = (self.config, self.config.hidden_size);
        let scale = (hidden as f32).sqrt();
        let mut x = Vec::with_capacity(tokens.len() * hidden);
        for &t in tokens {
            x.extend(self.model.embed.row(t as usize).iter().map(|e| e * scale));
        }
        let ple = match &self.model.ple {
            None => Vec::new(),
            Some(tables) => {
                // (rms(M e / sqrt(H)) + sqrt(P) T[token]) / sqrt(2), layer by layer.
                let (size, eps) = (config.ple_size, config.rms_norm_eps);
                let width = config.layers.len() * size;
                let (projected, looked_up) = ((hidden as f32).sqrt().recip(), (size as f32).sqrt());
                let mut ple = self.multiply(&tables.projection, &x);
                ops::each_row(&mut ple, width, 4, |r, row| {
                    let embedded = tables.embed.row(tokens[r] as usize);
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
        Rows { x, ple, positions: (begin..begin + tokens.len()).collect() }
    }

    /// Section 4: attention, MLP and per-layer input, each added to the residual stream after a norm of its own.
    fn layer(&self, l: usize, w: &LayerWeights, rows: &mut Rows, kv: &mut KvCache) {
        let eps = self.config.rms_norm_eps;
        let attended = self.attention(l, w, rows, kv);
        ops::add(&mut rows.x, &ops::normed(&attended, &w.post_attention_norm, eps));

        let y = ops::normed(&rows.x, &w.pre_feedforward_norm, eps);
        let mut gate = self.multiply(&w.gate_proj, &y);
        ops::gelu_times(&mut gate, &self.multiply(&w.up_proj, &y));
        let mlp = self.multiply(&w.down_proj, &gate);
        ops::add(&mut rows.x, &ops::normed(&mlp, &w.post_feedforward_norm, eps));

        if let Some(ple) = &w.ple {
            let (size, layers) = (self.config.ple_size, self.config.layers.len());
            let mut gate = self.multiply(&ple.gate, &rows.x);
            let inputs: Vec<f32> =
                rows.ple.chunks_exact(layers * size).flat_map(|row| &row[l * size..][..size]).copied().collect();
            ops::gelu_times(&mut gate, &inputs);
            let projected = self.multiply(&ple.projection, &gate);
            ops::add(&mut rows.x, &ops::normed(&projected, &ple.post_norm, eps));
        }
        rows.x.iter_mut().for_each(|x| *x *= w.scalar);
    }

    /// Section 5. The new keys and values are appended to the cache first, so that a row's own are the stored ones.
    fn attention(&self, l: usize, w: &LayerWeights, rows: &Rows, kv: &mut KvCache) -> Vec<f32> {
        let (config, layer) = (self.config, &self.config.layers[l]);
        let (heads, dim, eps) = (config.num_attention_heads, layer.head_dim, config.rms_norm_eps);
        let y = ops::normed(&rows.x, &w.input_norm, eps);
        let rotations: Vec<Rotation> =
            rows.positions.iter().map(|&p| Rotation::new(p, &self.model.inv_freq[l])).collect();

        if let Some(own) = &w.kv {
            let (mut k, mut v) = (self.multiply(&own.k_proj, &y), self.multiply(&own.v_proj, &y));
            for (row, rotation) in k.chunks_exact_mut(layer.kv_heads * dim).zip(&rotations) {
                for head in row.chunks_exact_mut(dim) {
                    ops::rms_norm(head, Some(&own.k_norm), eps);
                    rotation.apply(head);
                }
            }
            v.chunks_exact_mut(dim).for_each(|head| ops::rms_norm(head, None, eps));
            kv.append(l, &k, &v);
        }

        let mut q = self.multiply(&w.q_proj, &y);
        for (row, rotation) in q.chunks_exact_mut(heads * dim).zip(&rotations) {
            for head in row.chunks_exact_mut(dim) {
                ops::rms_norm(head, Some(&w.q_norm), eps);
                rotation.apply(head);
            }
        }

        let view = kv.view(config.kv_layer(l));
        let queries_per_kv = heads / layer.kv_heads;
        let longest = rows.positions.last().map_or(0, |&last| visible(layer, config, last).len());
        let mut out = vec![0.0; q.len()];
        ops::each_row(&mut out, dim, longest + 1, |i, out| {
            let (position, head) = (rows.positions[i / heads], i % heads / queries_per_kv);
            let query = &q[i * dim..][..dim];
            attend(self.isa, query, view, head, visible(layer, config, position), view.pair(position, head), out);
        });
        self.multiply(&w.o_proj, &out)
    }
}

/// Cached positions that a row sees besides itself: all earlier ones, or the last `sliding_window - 1` of them.
fn visible(layer: &LayerConfig, config: &ModelConfig, position: usize) -> Range<usize> {
    match layer.kind {
        LayerKind::Full => 0..position,
        LayerKind::Sliding => (position + 1).saturating_sub(config.sliding_window)..position,
    }
}
