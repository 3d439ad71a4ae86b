//! What a kernel is tested with, and what its result must be: of the self-test of a GPU and of the emulator's tests alike.
//!
//! | module | concept |
//! |---|---|
//! | [`attention`] | a cached sequence, rows that attend to it, and f64 and plain bf16 implementations |
//! | [`decide`] | a sequence that is decoded by given choices, and the rules in plain words |
//! | [`dot`] | int8 weights with int8 inputs, whose product is exact |
//! | [`draft`] | a drafter of random weights, and its passes in f64 |
//! | [`rows`] | rows for norms, and heads with the places of their keys and values |
//!
//! The functions here move numbers between host and device.

use half::bf16;

use super::{Failure, vectors::uniform};
use crate::device::{Buffer, Device};

pub mod attention;
pub mod decide;
pub mod dot;
pub mod draft;
pub mod rows;

/// `n` numbers from `-spread` to `spread`.
pub fn numbers(seed: u32, n: usize, spread: f32) -> Vec<f32> {
    (0..n).map(|i| uniform(seed, i, -spread, spread)).collect()
}

/// The same, rounded to bf16.
pub fn numbers16(seed: u32, n: usize, spread: f32) -> Vec<bf16> {
    (0..n).map(|i| bf16::from_f32(uniform(seed, i, -spread, spread))).collect()
}

/// Bytes of f32.
pub fn bytes32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Bytes of bf16.
pub fn bytes16(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// A buffer of f32 that kernels may write.
pub fn floats(device: &Device, values: &[f32]) -> Result<Buffer, Failure> {
    let buffer = device.allocate("floats", values.len() * 4)?;
    buffer.write(0, &bytes32(values))?;
    Ok(buffer)
}

/// A constant buffer of f32.
pub fn weights32(device: &Device, values: &[f32]) -> Result<Buffer, Failure> {
    Ok(device.constant("weights", &bytes32(values))?)
}

/// A constant buffer of u32.
pub fn ids(device: &Device, values: &[u32]) -> Result<Buffer, Failure> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Ok(device.constant("ids", &bytes)?)
}

/// All words of a buffer.
pub fn words(buffer: &Buffer) -> Result<Vec<u32>, Failure> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.read(0, &mut bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect())
}

/// All f32 of a buffer.
pub fn read32(buffer: &Buffer) -> Result<Vec<f32>, Failure> {
    Ok(words(buffer)?.into_iter().map(f32::from_bits).collect())
}

/// `count` bf16 of a buffer, from byte `offset` on, as bits.
pub fn bits16(buffer: &Buffer, offset: usize, count: usize) -> Result<Vec<u16>, Failure> {
    let mut bytes = vec![0; count * 2];
    buffer.read(offset, &mut bytes)?;
    Ok(bytes.as_chunks::<2>().0.iter().map(|&b| u16::from_le_bytes(b)).collect())
}

/// The same as numbers.
pub fn read16(buffer: &Buffer, offset: usize, count: usize) -> Result<Vec<f32>, Failure> {
    Ok(bits16(buffer, offset, count)?.into_iter().map(|b| bf16::from_bits(b).to_f32()).collect())
}

/// The largest error; NaN where a value is NaN.
pub fn worst(values: impl IntoIterator<Item = f32>, exact: &[f64]) -> f64 {
    let errors = values.into_iter().zip(exact).map(|(v, e)| (f64::from(v) - e).abs());
    errors.fold(0.0, |a: f64, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) })
}

/// `x / sqrt(mean(x^2) + eps) * weight` in f64.
pub fn rms(x: &[f64], weight: Option<&[f32]>, eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = (mean + f64::from(eps)).sqrt().recip();
    x.iter().enumerate().map(|(i, v)| v * scale * weight.map_or(1.0, |w| f64::from(w[i]))).collect()
}

/// GELU in its tanh form, in f64.
pub fn gelu(z: f64) -> f64 {
    0.5 * z * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (z + 0.044715 * z.powi(3))).tanh())
}

/// Pairs of a head turned by their angles, in f64.
pub fn turned(head: &[f64], position: usize, inverse_frequencies: &[f32]) -> Vec<f64> {
    let (low, high) = head.split_at(head.len() / 2);
    let angles: Vec<f64> = inverse_frequencies.iter().map(|f| f64::from(position as f32 * f)).collect();
    let pairs = || low.iter().zip(high).zip(&angles);
    let mut out: Vec<f64> = pairs().map(|((l, h), a)| l * a.cos() - h * a.sin()).collect();
    out.extend(pairs().map(|((l, h), a)| h * a.cos() + l * a.sin()));
    out
}
