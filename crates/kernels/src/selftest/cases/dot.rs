//! Int8 weights with int8 inputs: exact sums, so that the result is that of plain integers, bit for bit, on every device.

use half::bf16;

use super::{
    super::{Failure, vectors},
    bytes32, words,
};
use crate::{
    cpu::{Data, Matrix},
    device::Device,
    gemm::{GemmError, Input, Linear, Output, Scratch},
    layout::Tiles,
    packing::Bits,
};

/// Rows of inputs.
pub const ROWS: usize = 40;

/// Weights `[n, k]`, and inputs for [`ROWS`] rows.
pub struct Case {
    /// The device.
    pub device: Device,
    /// Weights there.
    pub linear: Linear,
    /// Sums of segments.
    pub scratch: Scratch,
    n: usize,
    k: usize,
    packed: Vec<u8>,
    scales: Vec<u8>,
    x: Vec<i8>,
    x_scales: Vec<f32>,
}

impl Case {
    /// Weights, whose word `flipped`, where there is one, has a bit changed, and inputs.
    pub fn new(device: &Device, n: usize, k: usize, flipped: Option<usize>) -> Result<Case, Failure> {
        let (mut packed, scales) = vectors::weights(8, n, k, k);
        if let Some(at) = flipped {
            packed[at * 4] ^= 1;
        }
        let data = Data::Packed { bits: Bits::Eight, packed: &packed[..], scales: &scales[..], group: k };
        let plain = |e: &dyn std::error::Error| Failure::Wrong(e.to_string());
        let tiles =
            Matrix::new(n, k, data).map_err(|e| plain(&e)).and_then(|m| Tiles::dot(m).map_err(|e| plain(&e)))?;
        let linear = Linear::new(device, "w", &tiles)?;
        let scratch = Scratch::new(device, [&linear])?;
        let x = (0..ROWS * k).map(|i| vectors::random(k as u32, i) as i8).collect();
        let x_scales = (0..ROWS).map(|row| vectors::uniform(n as u32, row, 0.001, 0.1)).collect();
        Ok(Case { device: device.clone(), linear, scratch, n, k, packed, scales, x, x_scales })
    }

    /// y of these rows, as bits.
    pub fn run(&self, rows: &[usize]) -> Result<Vec<u32>, Failure> {
        let k = self.k;
        let x: Vec<u8> = rows.iter().flat_map(|&r| &self.x[r * k..(r + 1) * k]).map(|&v| v as u8).collect();
        let scales: Vec<f32> = rows.iter().map(|&r| self.x_scales[r]).collect();
        let (x, scales) = (self.device.constant("x", &x)?, self.device.constant("x scales", &bytes32(&scales))?);
        let y = self.device.allocate("y", rows.len() * self.n * 4)?;
        let ran: Result<(), GemmError> =
            self.linear.run(Input::Int8(&x, &scales), rows.len(), Output::Plain(&y), &self.scratch);
        ran?;
        words(&y)
    }

    /// The same for row `row`, by plain integers.
    pub fn reference(&self, row: usize) -> Vec<u32> {
        let (n, k) = (self.n, self.k);
        let element = |channel: usize| {
            let weights =
                self.packed[channel * k.next_multiple_of(4)..][..k].iter().map(|&field| i32::from(field) - 128);
            let sum: i32 = self.x[row * k..].iter().zip(weights).map(|(&x, w)| i32::from(x) * w).sum();
            let scale = bf16::from_le_bytes([self.scales[channel * 2], self.scales[channel * 2 + 1]]).to_f32();
            (sum as f32 * scale * self.x_scales[row]).to_bits()
        };
        (0..n).map(element).collect()
    }
}
