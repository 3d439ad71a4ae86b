//! The CPU's kernels. Weights stay as the checkpoint packs them and are expanded in registers.
//!
//! Two instruction sets: [`Isa::portable`] is plain Rust, short enough to check by reading, and is what `--precision f32`
//! runs; [`Isa::best`] uses AVX2 and FMA where the processor has them. Both are row invariant. They differ from each other
//! in the last bits, because a fused multiply-add rounds once.

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
pub mod math;
mod matmul;
mod matrix;
mod portable;

pub use attention::{KvView, attend};
pub use matmul::{matmul, matmul_rows};
pub use matrix::{Data, Matrix, MatrixError, MatrixView};

/// Lanes of every partial sum: k is dealt to them round-robin, and they are folded in one fixed order.
pub const LANES: usize = 8;

/// An instruction set that this processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(any(test, feature = "planted"))]
    Planted,
}

impl Isa {
    /// Plain Rust, on any processor.
    pub fn portable() -> Isa {
        Isa(Kind::Portable)
    }

    /// The fastest that this processor has.
    pub fn best() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Isa(Kind::Avx2);
        }
        Isa::portable()
    }

    /// A deliberately wrong one: its segments depend on the number of rows. Tests use it to see that they would notice.
    #[cfg(any(test, feature = "planted"))]
    pub fn planted_m_dependence() -> Isa {
        Isa(Kind::Planted)
    }

    /// Name for reports.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2+fma",
            #[cfg(any(test, feature = "planted"))]
            Kind::Planted => "planted",
        }
    }

    /// Dot product of two vectors of the same length.
    pub fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        match self.0 {
            #[cfg(any(test, feature = "planted"))]
            Kind::Planted => portable::dot(a, b),
            Kind::Portable => portable::dot(a, b),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Kind::Avx2` is only made by `Isa::best`, after the processor said that it has AVX2 and FMA.
            Kind::Avx2 => unsafe { avx2::dot(a, b) },
        }
    }
}

/// The one order in which lanes are added.
#[inline(always)]
fn fold_lanes(t: [f32; LANES]) -> f32 {
    ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]))
}
