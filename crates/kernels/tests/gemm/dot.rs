//! Int8 weights with int8 inputs: exact sums, so that the result is that of the CPU, bit for bit.

use half::bf16;
use kernels::{
    device::{Device, Emulation},
    gemm::{GemmError, Input, Linear, Output, Scratch},
    layout::{Format, Tiles},
};
use rand::RngExt;

use crate::case::{SIXTEEN, Weights, emulation, random, words};

/// Rows of inputs.
const ROWS: usize = 40;

struct Case {
    device: Device,
    weights: Weights,
    x: Vec<i8>,
    x_scales: Vec<f32>,
    linear: Linear,
    scratch: Scratch,
}

impl Case {
    fn new(n: usize, k: usize) -> Case {
        let mut random = random(n + k);
        let x = (0..ROWS * k).map(|_| random.random()).collect();
        let x_scales = (0..ROWS).map(|_| random.random_range(0.001..0.1)).collect();
        let device = Device::emulated(emulation(0)).unwrap();
        let weights = Weights::random(Format::Int8, n, k, k);
        let linear = Linear::new(&device, "w", &Tiles::dot(weights.matrix()).unwrap()).unwrap();
        let scratch = Scratch::new(&device, [&linear]).unwrap();
        Case { device, weights, x, x_scales, linear, scratch }
    }

    fn run(&self, rows: &[usize]) -> Result<Vec<u32>, GemmError> {
        let (n, k) = (self.weights.n, self.weights.k);
        let x: Vec<u8> = rows.iter().flat_map(|&r| &self.x[r * k..(r + 1) * k]).map(|&v| v as u8).collect();
        let scales: Vec<u8> = rows.iter().flat_map(|&r| self.x_scales[r].to_le_bytes()).collect();
        let (x, scales) = (self.device.constant("x", &x)?, self.device.constant("x scales", &scales)?);
        let y = self.device.allocate("y", rows.len() * n * 4)?;
        self.linear.run(Input::Int8(&x, &scales), rows.len(), Output::Plain(&y), &self.scratch)?;
        Ok(words(&y))
    }

    fn reference(&self) -> Vec<u32> {
        let Weights { n, k, packed, scales, .. } = &self.weights;
        let (n, k) = (*n, *k);
        let element = |row: usize, channel: usize| {
            let weights = packed[channel * k..][..k].iter().map(|&field| i32::from(field) - 128);
            let sum: i32 = self.x[row * k..].iter().zip(weights).map(|(&x, w)| i32::from(x) * w).sum();
            let scale = bf16::from_le_bytes([scales[channel * 2], scales[channel * 2 + 1]]).to_f32();
            (sum as f32 * scale * self.x_scales[row]).to_bits()
        };
        (0..ROWS * n).map(|i| element(i / n, i % n)).collect()
    }
}

#[test]
fn products_of_integers_are_those_of_the_cpu_bit_for_bit() {
    for (n, k) in [(64, 256), (16, 16), (80, 1040), (128, 2560), (208, 784)] {
        let case = Case::new(n, k);
        let expected = case.reference();
        for m in (1..=16).chain([17, 33, ROWS]) {
            let rows: Vec<usize> = (0..m).collect();
            assert_eq!(case.run(&rows).unwrap(), expected[..m * n], "[{n}, {k}], {m} rows");
        }
    }
}

#[test]
fn any_cut_gives_the_same_integers() {
    let case = Case::new(128, 2560);
    let expected = case.reference();
    for (i, multiprocessors) in [1, 7, 72, 80, 132].into_iter().enumerate() {
        case.device.emulate(Emulation { multiprocessors, ..emulation(i as u64) });
        assert_eq!(case.run(&SIXTEEN).unwrap(), expected[..16 * 128]);
    }
    let [weights, _] = case.linear.buffers();
    assert_eq!(weights.traffic().unwrap().read, 128 * 2560);
}

#[test]
fn a_residual_stream_is_no_integer() {
    let case = Case::new(64, 256);
    let y = case.device.allocate("y", 64 * 4).unwrap();
    let refused = case.linear.run(Input::Rows(&y), 1, Output::Plain(&y), &case.scratch);
    assert!(matches!(refused, Err(GemmError::Kind { format: Format::Int8Dot, .. })));
}
