//! Linears quantised in memory: the bytes that `bake quantize` writes, for who tries many variants of a model and keeps few.

use kernels::cpu::{Data, Matrix};
use rayon::prelude::*;
use runtime::model::Weights;

use crate::error::{Error, Result};
use crate::method::{ByRow, Method, Quantiser as _};
use crate::quant::{self, Arithmetic, Bits};
use crate::quantize::{Strategy, check_strategy, describe, fitting};

/// How linears are quantised, whatever the width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantiser {
    method: Method,
    strategy: Strategy,
}

impl Default for Quantiser {
    /// What the field does.
    fn default() -> Quantiser {
        Quantiser { method: Method::Rtn, strategy: Strategy::Group(128) }
    }
}

impl Quantiser {
    /// By this method, with scales for groups of inputs or one a row.
    ///
    /// # Errors
    /// [`Error::Option`] for a group size that no kernel reads, and for [`Method::Gptq`].
    pub fn new(method: Method, strategy: Strategy) -> Result<Quantiser> {
        check_strategy("group", strategy)?;
        if method == Method::Gptq {
            let expected = "rtn or mse: one linear alone has no inputs to be fitted to".into();
            return Err(Error::Option { option: "method", expected, found: method.name().into() });
        }
        Ok(Quantiser { method, strategy })
    }

    /// `rtn group 128`.
    pub fn describe(&self) -> String {
        format!("{} {}", self.method.name(), describe(self.strategy))
    }

    /// The method.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Scales.
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }

    /// Inputs that share a scale in a matrix of this width.
    fn group(&self, inputs: usize) -> usize {
        match fitting(self.strategy, inputs) {
            Strategy::Group(size) => size,
            Strategy::Channel => inputs.max(1),
        }
    }

    /// Bytes of a quantised `[rows, inputs]` on a device, as [`Matrix::device_bytes`] counts them.
    pub fn device_bytes(&self, bits: Bits, rows: usize, inputs: usize) -> usize {
        bits.device_bytes(rows, inputs) + rows * inputs.div_ceil(self.group(inputs)) * 2
    }
}

/// Whether a matrix can be quantised: it is not yet.
pub fn is_dense(weights: &Weights) -> bool {
    arithmetic(weights).is_some()
}

/// Type of dense weights.
fn arithmetic(weights: &Weights) -> Option<Arithmetic> {
    match weights.view().data() {
        Data::F32(_) => Some(Arithmetic::F32),
        Data::Bf16(_) => Some(Arithmetic::Bf16),
        Data::Packed { .. } => None,
    }
}

/// A linear, quantised. `module` is for messages.
///
/// # Errors
/// [`Error::Weights`] for weights that are packed already, NaN or infinite.
pub fn quantise(module: &str, weights: &Weights, bits: Bits, quantiser: &Quantiser) -> Result<Weights> {
    let refuse = |reason: String| Error::Weights { module: module.to_string(), reason };
    let Some(arithmetic) = arithmetic(weights) else {
        return Err(refuse("is quantised already; start from a bf16 checkpoint".into()));
    };
    let (rows, inputs) = (weights.rows(), weights.cols());
    let group = quantiser.group(inputs);
    let (words, groups) = (bits.words(inputs), inputs.div_ceil(group));
    let by_row = ByRow { method: quantiser.method, bits, group, arithmetic };
    let (mut packed, mut scales) = (vec![0u8; rows * words * 4], vec![0u8; rows * groups * 2]);
    let row = |n: usize, packed: &mut [u8], scales: &mut [u8]| -> Result<()> {
        let row = weights.row(n);
        if let Some((index, value)) = quant::find_non_finite(&row) {
            return Err(refuse(format!("element {} is {value}; fetch the checkpoint again", n * inputs + index)));
        }
        let mut fields = vec![0; inputs];
        let (mut row_words, mut row_scales) = (vec![0u32; words], vec![half::bf16::ZERO; groups]);
        by_row.quantise(n, &row, &mut fields, &mut row_scales)?;
        quant::pack_row(&fields, bits, &mut row_words);
        packed.as_chunks_mut::<4>().0.iter_mut().zip(&row_words).for_each(|(b, w)| *b = w.to_le_bytes());
        scales.as_chunks_mut::<2>().0.iter_mut().zip(&row_scales).for_each(|(b, s)| *b = s.to_le_bytes());
        Ok(())
    };
    packed
        .par_chunks_mut((words * 4).max(1))
        .zip(scales.par_chunks_mut((groups * 2).max(1)))
        .enumerate()
        .try_for_each(|(n, (packed, scales))| row(n, packed, scales))?;
    let data = Data::Packed { bits, packed: packed.into(), scales: scales.into(), group };
    Matrix::new(rows, inputs, data).map_err(|e| refuse(e.to_string()))
}
