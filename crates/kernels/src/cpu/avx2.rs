//! The kernels with AVX2 and FMA. The order of every sum is that of [`super::portable`]; only the multiply-adds are fused.
//!
//! Three shapes of one computation, which all fold k alike, so that a row has the same bits in each:
//! - up to [`NARROW`] rows of activations (decode), several weight rows are expanded in registers side by side;
//! - up to [`MEDIUM`] rows (verify), a weight vector is expanded in a register and meets a panel of eight rows at once, segment by
//!   segment, so that the panel stays in the L1 cache;
//! - above (prefill), a tile of weights is expanded into the L1 cache once and meets all panels.

// Register tiles are indexed by row and column; iterators would hide which accumulator is meant.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::attention::{KvView, Ops, attend_with};
use super::{Data, LANES, MatrixView, fold_lanes};
use crate::SEGMENT;
use crate::packing::Bits;

mod format;
pub(super) mod int8;

use format::{Dense, Format, Packed, prefetch_lines};

/// Most rows that the register kernel takes: its accumulators must fit the 16 registers beside the weights.
const NARROW: usize = 4;
/// Most rows that the panel kernel takes: one panel. Expanding the weights again for a second one costs more than the detour
/// through the cache.
const MEDIUM: usize = 8;
/// Weight rows that meet a panel while it is in the L1 cache.
const MEDIUM_ROWS: usize = 8;
/// Activation rows of a panel of the tile kernel, and weight rows that meet it at a time: twelve accumulators, fed by seven
/// loads.
const WIDE_PANEL: usize = 4;
const MICRO_ROWS: usize = 3;
/// Weight rows of an expanded tile: each panel that is brought into the L1 cache meets all of them.
const TILE_ROWS: usize = 2 * MICRO_ROWS;
/// Vectors of a segment.
const SEGMENT_VECTORS: usize = SEGMENT / LANES;

/// Activations as the kernels read them.
pub(super) enum Activations<'a> {
    /// `[M, cols]` as they are, M at most [`NARROW`].
    Rows(Rows<'a>),
    /// Packed in panels of [`MEDIUM`].
    Medium(Panels),
    /// Packed in panels of [`WIDE_PANEL`].
    Wide(Panels),
}

impl<'a> Activations<'a> {
    /// Packs `x` `[m_rows, cols]` where that pays.
    pub(super) fn new(x: &'a [f32], m_rows: usize, cols: usize) -> Activations<'a> {
        match m_rows {
            0..=NARROW => Activations::Rows(Rows { data: x, cols, count: m_rows }),
            5..=MEDIUM => Activations::Medium(Panels::new(x, m_rows, cols, MEDIUM)),
            _ => Activations::Wide(Panels::new(x, m_rows, cols, WIDE_PANEL)),
        }
    }
}

/// Activation rows as they are.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    data: &'a [f32],
    cols: usize,
    count: usize,
}

impl Rows<'_> {
    /// # Safety
    /// `m < count` and `k + 8 <= cols`.
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

/// Activations in the order in which the tile kernel reads them: segment by segment, within it panel by panel, within that
/// vector by vector the panel's rows side by side. Rows of a model's activations lie a power of two apart and would evict
/// each other from the cache; here they are one stream. The last vector of k is filled up with zeros, as everywhere.
pub(super) struct Panels {
    /// Vectors, not arrays, for their alignment: a load that straddles two cache lines costs two.
    data: Vec<__m256>,
    m_rows: usize,
    /// Vectors of k.
    vectors: usize,
}

impl Panels {
    fn new(x: &[f32], m_rows: usize, cols: usize, panel_rows: usize) -> Panels {
        let vectors = cols.div_ceil(LANES);
        let mut data = Vec::with_capacity(m_rows * vectors);
        for segment in (0..vectors).step_by(SEGMENT_VECTORS) {
            for panel in (0..m_rows).step_by(panel_rows) {
                for v in segment..(segment + SEGMENT_VECTORS).min(vectors) {
                    for m in panel..(panel + panel_rows).min(m_rows) {
                        let row = &x[m * cols..][..cols];
                        let values = &row[v * LANES..cols.min((v + 1) * LANES)];
                        let mut vector = [0.0; LANES];
                        vector[..values.len()].copy_from_slice(values);
                        data.push(to_vector(vector));
                    }
                }
            }
        }
        Panels { data, m_rows, vectors }
    }
}

/// See [`super::portable::weight_rows`]: the same contract.
///
/// # Safety
/// The processor has AVX2 and FMA. `out` holds whole weight rows within the matrix, and `x` has the matrix's columns.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn weight_rows(w: &MatrixView, begin: usize, x: &Activations, m_rows: usize, out: &mut [f32]) {
    let cols = w.cols();
    debug_assert!(begin + out.len() / m_rows <= w.rows());
    // SAFETY: the pointers come from slices whose lengths `Matrix::new` checked against the shape.
    unsafe {
        match w.data() {
            Data::F32(data) => all_rows(Dense::<4>::new(data, cols), w, begin, x, out),
            Data::Bf16(data) => all_rows(Dense::<2>::new(data, cols), w, begin, x, out),
            Data::Packed { bits, packed, scales, group } => match bits {
                Bits::Two => all_rows(Packed::<2>::new(packed, scales, cols, group), w, begin, x, out),
                Bits::Three => all_rows(Packed::<3>::new(packed, scales, cols, group), w, begin, x, out),
                Bits::Four => all_rows(Packed::<4>::new(packed, scales, cols, group), w, begin, x, out),
                Bits::Eight => all_rows(Packed::<8>::new(packed, scales, cols, group), w, begin, x, out),
            },
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn all_rows<F: Format>(f: F, w: &MatrixView, begin: usize, x: &Activations, out: &mut [f32]) {
    // SAFETY: handed on from `weight_rows`. Few rows of activations leave registers free, so several weight rows run side by
    // side there to hide the latency of the multiply-adds.
    unsafe {
        match x {
            Activations::Medium(panels) => medium_rows(f, w, begin, panels, out),
            Activations::Wide(panels) => wide_rows(f, w, begin, panels, out),
            Activations::Rows(rows) => match rows.count {
                1 => narrow_rows::<F, 4, 1>(f, w, begin, *rows, out),
                2 => narrow_rows::<F, 4, 2>(f, w, begin, *rows, out),
                3 => narrow_rows::<F, 2, 3>(f, w, begin, *rows, out),
                _ => narrow_rows::<F, 2, NARROW>(f, w, begin, *rows, out),
            },
        }
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
    x: Rows,
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
    x: Rows,
    out: &mut [f32],
) {
    let cols = w.cols();
    let whole = cols - cols % LANES;
    let mut totals = [[_mm256_setzero_ps(); MR]; NR];
    for segment in (0..cols).step_by(SEGMENT) {
        let end = (segment + SEGMENT).min(cols);
        let whole_end = end.min(whole);
        for r in 0..NR {
            f.prefetch(n + NR + r, segment);
        }
        let mut sums = [[_mm256_setzero_ps(); MR]; NR];
        let mut k = segment;
        while k < whole_end {
            let run_end = f.run_end(k, whole_end);
            // SAFETY: n + r < rows and k + 8 <= whole <= cols.
            unsafe {
                // Arrays are filled by loops, not by closures: a closure handed to a library function is compiled without this
                // function's target features and would not be inlined.
                let mut scales = [f.scale(n, k); NR];
                for r in 1..NR {
                    scales[r] = f.scale(n + r, k);
                }
                while k < run_end {
                    let mut xs = [_mm256_setzero_ps(); MR];
                    for m in 0..MR {
                        xs[m] = x.load(m, k);
                    }
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
            out[r * MR + m] = fold(totals[r][m]);
        }
    }
}

/// Some activation rows (5 to [`MEDIUM`]): each segment of them meets [`MEDIUM_ROWS`] weight rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn medium_rows<F: Format>(f: F, w: &MatrixView, begin: usize, x: &Panels, out: &mut [f32]) {
    let m_rows = x.m_rows;
    let mut totals = [[_mm256_setzero_ps(); MEDIUM]; MEDIUM_ROWS];
    for (i, out) in out.chunks_mut(MEDIUM_ROWS * m_rows).enumerate() {
        let first = begin + i * MEDIUM_ROWS;
        totals.fill([_mm256_setzero_ps(); MEDIUM]);
        let mut packed = &x.data[..];
        for segment in (0..x.vectors).step_by(SEGMENT_VECTORS) {
            let vectors = SEGMENT_VECTORS.min(x.vectors - segment);
            let (panel, after) = packed.split_at(vectors * m_rows);
            packed = after;
            for (r, totals) in totals[..out.len() / m_rows].iter_mut().enumerate() {
                let (n, k) = (first + r, segment * LANES);
                // SAFETY: n is a row of the matrix, by the caller's word about `out`.
                unsafe {
                    match m_rows {
                        5 => panel_row::<F, 5>(f, w, n, k, panel, totals),
                        6 => panel_row::<F, 6>(f, w, n, k, panel, totals),
                        7 => panel_row::<F, 7>(f, w, n, k, panel, totals),
                        _ => panel_row::<F, MEDIUM>(f, w, n, k, panel, totals),
                    }
                }
            }
        }
        for (out, totals) in out.chunks_exact_mut(m_rows).zip(&totals) {
            for (out, total) in out.iter_mut().zip(totals) {
                *out = fold(*total);
            }
        }
    }
}

/// Adds the products of the segment of weight row `n` that begins at input `begin` and a panel to the totals.
#[target_feature(enable = "avx2,fma")]
unsafe fn panel_row<F: Format, const MR: usize>(
    f: F,
    w: &MatrixView,
    n: usize,
    begin: usize,
    panel: &[__m256],
    totals: &mut [__m256; MEDIUM],
) {
    let (panel, whole) = (panel.as_chunks::<MR>().0, w.cols() - w.cols() % LANES);
    let end = (begin + SEGMENT).min(w.cols());
    let whole_end = end.min(whole);
    f.prefetch(n + MEDIUM_ROWS, begin);
    let mut sums = [_mm256_setzero_ps(); MR];
    let mut k = begin;
    while k < whole_end {
        let run_end = f.run_end(k, whole_end);
        // SAFETY: the caller guarantees n < rows; k + 8 <= whole <= cols.
        let scale = unsafe { f.scale(n, k) };
        for xs in &panel[(k - begin) / LANES..(run_end - begin) / LANES] {
            // SAFETY: as above.
            let weights = unsafe { f.load(n, k, scale) };
            for m in 0..MR {
                sums[m] = _mm256_fmadd_ps(weights, xs[m], sums[m]);
            }
            k += LANES;
        }
    }
    if end > whole {
        let weights = to_vector(weight_tail(w, n));
        for m in 0..MR {
            sums[m] = _mm256_fmadd_ps(weights, panel[(whole - begin) / LANES][m], sums[m]);
        }
    }
    for (total, sum) in totals.iter_mut().zip(sums) {
        *total = _mm256_add_ps(*total, sum);
    }
}

/// A tile: one segment of [`TILE_ROWS`] weight rows, expanded; vector v of row r at `[v][r]`.
type Tile = [[__m256; TILE_ROWS]; SEGMENT_VECTORS];

/// Many activation rows: each tile of weights is expanded once and meets every panel.
#[target_feature(enable = "avx2,fma")]
unsafe fn wide_rows<F: Format>(f: F, w: &MatrixView, begin: usize, x: &Panels, out: &mut [f32]) {
    let (m_rows, rows) = (x.m_rows, out.len() / x.m_rows);
    let mut totals = vec![[_mm256_setzero_ps(); TILE_ROWS]; m_rows];
    for i in (0..rows).step_by(TILE_ROWS) {
        let tile_rows = TILE_ROWS.min(rows - i);
        totals.fill([_mm256_setzero_ps(); TILE_ROWS]);
        let mut tile: Tile = [[_mm256_setzero_ps(); TILE_ROWS]; SEGMENT_VECTORS];
        let mut packed = &x.data[..];
        for segment in (0..x.vectors).step_by(SEGMENT_VECTORS) {
            let vectors = SEGMENT_VECTORS.min(x.vectors - segment);
            for r in 0..tile_rows {
                // SAFETY: begin + i + r < rows of the matrix.
                unsafe { expand_segment(f, w, begin + i + r, segment * LANES, r, &mut tile) };
            }
            let (panels, rest) = totals.as_chunks_mut::<WIDE_PANEL>();
            for totals in panels {
                let (panel, after) = packed.split_at(vectors * WIDE_PANEL);
                multiply_panel::<WIDE_PANEL>(&tile, panel.as_chunks().0, totals);
                packed = after;
            }
            let (panel, after) = packed.split_at(vectors * rest.len());
            match rest {
                [a, b, c] => multiply_split::<3>(&tile, panel, [a, b, c]),
                [a, b] => multiply_split::<2>(&tile, panel, [a, b]),
                [a] => multiply_split::<1>(&tile, panel, [a]),
                _ => {}
            }
            packed = after;
        }
        for r in 0..tile_rows {
            for m in 0..m_rows {
                out[(i + r) * m_rows + m] = fold(totals[m][r]);
            }
        }
    }
}

/// Expands the segment that begins at input `begin` of weight row `n` into row `r` of the tile.
#[target_feature(enable = "avx2,fma")]
unsafe fn expand_segment<F: Format>(f: F, w: &MatrixView, n: usize, begin: usize, r: usize, tile: &mut Tile) {
    let whole = w.cols() - w.cols() % LANES;
    let end = (begin + SEGMENT).min(w.cols());
    let whole_end = end.min(whole);
    f.prefetch(n + TILE_ROWS, begin);
    let mut k = begin;
    while k < whole_end {
        let run_end = f.run_end(k, whole_end);
        // SAFETY: the caller guarantees n < rows; k + 8 <= whole <= cols.
        unsafe {
            let scale = f.scale(n, k);
            while k < run_end {
                tile[(k - begin) / LANES][r] = f.load(n, k, scale);
                k += LANES;
            }
        }
    }
    if end > whole {
        tile[(whole - begin) / LANES][r] = to_vector(weight_tail(w, n));
    }
}

/// The last panel, with fewer rows than the others.
#[target_feature(enable = "avx2,fma")]
fn multiply_split<const MR: usize>(tile: &Tile, panel: &[__m256], totals: [&mut [__m256; TILE_ROWS]; MR]) {
    let mut own = [[_mm256_setzero_ps(); TILE_ROWS]; MR];
    for m in 0..MR {
        own[m] = *totals[m];
    }
    multiply_panel::<MR>(tile, panel.as_chunks().0, &mut own);
    for (total, own) in totals.into_iter().zip(own) {
        *total = own;
    }
}

/// Adds one segment's products of a tile and a panel to the totals.
#[target_feature(enable = "avx2,fma")]
fn multiply_panel<const MR: usize>(tile: &Tile, panel: &[[__m256; MR]], totals: &mut [[__m256; TILE_ROWS]; MR]) {
    for half in 0..TILE_ROWS / MICRO_ROWS {
        let first = half * MICRO_ROWS;
        let mut sums = [[_mm256_setzero_ps(); MICRO_ROWS]; MR];
        for (weights, xs) in tile.iter().zip(panel) {
            for m in 0..MR {
                for r in 0..MICRO_ROWS {
                    sums[m][r] = _mm256_fmadd_ps(weights[first + r], xs[m], sums[m][r]);
                }
            }
        }
        for m in 0..MR {
            for r in 0..MICRO_ROWS {
                totals[m][first + r] = _mm256_add_ps(totals[m][first + r], sums[m][r]);
            }
        }
    }
}

/// # Safety
/// The processor has AVX2 and FMA; the slices are equally long.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: handed on.
    let [dot] = unsafe { Fused::dots(a, [b]) };
    dot
}

/// Fused multiply-adds, eight lanes at a time.
struct Fused;

impl Ops for Fused {
    #[inline(always)]
    unsafe fn dots<const M: usize>(a: &[f32], b: [&[f32]; M]) -> [f32; M] {
        // SAFETY: the features by the caller's word; the loads are of whole arrays.
        unsafe {
            let (a8, a_rest) = a.as_chunks::<LANES>();
            let mut sums = [_mm256_setzero_ps(); M];
            for (k, a) in a8.iter().enumerate() {
                for m in 0..M {
                    let b = b[m][k * LANES..].first_chunk().copied().unwrap_or_default();
                    sums[m] = _mm256_fmadd_ps(to_vector(*a), to_vector(b), sums[m]);
                }
            }
            let mut out = [0.0; M];
            for m in 0..M {
                let mut lanes = to_array(sums[m]);
                for (i, a) in a_rest.iter().enumerate() {
                    lanes[i] = a.mul_add(b[m][a8.len() * LANES + i], lanes[i]);
                }
                out[m] = fold_lanes(lanes);
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn scaled_adds<const M: usize>(y: &mut [f32], a: [f32; M], x: [&[f32]; M]) {
        let mut x = x;
        for x in &mut x {
            *x = &x[..y.len()];
        }
        for i in 0..y.len() {
            for m in 0..M {
                y[i] = a[m].mul_add(x[m][i], y[i]);
            }
        }
    }
}

/// See [`super::attend`].
///
/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn attend(
    query: &[f32],
    kv: KvView,
    head: usize,
    visible: Range<usize>,
    own: Option<(&[f32], &[f32])>,
    out: &mut [f32],
) {
    // SAFETY: handed on.
    unsafe { attend_with::<Fused>(query, kv, head, visible, own, out) }
}

/// [`fold_lanes`] in registers: lanes 4 apart, then 2 apart, then the last two.
#[target_feature(enable = "avx2,fma")]
fn fold(t: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps::<1>(t));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
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
