//! Attention of one query head over cached keys and values, and itself.

use std::ops::Range;

use super::Isa;
use super::math::exp_nonpositive;
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
    fn at(&self, position: usize, head: usize) -> Range<usize> {
        let begin = (position * self.kv_heads + head) * self.head_dim;
        begin..begin + self.head_dim
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
    let mut total = Partial::empty(kv.head_dim);
    let mut chunk = Partial::empty(kv.head_dim);
    let mut scores = Vec::new();
    for positions in chunks(visible) {
        scores.clear();
        scores.extend(positions.clone().map(|p| isa.dot(query, kv.pair(p, head).0)));
        chunk.max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        chunk.sum = 0.0;
        chunk.values.fill(0.0);
        scores.iter_mut().for_each(|s| *s = exp_nonpositive(*s - chunk.max));
        for (p, &weight) in positions.zip(&scores) {
            chunk.sum += weight;
            isa.scaled_add(&mut chunk.values, weight, kv.pair(p, head).1);
        }
        total.merge(&chunk);
    }
    if let Some((key, value)) = own {
        chunk.max = isa.dot(query, key);
        chunk.sum = 1.0;
        chunk.values.copy_from_slice(value);
        total.merge(&chunk);
    }
    for (o, v) in out.iter_mut().zip(&total.values) {
        *o = v / total.sum;
    }
}
