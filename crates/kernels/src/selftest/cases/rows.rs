//! Rows between matrix products.

use super::{super::Failure, floats, numbers, rms, turned, weights32};
use crate::{
    device::{Buffer, Device, Launch},
    step::{
        MOST_ROWS, Own, Rows,
        kv::{KvCache, KvShape, KvStorage},
        rows::{Heads, Rotations},
    },
};

/// Inside every root.
pub const EPS: f32 = 1e-6;

/// As f64.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

/// Norms of rows of `width`, one after another, in f64.
pub fn normed(x: &[f32], weight: Option<&[f32]>, width: usize) -> Vec<f64> {
    x.chunks_exact(width).flat_map(|row| rms(&wide(row), weight, EPS)).collect()
}

/// Rows and norm weights with which one bit of a row's scale shows: results near the middle of two bf16 numbers.
pub fn on_edges(seed: u32, width: usize) -> (Vec<f32>, Vec<f32>) {
    let x = numbers(seed, MOST_ROWS * width, 2.0);
    let scale = normed(&x[..width], None, width)[0] / f64::from(x[0]);
    let weight = x[..width].iter().map(|&v| (1.003_906_25 / (f64::from(v) * scale)) as f32).collect();
    (x, weight)
}

/// Seeds of rows with which the bits of norms are tested: sums that come out differently in another order are among them.
pub const NORM_SEEDS: std::ops::Range<u32> = 3..15;

/// Heads of queries, keys and values of some rows, and where they go.
pub struct HeadCase {
    /// The cache, of one layer, all zeros but for what the rows write.
    pub kv: KvCache,
    /// The rows.
    pub table: Rows,
    /// bf16 `[rows, heads, head_dim]`.
    pub queries: Buffer,
    /// f32 `[rows, (heads + 2 kv_heads) * head_dim]`.
    pub projected: Vec<f32>,
    /// The same on the device.
    pub buffer: Buffer,
    /// Weights of the queries' and of the keys' norm.
    pub weights: [Vec<f32>; 2],
    weight_buffers: [Buffer; 2],
    frequencies: Vec<f32>,
    rotations: Rotations,
}

impl HeadCase {
    /// Query heads.
    pub const HEADS: usize = 4;
    /// Key/value heads.
    pub const KV_HEADS: usize = 2;
    /// Positions of the context.
    pub const CONTEXT: usize = 64;
    /// Three rows of a chain, two branches.
    pub const PLACES: [(usize, Own); 5] =
        [(61, Own::Cached), (62, Own::Cached), (63, Own::Cached), (62, Own::Side(1)), (63, Own::Side(14))];

    /// Heads of `dim`, turned wholly in a sliding layer, in part in a full one.
    pub fn new(device: &Device, dim: usize, window: Option<usize>, storage: KvStorage) -> Result<HeadCase, Failure> {
        let (theta, turning) = if window.is_some() { (1e4_f64, dim / 2) } else { (1e6, dim / 8) };
        let frequency = |m: usize| if m < turning { theta.powf(-2.0 * m as f64 / dim as f64) as f32 } else { 0.0 };
        let frequencies: Vec<f32> = (0..dim / 2).map(frequency).collect();
        let kv = KvCache::with_storage(
            device,
            &[KvShape { kv_heads: Self::KV_HEADS, head_dim: dim, window }],
            Self::CONTEXT,
            storage,
        )?;
        kv.buffer().fill(0)?;
        let projected = numbers(9, MOST_ROWS * Self::of_row(dim), 2.0);
        let weights = [numbers(10, dim, 2.0), numbers(11, dim, 2.0)];
        Ok(HeadCase {
            kv,
            table: Rows::new(device)?,
            queries: device.allocate("queries", MOST_ROWS * Self::HEADS * dim * 2)?,
            buffer: floats(device, &projected)?,
            projected,
            weight_buffers: [weights32(device, &weights[0])?, weights32(device, &weights[1])?],
            weights,
            rotations: Rotations::new(device, &frequencies, Self::CONTEXT + 16)?,
            frequencies,
        })
    }

    /// Numbers of a row of the projections, for heads of `dim`.
    pub fn of_row(dim: usize) -> usize {
        (Self::HEADS + 2 * Self::KV_HEADS) * dim
    }

    /// The launch of so many rows of the table; without keys of its own where the layer reads another one's.
    pub fn launch(&self, rows: usize, own_keys: bool) -> Result<Launch, Failure> {
        let heads = Heads {
            projected: &self.buffer,
            query_weight: &self.weight_buffers[0],
            key_weight: own_keys.then_some(&self.weight_buffers[1]),
            rotations: &self.rotations,
            heads: Self::HEADS,
            kv: &self.kv,
            layer: 0,
            table: &self.table,
            rows,
            queries: &self.queries,
            eps: EPS,
        };
        Ok(heads.launch()?)
    }

    /// Byte offset of a row's key in the cache, and of its value.
    pub fn places(&self, (position, own): (usize, Own)) -> [usize; 2] {
        let layer = self.kv.layers()[0];
        let (place, part) = match own {
            Own::Side(slot) => (slot, 2),
            _ => (position % layer.capacity, 0),
        };
        [part, part + 1].map(|part| layer.offsets[part] + place * layer.position_bytes())
    }

    /// A head turned to a position, in f64.
    pub fn turned(&self, head: &[f64], position: usize) -> Vec<f64> {
        turned(head, position, &self.frequencies)
    }
}
