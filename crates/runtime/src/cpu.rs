//! The forward pass on the CPU. One function a formula, written to be checked by reading against the specification
//! (`tests/oracle/gemma4-text.md`); the matrix products and dot products are `kernels::cpu`'s.

mod forward;
pub(crate) mod kv;
mod ops;

pub use forward::Stage;
pub(crate) use forward::{Observer, forward};
