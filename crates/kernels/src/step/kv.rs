//! Cached keys and values of all layers that have their own, and the side slots of branches, in one piece of memory.
//!
//! Position p of a layer holds bf16 `[kv_heads, head_dim]` at place `p % capacity`. A layer that sees everything has room for the whole
//! context and a step's rows beyond it; a sliding layer is a ring, long enough that rows which are then rejected overwrite nothing that a
//! row may still see.

use super::{MOST_ROWS, StepError, require};
use crate::{
    attention::{chunk_end, chunk_index},
    device::{Argument, Buffer, Device},
};

/// Side slots of a layer.
pub const SIDE_SLOTS: usize = MOST_ROWS;
/// Largest head.
pub const MOST_HEAD_DIM: usize = 512;

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
    /// Positions that there is room for.
    pub capacity: usize,
    /// Byte offsets of keys, values, side keys and side values.
    pub offsets: [usize; 4],
}

/// The memory of all layers.
pub struct KvCache {
    buffer: Buffer,
    layers: Vec<KvLayer>,
    context: usize,
}

impl KvCache {
    /// Room for `context` positions and a step's rows beyond, in every layer of `shapes`.
    pub fn new(device: &Device, shapes: &[KvShape], context: usize) -> Result<KvCache, StepError> {
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
            let mut offsets = [0; 4];
            for (offset, positions) in offsets.iter_mut().zip([capacity, capacity, SIDE_SLOTS, SIDE_SLOTS]) {
                *offset = bytes;
                // Every part begins at a line of the cache.
                bytes += (positions * shape.width() * 2).next_multiple_of(128);
            }
            layers.push(KvLayer { shape, capacity, offsets });
        }
        Ok(KvCache { buffer: device.allocate("kv", bytes.max(16))?, layers, context })
    }

    /// Positions that there is room for, a step's rows not counted.
    pub fn context(&self) -> usize {
        self.context
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
