//! What a layer of a target and a layer of a drafter have in common (specification, sections 4 and 5): queries, the output of
//! attention and the MLP, each added to the residual stream after a norm of its own.

use kernels::cpu::{Isa, matmul};

use super::ops::{self, Rotation};
use crate::model::{BlockWeights, Weights};
use crate::op_clock::{Marks, Op};

/// `x W^T` for every row of x.
pub(crate) fn multiply(isa: Isa, w: &Weights, x: &[f32]) -> Vec<f32> {
    let mut y = vec![0.0; x.len() / w.cols() * w.rows()];
    matmul(isa, &w.view(), x, &mut y);
    y
}

impl BlockWeights {
    /// Components of a query head.
    pub(crate) fn head_dim(&self) -> usize {
        self.q_norm.len()
    }

    /// Rotations of this layer's heads at each position.
    pub(crate) fn rotations(&self, positions: &[usize]) -> Vec<Rotation> {
        positions.iter().map(|&p| Rotation::new(p, &self.inv_freq)).collect()
    }

    /// Queries `[rows, heads, head_dim]` of the normed rows `y`: a norm over each head, then the rotary embedding.
    pub(crate) fn queries(&self, isa: Isa, y: &[f32], rotations: &[Rotation], eps: f32, marks: Marks) -> Vec<f32> {
        let mut q = multiply(isa, &self.q_proj, y);
        marks.mark(Op::Qkv);
        for (row, rotation) in q.chunks_exact_mut(self.q_proj.rows()).zip(rotations) {
            for head in row.chunks_exact_mut(self.head_dim()) {
                ops::rms_norm(head, Some(&self.q_norm), eps);
                rotation.apply(head);
            }
        }
        marks.mark(Op::Norms);
        q
    }

    /// `x + rms(W_o attended)`.
    pub(crate) fn add_attention(&self, isa: Isa, x: &mut [f32], attended: &[f32], eps: f32, marks: Marks) {
        let projected = multiply(isa, &self.o_proj, attended);
        marks.mark(Op::Output);
        ops::add(x, &ops::normed(&projected, &self.post_attention_norm, eps));
        marks.mark(Op::Norms);
    }

    /// `gelu(W_g y) * W_u y` of the normed rows `y`.
    pub(crate) fn mlp_product(&self, isa: Isa, y: &[f32]) -> Vec<f32> {
        let mut gate = multiply(isa, &self.gate_proj, y);
        ops::gelu_times(&mut gate, &multiply(isa, &self.up_proj, y));
        gate
    }

    /// `x + rms(W_d product)`.
    pub(crate) fn add_mlp(&self, isa: Isa, x: &mut [f32], product: &[f32], eps: f32, marks: Marks) {
        let mlp = multiply(isa, &self.down_proj, product);
        marks.mark(Op::Down);
        ops::add(x, &ops::normed(&mlp, &self.post_feedforward_norm, eps));
        marks.mark(Op::Norms);
    }

    /// The scalar multiplies the whole stream, last.
    pub(crate) fn scale(&self, x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x *= self.scalar);
    }
}
