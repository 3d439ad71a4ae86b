//! Matrix products on a device: `y[rows, n] = x[rows, k] w[n, k]^T` for 1 to 16 rows (`kernels/gemm_int4.cu`).

use crate::{
    cpu::MatrixView,
    device::{Argument, Buffer, Device, DeviceError, Launch},
    layout::{Int4Tiles, LayoutError},
    schedule::Cut,
};

/// Most rows of one launch.
pub const MOST_ROWS: usize = 16;
/// Threads of a block.
const THREADS: u32 = 256;

/// A weight matrix on a device.
pub struct Int4Linear {
    device: Device,
    channels: usize,
    inputs: usize,
    group: Option<usize>,
    cut: Cut,
    weights: Buffer,
    scales: Buffer,
}

/// What every product of a device shares: sums of segments that wait for the last one, and how many columns' are there.
///
/// Launches on one device run one after another, so one of these serves all. [`Scratch::reset`] belongs in front of a step: a launch that
/// ended early leaves its counters behind.
pub struct Scratch {
    partial: Buffer,
    counters: Buffer,
}

/// Why a product cannot be launched.
#[derive(Debug, thiserror::Error)]
pub enum GemmError {
    /// The matrix has no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The device said no.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Too many rows, or none.
    #[error("{rows} rows: a launch takes 1 to {MOST_ROWS}")]
    Rows {
        /// Asked for.
        rows: usize,
    },
    /// A buffer that is too short.
    #[error("buffer {name} has {found} bytes; the product of {rows} rows needs {expected}")]
    Short {
        /// The buffer.
        name: String,
        /// Rows of the product.
        rows: usize,
        /// Bytes needed.
        expected: usize,
        /// Bytes there.
        found: usize,
    },
}

impl Scratch {
    /// Enough for products with any of these matrices.
    pub fn new<'a>(
        device: &Device,
        matrices: impl IntoIterator<Item = &'a Int4Linear>,
    ) -> Result<Scratch, DeviceError> {
        let (mut partial, mut columns) = (1, 1);
        for matrix in matrices {
            partial = partial.max(matrix.partial_bytes());
            columns = columns.max(matrix.cut.columns);
        }
        let scratch = Scratch {
            partial: device.allocate("partial", partial)?,
            counters: device.allocate("counters", columns * 4)?,
        };
        scratch.reset()?;
        Ok(scratch)
    }

    /// Makes ready for a first launch, or for one after a launch that failed.
    pub fn reset(&self) -> Result<(), DeviceError> {
        self.counters.fill(0)
    }

    /// Sums of segments, as a buffer to look at: what passes through it is counted apart from weights.
    pub fn partial(&self) -> &Buffer {
        &self.partial
    }
}

impl Int4Linear {
    /// Lays the matrix out and copies it to the device.
    pub fn new(device: &Device, name: &str, matrix: MatrixView<'_>) -> Result<Int4Linear, GemmError> {
        let Int4Tiles { channels, inputs, group, weights, scales } = Int4Tiles::pack(matrix)?;
        Ok(Int4Linear {
            device: device.clone(),
            channels,
            inputs,
            group,
            cut: Cut::of(channels, inputs),
            weights: device.constant(name, &weights)?,
            scales: device.constant(&format!("{name}.scales"), &scales)?,
        })
    }

    /// Weights and scales on the device.
    pub fn buffers(&self) -> [&Buffer; 2] {
        [&self.weights, &self.scales]
    }

    fn partial_bytes(&self) -> usize {
        if self.cut.segments == 1 { 0 } else { self.cut.segments * MOST_ROWS * self.channels * 4 }
    }

    /// The launch that computes `y` (f32 `[rows, n]`) from `x` (bf16 `[rows, k]`) on `blocks` blocks; every number of blocks gives the
    /// same bits.
    fn plan(&self, x: &Buffer, rows: usize, y: &Buffer, scratch: &Scratch, blocks: u32) -> Result<Launch, GemmError> {
        if !(1..=MOST_ROWS).contains(&rows) {
            return Err(GemmError::Rows { rows });
        }
        let needs = [
            (x, rows * self.inputs * 2),
            (y, rows * self.channels * 4),
            (&scratch.partial, self.partial_bytes()),
            (&scratch.counters, self.cut.columns * 4),
        ];
        for (buffer, expected) in needs {
            if buffer.bytes() < expected {
                return Err(GemmError::Short { name: buffer.name().into(), rows, expected, found: buffer.bytes() });
            }
        }
        let tile = if rows <= 8 { 8 } else { 16 };
        let (kernel, group_bytes) = match (self.group, tile) {
            (Some(32), 8) => ("gemm_int4_g32_m8", 1024),
            (Some(64), 8) => ("gemm_int4_g64_m8", 512),
            (Some(_), 8) => ("gemm_int4_g128_m8", 256),
            (None, 8) => ("gemm_int4_channel_m8", 0),
            (Some(32), _) => ("gemm_int4_g32_m16", 1024),
            (Some(64), _) => ("gemm_int4_g64_m16", 512),
            (Some(_), _) => ("gemm_int4_g128_m16", 256),
            (None, _) => ("gemm_int4_channel_m16", 0),
        };
        // As in the source: stages of weights, scales and inputs; the halves' sums; one word, rounded up.
        let stages = if tile == 8 { 7 } else { 5 };
        let shared_bytes = stages * (8192 + group_bytes + tile * 512) + 64 * tile * 4 + 16;
        let int = |v: usize| Argument::I32(v as i32);
        let arguments = vec![
            self.weights.at(0),
            self.scales.at(0),
            x.at(0),
            y.at(0),
            scratch.partial.at(0),
            scratch.counters.at(0),
            int(rows),
            int(self.channels),
            int(self.inputs),
            int(self.cut.segments),
        ];
        let grid = [blocks.clamp(1, self.cut.items() as u32), 1, 1];
        Ok(Launch { kernel, grid, block: THREADS, shared_bytes, cooperative: false, arguments })
    }

    /// The launch for this device's multiprocessors, to be recorded into a graph.
    pub fn launch(&self, x: &Buffer, rows: usize, y: &Buffer, scratch: &Scratch) -> Result<Launch, GemmError> {
        self.plan(x, rows, y, scratch, self.cut.blocks(self.device.properties().multiprocessors))
    }

    /// Computes `y` (f32 `[rows, n]`) from `x` (bf16 `[rows, k]`) and waits for it.
    pub fn run(&self, x: &Buffer, rows: usize, y: &Buffer, scratch: &Scratch) -> Result<(), GemmError> {
        let launch = self.launch(x, rows, y, scratch)?;
        // SAFETY: the arguments are the kernel's; `plan` checked that every buffer holds what the shape implies.
        Ok(unsafe { self.device.launch(&launch) }?)
    }
}
