//! Checkpoint surgery: quantise, prune the vocabulary, drop layers, make test checkpoints, and say what a checkpoint holds.
//!
//! What always holds here: input is never changed; a target appears complete, checked and synced, or not at all; a bake that was
//! stopped can be gone on with; memory is a few MB a thread at any size (more where linears are calibrated: [`gptq`]); a result
//! is interoperable (HF layout, `compressed-tensors` packing, the field's keepset file; int3 and int2 only this program reads)
//! and names its parents by hash in `lineage.json`.
//!
//! What the methods of [`quantize`] are worth, measured: perplexity of nano (33.066 in bf16) over the 160 records of
//! `prompts/ppl.jsonl`, every linear of the body in groups of 32, `gptq` calibrated on the 6108 tokens of `prompts/public.jsonl`
//! with damping 0.01. `cargo test -p bake --test gptq -- --ignored --nocapture` prints it, an ordinary test holds int3.
//!
//! | bits | `rtn` | `mse` | `gptq` | `gptq` in order of activation |
//! |---|---|---|---|---|
//! | 8 | 33.067 | 33.068 | 33.069 | 33.067 |
//! | 4 | 33.533 | 33.377 | 33.340 | 33.324 |
//! | 3 | 35.161 | 34.627 | 34.071 | 34.206 |
//! | 2 | 50.741 | 45.939 | 40.074 | 40.422 |
//!
//! A bake is a function from a checkpoint to a [`plan::Plan`]. One writer carries out all plans, and refuses a plan whose
//! tensors contradict its configuration: an unsliced projection or a wrong number of shared layers cannot be written.
//!
//! | module | concept |
//! |---|---|
//! | [`quant`], [`method`] | arithmetic of packed weights on rows; how scales and integers are chosen |
//! | [`gptq`] | quantisation fitted to the inputs of real text |
//! | [`in_memory`] | linears quantised without a checkpoint |
//! | [`quantize`], [`prune_vocab`], [`drop_layers`], [`synth`] | the bakes |
//! | [`precision`] | which linear gets how many bits: rules from a TOML file |
//! | [`recipe`] | several bakes in one, from a TOML file |
//! | [`keepset`] | which tokens a pruned head keeps, and what share of a text that covers |
//! | [`inspect`] | report on a checkpoint, with its problems |
//! | [`diff`] | which tensors of two checkpoints differ, and by how much |
//! | [`parent`] | what a bake works on: a checkpoint, or a plan not carried out |
//! | [`plan`], [`check`], [`writer`], [`staging`] | bake as data; its rules; its execution; all-or-nothing directories |
//! | `layout`, `journal`, `towers` | order of the tensors in the files; what an unfinished bake has done; leaving out towers |
//! | [`lineage`], `manifest` | parents by hash, knobs turned; the family tree; sums that publishers state |
//! | [`card`] | the model card, licence and notice of a result |
//! | [`roles`], [`source`], [`quant_config`] | tensor names; reads by ranges; `quantization_config` |
//! | [`context`] | cancel flag and progress |

#![forbid(unsafe_code)]

pub mod card;
pub mod check;
mod config_edit;
pub mod context;
pub mod diff;
pub mod drop_layers;
mod error;
pub mod gptq;
pub mod in_memory;
pub mod inspect;
mod journal;
pub mod keepset;
mod layout;
pub mod lineage;
mod manifest;
pub mod method;
pub mod parent;
pub mod plan;
pub mod precision;
pub mod prune_vocab;
pub mod quant;
pub mod quant_config;
pub mod quantize;
pub mod recipe;
pub mod roles;
mod side_files;
pub mod source;
pub mod staging;
pub mod synth;
mod towers;
pub mod writer;

pub use context::{Context, Progress, Silent};
pub use error::{Error, Result};
pub use runtime::config::Strategy;
pub use writer::{Report, WriteOptions};
