//! Two products in one launch (`kernels/pair.cuh`): a layer's per-layer gate and projection, which are too small for a launch each.

use super::{
    Buffer, DECODE_ROWS, Format, GemmError, Input, Launch, Linear, Operands, Output, Scratch, Stream, THREADS, check,
    columns_of, int, shared_bytes,
};
use crate::step;

/// `middle = gelu(stream first^T) * factor`, then `y = middle second^T` with sums of squares.
///
/// The same bits as [`Pair::launches`], for 1 to 16 rows and weights of one kind. Every block must be resident: the launch is cooperative.
#[derive(Clone, Copy)]
pub struct Pair<'a> {
    /// From the residual stream to the middle.
    pub first: &'a Linear,
    /// From there on.
    pub second: &'a Linear,
    /// What `first` multiplies.
    pub stream: Stream<'a>,
    /// f32; a row's factors begin at `offset + row * stride` elements.
    pub factor: &'a Buffer,
    /// Elements before the first row's.
    pub offset: usize,
    /// Elements from row to row.
    pub stride: usize,
    /// bf16 `[rows, channels of first]`.
    pub middle: &'a Buffer,
    /// f32 `[rows, channels of second]`; not what the stream's delta is read from.
    pub y: &'a Buffer,
    /// f32 `[rows, channels of second / 64 rounded up]`; not those of the stream's delta.
    pub squares: &'a Buffer,
}

/// Names of a packed format's kernels: for each kind of group, up to 8 rows and up to 16.
macro_rules! names {
    ($format:literal) => {
        [names!($format, "_g32"), names!($format, "_g64"), names!($format, "_g128"), names!($format, "_channel")]
    };
    ($format:literal, $group:literal) => {
        [concat!("pair_", $format, $group, "_m8"), concat!("pair_", $format, $group, "_m16")]
    };
}

/// The kernel for these weights and rows.
fn kernel(format: Format, group: Option<usize>, rows: usize) -> Option<&'static str> {
    let names: [[&'static str; 2]; 4] = match format {
        Format::Int2 => names!("int2"),
        Format::Int3 => names!("int3"),
        Format::Int4 => names!("int4"),
        Format::Int8 => names!("int8"),
        Format::Bf16 => [names!("bf16", ""); 4],
        Format::Int8Dot => return None,
    };
    let of_group = match group {
        Some(32) => names[0],
        Some(64) => names[1],
        Some(_) => names[2],
        None => names[3],
    };
    Some(of_group[usize::from(rows > 8)])
}

impl Pair<'_> {
    /// Whether one launch can do both: the weights are of one kind, and not int8 with int8 inputs, and the operands bf16.
    pub fn is_one(&self) -> bool {
        let (first, second) = (self.first, self.second);
        let bf16 = [first, second].iter().all(|l| l.operands == Operands::Bf16);
        bf16 && first.format == second.format && first.group == second.group && first.format != Format::Int8Dot
    }

    /// The launch.
    ///
    /// # Errors
    /// [`GemmError::Kind`] where [`Pair::is_one`] says no; sizes that do not fit each other; buffers that are too short.
    pub fn launch(&self, rows: usize, scratch: &Scratch) -> Result<Launch, GemmError> {
        let &Pair { first, second, stream, factor, offset, stride, middle, y, squares } = self;
        step::require((1..=DECODE_ROWS).contains(&rows), "rows", rows, format!("1 to {DECODE_ROWS}"))?;
        let fits = second.inputs == first.channels;
        step::require(
            fits,
            "inputs of the second product",
            second.inputs,
            format!("the first one's {} outputs", first.channels),
        )?;
        let name = if self.is_one() { kernel(first.format, first.group, rows) } else { None };
        let Some(kernel) = name else {
            return first.refuse("a second product with weights of the same kind, and no int8 inputs");
        };
        let (inner, outer) = (first.channels, second.channels);
        check(factor, rows, (offset + (rows - 1) * stride + inner) * 4)?;
        let mut arguments = Vec::with_capacity(26);
        for side in [first, second] {
            let [weights, scales] = side.buffers();
            arguments.extend([weights.at(0), scales.at(0), int(side.channels), int(side.cut.segments)]);
        }
        arguments.extend(stream.arguments(rows, first.inputs)?);
        arguments.extend([factor.at(offset * 4), int(stride), check(middle, rows, rows * inner * 2)?]);
        arguments.extend([check(y, rows, rows * outer * 4)?, check(squares, rows, rows * columns_of(outer) * 4)?]);
        scratch.arguments(second, rows)?;
        arguments.extend(scratch.arguments(first, rows)?);
        arguments.extend([scratch.counters.at(0), int(rows), int(first.inputs)]);
        let multiprocessors = first.device.properties().multiprocessors;
        let blocks = first.cut.blocks(multiprocessors).max(second.cut.blocks(multiprocessors));
        Ok(Launch {
            kernel,
            grid: [1, blocks, 1],
            block: THREADS,
            shared_bytes: shared_bytes(first.format, first.group, rows) as u32,
            cooperative: true,
            arguments,
        })
    }

    /// The same as two launches that no block waits in.
    pub fn launches(&self, rows: usize, scratch: &Scratch) -> Result<[Launch; 2], GemmError> {
        let &Pair { first, second, stream, factor, offset, stride, middle, y, squares } = self;
        let scaled = Output::Scaled { y: middle, operands: second.operands, factor, offset, stride };
        Ok([
            first.launch(Input::Stream(stream), rows, scaled, scratch)?,
            second.launch(second.rows(middle), rows, Output::Squares(y, squares), scratch)?,
        ])
    }
}
