//! The kernels with AVX2 and FMA. The order of every sum is that of [`super::portable`]; only the multiply-adds are fused.
//!
//! Two shapes of one computation. Up to [`NARROW`] rows of activations (decode), a weight vector is expanded in a register and
//! used for all rows at once: the weights are read and expanded once whatever M is. Above it (prefill), a tile of weights is
//! expanded into the L1 cache and reused over blocks of rows. Both fold k alike, so a row has the same bits in both.

// Register tiles are indexed by row and column; iterators would hide which accumulator is meant.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::{Data, LANES, MatrixView, fold_lanes, matrix};
use crate::SEGMENT;

/// Most rows that the register kernel takes: one accumulator each, with room for the weights among 16 registers.
const NARROW: usize = 8;
/// Weight rows of a tile of the wide kernel.
const TILE_ROWS: usize = 2;
/// Activation rows that share one expansion of a tile.
const BLOCK: usize = 64;

/// A weight format: how eight consecutive weights of a row become a vector of f32.
///
/// The methods are `#[inline(always)]` without a target feature, so that they take on the features of the kernel they are
/// inlined into; they must only be called from one that has AVX2 and FMA.
trait Format: Copy {
    /// What stays the same over a run of inputs.
    type Scale: Copy;
    /// Where the run that holds input k ends, at most `limit`.
    fn run_end(&self, k: usize, limit: usize) -> usize;
    /// The scale of the run that holds input `k` of row `n`.
    unsafe fn scale(&self, n: usize, k: usize) -> Self::Scale;
    /// Weights k .. k + 8 of row `n`. The caller guarantees `k + 8 <= cols` and `n < rows`.
    unsafe fn load(&self, n: usize, k: usize, scale: Self::Scale) -> __m256;
}

#[derive(Clone, Copy)]
struct F32 {
    data: *const u8,
    cols: usize,
}

impl Format for F32 {
    type Scale = ();
    #[inline(always)]
    fn run_end(&self, _: usize, limit: usize) -> usize {
        limit
    }
    #[inline(always)]
    unsafe fn scale(&self, _: usize, _: usize) {}
    #[inline(always)]
    unsafe fn load(&self, n: usize, k: usize, _: ()) -> __m256 {
        // SAFETY: `Matrix::new` checked that the slice holds rows * cols values; the load is unaligned.
        unsafe { _mm256_loadu_ps(self.data.add((n * self.cols + k) * 4).cast()) }
    }
}

#[derive(Clone, Copy)]
struct Bf16 {
    data: *const u8,
    cols: usize,
}

impl Format for Bf16 {
    type Scale = ();
    #[inline(always)]
    fn run_end(&self, _: usize, limit: usize) -> usize {
        limit
    }
    #[inline(always)]
    unsafe fn scale(&self, _: usize, _: usize) {}
    #[inline(always)]
    unsafe fn load(&self, n: usize, k: usize, _: ()) -> __m256 {
        // SAFETY: as for F32, with two bytes a value.
        unsafe {
            let halves = _mm_loadu_si128(self.data.add((n * self.cols + k) * 2).cast());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
        }
    }
}

#[derive(Clone, Copy)]
struct Int4 {
    packed: *const u8,
    scales: *const u8,
    /// Bytes of packed words a row.
    row_bytes: usize,
    /// Scales a row.
    row_scales: usize,
    group: usize,
}

impl Format for Int4 {
    type Scale = __m256;
    #[inline(always)]
    fn run_end(&self, k: usize, limit: usize) -> usize {
        limit.min((k / self.group + 1).saturating_mul(self.group))
    }
    #[inline(always)]
    unsafe fn scale(&self, n: usize, k: usize) -> __m256 {
        // SAFETY: `Matrix::new` checked that there are `row_scales` bf16 a row.
        unsafe {
            let bytes: [u8; 2] = self.scales.add((n * self.row_scales + k / self.group) * 2).cast::<[u8; 2]>().read();
            _mm256_set1_ps(matrix::bf16(bytes))
        }
    }
    #[inline(always)]
    unsafe fn load(&self, n: usize, k: usize, scale: __m256) -> __m256 {
        // SAFETY: k is a multiple of 8, so this is the word k / 8 of the row, which `Matrix::new` checked to exist.
        unsafe {
            let word = self.packed.add(n * self.row_bytes + k / 2).cast::<u32>().read_unaligned();
            // Flipping bit 3 turns offset binary into two's complement; nibble i then moves to the top of lane i and comes
            // back down with its sign.
            let words = _mm256_set1_epi32((word ^ 0x8888_8888) as i32);
            let top = _mm256_sllv_epi32(words, _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0));
            _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(top)), scale)
        }
    }
}

/// See [`super::portable::weight_rows`]: the same contract.
///
/// # Safety
/// The processor has AVX2 and FMA. `out` holds whole weight rows within the matrix, and `x` is `[m_rows, cols]`.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn weight_rows(w: &MatrixView, begin: usize, x: &[f32], m_rows: usize, out: &mut [f32]) {
    let cols = w.cols();
    debug_assert_eq!(x.len(), m_rows * cols);
    debug_assert!(begin + out.len() / m_rows <= w.rows());
    // SAFETY: the pointers come from slices whose lengths `Matrix::new` checked against the shape.
    unsafe {
        match w.data() {
            Data::F32(data) => all_rows(F32 { data: data.as_ptr(), cols }, w, begin, x, m_rows, out),
            Data::Bf16(data) => all_rows(Bf16 { data: data.as_ptr(), cols }, w, begin, x, m_rows, out),
            Data::Int4 { packed, scales, group } => {
                let format = Int4 {
                    packed: packed.as_ptr(),
                    scales: scales.as_ptr(),
                    row_bytes: cols.div_ceil(8) * 4,
                    row_scales: cols.div_ceil(group),
                    group,
                };
                all_rows(format, w, begin, x, m_rows, out);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn all_rows<F: Format>(f: F, w: &MatrixView, begin: usize, x: &[f32], m_rows: usize, out: &mut [f32]) {
    let x = Activations { data: x, cols: w.cols() };
    // SAFETY: handed on from `weight_rows`. Few rows of activations leave registers free, so several weight rows run side by
    // side there to hide the latency of the multiply-adds.
    unsafe {
        match m_rows {
            1 => narrow_rows::<F, 4, 1>(f, w, begin, x, out),
            2 => narrow_rows::<F, 4, 2>(f, w, begin, x, out),
            3 => narrow_rows::<F, 2, 3>(f, w, begin, x, out),
            4 => narrow_rows::<F, 2, 4>(f, w, begin, x, out),
            5 => narrow_rows::<F, 1, 5>(f, w, begin, x, out),
            6 => narrow_rows::<F, 1, 6>(f, w, begin, x, out),
            7 => narrow_rows::<F, 1, 7>(f, w, begin, x, out),
            NARROW => narrow_rows::<F, 1, NARROW>(f, w, begin, x, out),
            _ => wide_rows(f, w, begin, x, m_rows, out),
        }
    }
}

/// Activations `[M, cols]`.
#[derive(Clone, Copy)]
struct Activations<'a> {
    data: &'a [f32],
    cols: usize,
}

impl Activations<'_> {
    /// # Safety
    /// `m < M` and `k + 8 <= cols`.
    #[inline(always)]
    unsafe fn load(&self, m: usize, k: usize) -> __m256 {
        // SAFETY: inside the slice by the caller's word; the load is unaligned.
        unsafe { _mm256_loadu_ps(self.data.as_ptr().add(m * self.cols + k)) }
    }

    /// The last `cols % 8` values of a row, zeros behind them.
    #[inline(always)]
    fn tail(&self, m: usize) -> [f32; LANES] {
        let (row, len) = (&self.data[m * self.cols..][..self.cols], self.cols % LANES);
        let mut out = [0.0; LANES];
        out[..len].copy_from_slice(&row[self.cols - len..]);
        out
    }
}

/// The last `cols % 8` weights of a row, zeros behind them.
#[inline(always)]
fn weight_tail(w: &MatrixView, n: usize) -> [f32; LANES] {
    let len = w.cols() % LANES;
    let mut out = [0.0; LANES];
    w.expand(n, w.cols() - len, &mut out[..len]);
    out
}

#[target_feature(enable = "avx2,fma")]
unsafe fn narrow_rows<F: Format, const NR: usize, const MR: usize>(
    f: F,
    w: &MatrixView,
    begin: usize,
    x: Activations,
    out: &mut [f32],
) {
    let rows = out.len() / MR;
    let whole = rows - rows % NR;
    // SAFETY: handed on from `weight_rows`; n runs over the rows that `out` has room for.
    unsafe {
        for i in (0..whole).step_by(NR) {
            narrow::<F, NR, MR>(f, w, begin + i, x, &mut out[i * MR..(i + NR) * MR]);
        }
        for i in whole..rows {
            narrow::<F, 1, MR>(f, w, begin + i, x, &mut out[i * MR..(i + 1) * MR]);
        }
    }
}

/// NR weight rows times MR activation rows, all sums in registers.
#[target_feature(enable = "avx2,fma")]
unsafe fn narrow<F: Format, const NR: usize, const MR: usize>(
    f: F,
    w: &MatrixView,
    n: usize,
    x: Activations,
    out: &mut [f32],
) {
    let cols = w.cols();
    let whole = cols - cols % LANES;
    let mut totals = [[_mm256_setzero_ps(); MR]; NR];
    for segment in (0..cols).step_by(SEGMENT) {
        let end = (segment + SEGMENT).min(cols);
        let whole_end = end.min(whole);
        let mut sums = [[_mm256_setzero_ps(); MR]; NR];
        let mut k = segment;
        while k < whole_end {
            let run_end = f.run_end(k, whole_end);
            // SAFETY: n + r < rows and k + 8 <= whole <= cols.
            unsafe {
                let scales: [F::Scale; NR] = std::array::from_fn(|r| f.scale(n + r, k));
                while k < run_end {
                    let xs: [__m256; MR] = std::array::from_fn(|m| x.load(m, k));
                    for r in 0..NR {
                        let weights = f.load(n + r, k, scales[r]);
                        for m in 0..MR {
                            sums[r][m] = _mm256_fmadd_ps(weights, xs[m], sums[r][m]);
                        }
                    }
                    k += LANES;
                }
            }
        }
        if end > whole {
            for r in 0..NR {
                let weights = to_vector(weight_tail(w, n + r));
                for m in 0..MR {
                    sums[r][m] = _mm256_fmadd_ps(weights, to_vector(x.tail(m)), sums[r][m]);
                }
            }
        }
        for r in 0..NR {
            for m in 0..MR {
                totals[r][m] = _mm256_add_ps(totals[r][m], sums[r][m]);
            }
        }
    }
    for r in 0..NR {
        for m in 0..MR {
            out[r * MR + m] = fold_lanes(to_array(totals[r][m]));
        }
    }
}

/// Many activation rows: blocks of [`BLOCK`] share each expanded tile.
#[target_feature(enable = "avx2,fma")]
unsafe fn wide_rows<F: Format>(f: F, w: &MatrixView, begin: usize, x: Activations, m_rows: usize, out: &mut [f32]) {
    let rows = out.len() / m_rows;
    let cols = w.cols();
    let whole = cols - cols % LANES;
    let mut totals = [[_mm256_setzero_ps(); TILE_ROWS]; BLOCK];
    for i in (0..rows).step_by(TILE_ROWS) {
        let tile_rows = TILE_ROWS.min(rows - i);
        for block in (0..m_rows).step_by(BLOCK) {
            let block_rows = BLOCK.min(m_rows - block);
            totals[..block_rows].fill([_mm256_setzero_ps(); TILE_ROWS]);
            for segment in (0..cols).step_by(SEGMENT) {
                let end = (segment + SEGMENT).min(cols);
                let mut tile = [[_mm256_setzero_ps(); SEGMENT / LANES]; TILE_ROWS];
                // SAFETY: begin + i + r < rows; k + 8 <= whole <= cols.
                unsafe {
                    for (r, tile) in tile[..tile_rows].iter_mut().enumerate() {
                        expand_segment(f, w, begin + i + r, segment..end, whole, tile);
                    }
                    multiply_tile(&tile, x, block, segment, end.min(whole), end > whole, &mut totals[..block_rows]);
                }
            }
            for r in 0..tile_rows {
                for m in 0..block_rows {
                    out[(i + r) * m_rows + block + m] = fold_lanes(to_array(totals[m][r]));
                }
            }
        }
    }
}

/// Expands one segment of one weight row.
#[target_feature(enable = "avx2,fma")]
unsafe fn expand_segment<F: Format>(
    f: F,
    w: &MatrixView,
    n: usize,
    segment: std::ops::Range<usize>,
    whole: usize,
    tile: &mut [__m256; SEGMENT / LANES],
) {
    let whole_end = segment.end.min(whole);
    let mut k = segment.start;
    while k < whole_end {
        let run_end = f.run_end(k, whole_end);
        // SAFETY: the caller guarantees n < rows; k + 8 <= whole <= cols.
        unsafe {
            let scale = f.scale(n, k);
            while k < run_end {
                tile[(k - segment.start) / LANES] = f.load(n, k, scale);
                k += LANES;
            }
        }
    }
    if segment.end > whole {
        tile[(whole - segment.start) / LANES] = to_vector(weight_tail(w, n));
    }
}

/// Adds one segment's products to the totals of a block of rows, four rows at a time.
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply_tile(
    tile: &[[__m256; SEGMENT / LANES]; TILE_ROWS],
    x: Activations,
    first_row: usize,
    segment: usize,
    whole_end: usize,
    tail: bool,
    totals: &mut [[__m256; TILE_ROWS]],
) {
    const STEP: usize = 4;
    // SAFETY: rows first_row .. first_row + totals.len() exist, and k + 8 <= whole_end <= cols.
    unsafe {
        let (fours, rest) = totals.as_chunks_mut::<STEP>();
        for (i, totals) in fours.iter_mut().enumerate() {
            multiply_rows::<STEP>(tile, x, first_row + i * STEP, segment, whole_end, tail, totals);
        }
        let done = fours.len() * STEP;
        for (i, totals) in rest.as_chunks_mut::<1>().0.iter_mut().enumerate() {
            multiply_rows::<1>(tile, x, first_row + done + i, segment, whole_end, tail, totals);
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn multiply_rows<const MR: usize>(
    tile: &[[__m256; SEGMENT / LANES]; TILE_ROWS],
    x: Activations,
    row: usize,
    segment: usize,
    whole_end: usize,
    tail: bool,
    totals: &mut [[__m256; TILE_ROWS]; MR],
) {
    let mut sums = [[_mm256_setzero_ps(); TILE_ROWS]; MR];
    for k in (segment..whole_end.max(segment)).step_by(LANES) {
        let j = (k - segment) / LANES;
        for m in 0..MR {
            // SAFETY: the caller guarantees the row and the column.
            let xs = unsafe { x.load(row + m, k) };
            for r in 0..TILE_ROWS {
                sums[m][r] = _mm256_fmadd_ps(tile[r][j], xs, sums[m][r]);
            }
        }
    }
    if tail {
        let j = (whole_end.max(segment) - segment) / LANES;
        for m in 0..MR {
            let xs = to_vector(x.tail(row + m));
            for r in 0..TILE_ROWS {
                sums[m][r] = _mm256_fmadd_ps(tile[r][j], xs, sums[m][r]);
            }
        }
    }
    for m in 0..MR {
        for r in 0..TILE_ROWS {
            totals[m][r] = _mm256_add_ps(totals[m][r], sums[m][r]);
        }
    }
}

/// # Safety
/// The processor has AVX2 and FMA; the slices are equally long.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a8, a_rest), (b8, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sum = _mm256_setzero_ps();
    for (a, b) in a8.iter().zip(b8) {
        sum = _mm256_fmadd_ps(to_vector(*a), to_vector(*b), sum);
    }
    let mut lanes = to_array(sum);
    for (i, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        lanes[i] = a.mul_add(*b, lanes[i]);
    }
    fold_lanes(lanes)
}

/// # Safety
/// The processor has AVX2 and FMA; the slices are equally long.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn scaled_add(y: &mut [f32], a: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(*x, *y);
    }
}

#[inline(always)]
fn to_vector(values: [f32; LANES]) -> __m256 {
    // SAFETY: both types are 32 plain bytes and every bit pattern is valid in both.
    unsafe { std::mem::transmute(values) }
}

#[inline(always)]
fn to_array(vector: __m256) -> [f32; LANES] {
    // SAFETY: as in `to_vector`.
    unsafe { std::mem::transmute(vector) }
}
