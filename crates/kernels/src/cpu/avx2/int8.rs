//! The products of [`crate::cpu::int8`] in vectors of bytes: the same integers, the same order, the same bits.
//!
//! A block of 64 weights becomes two vectors of signed bytes once and meets the rows of a panel. `vpmaddubsw` multiplies them by the
//! activations, which are unsigned by an added 128, and sums pairs; what the 128 add is a sum of weights, which all rows share and which is
//! taken off in 16 bits. Bounds of the 16-bit sums of four products: |w| <= 8 gives 4 * 255 * 8 = 8160. Weights of 8 bits would
//! overflow: there the sign moves from the weight to the activation, 2 * 127 * 128 = 32512, and pairs are added in 32 bits.

#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::int8::{BLOCK, Block, PANEL, Packed, Panel, Rounded};
use super::super::matrix::bf16;
use super::{LANES, fold, prefetch_lines, to_vector};
use crate::packing::Bits;

/// Weight rows that meet a part of a panel while it is in the L1 cache.
const ROWS: usize = 8;
/// Blocks of a panel, times its rows, that meet [`ROWS`] weight rows at a time: 8 KiB in the L1 cache.
const PART: usize = 128;

/// See [`crate::cpu::int8::weight_rows`]: the same contract.
///
/// # Safety
/// The processor has AVX2 and FMA. `out` holds whole weight rows within the matrix.
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn weight_rows(w: Packed, begin: usize, x: &Rounded, m_rows: usize, out: &mut [f32]) {
    // SAFETY: handed on.
    unsafe {
        match w.bits {
            Bits::Two => all_rows::<2>(w, begin, x, m_rows, out),
            Bits::Three => all_rows::<3>(w, begin, x, m_rows, out),
            Bits::Four => all_rows::<4>(w, begin, x, m_rows, out),
            Bits::Eight => all_rows::<8>(w, begin, x, m_rows, out),
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn all_rows<const BITS: usize>(w: Packed, begin: usize, x: &Rounded, m_rows: usize, out: &mut [f32]) {
    let grouping = Grouping::of(&w);
    for (i, out) in out.chunks_mut(ROWS * m_rows).enumerate() {
        let rows = out.len() / m_rows;
        for (first, panel) in x.panels() {
            let mut lanes = [[_mm256_setzero_ps(); PANEL]; ROWS];
            let part = PART / panel.rows;
            for block in (0..x.blocks()).step_by(part) {
                let blocks = block..(block + part).min(x.blocks());
                for (r, lanes) in lanes[..rows].iter_mut().enumerate() {
                    let n = begin + i * ROWS + r;
                    // SAFETY: n is a row of the matrix, by the caller's word about `out`.
                    unsafe {
                        match panel.rows {
                            1 => panel_row::<BITS, 1>(w, grouping, n, blocks.clone(), panel, lanes),
                            2 => panel_row::<BITS, 2>(w, grouping, n, blocks.clone(), panel, lanes),
                            3 => panel_row::<BITS, 3>(w, grouping, n, blocks.clone(), panel, lanes),
                            4 => panel_row::<BITS, 4>(w, grouping, n, blocks.clone(), panel, lanes),
                            5 => panel_row::<BITS, 5>(w, grouping, n, blocks.clone(), panel, lanes),
                            6 => panel_row::<BITS, 6>(w, grouping, n, blocks.clone(), panel, lanes),
                            7 => panel_row::<BITS, 7>(w, grouping, n, blocks.clone(), panel, lanes),
                            _ => panel_row::<BITS, PANEL>(w, grouping, n, blocks.clone(), panel, lanes),
                        }
                    }
                }
            }
            for (r, lanes) in lanes[..rows].iter().enumerate() {
                for (m, lanes) in lanes[..panel.rows].iter().enumerate() {
                    out[r * m_rows + first + m] = fold(*lanes);
                }
            }
        }
    }
}

/// Adds the products of some blocks of weight row `n` and a panel of `MR` rows to the lanes.
#[target_feature(enable = "avx2,fma")]
unsafe fn panel_row<const BITS: usize, const MR: usize>(
    w: Packed,
    grouping: Grouping,
    n: usize,
    blocks: Range<usize>,
    panel: Panel,
    lanes: &mut [__m256; PANEL],
) {
    let mut sums = [_mm256_setzero_ps(); MR];
    sums.copy_from_slice(&lanes[..MR]);
    // The same blocks of the row that comes after this group of rows; it need not exist.
    let row = w.row(n);
    let ahead = row.as_ptr().wrapping_add(ROWS * row.len() + blocks.start * BLOCK * BITS / 8);
    prefetch_lines(ahead, blocks.len() * BLOCK * BITS / 8);
    let whole = blocks.start..blocks.end.min(w.cols() / BLOCK);
    let scales = w.row_scales(n);
    // SAFETY: the blocks are whole, so that all their words are in the row, and the groups that they begin in exist.
    unsafe {
        // One loop for each kind of groups: a branch in it would cost registers.
        match grouping {
            Grouping::Blocks { shift } => {
                let scale = |block: usize| _mm256_set1_ps(bf16(*scales.get_unchecked(block >> shift)));
                whole_blocks::<BITS, MR>(row, whole.clone(), panel, scale, &mut sums);
            }
            Grouping::Halves => {
                let half = |group: usize| _mm_set1_ps(bf16(*scales.get_unchecked(group)));
                let scale = |block: usize| _mm256_set_m128(half(2 * block + 1), half(2 * block));
                whole_blocks::<BITS, MR>(row, whole.clone(), panel, scale, &mut sums);
            }
            Grouping::Lanes => {
                let scale = |block: usize| to_vector(w.lane_scales(n, block));
                whole_blocks::<BITS, MR>(row, whole.clone(), panel, scale, &mut sums);
            }
        }
        for block in whole.end..blocks.end {
            let weights = halves(&Block(w.integers(n, block)));
            add_block::<BITS, MR>(weights, to_vector(w.lane_scales(n, block)), panel, block, &mut sums);
        }
    }
    lanes[..MR].copy_from_slice(&sums);
}

/// # Safety
/// The row has all of these blocks, and the panel `MR` rows. As for all that follows, the processor has AVX2 and FMA: what is always
/// inlined takes on the features of its caller.
#[inline(always)]
unsafe fn whole_blocks<const BITS: usize, const MR: usize>(
    row: &[u8],
    blocks: Range<usize>,
    panel: Panel,
    scale: impl Fn(usize) -> __m256,
    sums: &mut [__m256; MR],
) {
    let mut own = *sums;
    for block in blocks {
        // SAFETY: by the caller's word.
        unsafe {
            add_block::<BITS, MR>(integers::<BITS>(row, block * BLOCK), scale(block), panel, block, &mut own);
        }
    }
    *sums = own;
}

/// # Safety
/// The panel has `MR` rows and that block.
#[inline(always)]
unsafe fn add_block<const BITS: usize, const MR: usize>(
    [even, odd]: [__m256i; 2],
    weight_scales: __m256,
    panel: Panel,
    block: usize,
    sums: &mut [__m256; MR],
) {
    debug_assert!(panel.rows == MR && (block + 1) * MR <= panel.bytes.len() && panel.scales.len() == panel.bytes.len());
    // SAFETY: by the caller's word.
    unsafe {
        let (ones, center) = (_mm256_set1_epi16(1), _mm256_set1_epi8(-128));
        let sum_of_weights = _mm256_add_epi16(_mm256_maddubs_epi16(center, even), _mm256_maddubs_epi16(center, odd));
        for m in 0..MR {
            let [x_even, x_odd] = halves(panel.bytes.get_unchecked(block * MR + m));
            let integers = if BITS < 8 {
                let pairs = _mm256_add_epi16(
                    _mm256_sub_epi16(_mm256_maddubs_epi16(x_even, even), sum_of_weights),
                    _mm256_maddubs_epi16(x_odd, odd),
                );
                _mm256_madd_epi16(pairs, ones)
            } else {
                let pairs = |x, w| {
                    let signed = _mm256_sign_epi8(_mm256_xor_si256(x, center), w);
                    _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), signed), ones)
                };
                _mm256_add_epi32(pairs(x_even, even), pairs(x_odd, odd))
            };
            let scale = _mm256_mul_ps(weight_scales, _mm256_set1_ps(*panel.scales.get_unchecked(block * MR + m)));
            sums[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers), scale, sums[m]);
        }
    }
}

/// How groups of weights and blocks of activations meet.
#[derive(Clone, Copy)]
enum Grouping {
    /// A group is 2^shift blocks.
    Blocks { shift: u32 },
    /// A group is half a block.
    Halves,
    /// Groups end elsewhere.
    Lanes,
}

impl Grouping {
    fn of(w: &Packed) -> Grouping {
        match w.group() {
            // One group: all blocks come to 0.
            group if group >= w.cols() => Grouping::Blocks { shift: usize::BITS - 1 },
            32 => Grouping::Halves,
            group if group.is_multiple_of(BLOCK) && (group / BLOCK).is_power_of_two() => {
                Grouping::Blocks { shift: (group / BLOCK).ilog2() }
            }
            _ => Grouping::Lanes,
        }
    }
}

/// The two vectors of a block.
#[inline(always)]
fn halves<T>(block: &Block<T>) -> [__m256i; 2] {
    // SAFETY: both types are 64 plain bytes and every bit pattern is valid in both.
    unsafe { std::mem::transmute_copy(&block.0) }
}

/// The 64 weights from input `k` of a row on, as signed integers: even inputs, odd inputs.
///
/// # Safety
/// The row has all 64.
#[inline(always)]
unsafe fn integers<const BITS: usize>(row: &[u8], k: usize) -> [__m256i; 2] {
    // SAFETY: 64 fields of a width that divides 8 are 8 * BITS bytes from `at` on; for int3 see below.
    unsafe {
        let at = row.as_ptr().add(k * BITS / 8);
        let [even, odd] = match BITS {
            2 => {
                // A byte in 16 bits: fields 0 and 2 are its even inputs, 1 and 3 its odd ones.
                let v = _mm256_cvtepu8_epi16(_mm_loadu_si128(at.cast()));
                let (low, high) = (_mm256_set1_epi16(0x0003), _mm256_set1_epi16(0x0300));
                let pick =
                    |first, second| _mm256_or_si256(_mm256_and_si256(first, low), _mm256_and_si256(second, high));
                [pick(v, _mm256_slli_epi16::<4>(v)), pick(_mm256_srli_epi16::<2>(v), _mm256_slli_epi16::<2>(v))]
            }
            4 => {
                let v = _mm256_loadu_si256(at.cast());
                let low = _mm256_set1_epi8(15);
                [_mm256_and_si256(v, low), _mm256_and_si256(_mm256_srli_epi16::<4>(v), low)]
            }
            8 => apart(_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())),
            _ => apart(three_bits(row, k), three_bits(row, k + 32)),
        };
        let offset = _mm256_set1_epi8((1u8 << (BITS - 1)) as i8);
        [_mm256_sub_epi8(even, offset), _mm256_sub_epi8(odd, offset)]
    }
}

/// 64 bytes in two vectors as those at even and those at odd places.
#[inline(always)]
unsafe fn apart(a: __m256i, b: __m256i) -> [__m256i; 2] {
    // SAFETY: the processor has AVX2, by the caller's word.
    unsafe {
        let order = _mm256_setr_epi8(
            0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
        );
        let (a, b) = (_mm256_shuffle_epi8(a, order), _mm256_shuffle_epi8(b, order));
        let (even, odd) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
        // Quarters stand as a, b, a, b.
        [_mm256_permute4x64_epi64::<0b11_01_10_00>(even), _mm256_permute4x64_epi64::<0b11_01_10_00>(odd)]
    }
}

/// 32 fields of three bits from input `k` of a row on, one a byte.
///
/// # Safety
/// The row has all 32.
#[inline(always)]
unsafe fn three_bits(row: &[u8], k: usize) -> __m256i {
    let eight = |k: usize| {
        // SAFETY: both words hold one of the eight fields, so that they are in the row. Where it is one word, it is read twice, and what
        // the second adds is above the 24 bits that are looked at.
        unsafe {
            let word = |k: usize| row.as_ptr().add(k / 10 * 4).cast::<u32>().read_unaligned();
            let both = u64::from(word(k) & 0x3fff_ffff) | u64::from(word(k + 7)) << 30;
            let word = _mm256_set1_epi32((both >> (k % 10 * 3)) as i32);
            let fields = _mm256_srlv_epi32(word, _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21));
            _mm256_and_si256(fields, _mm256_set1_epi32(7))
        }
    };
    // SAFETY: the processor has AVX2, by the caller's word.
    unsafe {
        let first = _mm256_packus_epi32(eight(k), eight(k + 8));
        let second = _mm256_packus_epi32(eight(k + 16), eight(k + 24));
        let bytes = _mm256_packus_epi16(first, second);
        // Packing works within halves: four fields of each of the four, then the other four of each.
        _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
    }
}

const _: () = assert!(BLOCK == 2 * 32 && LANES == 8);
