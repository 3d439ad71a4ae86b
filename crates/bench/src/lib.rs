//! Is it really faster?

#![forbid(unsafe_code)]

mod error;
pub mod prompts;
pub mod stats;

pub use error::{Error, Result};
