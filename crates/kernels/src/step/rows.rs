//! What a step does with rows of activations between matrix products (`kernels/rows.cuh`): one function a launch.
//!
//! The residual stream and what matrix products give are f32, what they read is bf16. Weights of norms are f32.

use super::{
    MOST_ROWS, Rows, StepError, int,
    kv::{KvCache, KvShape, KvStorage},
    require, require_bytes, require_rows,
};
use crate::device::{Argument, Buffer, Device, DeviceError, Launch};

/// As in the source.
const THREADS: usize = 256;
const WARPS: usize = THREADS / 32;
/// Widest row that a norm takes: it lies in shared memory.
pub const MOST_WIDTH: usize = 16384;
/// In [`Tokens`]: a row that stands for no token, since a drafter proposed fewer. It is embedded as token 0 and never accepted.
pub const NO_TOKEN: u32 = u32::MAX;

/// The tokens of a step's rows on the device, u32 `[16]`.
#[derive(Clone)]
pub struct Tokens(Buffer);

impl Tokens {
    /// Room for 16 tokens.
    pub fn new(device: &Device) -> Result<Tokens, DeviceError> {
        Ok(Tokens(device.allocate("tokens", MOST_ROWS * 4)?))
    }

    /// Writes tokens from the host.
    pub fn set(&self, tokens: &[u32]) -> Result<(), StepError> {
        require_rows(tokens.len())?;
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        Ok(self.0.write(0, &bytes)?)
    }

    /// The tokens, for kernels.
    pub fn buffer(&self) -> &Buffer {
        &self.0
    }
}

/// A table with a row a token, bf16 `[vocabulary, width]`.
#[derive(Clone)]
pub struct Table {
    /// The rows.
    pub buffer: Buffer,
    /// How many there are.
    pub vocabulary: usize,
    /// Components of a row.
    pub width: usize,
}

/// Cosines and sines of a rotary embedding, `[positions, pairs, 2]` f32.
#[derive(Clone)]
pub struct Rotations {
    buffer: Buffer,
    positions: usize,
    pairs: usize,
}

impl Rotations {
    /// Of `positions` positions (a step's rows beyond the context included) and inverse frequencies `[head_dim / 2]`, of which those at
    /// the end may be 0: pairs that do not turn. Angles are f32 products, as in the reference implementation.
    pub fn new(device: &Device, inverse_frequencies: &[f32], positions: usize) -> Result<Rotations, DeviceError> {
        let pairs = inverse_frequencies.iter().rposition(|&f| f != 0.0).map_or(0, |last| last + 1);
        let mut table = Vec::with_capacity(positions * pairs * 8);
        for position in 0..positions {
            for frequency in &inverse_frequencies[..pairs] {
                let angle = position as f32 * frequency;
                table.extend(angle.cos().to_le_bytes());
                table.extend(angle.sin().to_le_bytes());
            }
        }
        // A device has no empty buffers.
        table.resize(table.len().max(8), 0);
        Ok(Rotations { buffer: device.constant("rotations", &table)?, positions, pairs })
    }

    /// The table.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Positions in it.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Pairs that turn.
    pub fn pairs(&self) -> usize {
        self.pairs
    }
}

fn float(value: f32) -> Argument {
    Argument::F32(value)
}

/// A pointer that may be absent.
fn optional(buffer: Option<&Buffer>) -> Argument {
    buffer.map_or(Argument::U64(0), |b| b.at(0))
}

fn launch(kernel: &'static str, grid: [usize; 2], shared_bytes: usize, arguments: Vec<Argument>) -> Launch {
    let grid = [grid[0] as u32, grid[1] as u32, 1];
    Launch { kernel, grid, block: THREADS as u32, shared_bytes: shared_bytes as u32, cooperative: false, arguments }
}

fn require_width(width: usize) -> Result<(), StepError> {
    require((1..=MOST_WIDTH).contains(&width), "width of a row", width, format!("1 to {MOST_WIDTH}"))
}

/// `x = table[token] * sqrt(hidden)`, f32 `[rows, hidden]`, and the same rounded to bf16 in `x16`.
pub fn embed(table: &Table, tokens: &Tokens, rows: usize, x: &Buffer, x16: &Buffer) -> Result<Launch, StepError> {
    require_rows(rows)?;
    let (vocabulary, hidden) = (table.vocabulary, table.width);
    let values = rows * hidden;
    require_bytes("embed", &[(&table.buffer, vocabulary * hidden * 2), (x, values * 4), (x16, values * 2)])?;
    let mut arguments = vec![table.buffer.at(0), tokens.0.at(0), x.at(0), x16.at(0)];
    arguments.extend([int(vocabulary), int(hidden), float((hidden as f32).sqrt())]);
    Ok(launch("embed", [rows, 1], 0, arguments))
}

/// Per-layer inputs: `ple` holds the model projection of the embeddings, f32 `[rows, layers, size]`, and gets
/// `(rms(ple / sqrt(hidden); weight) + table[token] * sqrt(size)) / sqrt(2)`. `table` is `[vocabulary, layers * size]`.
#[derive(Clone, Copy)]
pub struct PerLayer<'a> {
    /// Per-layer embeddings.
    pub table: &'a Table,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Weight of the norm, f32 `[size]`.
    pub weight: &'a Buffer,
    /// Inside the root.
    pub eps: f32,
}

/// See [`PerLayer`].
pub fn combine_per_layer(spec: PerLayer<'_>, tokens: &Tokens, rows: usize, ple: &Buffer) -> Result<Launch, StepError> {
    let PerLayer { table, layers, hidden, weight, eps } = spec;
    require_rows(rows)?;
    let divides = layers > 0 && table.width.is_multiple_of(layers);
    require(divides, "width of the per-layer table", table.width, format!("multiples of the {layers} layers"))?;
    let size = table.width / layers;
    require_bytes(
        "combine_per_layer",
        &[(&table.buffer, table.vocabulary * table.width * 2), (weight, size * 4), (ple, rows * table.width * 4)],
    )?;
    let mut arguments = vec![table.buffer.at(0), tokens.0.at(0), weight.at(0), ple.at(0)];
    arguments.extend([rows, table.vocabulary, layers, size].map(int));
    arguments.extend([(hidden as f32).sqrt().recip(), (size as f32).sqrt(), eps].map(float));
    Ok(launch("combine_per_layer", [(rows * layers).div_ceil(WARPS), 1], 0, arguments))
}

/// `y = rms(x; weight)`: f32 `[rows, width]` to bf16.
pub fn norm(x: &Buffer, weight: &Buffer, y: &Buffer, rows: usize, width: usize, eps: f32) -> Result<Launch, StepError> {
    require_rows(rows)?;
    require_width(width)?;
    require_bytes("rms_norm", &[(x, rows * width * 4), (weight, width * 4), (y, rows * width * 2)])?;
    let arguments = vec![x.at(0), weight.at(0), y.at(0), int(width), float(eps)];
    Ok(launch("rms_norm", [rows, 1], (WARPS + width) * 4, arguments))
}

/// `x = (x + rms(added; weight)) * scalar`, then `y = rms(x; next)`, or x itself where there is no next norm.
#[derive(Clone, Copy)]
pub struct AddNormed<'a> {
    /// f32 `[rows, width]`.
    pub added: &'a Buffer,
    /// Weight of its norm, f32 `[width]`.
    pub weight: &'a Buffer,
    /// The residual stream, f32 `[rows, width]`; changed in place.
    pub x: &'a Buffer,
    /// Multiplies the whole stream; 1 within a layer.
    pub scalar: f32,
    /// Weight of the norm that the next product reads through.
    pub next: Option<&'a Buffer>,
    /// What it reads, bf16 `[rows, width]`.
    pub y: &'a Buffer,
    /// Rows.
    pub rows: usize,
    /// Width of a row.
    pub width: usize,
    /// Inside the roots.
    pub eps: f32,
}

impl AddNormed<'_> {
    /// The launch.
    pub fn launch(&self) -> Result<Launch, StepError> {
        let &AddNormed { added, weight, x, scalar, next, y, rows, width, eps } = self;
        require_rows(rows)?;
        require_width(width)?;
        let bytes = rows * width * 4;
        let needs =
            [(added, bytes), (x, bytes), (y, bytes / 2), (weight, width * 4), (next.unwrap_or(weight), width * 4)];
        require_bytes("add_normed", &needs)?;
        let arguments =
            vec![added.at(0), weight.at(0), x.at(0), float(scalar), optional(next), y.at(0), int(width), float(eps)];
        Ok(launch("add_normed", [rows, 1], (2 * WARPS + width) * 4, arguments))
    }
}

/// Columns of an f32 matrix: `width` of them from `column` on, in rows of `stride`.
#[derive(Clone, Copy)]
pub struct Columns<'a> {
    /// The matrix.
    pub buffer: &'a Buffer,
    /// First column.
    pub column: usize,
    /// Columns of the whole matrix.
    pub stride: usize,
}

/// `y = gelu(gate) * other`, bf16 `[rows, width]`: of the MLP's two halves, or of a layer's gate and its per-layer input.
pub fn gated(
    gate: Columns<'_>,
    other: Columns<'_>,
    y: &Buffer,
    rows: usize,
    width: usize,
) -> Result<Launch, StepError> {
    require_rows(rows)?;
    for part in [gate, other] {
        let fits = width > 0 && part.column + width <= part.stride;
        require(fits, "last column", part.column + width, format!("at most {}", part.stride))?;
        require_bytes("gated", &[(part.buffer, rows * part.stride * 4)])?;
    }
    require_bytes("gated", &[(y, rows * width * 2)])?;
    let mut arguments = vec![gate.buffer.at(gate.column * 4), other.buffer.at(other.column * 4), y.at(0)];
    arguments.extend([rows, width, gate.stride, other.stride].map(int));
    Ok(launch("gated", [width.div_ceil(THREADS), rows], 0, arguments))
}

/// Norm and rotary embedding of heads, and the append of keys and values to the cache or to side slots.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// Products of the projections, f32 `[rows, (heads + 2 kv_heads) * head_dim]`: queries, keys, values; queries alone where the layer
    /// has no keys of its own.
    pub projected: &'a Buffer,
    /// Weight of the queries' norm, f32 `[head_dim]`.
    pub query_weight: &'a Buffer,
    /// Weight of the keys' norm, f32 `[head_dim]`; `None` where the layer reads another one's keys.
    pub key_weight: Option<&'a Buffer>,
    /// Of this kind of layer.
    pub rotations: &'a Rotations,
    /// Query heads.
    pub heads: usize,
    /// The cache, and the layer in it whose keys and values the queries are for.
    pub kv: &'a KvCache,
    /// See `kv`.
    pub layer: usize,
    /// The rows.
    pub table: &'a Rows,
    /// How many there are.
    pub rows: usize,
    /// bf16 `[rows, heads, head_dim]`.
    pub queries: &'a Buffer,
    /// Inside the roots.
    pub eps: f32,
}

impl Heads<'_> {
    /// What a kernel is given beside the products and the number of rows: pointers and sizes.
    pub(crate) fn arguments(&self) -> Result<([Argument; 9], [Argument; 8]), StepError> {
        let layer = self.kv.layer(self.layer)?;
        let KvShape { kv_heads, head_dim: dim, .. } = layer.shape;
        let (rows, heads) = (self.rows, self.heads);
        let own = if self.key_weight.is_some() { kv_heads } else { 0 };
        require_rows(rows)?;
        require(heads > 0, "query heads", heads, "at least one")?;
        let pairs = self.rotations.pairs;
        require(pairs <= dim / 2, "rotating pairs", pairs, format!("at most {}", dim / 2))?;
        require_bytes(
            "finish_heads",
            &[
                (self.projected, rows * (heads + 2 * own) * dim * 4),
                (self.query_weight, dim * 4),
                (self.key_weight.unwrap_or(self.query_weight), dim * 4),
                (self.queries, rows * heads * dim * 2),
            ],
        )?;
        let [keys, values, side_keys, side_values] = self.kv.arguments(layer);
        let (table, rotations) = (self.table.buffer().at(0), self.rotations.buffer.at(0));
        let (query_weight, key_weight) = (self.query_weight.at(0), optional(self.key_weight));
        let queries = self.queries.at(0);
        let pointers = [query_weight, key_weight, rotations, table, queries, keys, values, side_keys, side_values];
        let [heads, own, dim, capacity, positions, pairs] =
            [heads, own, dim, layer.capacity, self.rotations.positions, pairs].map(int);
        let int8 = int(usize::from(self.kv.storage() == KvStorage::Int8));
        Ok((pointers, [heads, own, dim, capacity, positions, pairs, int8, float(self.eps)]))
    }

    /// Heads of a row, those of keys and values included.
    fn of_row(&self) -> Result<usize, StepError> {
        let kv_heads = self.kv.layer(self.layer)?.shape.kv_heads;
        Ok(self.heads + if self.key_weight.is_some() { 2 * kv_heads } else { 0 })
    }

    /// Channels of the product that they are made of.
    pub fn channels(&self) -> Result<usize, StepError> {
        Ok(self.of_row()? * self.kv.layer(self.layer)?.shape.head_dim)
    }

    /// The launch, behind the product. [`crate::gemm::Output::Heads`] is both in one.
    pub fn launch(&self) -> Result<Launch, StepError> {
        let (pointers, sizes) = self.arguments()?;
        let mut arguments = vec![self.projected.at(0)];
        arguments.extend(pointers);
        arguments.push(int(self.rows));
        arguments.extend(sizes);
        Ok(launch("finish_heads", [(self.rows * self.of_row()?).div_ceil(WARPS), 1], 0, arguments))
    }
}
