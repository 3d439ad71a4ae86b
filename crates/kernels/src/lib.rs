//! Kernels: the only crate with SIMD or GPU code, and therefore the only one (beside the memory maps of `runtime`) with `unsafe`.
//!
//! What always holds: **row invariance**. The result for one row of activations does not depend on how many other rows are
//! computed beside it, on which rows they are, or on how the work is split over threads. The fold tree of every sum is a
//! constant of the shape and the format: k is cut into segments of [`SEGMENT`], segment sums are added in index order, and
//! a schedule only decides which thread computes which output.
//!
//! | module | concept |
//! |---|---|
//! | [`cpu`] | matrices on packed weights, dot products and attention on the CPU |
//! | [`attention`] | the table of chunk borders that every attention kernel shares |
//! | [`device`] | GPU or emulator behind one interface: buffers, launches, graphs; what GPU and driver this machine has |
//! | [`gemm`] | matrix products on a device |
//! | [`layout`] | how weights lie in device memory |
//! | [`packing`] | widths of packed weights, and where a field stands in its word |
//! | [`schedule`] | how a matrix product is cut into work for blocks |
//! | [`selftest`] | what must hold of a device before anything is claimed about it, and what its memory and launches cost |
//! | [`step`] | what a decode step launches beside matrix products: attention, norms, acceptance |
//! | [`roofline`] | bytes a decode step must read, and the time that takes at a given bandwidth |

pub mod attention;
pub mod cpu;
pub mod device;
pub mod gemm;
pub mod layout;
pub mod packing;
pub mod roofline;
pub mod schedule;
pub mod selftest;
pub mod step;

/// Inputs summed in f32 on the CPU before a partial sum is folded into the total, in every format. The GPU's kernels fold each group of scales,
/// and at the latest every 128 inputs.
pub const SEGMENT: usize = 128;
