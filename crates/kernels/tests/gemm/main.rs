//! `kernels/gemm.cuh` on the emulator: accurate, free of races, and the same bits for a row in any company, order and grid.

#![cfg(target_arch = "x86_64")]

mod best;
mod case;
mod dot;
mod fused;
mod heads;
mod mutants;
mod pair;
mod plain;
