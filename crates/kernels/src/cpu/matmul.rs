//! Matrix products on packed weights, split over threads by output rows.

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{Isa, Kind, MatrixView, int8, portable};
use crate::SEGMENT;

/// Multiply-adds below which a product stays on one thread: waking another one costs tens of microseconds, in which one thread does
/// about as many.
const PARALLEL_FROM: usize = 1 << 20;
/// Multiply-adds of one piece of work, at least.
const PIECE: usize = 1 << 18;
/// A multiple of the kernels' tiles of weight rows keeps their remainder loops out of all pieces but the last.
const TILE_MULTIPLE: usize = 12;
/// Pieces a thread, so that an uneven machine still balances.
const PIECES_PER_THREAD: usize = 4;

/// `y[m, n] = sum over k of w[n, k] * x[m, k]`, for x `[M, cols]` and y `[M, rows]`, on the current rayon pool.
///
/// Threads are given output rows, never a part of a sum, so their number changes no bit.
///
/// # Panics
/// If the slices have other lengths than the shape implies: a defect of the caller, not of its input.
pub fn matmul(isa: Isa, w: &MatrixView, x: &[f32], y: &mut [f32]) {
    let m_rows = x.len() / w.cols().max(1);
    matmul_rows(isa, w, x, m_rows, y);
}

/// [`matmul`] with the number of activation rows given, for a matrix that may have no columns.
pub fn matmul_rows(isa: Isa, w: &MatrixView, x: &[f32], m_rows: usize, y: &mut [f32]) {
    assert_eq!(x.len(), m_rows * w.cols(), "activations of a matrix product");
    assert_eq!(y.len(), m_rows * w.rows(), "results of a matrix product");
    if m_rows == 0 || w.rows() == 0 {
        return;
    }
    if m_rows == 1 {
        return weight_rows(isa, w, x, 1, y);
    }
    // Threads own runs of output rows, which lie apart in y: compute [rows, M], then transpose.
    let mut transposed = vec![0.0f32; y.len()];
    weight_rows(isa, w, x, m_rows, &mut transposed);
    // A row of y is written in one piece, by as many threads as computed it.
    let column = |(m, y): (usize, &mut [f32])| {
        for (value, outputs) in y.iter_mut().zip(transposed.chunks_exact(m_rows)) {
            *value = outputs[m];
        }
    };
    if is_shared(w, m_rows) {
        y.par_chunks_mut(w.rows()).enumerate().for_each(column);
    } else {
        y.chunks_mut(w.rows()).enumerate().for_each(column);
    }
}

/// Whether a product is shared by several threads.
fn is_shared(w: &MatrixView, m_rows: usize) -> bool {
    rayon::current_num_threads() > 1 && w.cols() * m_rows * w.rows() >= PARALLEL_FROM
}

/// `out[n, m]` for every weight row.
fn weight_rows(isa: Isa, w: &MatrixView, x: &[f32], m_rows: usize, out: &mut [f32]) {
    if isa.int8_activations
        && let Some(packed) = int8::Packed::of(w)
    {
        return int8_weight_rows(isa, w, packed, x, m_rows, out);
    }
    match isa.kind {
        Kind::Portable => {
            pieces(w, m_rows, out, |begin, out| portable::weight_rows::<SEGMENT>(w, begin, x, m_rows, out))
        }
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => {
            let x = avx2::Activations::new(x, m_rows, w.cols());
            // SAFETY: `Kind::Avx2` exists only where the processor has AVX2 and FMA; `matmul_rows` checked the lengths.
            pieces(w, m_rows, out, |begin, out| unsafe { avx2::weight_rows(w, begin, &x, m_rows, out) });
        }
        #[cfg(any(test, feature = "planted"))]
        Kind::Planted if m_rows == 1 => portable::weight_rows::<SEGMENT>(w, 0, x, m_rows, out),
        #[cfg(any(test, feature = "planted"))]
        Kind::Planted => portable::weight_rows::<{ SEGMENT / 2 }>(w, 0, x, m_rows, out),
    }
}

/// [`weight_rows`] with activations rounded to int8.
fn int8_weight_rows(isa: Isa, w: &MatrixView, packed: int8::Packed, x: &[f32], m_rows: usize, out: &mut [f32]) {
    let x = int8::Rounded::new(x, m_rows, w.cols());
    match isa.kind {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Kind::Avx2` exists only where the processor has AVX2 and FMA; `matmul_rows` checked the lengths.
        Kind::Avx2 => pieces(w, m_rows, out, |begin, out| unsafe {
            avx2::int8::weight_rows(packed, begin, &x, m_rows, out);
        }),
        _ => pieces(w, m_rows, out, |begin, out| int8::weight_rows(packed, begin, &x, out)),
    }
}

/// Calls `piece` with the first weight row and the outputs of each piece of work, on several threads where that pays.
fn pieces(w: &MatrixView, m_rows: usize, out: &mut [f32], piece: impl Fn(usize, &mut [f32]) + Sync + Send) {
    let row_work = w.cols() * m_rows;
    if !is_shared(w, m_rows) {
        return piece(0, out);
    }
    let even = w.rows().div_ceil(rayon::current_num_threads() * PIECES_PER_THREAD);
    let rows = even.max(PIECE.div_ceil(row_work.max(1))).next_multiple_of(TILE_MULTIPLE);
    out.par_chunks_mut(rows * m_rows).enumerate().for_each(|(i, out)| piece(i * rows, out));
}

#[cfg(test)]
mod tests;
