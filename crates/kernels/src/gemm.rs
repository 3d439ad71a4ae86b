//! Matrix products on a device: `y[rows, n] = x[rows, k] w[n, k]^T` for 1 to 1024 rows, with what stands before and behind a product of a
//! decoder layer (`kernels/gemm.cuh`).
//!
//! A row has the same bits in any company: decoded alone, verified among 16, or in the middle of a prompt.

use crate::{
    device::{Argument, Buffer, Device, DeviceError, Launch, SHARED_BYTES},
    layout::{Format, TILE_CHANNELS, Tiles},
    schedule::Cut,
};

/// Most rows of one launch.
pub const MOST_ROWS: usize = 1024;
/// Most rows that share one pass over the weights, whose reading is what a decode step waits for. More run in blocks of [`WIDE_ROWS`].
pub const DECODE_ROWS: usize = 16;
/// Rows of a block of a wide product.
pub const WIDE_ROWS: usize = 32;
/// Threads of a block.
const THREADS: u32 = 256;

/// Weights on a device: one matrix, or several that are multiplied as one.
pub struct Linear {
    device: Device,
    format: Format,
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

/// What is multiplied.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// bf16 `[rows, k]`.
    Rows(&'a Buffer),
    /// int8 `[rows, k]` and f32 scales `[rows]`, for [`Format::Int8Dot`].
    Int8(&'a Buffer, &'a Buffer),
    /// The residual stream, with what is still to be added and the norm in front of the product.
    Stream(Stream<'a>),
}

/// `stream = (stream + norm(delta) * delta.norm) * scalar`, and of that the operands `norm(stream) * norm`, norms being divisions by the
/// root of the mean square plus `eps`.
#[derive(Clone, Copy)]
pub struct Stream<'a> {
    /// f32 `[rows, k]`.
    pub stream: &'a Buffer,
    /// What is added first.
    pub delta: Option<Delta<'a>>,
    /// Weights of the norm in front of the product, bf16 `[k]`; none: the stream itself is multiplied.
    pub norm: Option<&'a Buffer>,
    /// Under the roots of both norms.
    pub eps: f32,
    /// Where the new stream goes, f32 `[rows, k]`; another buffer than the old one.
    pub out: Option<&'a Buffer>,
}

/// The product of a sublayer, to be normed and added to the residual stream.
#[derive(Clone, Copy)]
pub struct Delta<'a> {
    /// f32 `[rows, k]`.
    pub y: &'a Buffer,
    /// [`Output::Squares`] of the launch that made it, f32 `[rows, k / 64 rounded up]`.
    pub squares: &'a Buffer,
    /// Weights of the norm, bf16 `[k]`.
    pub norm: &'a Buffer,
    /// What the sum is multiplied with: the layer's scalar behind its last sublayer, else 1.
    pub scalar: f32,
}

/// What becomes of the product.
#[derive(Clone, Copy)]
pub enum Output<'a> {
    /// f32 `[rows, n]`.
    Plain(&'a Buffer),
    /// The same, and sums of squares f32 `[rows, n / 64 rounded up]`.
    Squares(&'a Buffer, &'a Buffer),
    /// bf16 `[rows, n / 2]`: `gelu(gate) * up` of a matrix laid out by [`Tiles::gated`].
    Gated(&'a Buffer),
    /// bf16 `[rows, n]`: `gelu(y) * factor`.
    Scaled {
        /// Where it goes.
        y: &'a Buffer,
        /// f32; a row's n factors begin at `offset + row * stride` elements.
        factor: &'a Buffer,
        /// Elements before the first row's.
        offset: usize,
        /// Elements from row to row.
        stride: usize,
    },
}

/// Why a product cannot be launched.
#[derive(Debug, thiserror::Error)]
pub enum GemmError {
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
    /// Inputs or output of a kind that these weights do not take.
    #[error("{format:?} weights take {expected}")]
    Kind {
        /// How the weights are stored.
        format: Format,
        /// What they take.
        expected: &'static str,
    },
}

impl Scratch {
    /// Enough for products with any of these matrices.
    pub fn new<'a>(device: &Device, matrices: impl IntoIterator<Item = &'a Linear>) -> Result<Scratch, DeviceError> {
        let (mut partial, mut columns) = (1, 1);
        for matrix in matrices {
            partial = partial.max(matrix.partial_bytes(DECODE_ROWS));
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

/// Names of a packed format's kernels: for each kind of group, up to 8 rows, up to 16, more.
macro_rules! names {
    ($format:literal) => {
        [names!($format, "_g32"), names!($format, "_g64"), names!($format, "_g128"), names!($format, "_channel")]
    };
    ($format:literal, $group:literal) => {
        [
            concat!("gemm_", $format, $group, "_m8"),
            concat!("gemm_", $format, $group, "_m16"),
            concat!("gemm_", $format, $group, "_wide"),
        ]
    };
}

/// The kernel for these weights and rows.
fn kernel(format: Format, group: Option<usize>, rows: usize) -> &'static str {
    let names: [[&'static str; 3]; 4] = match format {
        Format::Int2 => names!("int2"),
        Format::Int3 => names!("int3"),
        Format::Int4 => names!("int4"),
        Format::Int8 => names!("int8"),
        Format::Bf16 => [names!("bf16", ""); 4],
        Format::Int8Dot => [names!("int8_dot", ""); 4],
    };
    let of_group = match group {
        Some(32) => names[0],
        Some(64) => names[1],
        Some(_) => names[2],
        None => names[3],
    };
    of_group[(rows > 8) as usize + (rows > DECODE_ROWS) as usize]
}

/// Rows for which a kernel has room.
const fn tile_rows(rows: usize) -> usize {
    match rows {
        0..=8 => 8,
        9..=DECODE_ROWS => DECODE_ROWS,
        _ => WIDE_ROWS,
    }
}

/// Dynamic shared memory of a block: as `Stage` in the source, as many stages as there is room for.
const fn shared_bytes(format: Format, group: Option<usize>, rows: usize) -> usize {
    let rows = tile_rows(rows);
    let scales = match group {
        Some(group) => format.tile_inputs() / group * TILE_CHANNELS * 2,
        None => 0,
    };
    let stage = format.tile_bytes() + scales + rows * format.tile_inputs() * format.input_bytes();
    let rest = (rows * (TILE_CHANNELS + 4) + 16 * rows + 2 * rows) * 4 + 16;
    (SHARED_BYTES as usize - rest) / stage * stage + rest
}

/// A null pointer.
const NONE: Argument = Argument::U64(0);

impl Linear {
    /// Copies a matrix to the device.
    pub fn new(device: &Device, name: &str, tiles: &Tiles) -> Result<Linear, DeviceError> {
        let &Tiles { format, channels, inputs, group, .. } = tiles;
        Ok(Linear {
            device: device.clone(),
            format,
            channels,
            inputs,
            group,
            cut: Cut::of(format, channels, inputs),
            weights: device.constant(name, &tiles.weights)?,
            scales: device.constant(&format!("{name}.scales"), &tiles.scales)?,
        })
    }

    /// Weights and scales on the device.
    pub fn buffers(&self) -> [&Buffer; 2] {
        [&self.weights, &self.scales]
    }

    /// Output channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// How the product is cut.
    pub fn cut(&self) -> Cut {
        self.cut
    }

    /// Sums of segments, and of their inputs' squares for every column, where blocks share columns.
    fn partial_bytes(&self, rows: usize) -> usize {
        let Cut { columns, segments, .. } = self.cut;
        let shared = segments > 1 && rows <= DECODE_ROWS;
        if shared { segments * tile_rows(rows) * (self.channels + columns) * 4 } else { 0 }
    }

    fn refuse<T>(&self, expected: &'static str) -> Result<T, GemmError> {
        Err(GemmError::Kind { format: self.format, expected })
    }

    /// The launch that computes `output` from `input`, to be run or recorded into a graph. The number of the device's multiprocessors
    /// decides how the work is dealt, and changes no bit.
    pub fn launch(
        &self,
        input: Input<'_>,
        rows: usize,
        output: Output<'_>,
        scratch: &Scratch,
    ) -> Result<Launch, GemmError> {
        if !(1..=MOST_ROWS).contains(&rows) {
            return Err(GemmError::Rows { rows });
        }
        let (n, k) = (self.channels, self.inputs);
        let check = |buffer: &Buffer, expected: usize| match buffer.bytes() < expected {
            true => Err(GemmError::Short { name: buffer.name().into(), rows, expected, found: buffer.bytes() }),
            false => Ok(buffer.at(0)),
        };
        let optional = |buffer: Option<&Buffer>, expected| buffer.map_or(Ok(NONE), |b| check(b, expected));
        let int = |v: usize| Argument::I32(v as i32);
        let dot = self.format == Format::Int8Dot;
        let columns_of = |channels: usize| channels.div_ceil(TILE_CHANNELS);

        let mut arguments = vec![self.weights.at(0), self.scales.at(0)];
        match input {
            Input::Int8(x, scales) if dot => arguments.extend([check(x, rows * k)?, check(scales, rows * 4)?]),
            _ if dot => return self.refuse("int8 inputs and a plain output"),
            Input::Int8(..) => return self.refuse("bf16 inputs or a residual stream"),
            Input::Rows(x) => {
                arguments.extend([check(x, rows * k * 2)?, NONE, NONE, NONE, NONE, NONE, NONE]);
                arguments.extend([Argument::F32(1.0), Argument::F32(0.0)]);
            }
            Input::Stream(Stream { stream, delta, norm, eps, out }) => {
                let bytes = rows * k * 4;
                arguments.extend([NONE, check(stream, bytes)?]);
                match delta {
                    Some(Delta { y, squares, norm, .. }) => {
                        let squares = check(squares, rows * columns_of(k) * 4)?;
                        arguments.extend([check(y, bytes)?, squares, check(norm, k * 2)?]);
                    }
                    None => arguments.extend([NONE, NONE, NONE]),
                }
                arguments.extend([optional(norm, k * 2)?, optional(out, bytes)?]);
                arguments.extend([Argument::F32(delta.map_or(1.0, |d| d.scalar)), Argument::F32(eps)]);
            }
        }
        match output {
            Output::Plain(y) if dot => arguments.push(check(y, rows * n * 4)?),
            _ if dot => return self.refuse("int8 inputs and a plain output"),
            Output::Plain(y) => arguments.extend([check(y, rows * n * 4)?, NONE, NONE, int(0), int(0)]),
            Output::Squares(y, squares) => {
                let squares = check(squares, rows * columns_of(n) * 4)?;
                arguments.extend([check(y, rows * n * 4)?, squares, NONE, int(0), int(1)]);
            }
            Output::Gated(_) if !n.is_multiple_of(16) => return self.refuse("gates and ups by eights for this output"),
            Output::Gated(y) => arguments.extend([check(y, rows * n)?, NONE, NONE, int(0), int(2)]),
            Output::Scaled { y, factor, offset, stride } => {
                check(factor, (offset + (rows - 1) * stride + n) * 4)?;
                arguments.extend([check(y, rows * n * 2)?, NONE, factor.at(offset * 4), int(stride), int(3)]);
            }
        }
        arguments.extend([
            check(&scratch.partial, self.partial_bytes(rows))?,
            check(&scratch.counters, self.cut.columns * 4)?,
            int(rows),
            int(n),
            int(k),
            int(self.cut.segments),
        ]);
        let wide = rows > DECODE_ROWS;
        let blocks = self.cut.blocks(self.device.properties().multiprocessors);
        let grid = match wide {
            // Blocks beside each other have the same weights.
            true => [rows.div_ceil(WIDE_ROWS) as u32, self.cut.columns as u32, 1],
            false => [1, blocks, 1],
        };
        Ok(Launch {
            kernel: kernel(self.format, self.group, rows),
            grid,
            block: THREADS,
            shared_bytes: shared_bytes(self.format, self.group, rows) as u32,
            cooperative: false,
            arguments,
        })
    }

    /// Computes `output` from `input` and waits for it.
    pub fn run(&self, input: Input<'_>, rows: usize, output: Output<'_>, scratch: &Scratch) -> Result<(), GemmError> {
        let launch = self.launch(input, rows, output, scratch)?;
        // SAFETY: the arguments are the kernel's; `launch` checked that every buffer holds what the shape implies.
        Ok(unsafe { self.device.launch(&launch) }?)
    }
}
