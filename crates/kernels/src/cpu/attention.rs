//! Attention of one query head over cached keys and values, and itself.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::math::exp_nonpositive;
use super::{Isa, Kind, portable};
use crate::attention::chunks;

/// Cached keys and values of one layer: position p holds `[kv_heads, head_dim]` f32 at `p * kv_heads * head_dim`.
#[derive(Clone, Copy)]
pub struct KvView<'a> {
    /// Keys, after norm and rotary embedding.
    pub keys: &'a [f32],
    /// Values, after norm.
    pub values: &'a [f32],
    /// Key/value heads.
    pub kv_heads: usize,
    /// Components of a head.
    pub head_dim: usize,
}

impl<'a> KvView<'a> {
    #[inline(always)]
    fn at(&self, position: usize, head: usize) -> Range<usize> {
        let begin = (position * self.kv_heads + head) * self.head_dim;
        begin..begin + self.head_dim
    }

    #[inline(always)]
    fn keys_of<const N: usize>(&self, first: usize, head: usize) -> [&'a [f32]; N] {
        let mut keys = [&self.keys[..0]; N];
        for (i, key) in keys.iter_mut().enumerate() {
            *key = &self.keys[self.at(first + i, head)];
        }
        keys
    }

    #[inline(always)]
    fn values_of<const N: usize>(&self, first: usize, head: usize) -> [&'a [f32]; N] {
        let mut values = [&self.values[..0]; N];
        for (i, value) in values.iter_mut().enumerate() {
            *value = &self.values[self.at(first + i, head)];
        }
        values
    }

    /// The key and value of one position and head.
    pub fn pair(&self, position: usize, head: usize) -> (&'a [f32], &'a [f32]) {
        (&self.keys[self.at(position, head)], &self.values[self.at(position, head)])
    }
}

/// A softmax-weighted sum in progress: maximum score m, sum l of exp(score - m), and the values weighted alike.
struct Partial {
    max: f32,
    sum: f32,
    values: Vec<f32>,
}

impl Partial {
    fn empty(head_dim: usize) -> Partial {
        Partial { max: f32::NEG_INFINITY, sum: 0.0, values: vec![0.0; head_dim] }
    }

    /// Appends the chunk `other`; an empty `self` contributes exact zeros.
    fn merge(&mut self, other: &Partial) {
        let max = self.max.max(other.max);
        let (mine, theirs) = (exp_nonpositive(self.max - max), exp_nonpositive(other.max - max));
        self.sum = self.sum * mine + other.sum * theirs;
        for (a, b) in self.values.iter_mut().zip(&other.values) {
            *a = *a * mine + b * theirs;
        }
        self.max = max;
    }
}

/// What attention needs of an instruction set. The functions are inlined into [`attend_with`], which an instruction set compiles with
/// its own features.
///
/// # Safety
/// Of both: the processor has the features that the instruction set is named for.
pub(super) trait Ops {
    /// Dot products of `a` with `M` vectors of its length.
    unsafe fn dots<const M: usize>(a: &[f32], b: [&[f32]; M]) -> [f32; M];
    /// `y += a[0] * x[0]`, then `y += a[1] * x[1]`, and so on, element by element.
    unsafe fn scaled_adds<const M: usize>(y: &mut [f32], a: [f32; M], x: [&[f32]; M]);
}

/// Keys and values that are in flight together, only so that the processor has independent sums to work on.
const BLOCK: usize = 4;

/// `out = sum over j of softmax(q . k_j) v_j` for j in `visible` (cached positions), then the row's own key and value, where it
/// has some (a drafter's query has none; it must see at least one position).
///
/// The scores are not scaled (Gemma 4 has scale 1). Chunks are cut at the constant table of absolute positions, summed
/// in key order, and merged in chunk order; the self term comes last. So the bits depend on the row's position alone.
pub fn attend(
    isa: Isa,
    query: &[f32],
    kv: KvView,
    head: usize,
    visible: Range<usize>,
    own: Option<(&[f32], &[f32])>,
    out: &mut [f32],
) {
    match isa.kind {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Kind::Avx2` is only made by `Isa::best`, after the processor said that it has AVX2 and FMA.
        Kind::Avx2 => unsafe { avx2::attend(query, kv, head, visible, own, out) },
        _ => portable::attend(query, kv, head, visible, own, out),
    }
}

/// [`attend`] with the arithmetic of `O`.
///
/// # Safety
/// The processor has the features that `O` is named for.
#[inline(always)]
pub(super) unsafe fn attend_with<O: Ops>(
    query: &[f32],
    kv: KvView,
    head: usize,
    visible: Range<usize>,
    own: Option<(&[f32], &[f32])>,
    out: &mut [f32],
) {
    let mut total = Partial::empty(kv.head_dim);
    let mut chunk = Partial::empty(kv.head_dim);
    let mut scores = Vec::new();
    for positions in chunks(visible) {
        let (begin, len) = (positions.start, positions.len());
        scores.resize(len, 0.0);
        let (blocks, rest) = scores.as_chunks_mut::<BLOCK>();
        // SAFETY: by the caller's word.
        unsafe {
            for (b, scores) in blocks.iter_mut().enumerate() {
                *scores = O::dots(query, kv.keys_of::<BLOCK>(begin + b * BLOCK, head));
            }
            for (i, score) in rest.iter_mut().enumerate() {
                [*score] = O::dots(query, kv.keys_of::<1>(begin + len - len % BLOCK + i, head));
            }
        }
        chunk.max = f32::NEG_INFINITY;
        for &score in &scores {
            chunk.max = chunk.max.max(score);
        }
        for score in &mut scores {
            *score = exp_nonpositive(*score - chunk.max);
        }
        chunk.sum = 0.0;
        for &weight in &scores {
            chunk.sum += weight;
        }
        chunk.values.fill(0.0);
        let (blocks, rest) = scores.as_chunks::<BLOCK>();
        // SAFETY: by the caller's word.
        unsafe {
            for (b, weights) in blocks.iter().enumerate() {
                O::scaled_adds(&mut chunk.values, *weights, kv.values_of::<BLOCK>(begin + b * BLOCK, head));
            }
            for (i, weight) in rest.iter().enumerate() {
                let at = begin + len - len % BLOCK + i;
                O::scaled_adds(&mut chunk.values, [*weight], kv.values_of::<1>(at, head));
            }
        }
        total.merge(&chunk);
    }
    if let Some((key, value)) = own {
        // SAFETY: by the caller's word.
        [chunk.max] = unsafe { O::dots(query, [key]) };
        chunk.sum = 1.0;
        chunk.values.copy_from_slice(value);
        total.merge(&chunk);
    }
    for (o, v) in out.iter_mut().zip(&total.values) {
        *o = v / total.sum;
    }
}
