//! Matrix products on a device as on the emulator: accurate, the same bits for a row in any company and on any run, and how fast their
//! weights are read when they come from memory.

use super::{Check, Failure, Measurement, Subject, vectors, words, wrong};
use crate::{
    cpu::{Data, Matrix, MatrixView},
    device::{Buffer, Command},
    gemm::{DECODE_ROWS, GemmError, Linear, Operands, Output, Scratch},
    layout::{Format, Tiles},
    packing::Bits,
};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "gemm accuracy",
        what: "errors against f64 are at most twice those of plain f32 sums",
        timed: false,
        run: accuracy,
    },
    Check {
        name: "gemm bits",
        what: "a row of 16 has the bits that it has alone, in any order, on every run",
        timed: false,
        run: bits,
    },
    Check {
        name: "gemm mutations",
        what: "one flipped bit of weights, scales or inputs shows in its channel or row",
        timed: false,
        run: mutations,
    },
    Check {
        name: "gemm speed",
        what: "weights come from memory as fast as it reads, at every shape of E4B",
        timed: true,
        run: speed,
    },
];

/// Channels, inputs, group: fewer units of k than stages, more; padding in both directions; several segments.
const SHAPES: [(usize, usize, usize); 4] = [(64, 256, 128), (80, 1040, 32), (64, 2304, 2304), (144, 336, 64)];
/// Larger ones, for a GPU.
const LARGE: [(usize, usize, usize); 3] = [(3072, 2560, 128), (2560, 10240, 128), (2560, 2048, 32)];
/// Formats that multiply bf16 inputs.
const FORMATS: [Format; 5] = [Format::Int2, Format::Int3, Format::Int4, Format::Int8, Format::Bf16];
/// Formats that multiply f16 inputs.
const OF_F16: [Format; 3] = [Format::Int2, Format::Int3, Format::Int4];

/// All formats, each with the operands that it can have.
fn kinds() -> impl Iterator<Item = (Format, Operands)> {
    FORMATS.map(|f| (f, Operands::Bf16)).into_iter().chain(OF_F16.map(|f| (f, Operands::F16)))
}
/// Matrices of E4B: name, channels, inputs.
const E4B: [(&str, usize, usize); 6] = [
    ("gate and up", 20480, 2560),
    ("down", 2560, 10240),
    ("qkv sliding", 3072, 2560),
    ("o sliding", 2560, 2048),
    ("qkv full", 6144, 2560),
    ("head of 12288 tokens", 12288, 2560),
];
/// Rows whose speed is measured.
const ROWS: [usize; 3] = [1, 8, 16];
/// How much longer than its weights' reading a timed graph is at least, in bytes: a millisecond or more on any GPU.
const LEAST_BYTES: usize = 1 << 30;

impl From<GemmError> for Failure {
    fn from(error: GemmError) -> Failure {
        match error {
            GemmError::Device(error) => Failure::Device(error),
            other => Failure::Wrong(other.to_string()),
        }
    }
}

/// A product on the device under test.
struct Case<'a> {
    subject: &'a Subject,
    weights: Weights,
    /// Numbers that operands stand for.
    x: Vec<f32>,
    linear: Linear,
    scratch: Scratch,
}

impl<'a> Case<'a> {
    fn new(subject: &'a Subject, weights: Weights, operands: Operands) -> Result<Case<'a>, Failure> {
        let linear = Linear::new(&subject.device, "w", &weights.tiles()?)?.with_operands(operands)?;
        let scratch = Scratch::new(&subject.device, [&linear])?;
        let x = inputs(DECODE_ROWS, weights.k, operands);
        Ok(Case { subject, weights, x, linear, scratch })
    }

    /// y of these rows, as bits.
    fn run(&self, rows: &[usize]) -> Result<Vec<u32>, Failure> {
        let k = self.weights.k;
        let bytes: Vec<u8> = rows.iter().flat_map(|&r| self.linear.operands().bytes(&self.x[r * k..][..k])).collect();
        let x = self.subject.device.constant("x", &bytes)?;
        let y = self.subject.device.allocate("y", rows.len() * self.weights.n * 4)?;
        self.linear.run(self.linear.rows(&x), rows.len(), Output::Plain(&y), &self.scratch)?;
        words(&y)
    }
}

/// [`vectors::inputs`] as these operands have them.
fn inputs(rows: usize, k: usize, operands: Operands) -> Vec<f32> {
    vectors::inputs(rows, k).into_iter().map(|v| operands.read(operands.bits(v.to_f32()))).collect()
}

/// Weights in the order of a file.
pub(super) struct Weights {
    format: Format,
    pub(super) n: usize,
    k: usize,
    group: usize,
    packed: Vec<u8>,
    scales: Vec<u8>,
}

impl Weights {
    pub(super) fn new(format: Format, n: usize, k: usize, group: usize) -> Weights {
        let (packed, scales) = vectors::weights(format.bits(), n, k, group);
        Weights { format, n, k, group, packed, scales }
    }

    pub(super) fn matrix(&self) -> Result<MatrixView<'_>, Failure> {
        let (packed, scales, group) = (&self.packed[..], &self.scales[..], self.group);
        let data = match Bits::new(self.format.bits()) {
            Some(bits) => Data::Packed { bits, packed, scales, group },
            None => Data::Bf16(packed),
        };
        Matrix::new(self.n, self.k, data).map_err(|e| Failure::Wrong(e.to_string()))
    }

    pub(super) fn tiles(&self) -> Result<Tiles, Failure> {
        Tiles::pack(self.matrix()?).map_err(|e| Failure::Wrong(e.to_string()))
    }
}

/// The cases of this device: all formats in the small shapes, int4 in those of E4B too where a GPU computes them.
fn cases(subject: &Subject) -> Vec<((Format, Operands), usize, usize, usize)> {
    let small = kinds().flat_map(|kind| SHAPES.iter().map(move |&(n, k, group)| (kind, n, k, group)));
    let large = LARGE.iter().map(|&(n, k, group)| ((Format::Int4, Operands::Bf16), n, k, group));
    small.chain(large.take(subject.size(LARGE.len(), 0))).collect()
}

fn accuracy(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    for ((format, operands), n, k, group) in cases(subject) {
        let case = Case::new(subject, Weights::new(format, n, k, group), operands)?;
        let matrix = case.weights.matrix()?;
        // Of a large matrix some channels: the references are slow.
        let channels: Vec<usize> = (0..n).step_by((n / 200).max(1)).collect();
        let rows: Vec<usize> = (0..DECODE_ROWS).collect();
        let y = case.run(&rows)?;
        let (mut ours, mut plain) = (0.0_f64, 0.0_f64);
        for &channel in &channels {
            let w = matrix.row(channel);
            for &row in &rows {
                let terms = || case.x[row * k..][..k].iter().copied().zip(&w);
                let exact: f64 = terms().map(|(x, w)| f64::from(x) * f64::from(*w)).sum();
                let naive: f32 = terms().map(|(x, w)| x * w).sum();
                ours = ours.max((f64::from(f32::from_bits(y[row * n + channel])) - exact).abs());
                plain = plain.max((f64::from(naive) - exact).abs());
            }
        }
        if ours.is_nan() || ours > 2.0 * plain {
            return wrong(format!(
                "{format:?}, {operands:?} [{n}, {k}] group {group}: error {ours:e}, of plain f32 sums {plain:e}"
            ));
        }
    }
    Ok(Vec::new())
}

fn bits(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let order = [11, 3, 7, 0, 14, 9, 5, 1, 15, 2, 8, 13, 4, 12, 6, 10];
    let wide: Vec<usize> = (0..2 * DECODE_ROWS + 5).map(|i| i * 7 % DECODE_ROWS).collect();
    for ((format, operands), n, k, group) in cases(subject) {
        let case = Case::new(subject, Weights::new(format, n, k, group), operands)?;
        let alone: Vec<Vec<u32>> = (0..DECODE_ROWS).map(|row| case.run(&[row])).collect::<Result<_, _>>()?;
        let same = |rows: &[usize], what: &str| -> Result<(), Failure> {
            let together = case.run(rows)?;
            match rows.iter().enumerate().find(|&(place, &row)| together[place * n..][..n] != alone[row]) {
                Some((place, row)) => wrong(format!(
                    "{format:?}, {operands:?} [{n}, {k}] group {group}: row {row} at place {place} of {} has other bits than alone ({what})",
                    rows.len()
                )),
                None => Ok(()),
            }
        };
        for m in [2, 7, 8, 9, 16] {
            same(&order[..m], "another order")?;
        }
        same(&wide, "the wide kernel")?;
        for _ in 0..subject.size(100, 2) {
            same(&order, "another run")?;
        }
    }
    Ok(Vec::new())
}

fn mutations(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let (n, k, group) = (64, 2560, 128);
    let rows: Vec<usize> = (0..DECODE_ROWS).collect();
    for (format, operands) in kinds().filter(|kind| kind.0 != Format::Bf16) {
        let good = Case::new(subject, Weights::new(format, n, k, group), operands)?.run(&rows)?;
        let changed = |weights: Weights, x: Vec<f32>| -> Result<Vec<usize>, Failure> {
            let y = Case { x, ..Case::new(subject, weights, operands)? }.run(&rows)?;
            Ok((0..y.len()).filter(|&i| y[i] != good[i]).collect())
        };
        let x = inputs(DECODE_ROWS, k, operands);
        let row_bytes = file_row_bytes(format, k);
        let mut weights = Weights::new(format, n, k, group);
        weights.packed[17 * row_bytes + 40] ^= 0x10;
        let of_weights = changed(weights, x.clone())?;
        let mut weights = Weights::new(format, n, k, group);
        weights.scales[(33 * k / group + 7) * 2] ^= 0x20;
        let of_scales = changed(weights, x.clone())?;
        let mut other = x;
        other[5 * k + 2559] = -other[5 * k + 2559];
        let of_inputs = changed(Weights::new(format, n, k, group), other)?;
        let only =
            |found: &[usize], inside: &dyn Fn(usize) -> bool| !found.is_empty() && found.iter().all(|&i| inside(i));
        for (what, right) in [
            ("a weight of channel 17", only(&of_weights, &|i| i % n == 17)),
            ("a scale of channel 33", only(&of_scales, &|i| i % n == 33)),
            ("an input of row 5", only(&of_inputs, &|i| i / n == 5)),
        ] {
            if !right {
                return wrong(format!("{format:?}, {operands:?}: a flipped bit in {what} shows elsewhere, or nowhere"));
            }
        }
    }
    Ok(Vec::new())
}

/// Bytes of a channel in the order of a file.
fn file_row_bytes(format: Format, k: usize) -> usize {
    Bits::new(format.bits()).map_or(k * 2, |bits| bits.words(k) * 4)
}

fn speed(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let mut measured = Vec::new();
    if subject.properties.emulated {
        // The same graph of rotating weights, once and small.
        measured.extend(shape_speed(subject, "small", (Format::Int4, Operands::Bf16), 192, 512, 8)?);
        return Ok(measured);
    }
    for (name, n, k) in E4B {
        for rows in ROWS {
            measured.extend(shape_speed(subject, name, (Format::Int4, Operands::Bf16), n, k, rows)?);
        }
    }
    for kind in kinds().filter(|&kind| kind != (Format::Int4, Operands::Bf16)) {
        measured.extend(shape_speed(subject, "down", kind, 2560, 10240, 8)?);
    }
    Ok(measured)
}

/// Bytes a second of a graph that multiplies with one copy of the weights after another, so many that none is found in the cache.
fn shape_speed(
    subject: &Subject,
    name: &str,
    (format, operands): (Format, Operands),
    n: usize,
    k: usize,
    rows: usize,
) -> Result<Option<Measurement>, Failure> {
    let what = match operands {
        Operands::Bf16 => format!("{name}: {format:?} [{n}, {k}] in groups of 128, {rows} rows"),
        Operands::F16 => format!("{name}: {format:?} with f16 operands [{n}, {k}] in groups of 128, {rows} rows"),
    };
    let tiles = Weights::new(format, n, k, if format == Format::Bf16 { k } else { 128 }).tiles()?;
    let bytes = tiles.weights.len() + tiles.scales.len();
    let copies = subject.size((4 * subject.properties.l2_bytes).div_ceil(bytes) + 1, 2);
    let copy = |_| -> Result<Linear, GemmError> { Linear::new(&subject.device, "w", &tiles)?.with_operands(operands) };
    let linears = (0..copies).map(copy).collect::<Result<Vec<Linear>, _>>()?;
    let scratch = Scratch::new(&subject.device, &linears)?;
    let x = subject.device.constant("x", &operands.bytes(&inputs(rows, k, operands)))?;
    let outputs: Vec<Buffer> =
        (0..copies).map(|i| subject.device.allocate(&format!("y{i}"), rows * n * 4)).collect::<Result<_, _>>()?;
    let rounds = subject.size(LEAST_BYTES.div_ceil(bytes * copies), 1);
    let mut commands: Vec<Command> = Vec::new();
    for _ in 0..rounds {
        for (linear, y) in linears.iter().zip(&outputs) {
            commands.push(linear.launch(linear.rows(&x), rows, Output::Plain(y), &scratch)?.into());
        }
    }
    // SAFETY: launches as `Linear::launch` makes them.
    let graph = unsafe { subject.record(commands) }?;
    let samples = subject.time(&what, &graph, &outputs.iter().collect::<Vec<_>>())?;
    let first = words(&outputs[0])?;
    for y in &outputs[1..] {
        if words(y)? != first {
            return wrong(format!("{what}: copies of the same weights give different bits"));
        }
    }
    samples.map(|samples| subject.rate(what, (bytes * copies * rounds) as u64, samples)).transpose()
}
