//! How each weight format becomes vectors of f32.

use std::arch::x86_64::*;

use super::super::matrix;
use crate::SEGMENT;

/// A weight format: how eight consecutive weights of a row become a vector of f32.
///
/// The methods are `#[inline(always)]` without a target feature, so that they take on the features of the kernel they are
/// inlined into; they must only be called from one that has AVX2 and FMA.
pub(super) trait Format: Copy {
    /// What stays the same over a run of inputs.
    type Scale: Copy;
    /// Where the run that holds input k ends, at most `limit`.
    fn run_end(&self, k: usize, limit: usize) -> usize;
    /// The scale of the run that holds input `k` of row `n`.
    unsafe fn scale(&self, n: usize, k: usize) -> Self::Scale;
    /// Asks for the segment that begins at input `k` of row `n`, which need not exist. Rows are a few cache lines long and are read
    /// several at a time, which the processor's own prefetcher does not follow from one group of rows to the next.
    fn prefetch(&self, n: usize, k: usize);
    /// Weights k .. k + 8 of row `n`. The caller guarantees `k + 8 <= cols` and `n < rows`.
    unsafe fn load(&self, n: usize, k: usize, scale: Self::Scale) -> __m256;
}

/// Floats of `BYTES` bytes: 4 for f32, 2 for bf16.
#[derive(Clone, Copy)]
pub(super) struct Dense<const BYTES: usize> {
    data: *const u8,
    cols: usize,
}

impl<const BYTES: usize> Dense<BYTES> {
    /// `data` holds the rows of a checked matrix.
    pub(super) fn new(data: &[u8], cols: usize) -> Dense<BYTES> {
        const { assert!(BYTES == 2 || BYTES == 4) }
        Dense { data: data.as_ptr(), cols }
    }
}

impl<const BYTES: usize> Format for Dense<BYTES> {
    type Scale = ();
    #[inline(always)]
    fn run_end(&self, _: usize, limit: usize) -> usize {
        limit
    }
    #[inline(always)]
    unsafe fn scale(&self, _: usize, _: usize) {}
    #[inline(always)]
    fn prefetch(&self, n: usize, k: usize) {
        prefetch_lines(self.data.wrapping_add((n * self.cols + k) * BYTES), SEGMENT * BYTES);
    }
    #[inline(always)]
    unsafe fn load(&self, n: usize, k: usize, _: ()) -> __m256 {
        // SAFETY: `Matrix::new` checked that the slice holds rows * cols values of BYTES bytes; the loads are unaligned.
        unsafe {
            let at = self.data.add((n * self.cols + k) * BYTES);
            if BYTES == 4 {
                return _mm256_loadu_ps(at.cast());
            }
            let halves = _mm_loadu_si128(at.cast());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
        }
    }
}

/// Symmetric integers of `BITS` bits, as [`crate::packing`] describes them.
#[derive(Clone, Copy)]
pub(super) struct Packed<const BITS: usize> {
    packed: *const u8,
    scales: *const u8,
    /// Bytes of packed words a row.
    row_bytes: usize,
    /// Scales a row.
    row_scales: usize,
    group: usize,
}

impl<const BITS: usize> Packed<BITS> {
    /// Fields in a word.
    const PER_WORD: usize = 32 / BITS;

    /// The slices belong to a checked matrix of `cols` columns.
    pub(super) fn new(packed: &[u8], scales: &[u8], cols: usize, group: usize) -> Packed<BITS> {
        Packed {
            packed: packed.as_ptr(),
            scales: scales.as_ptr(),
            row_bytes: cols.div_ceil(Self::PER_WORD) * 4,
            row_scales: cols.div_ceil(group),
            group,
        }
    }

    /// Byte of a row that holds the first bit of field k, a multiple of 8, of a width that divides 8.
    #[inline(always)]
    fn byte(k: usize) -> usize {
        k / 8 * BITS
    }
}

impl<const BITS: usize> Format for Packed<BITS> {
    /// s, and what zero is stored as times -s.
    type Scale = (__m256, __m256);
    #[inline(always)]
    fn run_end(&self, k: usize, limit: usize) -> usize {
        limit.min((k / self.group + 1).saturating_mul(self.group))
    }
    #[inline(always)]
    unsafe fn scale(&self, n: usize, k: usize) -> (__m256, __m256) {
        // SAFETY: `Matrix::new` checked that there are `row_scales` bf16 a row.
        unsafe {
            let bytes: [u8; 2] = self.scales.add((n * self.row_scales + k / self.group) * 2).cast::<[u8; 2]>().read();
            let s = matrix::bf16(bytes);
            (_mm256_set1_ps(s), _mm256_set1_ps(-((1 << (BITS - 1)) as f32) * s))
        }
    }
    #[inline(always)]
    fn prefetch(&self, n: usize, k: usize) {
        prefetch_lines(
            self.packed.wrapping_add(n * self.row_bytes + k / Self::PER_WORD * 4),
            SEGMENT / Self::PER_WORD * 4,
        );
    }
    #[inline(always)]
    unsafe fn load(&self, n: usize, k: usize, scale: Self::Scale) -> __m256 {
        // SAFETY: k is a multiple of 8 and k + 8 <= cols, so every byte read here belongs to a word of the row that holds one of
        // the eight fields; `Matrix::new` checked that they exist.
        unsafe {
            let row = self.packed.add(n * self.row_bytes);
            let fields = match BITS {
                2 => {
                    let word = i32::from(row.add(Self::byte(k)).cast::<u16>().read_unaligned());
                    shifted(word, _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), 3)
                }
                3 => {
                    // The eight fields lie in one word or in two neighbours, of 30 bits each. Where it is one, the second read
                    // gives the same word again, and its bits are above the 24 that are looked at.
                    let first = row.add(k / 10 * 4).cast::<u32>().read_unaligned() & 0x3fff_ffff;
                    let second = row.add((k + 7) / 10 * 4).cast::<u32>().read_unaligned();
                    let word = (u64::from(first) | u64::from(second) << 30) >> (k % 10 * 3);
                    shifted(word as i32, _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21), 7)
                }
                4 => {
                    let word = row.add(Self::byte(k)).cast::<i32>().read_unaligned();
                    shifted(word, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28), 15)
                }
                _ => _mm256_cvtepu8_epi32(_mm_loadl_epi64(row.add(Self::byte(k)).cast())),
            };
            // (field - offset) * s as field * s - offset * s, rounded once. The result has at most 16 significant bits, so
            // nothing is rounded.
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(fields), scale.0, scale.1)
        }
    }
}

/// Each lane holds `word` shifted right by its own distance, and masked.
#[target_feature(enable = "avx2")]
#[inline]
fn shifted(word: i32, distances: __m256i, mask: i32) -> __m256i {
    _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word), distances), _mm256_set1_epi32(mask))
}

/// Prefetches the cache lines of `bytes` bytes.
#[inline(always)]
pub(super) fn prefetch_lines(at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: a prefetch reads nothing and may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(line).cast()) };
    }
}
