//! Cached keys and values of all layers that have their own, and the side slots of branches, in one piece of memory.
//!
//! Position p of a layer holds `[kv_heads, head_dim]` at place `p % capacity`, as its [`KvStorage`] says. A layer that sees everything has room for the whole
//! context and a step's rows beyond it; a sliding layer is a ring, long enough that rows which are then rejected overwrite nothing that a
//! row may still see.

use half::bf16;

use super::{MOST_ROWS, StepError, require};
use crate::{
    attention::{chunk_end, chunk_index},
    device::{Argument, Buffer, Device},
};

/// Side slots of a layer.
pub const SIDE_SLOTS: usize = MOST_ROWS;
/// Largest head.
pub const MOST_HEAD_DIM: usize = 512;

/// How keys and values are stored, in all layers alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvStorage {
    /// bf16.
    #[default]
    Bf16,
    /// int8, and an f32 scale for each position and head: the largest component over 127. What is read is their product, rounded to bf16.
    /// A head with a component that is NaN or infinite is NaN as a whole.
    Int8,
}

/// Keys and values of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Key/value heads.
    pub kv_heads: usize,
    /// Components of a head: a multiple of 16, at most 512.
    pub head_dim: usize,
    /// Positions that a row sees, itself included; `None`: all.
    pub window: Option<usize>,
}

impl KvShape {
    /// Values of one position.
    pub fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Most chunks that up to 16 rows of consecutive positions see together, in a context of so many positions.
    pub fn most_chunks(&self, context: usize) -> usize {
        let all = chunk_index(context + MOST_ROWS - 1) + 1;
        // A window's positions and those of the other rows, beginning anywhere in a chunk of the shortest kind. One more position on
        // either side is for drafters, whose window is counted differently.
        let of_window = |window: usize| (window + MOST_ROWS + 2).div_ceil(chunk_end(0)) + 1;
        self.window.map_or(all, |w| all.min(of_window(w)))
    }

    fn capacity(&self, context: usize) -> usize {
        let (all, last) = (context + MOST_ROWS, chunk_end(context));
        // Chunks only grow, so the last is the longest.
        let longest = chunk_end(last) - last;
        self.window.map_or(all, |w| all.min(w + MOST_ROWS + longest))
    }
}

/// Where the parts of a layer begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayer {
    /// Sizes.
    pub shape: KvShape,
    /// What a component is.
    pub storage: KvStorage,
    /// Positions that there is room for.
    pub capacity: usize,
    /// Byte offsets of keys, values, side keys and side values.
    pub offsets: [usize; 4],
}

impl KvLayer {
    /// Bytes of one position's keys, or values: of int8 with the scales behind them, padded to 16 bytes.
    pub fn position_bytes(&self) -> usize {
        match self.storage {
            KvStorage::Bf16 => self.shape.width() * 2,
            KvStorage::Int8 => self.shape.width() + (self.shape.kv_heads * 4).next_multiple_of(16),
        }
    }

    /// A position's components `[kv_heads, head_dim]` as they are stored.
    pub fn encode(&self, components: &[f32]) -> Vec<u8> {
        if self.storage == KvStorage::Bf16 {
            return components.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
        }
        let heads = components.chunks_exact(self.shape.head_dim);
        // NaN where a component is: an int8 can't say so.
        let larger = |most: f32, v: &f32| if most.is_nan() || v.abs() < most { most } else { v.abs() };
        let largest: Vec<f32> = heads.clone().map(|head| head.iter().fold(0.0, larger)).collect();
        let rounded = |(head, &most): (&[f32], &f32)| -> Vec<u8> {
            let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
            head.iter().map(|v| (v * inverse).round_ties_even() as i8 as u8).collect()
        };
        let mut bytes: Vec<u8> = heads.zip(&largest).flat_map(rounded).collect();
        bytes.extend(largest.iter().flat_map(|most| (most / 127.0).to_le_bytes()));
        bytes.resize(self.position_bytes(), 0);
        bytes
    }

    /// The components that stored bytes of a position stand for.
    pub fn decode(&self, bytes: &[u8]) -> Vec<f32> {
        let width = self.shape.width();
        match self.storage {
            KvStorage::Bf16 => bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
            KvStorage::Int8 => {
                let scales: Vec<f32> = bytes[width..].as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
                let component = |(i, &v): (usize, &u8)| f32::from(v as i8) * scales[i / self.shape.head_dim];
                bytes[..width].iter().enumerate().map(component).map(|v| bf16::from_f32(v).to_f32()).collect()
            }
        }
    }
}

/// The memory of all layers.
pub struct KvCache {
    buffer: Buffer,
    storage: KvStorage,
    layers: Vec<KvLayer>,
    context: usize,
}

impl KvCache {
    /// Room for `context` positions and a step's rows beyond, in every layer of `shapes`, as bf16.
    pub fn new(device: &Device, shapes: &[KvShape], context: usize) -> Result<KvCache, StepError> {
        KvCache::with_storage(device, shapes, context, KvStorage::Bf16)
    }

    /// The same, stored in another way.
    pub fn with_storage(
        device: &Device,
        shapes: &[KvShape],
        context: usize,
        storage: KvStorage,
    ) -> Result<KvCache, StepError> {
        require((1..1 << 24).contains(&context), "context", context, "1 to 16777215 positions")?;
        let mut bytes = 0;
        let mut layers = Vec::with_capacity(shapes.len());
        for &shape in shapes {
            let dim = shape.head_dim;
            let multiple = dim.is_multiple_of(16) && (16..=MOST_HEAD_DIM).contains(&dim);
            require(multiple, "head_dim", dim, format!("multiples of 16 up to {MOST_HEAD_DIM}"))?;
            require(shape.kv_heads > 0, "key/value heads", shape.kv_heads, "at least one")?;
            require(shape.window != Some(0), "window", 0, "at least one position")?;
            let capacity = shape.capacity(context);
            let mut layer = KvLayer { shape, storage, capacity, offsets: [0; 4] };
            for (part, positions) in [capacity, capacity, SIDE_SLOTS, SIDE_SLOTS].into_iter().enumerate() {
                layer.offsets[part] = bytes;
                // Every part begins at a line of the cache.
                bytes += (positions * layer.position_bytes()).next_multiple_of(128);
            }
            layers.push(layer);
        }
        Ok(KvCache { buffer: device.allocate("kv", bytes.max(16))?, storage, layers, context })
    }

    /// Positions that there is room for, a step's rows not counted.
    pub fn context(&self) -> usize {
        self.context
    }

    /// How keys and values are stored.
    pub fn storage(&self) -> KvStorage {
        self.storage
    }

    /// A layer, by its number among those with keys and values of their own.
    pub fn layer(&self, layer: usize) -> Result<&KvLayer, StepError> {
        self.layers.get(layer).ok_or_else(|| StepError::Shape {
            what: "key/value layer",
            expected: format!("0 to {}", self.layers.len().saturating_sub(1)),
            found: layer,
        })
    }

    /// All layers.
    pub fn layers(&self) -> &[KvLayer] {
        &self.layers
    }

    /// The memory of all layers.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Keys, values, side keys and side values of a layer, as arguments.
    pub(super) fn arguments(&self, layer: &KvLayer) -> [Argument; 4] {
        layer.offsets.map(|offset| self.buffer.at(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int8_is_within_half_a_step_of_what_it_was() {
        let shape = KvShape { kv_heads: 3, head_dim: 16, window: None };
        let layer = KvLayer { shape, storage: KvStorage::Int8, capacity: 1, offsets: [0; 4] };
        assert_eq!(layer.position_bytes(), 48 + 16);
        let components: Vec<f32> =
            (0..48).map(|i| if i < 16 { 0.0 } else { ((i * 37 % 48) as f32 - 20.0) / 7.0 }).collect();
        let bytes = layer.encode(&components);
        assert_eq!(bytes.len(), layer.position_bytes());
        for (head, (was, is)) in components.chunks(16).zip(layer.decode(&bytes).chunks(16)).enumerate() {
            let most = was.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            // Half a step of int8, and what rounding to bf16 adds.
            assert!(
                was.iter().zip(is).all(|(a, b)| (a - b).abs() <= most * (0.5 / 127.0 + 1.0 / 512.0)),
                "head {head}"
            );
        }
    }

    #[test]
    fn rings_hold_what_a_step_may_see_or_write() {
        let shape = |window| KvShape { kv_heads: 2, head_dim: 256, window };
        assert_eq!(shape(Some(512)).capacity(4000), 512 + 16 + 64);
        assert_eq!(shape(Some(512)).capacity(8192), 512 + 16 + 256);
        assert_eq!(shape(Some(512)).capacity(131_072), 512 + 16 + 1024);
        assert_eq!(shape(Some(512)).capacity(100), 116);
        assert_eq!(shape(None).capacity(131_072), 131_088);
        assert_eq!(shape(None).most_chunks(131_072), 225);
        assert_eq!(shape(Some(512)).most_chunks(131_072), 10);
        assert_eq!(shape(Some(512)).most_chunks(100), 2);
    }
}
