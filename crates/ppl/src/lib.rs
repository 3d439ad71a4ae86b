//! Is it still the same model? Perplexity, greedy identity, and the agreement of computational paths.
//!
//! What always holds here: a number that could not be computed is absent (`None`), never zero or infinite, and a gate fails
//! on it; sums are f64 in the order of the input, so a result can be reproduced to the bit; a failed gate is a report, not
//! an error, and an error is about the input or the machine.
//!
//! | module | concept |
//! |---|---|
//! | [`jsonl`] | strict reading of JSON lines |
//! | [`records`] | token sequences of which a span is scored |
//! | [`forward`] | what is asked of a model: append tokens, get logits |
//! | [`score`](mod@score) | perplexity |
//! | [`identity`] | two files of generations, index by index |
//! | [`paths`] | ways of one checkpoint to arrive at the next token |
//! | [`verify`] | the gate: perplexity under a cap, paths identical |
//! | [`sensitivity`] | what a model can do without, and the plan with the fewest bytes under a cap |

#![forbid(unsafe_code)]

mod error;
pub mod forward;
pub mod identity;
pub mod jsonl;
pub mod paths;
pub mod records;
pub mod score;
pub mod sensitivity;
pub mod verify;

pub use error::{Error, Result};
