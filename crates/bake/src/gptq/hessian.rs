//! Second moments of the inputs of a linear, and their factors.
//!
//! With H the sum of `x x^T` over calibration rows, the squared error of a linear's outputs under weight errors e (a row) is
//! `e H e^T`. Its factors `H = (I + U) D (I + U)^T`, U strictly upper triangular and D diagonal, turn that into a sum over the
//! inputs in order: `sum_j D_j (e_j + sum_{i<j} e_i U_ij)^2`. So an error made at input i can be made up for by every later
//! one, and [`super::solve`] does exactly that.
//!
//! U and D come from a Cholesky factorisation that begins at the last input. The usual account of the method inverts H and
//! factors the inverse; the factors are the same and this way needs no inverse. Sums are f64. All work is cut into pieces of
//! fixed size, so the bits do not depend on the number of threads.

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, Axis};
use rayon::prelude::*;

use super::Order;
use super::parts::{part, part_mut, row_part, tail};

/// Rows that are added at once.
const ROWS: usize = 512;
/// Rows of H that one task works on.
const TILE: usize = 128;
/// Inputs that are factored at once.
const BLOCK: usize = 128;

/// Sum of `x x^T` over rows x. Only the upper triangle is kept.
pub struct Hessian {
    sum: Array2<f64>,
    pending: Array2<f64>,
    /// Rows of `pending` in use.
    waiting: usize,
    rows: usize,
}

impl Hessian {
    /// Of no rows yet; `width` inputs.
    pub fn new(width: usize) -> Hessian {
        Hessian { sum: Array2::zeros((width, width)), pending: Array2::zeros((ROWS, width)), waiting: 0, rows: 0 }
    }

    /// Inputs.
    pub fn width(&self) -> usize {
        self.sum.ncols()
    }

    /// Rows added.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Adds rows, `[rows, width]`.
    pub fn add(&mut self, values: &[f32]) {
        for row in values.chunks_exact(self.width().max(1)) {
            self.pending.row_mut(self.waiting).iter_mut().zip(row).for_each(|(p, v)| *p = f64::from(*v));
            (self.waiting, self.rows) = (self.waiting + 1, self.rows + 1);
            if self.waiting == ROWS {
                self.flush();
            }
        }
    }

    fn flush(&mut self) {
        let width = self.width();
        let x = part(&self.pending, 0..self.waiting, 0..width);
        let tiles: Vec<_> = self.sum.axis_chunks_iter_mut(Axis(0), TILE).enumerate().collect();
        tiles.into_par_iter().for_each(|(t, mut rows)| {
            let (first, end) = (t * TILE, t * TILE + rows.nrows());
            let mut upper = part_mut(&mut rows, 0..end - first, first..width);
            let (left, right) = (part(&x, 0..x.nrows(), first..end), part(&x, 0..x.nrows(), first..width));
            general_mat_mul(1.0, &left.t(), &right, 1.0, &mut upper);
        });
        self.waiting = 0;
    }

    /// Factors `H + damping * mean(diagonal) * I`. Inputs that were always zero so become independent of all others; where all
    /// were, H is the identity.
    ///
    /// # Errors
    /// The input at which the matrix was found not to be positive definite: more damping is needed.
    pub fn factor(mut self, damping: f64, order: Order) -> Result<Factor, usize> {
        self.flush();
        let mut h = self.sum;
        let width = h.ncols();
        let mean = h.diag().sum() / width.max(1) as f64;
        let noise = if mean > 0.0 { damping * mean } else { 1.0 };
        h.diag_mut().iter_mut().for_each(|d| *d += noise);
        let mut places: Vec<usize> = (0..width).collect();
        if order == Order::Activation {
            places.sort_by(|&a, &b| h[[b, b]].total_cmp(&h[[a, a]]).then(a.cmp(&b)));
            h = Array2::from_shape_fn((width, width), |(i, j)| {
                let (a, b) = (places[i], places[j]);
                h[[a.min(b), a.max(b)]]
            });
        }
        cholesky_from_the_end(&mut h).map_err(|place| places[place])?;
        let roots: Vec<f64> = h.diag().to_vec();
        let unit = Array2::from_shape_fn((width, width), |(i, j)| match i < j {
            true => (h[[i, j]] / roots[j]) as f32,
            false => 0.0,
        });
        Ok(Factor { order: places, unit, pivots: roots.iter().map(|r| r * r).collect() })
    }
}

/// `H = (I + U) D (I + U)^T`, for inputs in some order.
pub struct Factor {
    /// The input that stands at each place.
    pub order: Vec<usize>,
    /// U, by places.
    pub unit: Array2<f32>,
    /// D, by places; positive.
    pub pivots: Vec<f64>,
}

/// Replaces the upper triangle of a symmetric matrix by R, upper triangular, with `H = R R^T`. What stands below the diagonal
/// is neither read nor meant afterwards. On failure, the first place whose pivot is not positive.
fn cholesky_from_the_end(h: &mut Array2<f64>) -> Result<(), usize> {
    let mut end = h.ncols();
    while end > 0 {
        let begin = end.saturating_sub(BLOCK);
        let mut corner = part(h, begin..end, begin..end).to_owned();
        factor_corner(&mut corner).map_err(|place| begin + place)?;
        part_mut(h, begin..end, begin..end).assign(&corner);
        // The rows above: X with X R_corner^T = H, one row at a time from its last entry on.
        let mut above = part_mut(h, 0..begin, begin..end);
        let rows: Vec<_> = above.axis_iter_mut(Axis(0)).collect();
        rows.into_par_iter().with_min_len(16).for_each(|mut x| {
            for j in (0..x.len()).rev() {
                let known = tail(&x, j + 1).dot(&row_part(&corner, j, j + 1..corner.ncols()));
                x[j] = (x[j] - known) / corner[[j, j]];
            }
        });
        // What is left over loses what these inputs account for.
        let panel = above.to_owned();
        let mut rest = part_mut(h, 0..begin, 0..begin);
        let tiles: Vec<_> = rest.axis_chunks_iter_mut(Axis(0), TILE).enumerate().collect();
        tiles.into_par_iter().for_each(|(t, mut rows)| {
            let (first, end) = (t * TILE, t * TILE + rows.nrows());
            let mut upper = part_mut(&mut rows, 0..end - first, first..begin);
            let width = panel.ncols();
            let (left, right) = (part(&panel, first..end, 0..width), part(&panel, first..begin, 0..width));
            general_mat_mul(-1.0, &left, &right.t(), 1.0, &mut upper);
        });
        end = begin;
    }
    Ok(())
}

/// [`cholesky_from_the_end`] of a small matrix.
fn factor_corner(h: &mut Array2<f64>) -> Result<(), usize> {
    for j in (0..h.ncols()).rev() {
        let later = row_part(h, j, j + 1..h.ncols()).to_owned();
        let pivot = h[[j, j]] - later.dot(&later);
        if !(pivot > 0.0 && pivot.is_finite()) {
            return Err(j);
        }
        h[[j, j]] = pivot.sqrt();
        for i in 0..j {
            let known = row_part(h, i, j + 1..h.ncols()).dot(&later);
            h[[i, j]] = (h[[i, j]] - known) / h[[j, j]];
        }
    }
    Ok(())
}
