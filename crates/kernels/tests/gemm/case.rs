//! A product to test: weights of a format, inputs, and both on a device.

use half::bf16;
use kernels::{
    cpu::{Data, Matrix, MatrixView},
    device::{Buffer, Device, Emulation},
    gemm::{GemmError, Linear, Operands, Output, Scratch},
    layout::{Format, Tiles},
    packing::Bits,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Rows of inputs.
pub const ROWS: usize = 70;
/// The rows of a launch that a step makes.
pub const SIXTEEN: [usize; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
/// Formats of weights with 16-bit inputs, each with the operands that it can have.
pub const KINDS: [Kind; 8] = [
    Kind(Format::Int2, Operands::Bf16),
    Kind(Format::Int3, Operands::Bf16),
    Kind(Format::Int4, Operands::Bf16),
    Kind(Format::Int8, Operands::Bf16),
    Kind(Format::Bf16, Operands::Bf16),
    Kind(Format::Int2, Operands::F16),
    Kind(Format::Int3, Operands::F16),
    Kind(Format::Int4, Operands::F16),
];

/// A format of weights with operands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kind(pub Format, pub Operands);

impl From<Format> for Kind {
    fn from(format: Format) -> Kind {
        Kind(format, Operands::Bf16)
    }
}

impl Kind {
    /// The nearest operand, as a number.
    pub fn round(self, v: f32) -> f32 {
        self.1.read(self.1.bits(v))
    }
}

pub fn emulation(seed: u64) -> Emulation {
    Emulation { seed, ..Emulation::default() }
}

pub fn random(seed: usize) -> StdRng {
    StdRng::seed_from_u64(seed as u64)
}

/// Weights of a matrix in the order of a file.
#[derive(Clone)]
pub struct Weights {
    pub format: Format,
    pub n: usize,
    pub k: usize,
    pub group: usize,
    pub packed: Vec<u8>,
    pub scales: Vec<u8>,
}

impl Weights {
    /// Random weights whose largest are about 0.1; one scale a channel where `group` is `k`.
    pub fn random(format: Format, n: usize, k: usize, group: usize) -> Weights {
        let mut random = random(n * 31 + k * 7 + group + format.bits());
        let Some(bits) = Bits::new(format.bits()) else {
            let packed =
                (0..n * k).flat_map(|_| bf16::from_f32(random.random_range(-0.1..0.1)).to_le_bytes()).collect();
            return Weights { format, n, k, group: k, packed, scales: Vec::new() };
        };
        let packed = (0..n * bits.words(k) * 4).map(|_| random.random()).collect();
        let most = 0.1 / -bits.q_min() as f32;
        let scale = |_| bf16::from_f32(random.random_range(0.25 * most..most)).to_le_bytes();
        let scales = (0..n * k.div_ceil(group)).flat_map(scale).collect();
        Weights { format, n, k, group, packed, scales }
    }

    pub fn matrix(&self) -> MatrixView<'_> {
        let (packed, scales, group) = (&self.packed[..], &self.scales[..], self.group);
        let data = match Bits::new(self.format.bits()) {
            Some(bits) => Data::Packed { bits, packed, scales, group },
            None => Data::Bf16(packed),
        };
        Matrix::new(self.n, self.k, data).unwrap()
    }

    /// Expanded rows.
    pub fn rows(&self) -> Vec<Vec<f32>> {
        (0..self.n).map(|row| self.matrix().row(row)).collect()
    }
}

/// Weights, inputs for [`ROWS`] rows, and both on a device.
pub struct Case {
    pub device: Device,
    pub n: usize,
    pub k: usize,
    pub kind: Kind,
    pub weights: Weights,
    /// Numbers that operands stand for.
    pub x: Vec<f32>,
    pub linear: Linear,
    pub scratch: Scratch,
}

impl Case {
    pub fn new(kind: impl Into<Kind>, n: usize, k: usize, group: usize) -> Case {
        let (mut random, kind) = (random(n + k), kind.into());
        let x = (0..ROWS * k).map(|_| kind.round(random.random_range(-2.0..2.0))).collect();
        Case::with(kind, Weights::random(kind.0, n, k, group), x)
    }

    pub fn with(kind: impl Into<Kind>, weights: Weights, x: Vec<f32>) -> Case {
        let (device, kind) = (Device::emulated(emulation(0)).unwrap(), kind.into());
        let linear = Linear::new(&device, "w", &Tiles::pack(weights.matrix()).unwrap()).unwrap();
        let linear = linear.with_operands(kind.1).unwrap();
        let scratch = Scratch::new(&device, [&linear]).unwrap();
        Case { device, n: weights.n, k: weights.k, kind, weights, x, linear, scratch }
    }

    /// The rows of `x` that `rows` names, on the device; and room for as many of y.
    pub fn buffers(&self, rows: &[usize]) -> (Buffer, Buffer) {
        let bytes: Vec<u8> =
            rows.iter().flat_map(|&r| self.kind.1.bytes(&self.x[r * self.k..(r + 1) * self.k])).collect();
        let x = self.device.allocate("x", bytes.len()).unwrap();
        x.write(0, &bytes).unwrap();
        (x, self.device.allocate("y", rows.len() * self.n * 4).unwrap())
    }

    /// y of these rows, as bits.
    pub fn run(&self, rows: &[usize]) -> Result<Vec<u32>, GemmError> {
        let (x, y) = self.buffers(rows);
        self.linear.run(self.linear.rows(&x), rows.len(), Output::Plain(&y), &self.scratch)?;
        Ok(words(&y))
    }

    /// y of the first `rows` rows in f64, and as plain f32 sums give it.
    pub fn references(&self, rows: usize) -> (Vec<f64>, Vec<f32>) {
        let w = self.weights.rows();
        let dot = |row: usize, n: usize| self.x[row * self.k..].iter().copied().zip(&w[n]);
        let places = || (0..rows * self.n).map(|i| (i / self.n, i % self.n));
        let exact = places().map(|(r, n)| dot(r, n).map(|(x, w)| f64::from(x) * f64::from(*w)).sum()).collect();
        let naive = places().map(|(r, n)| dot(r, n).map(|(x, w)| x * w).sum()).collect();
        (exact, naive)
    }
}

impl Case {
    /// y of the first `rows` rows, added in the order that `kernels/gemm.cuh` promises; the emulator's products add k ascending and round at
    /// every step. As bits.
    pub fn in_order(&self, rows: usize) -> Vec<u32> {
        let Weights { format, n, k, group, ref scales, .. } = self.weights;
        let (unit, half) = (format.tile_inputs(), format.tile_inputs() / 2);
        let grouped = group < k;
        let fold = if grouped { group } else { half };
        let cut = self.linear.cut();
        let weights = self.weights.rows();
        let scale = |channel: usize, group: usize| match format {
            Format::Bf16 => 1.0,
            _ => {
                let at = (channel * k.div_ceil(self.weights.group) + group) * 2;
                bf16::from_le_bytes([scales[at], scales[at + 1]]).to_f32()
            }
        };
        let element = |row: usize, channel: usize| {
            let mut y = 0.0;
            for segment in 0..cut.segments {
                let mut total = [0.0_f32; 2];
                let units = cut.units / cut.segments;
                for begin in (segment * units..(segment + 1) * units).map(|u| u * unit) {
                    for (h, begin) in [begin, begin + half].into_iter().enumerate() {
                        for begin in (begin..begin + half).step_by(fold).filter(|&b| b < k) {
                            let scale = scale(channel, begin / self.weights.group);
                            // Integers again: a weight is exactly that times its scale.
                            let weight = |i: usize| weights[channel][i] / scale;
                            let x = |i: usize| self.x[row * k + i];
                            let sum = (begin..(begin + fold).min(k)).fold(0.0, |sum, i| sum + weight(i) * x(i));
                            total[h] = if grouped { scale.mul_add(sum, total[h]) } else { total[h] + sum };
                        }
                    }
                }
                let mut v = total[0] + total[1];
                if !grouped {
                    v *= scale(channel, 0);
                }
                y = if segment == 0 { v } else { y + v };
            }
            y.to_bits()
        };
        (0..rows * n).map(|i| element(i / n, i % n)).collect()
    }
}

pub fn words(buffer: &Buffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.read(0, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect()
}

/// The largest error.
pub fn worst(values: impl IntoIterator<Item = f64>, exact: &[f64]) -> f64 {
    values.into_iter().zip(exact).map(|(v, e)| (v - e).abs()).fold(0.0, f64::max)
}
