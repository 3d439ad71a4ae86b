//! The rows of one linear, quantised input by input.
//!
//! A row is quantised in the order of its inputs. The weight of input j is rounded not from itself but from
//! `w_j + sum_{i<j} e_i U_ij`, e the errors made so far, which makes up for them as well as one weight can (see
//! [`super::hessian`]). Where a group begins, its scale is searched for the weights as they would best be then: each with all
//! that earlier groups left to it, its error weighed by what it costs. With the inputs in order of activation, the weights of a group are not met together, so
//! scales are those of the row itself, and the result is in input order all the same.
//!
//! Rounding to nearest is computed beside it, and a row keeps whichever has the smaller error: a range that clips can make the
//! corrected row the worse one.

use half::bf16;
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayViewMut1};
use rayon::prelude::*;

use super::hessian::Factor;
use super::parts::{part, part_mut, row_part, tail_mut};
use crate::error::Result;
use crate::method::{self, ByRow, Quantiser};
use crate::quant::{self, Arithmetic};

/// Rows that one task works on.
const TILE: usize = 32;
/// Inputs between two products with all errors so far.
const BLOCK: usize = 128;

/// A quantised linear.
pub struct Solved {
    /// `[rows, inputs]`, as packed.
    pub fields: Vec<u8>,
    /// `[rows, groups]`.
    pub scales: Vec<bf16>,
    /// Errors of all rows.
    pub errors: Errors,
}

/// Squared outputs, summed over rows of the linear and calibration rows, the damping as white noise among the inputs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Errors {
    /// Of the outputs themselves.
    pub signal: f64,
    /// Of the error that rounding to nearest makes.
    pub nearest: f64,
    /// Of the error that is left.
    pub gptq: f64,
}

impl Errors {
    fn add(&mut self, other: Errors) {
        self.signal += other.signal;
        self.nearest += other.nearest;
        self.gptq += other.gptq;
    }
}

/// Quantises `weights`, `[rows, inputs]`. `nearest` says how they are packed, and rounds where that is better.
pub fn solve(factor: &Factor, weights: &[f32], nearest: &ByRow) -> Result<Solved> {
    let inputs = factor.order.len();
    let groups = inputs / nearest.group;
    let tile = |weights: &[f32]| Tile::new(factor, weights, nearest)?.run();
    let tiles: Vec<Solved> = weights.par_chunks(TILE * inputs).map(tile).collect::<Result<_>>()?;
    let rows = weights.len() / inputs;
    let mut all = Solved {
        fields: Vec::with_capacity(weights.len()),
        scales: Vec::with_capacity(rows * groups),
        errors: Errors::default(),
    };
    for tile in tiles {
        all.fields.extend_from_slice(&tile.fields);
        all.scales.extend_from_slice(&tile.scales);
        all.errors.add(tile.errors);
    }
    Ok(all)
}

/// A few rows. Everything but `out` is by places, see [`Factor::order`].
struct Tile<'a> {
    factor: &'a Factor,
    packing: &'a ByRow,
    rows: usize,
    /// Errors of three versions of each row: corrected (filled on the way), rounded to nearest, and all zero (the weights).
    errors: Array2<f32>,
    /// Rounded to nearest, in input order.
    out: Solved,
    /// Scale of each place.
    scales: Array2<f32>,
    fields: Array2<u8>,
    /// Scales are searched where groups begin.
    searched: bool,
}

impl<'a> Tile<'a> {
    fn new(factor: &'a Factor, weights: &[f32], packing: &'a ByRow) -> Result<Tile<'a>> {
        let inputs = factor.order.len();
        let (rows, groups) = (weights.len() / inputs, inputs / packing.group);
        let mut errors = Array2::zeros((3 * rows, inputs));
        let mut scales = Array2::zeros((rows, inputs));
        let mut out = Solved {
            fields: vec![0; rows * inputs],
            scales: vec![bf16::ZERO; rows * groups],
            errors: Errors::default(),
        };
        let mut rounded = vec![0.0; inputs];
        for (r, row) in weights.chunks_exact(inputs).enumerate() {
            let fields = &mut out.fields[r * inputs..(r + 1) * inputs];
            let row_scales = &mut out.scales[r * groups..(r + 1) * groups];
            packing.quantise(r, row, fields, row_scales)?;
            quant::dequantise_row(fields, row_scales, packing.group, packing.bits, &mut rounded);
            for (place, &input) in factor.order.iter().enumerate() {
                errors[[rows + r, place]] = row[input] - rounded[input];
                errors[[2 * rows + r, place]] = row[input];
                scales[[r, place]] = row_scales[input / packing.group].to_f32();
            }
        }
        let searched = groups > 1 && factor.order.is_sorted();
        let fields = Array2::zeros((rows, inputs));
        Ok(Tile { factor, packing, rows, errors, out, scales, fields, searched })
    }

    fn run(mut self) -> Result<Solved> {
        let inputs = self.factor.order.len();
        let block = if self.searched { self.packing.group * (BLOCK / self.packing.group).max(1) } else { BLOCK };
        let mut losses = vec![0.0; 3 * self.rows];
        for begin in (0..inputs).step_by(block) {
            let end = (begin + block).min(inputs);
            // What the errors of all earlier blocks add to these inputs.
            let mut carried = Array2::zeros((3 * self.rows, end - begin));
            let unit = part(&self.factor.unit, 0..begin, begin..end);
            general_mat_mul(1.0, &part(&self.errors, 0..3 * self.rows, 0..begin), &unit, 0.0, &mut carried);
            for (r, carried) in carried.rows_mut().into_iter().enumerate() {
                losses[r] += self.block(r, begin, carried);
            }
        }
        self.keep_the_better(&losses);
        Ok(self.out)
    }

    /// The inputs `begin..begin + carried.len()` of version `r`; its loss.
    fn block(&mut self, r: usize, begin: usize, mut carried: ArrayViewMut1<f32>) -> f64 {
        let end = begin + carried.len();
        let mut loss = 0.0;
        for j in begin..end {
            if r < self.rows {
                if self.searched && j.is_multiple_of(self.packing.group) {
                    self.begin_group(r, j, carried.iter().skip(j - begin).take(self.packing.group).copied().collect());
                }
                self.round(r, j, carried[j - begin]);
            }
            let error = self.errors[[r, j]];
            loss += self.factor.pivots[j] * f64::from(error + carried[j - begin]).powi(2);
            let unit = row_part(&self.factor.unit, j, j + 1..end);
            tail_mut(&mut carried, j - begin + 1).scaled_add(error, &unit);
        }
        loss
    }

    fn weight(&self, r: usize, place: usize) -> f32 {
        self.errors[[2 * self.rows + r, place]]
    }

    /// Rounds the weight at `place` from where earlier errors have moved it.
    fn round(&mut self, r: usize, place: usize, carried: f32) {
        let (w, scale, bits) = (self.weight(r, place), self.scales[[r, place]], self.packing.bits);
        let (low, high) = (bits.q_min() as f32, bits.q_max() as f32);
        let q = quant::nearest((w + carried) / scale, low, high, Arithmetic::F32);
        self.errors[[r, place]] = w - q * scale;
        self.fields[[r, place]] = (q - low) as u8;
    }

    /// Scale of the group that begins at `begin`; `carried` is what earlier errors add to its inputs.
    fn begin_group(&mut self, r: usize, begin: usize, mut carried: Vec<f32>) {
        let group = carried.len();
        // The weights that would undo the earlier errors best, if they need not be rounded.
        let mut wanted = vec![0.0; group];
        for i in 0..group {
            let correction = carried[i];
            wanted[i] = self.weight(r, begin + i) + correction;
            let unit = row_part(&self.factor.unit, begin + i, begin + i + 1..begin + group);
            carried[i + 1..].iter_mut().zip(unit).for_each(|(c, u)| *c -= correction * u);
        }
        let scale = self.scale_for(&wanted, &self.factor.pivots[begin..begin + group]);
        part_mut(&mut self.scales, r..r + 1, begin..begin + group).fill(scale.to_f32());
    }

    /// The scale of the `mse` grid with the least squared error, each input's weighed by what it costs ([`Factor::pivots`]).
    fn scale_for(&self, wanted: &[f32], costs: &[f64]) -> bf16 {
        let ByRow { bits, arithmetic, .. } = *self.packing;
        let (low, high) = (bits.q_min() as f32, bits.q_max() as f32);
        let error = |scale: bf16| -> f64 {
            let scale = scale.to_f32();
            let error = |w: &f32| w - quant::nearest(w / scale, low, high, Arithmetic::F32) * scale;
            wanted.iter().zip(costs).map(|(w, cost)| cost * f64::from(error(w)).powi(2)).sum()
        };
        let absmax = quant::absmax(wanted);
        let min_max = quant::scale(absmax, bits, arithmetic);
        let mut best = (min_max, error(min_max));
        for scale in method::grid(absmax, bits) {
            let error = error(scale);
            if error < best.1 {
                best = (scale, error);
            }
        }
        best.0
    }

    fn keep_the_better(&mut self, losses: &[f64]) {
        let inputs = self.factor.order.len();
        let group = self.packing.group;
        for r in 0..self.rows {
            let (corrected, nearest, signal) = (losses[r], losses[self.rows + r], losses[2 * self.rows + r]);
            let better = corrected < nearest;
            self.out.errors.add(Errors { signal, nearest, gptq: if better { corrected } else { nearest } });
            if !better {
                continue;
            }
            for (place, &input) in self.factor.order.iter().enumerate() {
                self.out.fields[r * inputs + input] = self.fields[[r, place]];
                // Exact: every scale was a bf16.
                self.out.scales[(r * inputs + input) / group] = bf16::from_f32(self.scales[[r, place]]);
            }
        }
    }
}
