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
use crate::op_clock::{Marks, Op, OpClock};

/// A point of the computation, for who looks at intermediate values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Scaled embedding, `[rows, hidden]`. The PLE model projection reads it.
    Embed,
    /// Combined per-layer inputs, `[rows, layers, ple]`; nothing where the model has none.
    Ple,
    /// What linears of this layer read. Rows without wanted logits are gone from the first KV-shared layer on.
    Input(usize, LayerInput),
    /// The residual stream after this layer, `[rows, hidden]`. Rows go as for [`Stage::Input`].
    Layer(usize),
    /// After the final norm, `[wanted rows, hidden]`. The head reads it.
    FinalNorm,
}

/// What linears of a layer read, in the order of the computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerInput {
    /// The normed residual stream, `[rows, hidden]`: queries, keys, values.
    Attention,
    /// Output of attention, `[rows, heads * head_dim]`: `o_proj`.
    Attended,
    /// The normed residual stream after attention, `[rows, hidden]`: gate and up.
    Mlp,
    /// `gelu(gate) * up`, `[rows, intermediate]`: down.
    MlpProduct,
    /// The residual stream after the MLP, `[rows, hidden]`: the gate of the per-layer input.
    Ple,
    /// The gated per-layer input, `[rows, ple]`: its projection.
    PleProduct,
}

impl LayerInput {
    /// The linears that read it.
    pub fn linears(self) -> &'static [&'static str] {
        match self {
            LayerInput::Attention => &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            LayerInput::Attended => &["self_attn.o_proj"],
            LayerInput::Mlp => &["mlp.gate_proj", "mlp.up_proj"],
            LayerInput::MlpProduct => &["mlp.down_proj"],
            LayerInput::Ple => &["per_layer_input_gate"],
            LayerInput::PleProduct => &["per_layer_projection"],
        }
    }
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
pub(crate) struct Rows {
    tokens: Vec<u32>,
    places: Vec<Place>,
    /// Rows of the sequence; the others are branches.
    chain: usize,
    /// `[rows, hidden]`.
    x: Vec<f32>,
    /// `[rows, layers * ple]`.
    ple: Vec<f32>,
    /// What the next linears read, where that is not the residual stream.
    input: Vec<f32>,
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
pub(crate) fn forward(
    isa: Isa,
    model: &Model,
    kv: &mut KvCache,
    batch: Batch,
    clock: Option<&OpClock>,
    observe: &mut Observer,
) -> Pass {
    let config = model.config();
    let marks = Marks::begin(clock);
    let pass = Computation { isa, model, config, marks };
    let begin = kv.len();
    let mut rows = pass.rows(&batch, begin);
    marks.mark(Op::Embedding);
    let mut stage = Stage::Embed;
    while stage != Stage::FinalNorm {
        observe(stage, rows.values(stage));
        if stage == Stage::Layer(config.first_kv_shared() - 1) {
            // From here on no layer stores keys or values, so only the wanted rows matter.
            rows.keep(batch.wanted.clone(), config);
        }
        stage = pass.advance(stage, &mut rows, kv);
    }
    kv.commit(begin + batch.chain.len());
    let hidden = rows.input;
    observe(stage, &hidden);
    let mut logits = multiply(isa, model.head(), &hidden);
    if let Some(cap) = config.final_logit_softcapping {
        ops::each_row(&mut logits, model.head().rows(), 50, |_, row| ops::softcap(row, cap));
    }
    marks.mark(Op::Head);
    Pass { hidden, logits }
}

impl Rows {
    /// The values of the stage that was reached last.
    pub fn values(&self, stage: Stage) -> &[f32] {
        match stage {
            Stage::Embed | Stage::Layer(_) | Stage::Input(_, LayerInput::Ple) => &self.x,
            Stage::Ple => &self.ple,
            Stage::Input(..) | Stage::FinalNorm => &self.input,
        }
    }

    /// Drops all rows but `wanted`.
    fn keep(&mut self, wanted: Range<usize>, config: &ModelConfig) {
        let width = config.hidden_size;
        self.x = self.x[wanted.start * width..wanted.end * width].to_vec();
        let width = config.layers.len() * config.ple_size;
        self.ple = self.ple[wanted.start * width..wanted.end * width].to_vec();
        self.tokens = self.tokens[wanted.clone()].to_vec();
        self.places = self.places[wanted].to_vec();
    }
}

pub(crate) struct Computation<'a> {
    pub isa: Isa,
    pub model: &'a Model,
    pub config: &'a ModelConfig,
    pub marks: Marks<'a>,
}

impl Computation<'_> {
    /// The rows of a batch at [`Stage::Embed`]; the chain begins at position `begin`.
    pub fn rows(&self, batch: &Batch, begin: usize) -> Rows {
        let hidden = self.config.hidden_size;
        let tokens: Vec<u32> = batch.chain.iter().copied().chain(batch.side.iter().map(|s| s.1)).collect();
        let chain = (0..batch.chain.len()).map(|i| Place { position: begin + i, slot: None });
        let side = batch.side.iter().enumerate().map(|(i, s)| Place { position: s.0, slot: Some(i) });
        let scale = (hidden as f32).sqrt();
        let mut x = Vec::with_capacity(tokens.len() * hidden);
        for &t in &tokens {
            x.extend(self.model.embed.row(t as usize).iter().map(|e| e * scale));
        }
        let places = chain.chain(side).collect();
        Rows { tokens, places, chain: batch.chain.len(), x, ple: Vec::new(), input: Vec::new() }
    }

    /// Computes from one stage to the next. Keys and values of the rows go into `kv` on the way.
    pub fn advance(&self, stage: Stage, rows: &mut Rows, kv: &mut KvCache) -> Stage {
        match stage {
            Stage::Embed => {
                rows.ple = self.per_layer_inputs(&rows.tokens, &rows.x);
                self.marks.mark(Op::PerLayer);
                Stage::Ple
            }
            Stage::Ple => self.enter(0, rows),
            Stage::Input(l, input) => self.inside(l, input, rows, kv),
            Stage::Layer(l) => self.enter(l + 1, rows),
            Stage::FinalNorm => Stage::FinalNorm,
        }
    }

    /// Section 3: `(rms(M e / sqrt(H)) + sqrt(P) T[token]) / sqrt(2)`, layer by layer.
    fn per_layer_inputs(&self, tokens: &[u32], x: &[f32]) -> Vec<f32> {
        let Some(tables) = &self.model.ple else { return Vec::new() };
        let (size, eps) = (self.config.ple_size, self.config.rms_norm_eps);
        let width = self.config.layers.len() * size;
        let (projected, looked_up) = ((self.config.hidden_size as f32).sqrt().recip(), (size as f32).sqrt());
        let mut ple = multiply(self.isa, &tables.projection, x);
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

    /// To the first stage of layer `l`, or past the last one.
    fn enter(&self, l: usize, rows: &mut Rows) -> Stage {
        let (norm, stage) = match self.model.layers.get(l) {
            Some(w) => (&w.block.input_norm, Stage::Input(l, LayerInput::Attention)),
            None => (&self.model.final_norm, Stage::FinalNorm),
        };
        rows.input = ops::normed(&rows.x, norm, self.config.rms_norm_eps);
        self.marks.mark(Op::Norms);
        stage
    }

    /// Section 4: attention, MLP and per-layer input, each added to the residual stream after a norm of its own.
    fn inside(&self, l: usize, input: LayerInput, rows: &mut Rows, kv: &mut KvCache) -> Stage {
        let (isa, eps, w, marks) = (self.isa, self.config.rms_norm_eps, &self.model.layers[l], self.marks);
        let next = match (input, &w.ple) {
            (LayerInput::Attention, _) => {
                rows.input = self.attention(l, w, rows, kv);
                LayerInput::Attended
            }
            (LayerInput::Attended, _) => {
                w.block.add_attention(isa, &mut rows.x, &rows.input, eps, marks);
                rows.input = ops::normed(&rows.x, &w.block.pre_feedforward_norm, eps);
                marks.mark(Op::Norms);
                LayerInput::Mlp
            }
            (LayerInput::Mlp, _) => {
                rows.input = w.block.mlp_product(isa, &rows.input);
                marks.mark(Op::GateUp);
                LayerInput::MlpProduct
            }
            (LayerInput::MlpProduct, ple) => {
                w.block.add_mlp(isa, &mut rows.x, &rows.input, eps, marks);
                if ple.is_none() {
                    w.block.scale(&mut rows.x);
                    return Stage::Layer(l);
                }
                LayerInput::Ple
            }
            (LayerInput::Ple, Some(ple)) => {
                let (size, layers) = (self.config.ple_size, self.config.layers.len());
                let mut gate = multiply(isa, &ple.gate, &rows.x);
                let inputs: Vec<f32> =
                    rows.ple.chunks_exact(layers * size).flat_map(|row| &row[l * size..][..size]).copied().collect();
                ops::gelu_times(&mut gate, &inputs);
                rows.input = gate;
                marks.mark(Op::PerLayer);
                LayerInput::PleProduct
            }
            (LayerInput::PleProduct, Some(ple)) => {
                let projected = multiply(isa, &ple.projection, &rows.input);
                ops::add(&mut rows.x, &ops::normed(&projected, &ple.post_norm, eps));
                w.block.scale(&mut rows.x);
                marks.mark(Op::PerLayer);
                return Stage::Layer(l);
            }
            // Never reached: without per-layer inputs the layer ends before them.
            (LayerInput::Ple | LayerInput::PleProduct, None) => return Stage::Layer(l),
        };
        Stage::Input(l, next)
    }

    /// Section 5. The new keys and values are stored first, so that a row's own are the stored ones.
    fn attention(&self, l: usize, w: &LayerWeights, rows: &Rows, kv: &mut KvCache) -> Vec<f32> {
        let (isa, config, layer) = (self.isa, self.config, &self.config.layers[l]);
        let (heads, dim, eps) = (config.num_attention_heads, layer.head_dim, config.rms_norm_eps);
        let y = &rows.input;
        let positions: Vec<usize> = rows.places.iter().map(|p| p.position).collect();
        let rotations = w.block.rotations(&positions);
        self.marks.mark(Op::Norms);

        if let Some(own) = &w.kv {
            let (mut k, mut v) = (multiply(isa, &own.k_proj, y), multiply(isa, &own.v_proj, y));
            self.marks.mark(Op::Qkv);
            for (row, rotation) in k.chunks_exact_mut(layer.kv_heads * dim).zip(&rotations) {
                for head in row.chunks_exact_mut(dim) {
                    ops::rms_norm(head, Some(&own.k_norm), eps);
                    rotation.apply(head);
                }
            }
            v.chunks_exact_mut(dim).for_each(|head| ops::rms_norm(head, None, eps));
            self.marks.mark(Op::Norms);
            kv.append(l, &k, &v, rows.chain);
            self.marks.mark(Op::Attention);
        }

        let q = w.block.queries(isa, y, &rotations, eps, self.marks);
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
        self.marks.mark(Op::Attention);
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
