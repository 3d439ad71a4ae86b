//! One module a subcommand.

pub mod bake;
pub mod bench;
pub mod demo;
pub mod doctor;
pub mod generate;
pub mod gpu_check;
pub mod logits;
pub mod ppl;
pub mod sensitivity;
pub mod stats;
pub mod verify;
