//! The forward pass on the CPU. One function a formula, written to be checked by reading against the specification
//! (`tests/oracle/gemma4-text.md`); the matrix products and dot products are `kernels::cpu`'s.

pub(crate) mod block;
mod forward;
pub(crate) mod kv;
pub(crate) mod ops;

pub(crate) use forward::{Batch, Computation, Observer, Rows, forward};
pub use forward::{LayerInput, Stage};
