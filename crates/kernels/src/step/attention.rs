//! Attention of 1 to 16 rows: two launches, the chunks' partial sums and their merging.

use super::{
    MOST_ROWS, Rows, StepError, int,
    kv::{KvCache, KvShape, KvStorage},
    require, require_bytes, require_rows,
};
use crate::device::{Buffer, Device, DeviceError, Launch};

/// As in the source.
const THREADS: u32 = 256;
const COMBINE_THREADS: usize = 128;

/// Partial sums between the two launches. Launches run one after another, so one of these serves all layers.
pub struct AttentionScratch {
    partial: Buffer,
    stats: Buffer,
}

impl AttentionScratch {
    /// Enough for 16 rows of `heads` query heads in any of these layers, in a context of so many positions.
    pub fn new(
        device: &Device,
        heads: usize,
        shapes: &[KvShape],
        context: usize,
    ) -> Result<AttentionScratch, DeviceError> {
        let sums = |s: &KvShape| s.most_chunks(context) * MOST_ROWS * heads;
        let stats = shapes.iter().map(sums).max().unwrap_or(1);
        let partial = shapes.iter().map(|s| sums(s) * s.head_dim).max().unwrap_or(1);
        Ok(AttentionScratch {
            partial: device.allocate("attention.partial", partial * 4)?,
            stats: device.allocate("attention.stats", stats * 8)?,
        })
    }

    /// Weighted sums of values, f32 `[chunks, rows, heads, head_dim]`, of the chunks that any row sees.
    pub fn partial(&self) -> &Buffer {
        &self.partial
    }

    /// Largest score and sum of weights, f32 `[chunks, rows, heads, 2]`.
    pub fn stats(&self) -> &Buffer {
        &self.stats
    }
}

/// Shared memory of a block, as in the source: queries, the ring, of int8 the tile that it becomes, scores, weights, scales.
pub(super) fn shared_bytes(storage: KvStorage, stages: usize, dim: usize) -> usize {
    let tiles = match storage {
        KvStorage::Bf16 => stages * 32 * dim * 2,
        KvStorage::Int8 => stages * 32 * (dim + 16) + 32 * dim * 2,
    };
    16 * dim * 2 + tiles + 2 * 16 * 36 * 4 + 16 * 20 * 4 + 16 * 4
}

/// What one attention reads and writes.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Queries after norm and rotary embedding, bf16 `[rows, heads, head_dim]`.
    pub queries: &'a Buffer,
    /// Query heads; a multiple of the layer's key/value heads.
    pub heads: usize,
    /// Keys and values, those of this step's rows included.
    pub kv: &'a KvCache,
    /// Layer of `kv`.
    pub layer: usize,
    /// Positions that a row sees, itself included; `None`: all. A drafter counts its window in another way than the layer does.
    pub window: Option<usize>,
    /// The rows.
    pub table: &'a Rows,
    /// How many there are.
    pub rows: usize,
    /// bf16 `[rows, heads, head_dim]`.
    pub out: &'a Buffer,
}

impl Attention<'_> {
    /// The launches, for so many multiprocessors; every number gives the same bits.
    ///
    /// # Errors
    /// Shapes that the kernels do not take, and buffers that are too short. What stands in the table of rows is not known here: a launch
    /// whose rows are further apart than 16 positions ends with an error.
    pub fn launches(&self, scratch: &AttentionScratch, multiprocessors: u32) -> Result<[Launch; 2], StepError> {
        let layer = self.kv.layer(self.layer)?;
        let KvShape { kv_heads, head_dim: dim, window: own } = layer.shape;
        require_rows(self.rows)?;
        let multiple = self.heads > 0 && self.heads.is_multiple_of(kv_heads);
        require(multiple, "query heads", self.heads, format!("multiples of the {kv_heads} key/value heads"))?;
        let most = own.map_or(usize::MAX, |w| w + 2);
        let window = self.window.unwrap_or(usize::MAX);
        let inside = window > 0 && (window <= most || own.is_none());
        require(inside, "window", window, format!("1 to {most} positions of this layer"))?;
        let most_chunks = KvShape { window: self.window, ..layer.shape }.most_chunks(self.kv.context());
        let sums = most_chunks * self.rows * self.heads;
        let bytes = self.rows * self.heads * dim * 2;
        require_bytes(
            "attention",
            &[
                (self.queries, bytes),
                (self.out, bytes),
                (&scratch.partial, sums * dim * 4),
                (&scratch.stats, sums * 8),
                (self.table.buffer(), self.rows * 8),
            ],
        )?;
        let (kernels, stages) = match dim {
            256 => (["attention_256", "attention_256_int8"], 4),
            512 => (["attention_512", "attention_512_int8"], 2),
            _ => (["attention_any", "attention_any_int8"], 2),
        };
        let int8 = usize::from(self.kv.storage() == KvStorage::Int8);
        let shared_bytes = shared_bytes(self.kv.storage(), stages, dim);
        let [keys, values, side_keys, side_values] = self.kv.arguments(layer);
        let sizes = || {
            let window = self.window.map_or(0, |w| w.min(1 << 30));
            [self.rows, self.heads, kv_heads, dim, layer.capacity, window].map(int)
        };
        let mut arguments = vec![self.queries.at(0), keys.clone(), values.clone(), self.table.buffer().at(0)];
        arguments.extend([scratch.partial.at(0), scratch.stats.at(0)]);
        arguments.extend(sizes());
        arguments.push(int(most_chunks));
        let partials = Launch {
            kernel: kernels[int8],
            grid: [multiprocessors.max(1), 1, 1],
            block: THREADS,
            shared_bytes: shared_bytes as u32,
            cooperative: false,
            arguments,
        };
        let mut arguments = vec![self.queries.at(0), keys, values, side_keys, side_values, self.table.buffer().at(0)];
        arguments.extend([scratch.partial.at(0), scratch.stats.at(0), self.out.at(0)]);
        arguments.extend(sizes());
        let combine = Launch {
            kernel: ["attention_combine", "attention_combine_int8"][int8],
            grid: [(self.rows * self.heads) as u32, dim.div_ceil(COMBINE_THREADS) as u32, 1],
            block: COMBINE_THREADS as u32,
            shared_bytes: 16,
            cooperative: false,
            arguments,
        };
        Ok([partials, combine])
    }
}
