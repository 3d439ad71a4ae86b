//! From a checkpoint directory to tokens: configuration, weights, tokenizer, KV cache, forward pass, generation.
//!
//! What always holds here: the logits of a row do not depend on which or how many other rows are computed beside it, on
//! where a chunk began, or on the number of threads (*row invariance*); nothing larger than a norm is copied out of the
//! memory-mapped checkpoint as it is loaded; bad input is an [`Error`] that names the file and what to do.
//!
//! | module | concept |
//! |---|---|
//! | [`config`] | `config.json`, checked and resolved to layers |
//! | [`checkpoint`] | safetensors files, shards, keepset; mapped, not read |
//! | [`names`], [`files`] | tensor names; small files, read with limits |
//! | [`model`] | weights bound to their roles |
//! | [`engine`] | a model, a KV cache and threads: extends one sequence |
//! | [`staged`] | a pass that stops at every stage, for quantisation layer by layer |
//! | [`op_clock`] | where the time of a pass goes, op by op |
//! | [`logits`] | the greedy token, log-probabilities |
//! | [`generate`] | greedy generation |
//! | [`speculate`] | shapes of drafts, acceptance, as pure logic |
//! | [`drafter`] | who proposes tokens: the MTP drafter, n-gram look-up |
//! | [`speculative`] | draft, verify, accept, emit |
//! | [`tokenizer`], [`template`] | text to ids and back, chat turns |
//! | [`nano`] | the embedded model |

#![deny(unsafe_code)]

pub mod checkpoint;
pub mod config;
mod cpu;
pub mod drafter;
pub mod engine;
mod error;
pub mod files;
pub mod generate;
pub mod logits;
pub mod model;
pub mod names;
pub mod nano;
pub mod op_clock;
pub mod speculate;
pub mod speculative;
pub mod staged;
pub mod template;
pub mod tokenizer;

pub use cpu::{LayerInput, Stage};
pub use engine::{Engine, EngineOptions, Precision};
pub use error::{Error, Result};
pub use logits::Logits;
pub use model::Model;
