//! Matrix products on a device: `y[rows, n] = x[rows, k] w[n, k]^T` for 1 to 1024 rows, with what stands before and behind a product of a
//! decoder layer (`kernels/gemm.cuh`).
//!
//! A row has the same bits in any company: decoded alone, verified among 16, or in the middle of a prompt.

use crate::{
    device::{Argument, Buffer, Device, DeviceError, Launch, SHARED_BYTES},
    layout::{Format, TILE_CHANNELS, Tiles},
    schedule::Cut,
    step::{self, StepError, decide::Best, rows::Heads},
};

mod pair;

pub use pair::Pair;

/// Most rows of one launch.
pub const MOST_ROWS: usize = 1024;
/// Most rows that share one pass over the weights, whose reading is what a decode step waits for. More run in blocks of [`WIDE_ROWS`].
pub const DECODE_ROWS: usize = 16;
/// Rows of a block of a wide product.
pub const WIDE_ROWS: usize = 32;
/// Threads of a block.
const THREADS: u32 = 256;
/// Counters begin behind the words of the grid's barrier.
const BARRIER_BYTES: usize = 8;
/// A column has one itself, and up to four heads that begin in it have theirs.
const COUNTERS_OF_COLUMN: usize = 1 + TILE_CHANNELS / 16;

/// What a product rounds its inputs to. Neither is a matter of the weights, which are exact in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Operands {
    /// Eight bits of precision, and the range of f32.
    #[default]
    Bf16,
    /// Eleven bits, up to 65504, and fewer instructions to expand weights of 2 to 4 bits: for 8 of them 9.4 instead of 11.3 at int4, 13.5
    /// instead of 14.8 at int3, 9.0 instead of 9.4 at int2 (`kernels/resources.json`, sm_86, the worst of each).
    F16,
}

impl Operands {
    /// Those for inputs of which `largest` is the largest that was measured: f16 where eight times that is still a number.
    pub fn for_largest(largest: f32) -> Operands {
        let fits = largest.abs() * 8.0 <= half::f16::MAX.to_f32();
        if fits { Operands::F16 } else { Operands::Bf16 }
    }

    /// The bits of the operand next to a number.
    pub fn bits(self, v: f32) -> u16 {
        match self {
            Operands::Bf16 => half::bf16::from_f32(v).to_bits(),
            Operands::F16 => half::f16::from_f32(v).to_bits(),
        }
    }

    /// The number that an operand's bits stand for.
    pub fn read(self, bits: u16) -> f32 {
        match self {
            Operands::Bf16 => half::bf16::from_bits(bits).to_f32(),
            Operands::F16 => half::f16::from_bits(bits).to_f32(),
        }
    }

    /// Numbers as a row of operands.
    pub fn bytes(self, values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|&v| self.bits(v).to_le_bytes()).collect()
    }
}

/// Weights on a device: one matrix, or several that are multiplied as one.
pub struct Linear {
    device: Device,
    format: Format,
    operands: Operands,
    channels: usize,
    inputs: usize,
    group: Option<usize>,
    cut: Cut,
    weights: Buffer,
    scales: Buffer,
}

/// What every product of a device shares: sums of segments that wait for the last one, and how many columns' are there; of heads, how
/// many of their columns; and the barrier of paired products.
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
    /// bf16 `[rows, k]`, for [`Operands::Bf16`].
    Rows(&'a Buffer),
    /// f16 `[rows, k]`, for [`Operands::F16`].
    Halves(&'a Buffer),
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
    /// `[rows, n / 2]`: `gelu(gate) * up` of a matrix laid out by [`Tiles::gated`], as what the next product takes.
    Gated(&'a Buffer, Operands),
    /// `[rows, n]`: `gelu(y) * factor`.
    Scaled {
        /// Where it goes.
        y: &'a Buffer,
        /// As what the next product takes.
        operands: Operands,
        /// f32; a row's n factors begin at `offset + row * stride` elements.
        factor: &'a Buffer,
        /// Elements before the first row's.
        offset: usize,
        /// Elements from row to row.
        stride: usize,
    },
    /// Of a layer's queries, keys and values as one matrix, for 1 to 16 rows: f32 to [`Heads::projected`], and each head, as soon as all of
    /// it is there, on its way that [`Heads::launch`] would be a second launch for, bit for bit.
    Heads(Heads<'a>),
    /// Of a head, for 1 to 16 rows: the best token of each row, as [`step::decide::Sequence::choose`] finds it among logits in memory. They
    /// are not written.
    Best(Best<'a>),
}

/// Why a product cannot be launched.
#[derive(Debug, thiserror::Error)]
pub enum GemmError {
    /// The device said no.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Heads or tokens that do not fit the product.
    #[error(transparent)]
    Step(#[from] StepError),
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
            counters: device.allocate("counters", BARRIER_BYTES + columns * COUNTERS_OF_COLUMN * 4)?,
        };
        scratch.reset()?;
        Ok(scratch)
    }

    /// Makes ready for a first launch, or for one after a launch that failed.
    pub fn reset(&self) -> Result<(), DeviceError> {
        self.counters.fill(0)
    }

    /// Sums and counters, for a product of `rows` rows with this matrix.
    fn arguments(&self, matrix: &Linear, rows: usize) -> Result<[Argument; 2], GemmError> {
        let counters = BARRIER_BYTES + matrix.cut.columns * COUNTERS_OF_COLUMN * 4;
        check(&self.counters, rows, counters)?;
        Ok([check(&self.partial, rows, matrix.partial_bytes(rows))?, self.counters.at(BARRIER_BYTES)])
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

/// The kernel for these weights, operands and rows.
fn kernel(format: Format, operands: Operands, group: Option<usize>, rows: usize) -> &'static str {
    let f16 = operands == Operands::F16;
    let names: [[&'static str; 3]; 4] = match format {
        Format::Int2 if f16 => names!("int2_f16"),
        Format::Int3 if f16 => names!("int3_f16"),
        Format::Int4 if f16 => names!("int4_f16"),
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

fn int(v: usize) -> Argument {
    Argument::I32(v as i32)
}

/// Beside an epilogue that writes operands, as `HALVES` in the source.
const fn halves(operands: Operands) -> usize {
    match operands {
        Operands::Bf16 => 0,
        Operands::F16 => 8,
    }
}

/// The buffer's beginning, if it has as many bytes as a product of so many rows needs.
fn check(buffer: &Buffer, rows: usize, expected: usize) -> Result<Argument, GemmError> {
    match buffer.bytes() < expected {
        true => Err(GemmError::Short { name: buffer.name().into(), rows, expected, found: buffer.bytes() }),
        false => Ok(buffer.at(0)),
    }
}

const fn columns_of(channels: usize) -> usize {
    channels.div_ceil(TILE_CHANNELS)
}

/// Where no heads are finished.
fn no_heads() -> ([Argument; 9], [Argument; 8]) {
    let [a, b, c, d, e, f, g] = [0; 7].map(int);
    ([NONE; 9], [a, b, c, d, e, f, g, Argument::F32(0.0)])
}

impl Stream<'_> {
    /// From the stream to eps, for `rows` rows of `k` inputs.
    fn arguments(&self, rows: usize, k: usize) -> Result<[Argument; 8], GemmError> {
        let &Stream { stream, delta, norm, eps, out } = self;
        let check = |buffer: &Buffer, expected| check(buffer, rows, expected);
        let optional = |buffer: Option<&Buffer>, expected| buffer.map_or(Ok(NONE), |b| check(b, expected));
        let bytes = rows * k * 4;
        let scalar = delta.map_or(1.0, |d| d.scalar);
        Ok([
            check(stream, bytes)?,
            optional(delta.map(|d| d.y), bytes)?,
            optional(delta.map(|d| d.squares), rows * columns_of(k) * 4)?,
            optional(delta.map(|d| d.norm), k * 2)?,
            optional(norm, k * 2)?,
            optional(out, bytes)?,
            Argument::F32(scalar),
            Argument::F32(eps),
        ])
    }
}

impl Linear {
    /// Copies a matrix to the device.
    pub fn new(device: &Device, name: &str, tiles: &Tiles) -> Result<Linear, DeviceError> {
        let &Tiles { format, channels, inputs, group, .. } = tiles;
        Ok(Linear {
            device: device.clone(),
            format,
            operands: Operands::default(),
            channels,
            inputs,
            group,
            cut: Cut::of(format, channels, inputs),
            weights: device.constant(name, &tiles.weights)?,
            scales: device.constant(&format!("{name}.scales"), &tiles.scales)?,
        })
    }

    /// The same matrix with these operands.
    ///
    /// # Errors
    /// [`GemmError::Kind`]: f16 for weights of more than four bits.
    pub fn with_operands(self, operands: Operands) -> Result<Linear, GemmError> {
        let packed = matches!(self.format, Format::Int2 | Format::Int3 | Format::Int4);
        if operands == Operands::F16 && !packed {
            return self.refuse("bf16 or int8 operands");
        }
        Ok(Linear { operands, ..self })
    }

    /// What inputs are rounded to.
    pub fn operands(&self) -> Operands {
        self.operands
    }

    /// Rows that are what this matrix takes.
    pub fn rows<'a>(&self, x: &'a Buffer) -> Input<'a> {
        match self.operands {
            Operands::Bf16 => Input::Rows(x),
            Operands::F16 => Input::Halves(x),
        }
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
        let check = |buffer: &Buffer, expected: usize| check(buffer, rows, expected);
        let dot = self.format == Format::Int8Dot;

        // What the epilogues of heads and of the best token are given, where there is one.
        let (mut heads, mut best) = (no_heads(), [NONE, NONE, NONE, Argument::F32(0.0)]);
        let mut arguments = vec![self.weights.at(0), self.scales.at(0)];
        match input {
            Input::Int8(x, scales) if dot => arguments.extend([check(x, rows * k)?, check(scales, rows * 4)?]),
            _ if dot => return self.refuse("int8 inputs and a plain output"),
            Input::Int8(..) => return self.refuse("bf16 or f16 inputs, or a residual stream"),
            Input::Rows(_) if self.operands != Operands::Bf16 => {
                return self.refuse("f16 inputs with the operands that were chosen");
            }
            Input::Halves(_) if self.operands != Operands::F16 => return self.refuse("bf16 inputs"),
            Input::Rows(x) | Input::Halves(x) => {
                arguments.extend([check(x, rows * k * 2)?, NONE, NONE, NONE, NONE, NONE, NONE]);
                arguments.extend([Argument::F32(1.0), Argument::F32(0.0)]);
            }
            Input::Stream(stream) => {
                arguments.push(NONE);
                arguments.extend(stream.arguments(rows, k)?);
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
            Output::Gated(..) if !n.is_multiple_of(16) => {
                return self.refuse("gates and ups by eights for this output");
            }
            Output::Gated(y, operands) => {
                arguments.extend([check(y, rows * n)?, NONE, NONE, int(0), int(2 | halves(operands))]);
            }
            Output::Scaled { y, operands, factor, offset, stride } => {
                check(factor, (offset + (rows - 1) * stride + n) * 4)?;
                let (y, factor) = (check(y, rows * n * 2)?, factor.at(offset * 4));
                arguments.extend([y, NONE, factor, int(stride), int(3 | halves(operands))]);
            }
            Output::Heads(of) => {
                step::require(of.rows == rows, "rows of the heads", of.rows, format!("the product's {rows}"))?;
                step::require(
                    of.channels()? == n,
                    "channels of the heads",
                    of.channels()?,
                    format!("the matrix's {n}"),
                )?;
                heads = of.arguments()?;
                arguments.extend([check(of.projected, rows * n * 4)?, NONE, NONE, int(0), int(4)]);
            }
            Output::Best(of) => {
                best = of.arguments(rows, n)?;
                arguments.extend([NONE, NONE, NONE, int(0), int(5)]);
            }
        }
        arguments.extend(scratch.arguments(self, rows)?);
        arguments.extend([rows, n, k, self.cut.segments].map(int));
        if !dot {
            arguments.extend(heads.0);
            arguments.extend(heads.1);
            arguments.extend(best);
        }
        let wide = rows > DECODE_ROWS;
        let blocks = self.cut.blocks(self.device.properties().multiprocessors);
        let grid = match wide {
            // Blocks beside each other have the same weights.
            true => [rows.div_ceil(WIDE_ROWS) as u32, self.cut.columns as u32, 1],
            false => [1, blocks, 1],
        };
        Ok(Launch {
            kernel: kernel(self.format, self.operands, self.group, rows),
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
