//! The CPU's kernels. Weights stay as the checkpoint packs them and are expanded in registers.
//!
//! Two instruction sets: [`Isa::portable`] is plain Rust, short enough to check by reading, and is what `--precision f32`
//! runs; [`Isa::best`] uses AVX2 and FMA where the processor has them. Both are row invariant. They differ from each other
//! in the last bits, because a fused multiply-add rounds once. With [`Isa::with_int8_activations`], either multiplies packed weights
//! by activations rounded to int8: several times as fast for several rows, and as exact as `int8` (the module) says.

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
mod int8;
pub mod math;
mod matmul;
mod matrix;
mod portable;

pub use attention::{KvView, attend};
pub use matmul::{matmul, matmul_rows};
pub use matrix::{Data, Matrix, MatrixError, MatrixView};

/// Lanes of every partial sum: k is dealt to them round-robin, and they are folded in one fixed order.
pub const LANES: usize = 8;

/// How to compute: an instruction set that this processor has, and how activations meet packed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa {
    kind: Kind,
    int8_activations: bool,
}

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
        Isa { kind: Kind::Portable, int8_activations: false }
    }

    /// The fastest that this processor has.
    pub fn best() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Isa { kind: Kind::Avx2, int8_activations: false };
        }
        Isa::portable()
    }

    /// A deliberately wrong one: its segments depend on the number of rows. Tests use it to see that they would notice.
    #[cfg(any(test, feature = "planted"))]
    pub fn planted_m_dependence() -> Isa {
        Isa { kind: Kind::Planted, int8_activations: false }
    }

    /// The same, with activations rounded to int8 where they meet packed weights.
    pub fn with_int8_activations(self) -> Isa {
        Isa { int8_activations: true, ..self }
    }

    /// Name for reports.
    pub fn name(self) -> &'static str {
        match (self.kind, self.int8_activations) {
            (Kind::Portable, false) => "portable",
            (Kind::Portable, true) => "portable, int8 activations",
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, false) => "avx2+fma",
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, true) => "avx2+fma, int8 activations",
            #[cfg(any(test, feature = "planted"))]
            (Kind::Planted, _) => "planted",
        }
    }

    /// Dot product of two vectors of the same length.
    pub fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        match self.kind {
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
