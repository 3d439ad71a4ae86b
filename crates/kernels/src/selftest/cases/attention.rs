//! Attention of one layer over one sequence: what a position holds is the same wherever it is asked for.

use std::ops::Range;

use half::bf16;

use super::{super::Failure, bits16, bytes16, numbers16};
use crate::{
    device::{Buffer, Device, Launch},
    step::{
        Own, Rows,
        attention::{Attention, AttentionScratch},
        kv::{KvCache, KvShape, KvStorage},
    },
};

/// Heads, key/value heads, head size, window: every kernel, odd sizes, no grouping, a window shorter than a step, one of E4B's shapes each.
pub const SHAPES: [(usize, usize, usize, Option<usize>); 8] = [
    (4, 2, 16, Some(8)),
    (4, 1, 48, None),
    (3, 1, 80, Some(100)),
    (2, 2, 64, None),
    (8, 2, 256, Some(64)),
    (8, 2, 512, None),
    (6, 2, 128, Some(65)),
    (20, 1, 32, Some(33)),
];

/// Where steps begin: at nothing, within and at borders of tiles, chunks and windows.
pub const BEGINNINGS: [usize; 9] = [0, 1, 5, 31, 57, 63, 64, 120, 190];

/// A row: its position, and where its own key is.
pub type Row = (usize, Own);

/// Keys and values of one layer and queries of one sequence.
pub struct Case {
    /// The device.
    pub device: Device,
    /// Query heads.
    pub heads: usize,
    /// The layer.
    pub shape: KvShape,
    /// Its keys and values.
    pub kv: KvCache,
    /// Partial sums.
    pub scratch: AttentionScratch,
    /// The rows of a step.
    pub table: Rows,
    /// `[positions, kv_heads, head_dim]`.
    pub keys: Vec<bf16>,
    /// As the keys.
    pub values: Vec<bf16>,
    /// Keys and values as the cache has them, position after position, where that is not bf16: what they stand for is above.
    stored: Option<[Vec<u8>; 2]>,
    /// `[positions, heads, head_dim]`.
    pub queries: Vec<bf16>,
}

/// A step that can be launched.
pub struct Planned {
    /// Partial sums, and their merging.
    pub launches: [Launch; 2],
    /// bf16 `[rows, heads, head_dim]`.
    pub queries: Buffer,
    /// As the queries.
    pub out: Buffer,
}

/// Rows of the chain.
pub fn chain(begin: usize, rows: usize) -> Vec<Row> {
    (begin..begin + rows).map(|p| (p, Own::Cached)).collect()
}

impl Case {
    /// A context of `context` positions, none of them cached yet.
    pub fn new(
        device: &Device,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        window: Option<usize>,
        context: usize,
    ) -> Result<Case, Failure> {
        Case::with_storage(device, heads, kv_heads, head_dim, window, context, KvStorage::Bf16)
    }

    /// The same with a cache of another kind, and the keys and values that are in it then.
    pub fn with_storage(
        device: &Device,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        window: Option<usize>,
        context: usize,
        storage: KvStorage,
    ) -> Result<Case, Failure> {
        let seed = (heads * 1000 + head_dim + context) as u32;
        let shape = KvShape { kv_heads, head_dim, window };
        let positions = context + 16;
        // Scores of a standard deviation of about 2: weights neither equal nor all in one key.
        let spread = (12.0 / (head_dim as f32).sqrt()).sqrt();
        let kv = KvCache::with_storage(device, &[shape], context, storage)?;
        let mut both = [(seed, spread), (!seed, 1.0)].map(|(seed, s)| numbers16(seed, positions * shape.width(), s));
        let stored = (storage != KvStorage::Bf16).then(|| {
            let layer = kv.layers()[0];
            both.each_mut().map(|values| {
                let position = |values: &mut [bf16]| {
                    let bytes = layer.encode(&values.iter().map(|v| v.to_f32()).collect::<Vec<_>>());
                    values.iter_mut().zip(layer.decode(&bytes)).for_each(|(v, is)| *v = bf16::from_f32(is));
                    bytes
                };
                values.chunks_exact_mut(shape.width()).flat_map(position).collect()
            })
        });
        let [keys, values] = both;
        Ok(Case {
            device: device.clone(),
            heads,
            shape,
            kv,
            scratch: AttentionScratch::new(device, heads, &[shape], context)?,
            table: Rows::new(device)?,
            keys,
            values,
            stored,
            queries: numbers16(seed ^ 0x5555, positions * heads * head_dim, spread),
        })
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.heads * self.shape.head_dim
    }

    /// Puts keys and values of `positions` where they belong; all other bytes are `poison`.
    pub fn cache(&self, positions: Range<usize>, poison: u8) -> Result<(), Failure> {
        self.kv.buffer().fill(poison)?;
        positions.into_iter().try_for_each(|p| self.put(p, Own::Cached))
    }

    /// The same for a step that begins at `begin` with `rows` rows, everything beside what it sees being NaN.
    pub fn cache_for(&self, begin: usize, rows: usize) -> Result<(), Failure> {
        self.cache(self.seen(begin).start..begin + rows, 0xff)
    }

    /// Puts key and value of a position into the cache, or into a side slot.
    pub fn put(&self, position: usize, own: Own) -> Result<(), Failure> {
        let (layer, width) = (self.kv.layers()[0], self.shape.width());
        let (place, part) = match own {
            Own::Side(slot) => (slot, 2),
            _ => (position % layer.capacity, 0),
        };
        for (side, from) in [&self.keys, &self.values].into_iter().enumerate() {
            let bytes = layer.position_bytes();
            let found = match &self.stored {
                Some(stored) => stored[side][position * bytes..][..bytes].to_vec(),
                None => bytes16(&from[position * width..(position + 1) * width]),
            };
            self.kv.buffer().write(layer.offsets[part + side] + place * bytes, &found)?;
        }
        Ok(())
    }

    /// Buffers for rows, filled; the launches, for so many multiprocessors.
    pub fn plan(&self, rows: &[Row], multiprocessors: u32) -> Result<Planned, Failure> {
        let width = self.width();
        self.table.set(rows)?;
        let queries = self.device.allocate("queries", rows.len() * width * 2)?;
        let q: Vec<bf16> = rows.iter().flat_map(|&(p, _)| &self.queries[p * width..(p + 1) * width]).copied().collect();
        queries.write(0, &bytes16(&q))?;
        let out = self.device.allocate("out", rows.len() * width * 2)?;
        let attention = Attention {
            queries: &queries,
            heads: self.heads,
            kv: &self.kv,
            layer: 0,
            window: self.shape.window,
            table: &self.table,
            rows: rows.len(),
            out: &out,
        };
        let launches = attention.launches(&self.scratch, multiprocessors)?;
        Ok(Planned { launches, queries, out })
    }

    /// Output of every row, as bits.
    pub fn run(&self, rows: &[Row]) -> Result<Vec<Vec<u16>>, Failure> {
        self.run_on(rows, self.device.properties().multiprocessors)
    }

    /// The same with a grid for so many multiprocessors.
    pub fn run_on(&self, rows: &[Row], multiprocessors: u32) -> Result<Vec<Vec<u16>>, Failure> {
        let Planned { launches, out, .. } = self.plan(rows, multiprocessors)?;
        // SAFETY: typed launches of this shape.
        launches.iter().try_for_each(|launch| unsafe { self.device.launch(launch) })?;
        let out = bits16(&out, 0, rows.len() * self.width())?;
        Ok(out.chunks_exact(self.width()).map(<[u16]>::to_vec).collect())
    }

    /// Cached positions that a row sees.
    pub fn seen(&self, position: usize) -> Range<usize> {
        self.shape.window.map_or(0, |w| (position + 1).saturating_sub(w))..position
    }

    /// Output of a row in f64, and by plain f32 sums with weights and result rounded as a bf16 implementation does.
    pub fn references(&self, (position, own): Row) -> (Vec<f64>, Vec<f32>) {
        let (dim, width) = (self.shape.head_dim, self.shape.width());
        let mut exact = Vec::new();
        let mut naive = Vec::new();
        let mut positions: Vec<usize> = self.seen(position).collect();
        if own != Own::None {
            positions.push(position);
        }
        for head in 0..self.heads {
            let q = &self.queries[(position * self.heads + head) * dim..][..dim];
            let at = |p: usize| p * width + head / (self.heads / self.shape.kv_heads) * dim;
            let dot = |p: usize| q.iter().zip(&self.keys[at(p)..][..dim]);
            let scores: Vec<f64> =
                positions.iter().map(|&p| dot(p).map(|(a, b)| a.to_f64() * b.to_f64()).sum()).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let plain: Vec<f32> =
                positions.iter().map(|&p| dot(p).map(|(a, b)| a.to_f32() * b.to_f32()).sum()).collect();
            let top = plain.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let rounded: Vec<f32> = plain.iter().map(|s| bf16::from_f32((s - top).exp()).to_f32()).collect();
            let plain_sum: f32 = rounded.iter().sum();
            for d in 0..dim {
                let value = |p: usize| self.values[at(p) + d];
                exact.push(weights.iter().zip(&positions).map(|(w, &p)| w * value(p).to_f64()).sum::<f64>() / sum);
                let out: f32 = rounded.iter().zip(&positions).map(|(w, &p)| w * value(p).to_f32()).sum();
                naive.push(bf16::from_f32(out / plain_sum).to_f32());
            }
        }
        (exact, naive)
    }

    /// Equal weights, and values of three chunks whose sum is their last one's in the order of the table, and 0 in others: what is small is
    /// lost beside what is large. 192 positions, of which all are cached.
    pub fn cancelling(device: &Device) -> Result<Case, Failure> {
        let mut case = Case::new(device, 1, 1, 16, None, 256)?;
        case.queries.fill(bf16::ZERO);
        for (position, value) in case.values.chunks_exact_mut(16).enumerate() {
            value.fill(bf16::from_f32(match position / 64 {
                0 => 1e10,
                1 => -1e10,
                _ => 1.0,
            }));
        }
        case.cache(0..192, 0xff)?;
        Ok(case)
    }
}
