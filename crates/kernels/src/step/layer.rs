//! A decoder layer as launches, in order: seven for 1 to 16 rows, of which one is cooperative.
//!
//! Norms and the residual stream have no launches of their own ([`crate::gemm`]): what a sublayer adds stays a product, with its sums of
//! squares, until the next product's prologue norms and adds it. So a [`Pass`] remembers what is still to be added.

use super::{
    MOST_ROWS, Rows, StepError,
    attention::{Attention, AttentionScratch},
    kv::KvCache,
    require, require_rows,
    rows::{AddNormed, Heads, Rotations},
};
use crate::{
    device::{Buffer, Device, DeviceError, Launch},
    gemm::{Delta, GemmError, Input, Linear, Output, Pair, Scratch, Stream},
    layout::TILE_CHANNELS,
};

/// Weights of a layer's norms over the residual stream, bf16 `[hidden]`.
#[derive(Clone, Copy)]
pub struct Norms<'a> {
    /// In front of queries, keys and values.
    pub input: &'a Buffer,
    /// Of what attention adds.
    pub after_attention: &'a Buffer,
    /// In front of gate and up.
    pub before_mlp: &'a Buffer,
    /// Of what the MLP adds.
    pub after_mlp: &'a Buffer,
    /// Of what the per-layer input adds.
    pub after_per_layer: &'a Buffer,
}

/// A layer on a device.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// Its number, which says where its per-layer inputs are.
    pub number: usize,
    /// Queries, keys and values as one matrix; queries alone where the layer reads another one's keys.
    pub qkv: &'a Linear,
    /// Behind attention.
    pub o: &'a Linear,
    /// [`crate::layout::Tiles::gated`].
    pub gate_up: &'a Linear,
    /// From the MLP's inner width.
    pub down: &'a Linear,
    /// From the residual stream to the width of a per-layer input.
    pub per_layer_gate: &'a Linear,
    /// And back.
    pub per_layer_projection: &'a Linear,
    /// Norms over the residual stream.
    pub norms: Norms<'a>,
    /// Weight of a query head's norm, f32 `[head_dim]`.
    pub query_weight: &'a Buffer,
    /// Weight of a key head's norm, f32 `[head_dim]`; `None` where the layer reads another one's keys.
    pub key_weight: Option<&'a Buffer>,
    /// Of this kind of layer.
    pub rotations: &'a Rotations,
    /// Query heads.
    pub heads: usize,
    /// Layer of the cache that it reads, and where it has keys of its own also writes.
    pub kv_layer: usize,
    /// Multiplies the stream at the layer's end.
    pub scalar: f32,
}

/// Widths of a model's activations: the widest of all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Widths {
    /// The residual stream.
    pub hidden: usize,
    /// Queries, keys and values together.
    pub projected: usize,
    /// Query heads together.
    pub attended: usize,
    /// Inside the MLP.
    pub inner: usize,
    /// A layer's per-layer input.
    pub per_layer: usize,
}

/// What lies between a pass's launches, for up to 16 rows.
pub struct Activations {
    widths: Widths,
    streams: [Buffer; 2],
    /// Products to be normed and added, and their sums of squares; neighbours in time differ.
    deltas: [(Buffer, Buffer); 2],
    projected: Buffer,
    queries: Buffer,
    attended: Buffer,
    gated: Buffer,
    middle: Buffer,
    rounded: Buffer,
}

impl Activations {
    /// Room on a device.
    pub fn new(device: &Device, widths: Widths) -> Result<Activations, DeviceError> {
        let room = |name: &str, width: usize, bytes: usize| device.allocate(name, MOST_ROWS * width * bytes);
        let Widths { hidden, projected, attended, inner, per_layer } = widths;
        let stream = || room("stream", hidden, 4);
        let delta = || Ok((room("delta", hidden, 4)?, room("delta.squares", hidden.div_ceil(TILE_CHANNELS), 4)?));
        Ok(Activations {
            widths,
            streams: [stream()?, stream()?],
            deltas: [delta()?, delta()?],
            projected: room("projected", projected, 4)?,
            queries: room("queries", attended, 2)?,
            attended: room("attended", attended, 2)?,
            gated: room("gated", inner, 2)?,
            middle: room("per-layer", per_layer, 2)?,
            rounded: room("rounded", hidden, 2)?,
        })
    }

    /// The residual stream that a pass begins with, f32 `[16, hidden]`: where embeddings go.
    pub fn stream(&self) -> &Buffer {
        &self.streams[0]
    }

    /// bf16 `[16, hidden]`: embeddings at a pass's beginning, hidden states after the last norm at its end.
    pub fn rounded(&self) -> &Buffer {
        &self.rounded
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Buffer> {
        let deltas = self.deltas.iter().flat_map(|(y, squares)| [y, squares]);
        let others = [&self.projected, &self.queries, &self.attended, &self.gated, &self.middle, &self.rounded];
        self.streams.iter().chain(deltas).chain(others)
    }
}

/// A launch, and which one of a layer or a step it is.
#[derive(Clone)]
pub struct Planned {
    /// Its name in tables and traces.
    pub op: &'static str,
    /// What runs.
    pub launch: Launch,
}

/// What all layers of a pass share.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// Where it runs.
    pub device: &'a Device,
    /// Between launches.
    pub activations: &'a Activations,
    /// Of matrix products.
    pub scratch: &'a Scratch,
    /// Of attention.
    pub attention: &'a AttentionScratch,
    /// Keys and values.
    pub kv: &'a KvCache,
    /// The rows.
    pub table: &'a Rows,
    /// Per-layer inputs, f32 `[rows, layers, size]`.
    pub per_layer: &'a Buffer,
    /// Layers in it.
    pub layers: usize,
    /// Rows.
    pub rows: usize,
    /// Inside every root.
    pub eps: f32,
}

/// A pass through the layers, planned from the first to the last.
pub struct Pass<'a> {
    with: Surroundings<'a>,
    /// Which of the streams is whole but for `pending`.
    stream: usize,
    /// Norm and scalar of the first delta, which is still to be added.
    pending: Option<(&'a Buffer, f32)>,
}

impl<'a> Pass<'a> {
    /// From the embeddings in [`Activations::stream`].
    pub fn new(with: Surroundings<'a>) -> Result<Pass<'a>, StepError> {
        require_rows(with.rows)?;
        Ok(Pass { with, stream: 0, pending: None })
    }

    /// The stream with delta `index` added, which is `norm`ed and `scaled`, in front of a product with a norm of its own.
    fn take(&mut self, index: usize, added: Option<(&'a Buffer, f32)>, norm: Option<&'a Buffer>) -> Stream<'a> {
        let activations = self.with.activations;
        let stream = &activations.streams[self.stream];
        let (y, squares) = &activations.deltas[index];
        let delta = added.map(|(norm, scalar)| Delta { y, squares, norm, scalar });
        let out = added.map(|_| &activations.streams[1 - self.stream]);
        if added.is_some() {
            self.stream = 1 - self.stream;
        }
        Stream { stream, delta, norm, eps: self.with.eps, out }
    }

    /// The next layer's launches: seven, or eight where the per-layer matrices are of different kinds ([`Pair::is_one`]).
    ///
    /// # Errors
    /// What any of them refuses.
    pub fn layer(&mut self, layer: &Layer<'a>) -> Result<Vec<Planned>, GemmError> {
        let with = self.with;
        let Surroundings { activations, scratch, rows, kv, table, eps, .. } = with;
        let norms = layer.norms;
        let [(first, first_squares), (second, second_squares)] = &activations.deltas;

        let (pending, own) = (self.pending.take(), layer.key_weight.is_some());
        let stream = self.take(0, pending, Some(norms.input));
        let heads = Heads {
            projected: &activations.projected,
            query_weight: layer.query_weight,
            key_weight: layer.key_weight,
            rotations: layer.rotations,
            heads: layer.heads,
            kv,
            layer: layer.kv_layer,
            table,
            rows,
            queries: &activations.queries,
            eps,
        };
        let qkv = layer.qkv.launch(Input::Stream(stream), rows, Output::Heads(heads), scratch)?;
        let attention = Attention {
            queries: &activations.queries,
            heads: layer.heads,
            kv,
            layer: layer.kv_layer,
            window: kv.layer(layer.kv_layer)?.shape.window,
            table,
            rows,
            out: &activations.attended,
        };
        let multiprocessors = with.device.properties().multiprocessors;
        let [partials, combine] = attention.launches(with.attention, multiprocessors)?;
        let attended = Input::Rows(&activations.attended);
        let o = layer.o.launch(attended, rows, Output::Squares(first, first_squares), scratch)?;

        let stream = self.take(0, Some((norms.after_attention, 1.0)), Some(norms.before_mlp));
        let gated = Output::Gated(&activations.gated, layer.down.operands());
        let gate_up = layer.gate_up.launch(Input::Stream(stream), rows, gated, scratch)?;
        let inner = layer.down.rows(&activations.gated);
        let down = layer.down.launch(inner, rows, Output::Squares(second, second_squares), scratch)?;

        let size = layer.per_layer_gate.channels();
        let last = format!("less than the {} of the per-layer inputs", with.layers);
        require(layer.number < with.layers, "number of the layer", layer.number, last)?;
        let pair = Pair {
            first: layer.per_layer_gate,
            second: layer.per_layer_projection,
            stream: self.take(1, Some((norms.after_mlp, 1.0)), None),
            factor: with.per_layer,
            offset: layer.number * size,
            stride: with.layers * size,
            middle: &activations.middle,
            y: first,
            squares: first_squares,
        };
        self.pending = Some((norms.after_per_layer, layer.scalar));

        let planned = |op, launch| Planned { op, launch };
        let mut launches = vec![
            planned(if own { "q, k, v and heads" } else { "q and heads" }, qkv),
            planned("attention", partials),
            planned("merge of chunks", combine),
            planned("o", o),
            planned("gate and up", gate_up),
            planned("down", down),
        ];
        if pair.is_one() {
            launches.push(planned("per-layer gate and projection", pair.launch(rows, scratch)?));
        } else {
            let [gate, projection] = pair.launches(rows, scratch)?;
            launches.extend([planned("per-layer gate", gate), planned("per-layer projection", projection)]);
        }
        Ok(launches)
    }

    /// What the last layer still adds, and the last norm: hidden states in [`Activations::rounded`], for the head and the drafter.
    /// `last` is the last layer's [`Norms::after_per_layer`] and `norm` the model's own, both f32 `[hidden]`.
    ///
    /// # Errors
    /// Before the first layer there is nothing to add.
    pub fn end(self, last: &Buffer, norm: &Buffer) -> Result<Planned, StepError> {
        let Surroundings { activations, rows, eps, .. } = self.with;
        let layers = usize::from(self.pending.is_some());
        require(layers > 0, "layers of the pass", layers, "at least one")?;
        let add = AddNormed {
            added: &activations.deltas[0].0,
            weight: last,
            x: &activations.streams[self.stream],
            scalar: self.pending.map_or(1.0, |(_, scalar)| scalar),
            next: Some(norm),
            y: &activations.rounded,
            rows,
            width: activations.widths.hidden,
            eps,
        };
        Ok(Planned { op: "last norm", launch: add.launch()? })
    }
}
