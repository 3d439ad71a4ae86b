//! What a model can do without: perplexity with each layer removed, each group of linears narrowed, and the search for the
//! plan with the fewest bytes under a cap. Variants are made in memory ([`runtime::Model::without_layers`],
//! [`bake::in_memory`]) and compute the bits that their checkpoints would.
//!
//! | module | concept |
//! |---|---|
//! | [`variant`] | what is done to a model, by name |
//! | [`subject`] | variants in memory, their bytes |
//! | [`paired`] | how much worse, with its standard error |
//! | [`journal`] | what was measured, in a file that work resumes from |
//! | [`trials`] | perplexities of variants, each measured once |
//! | [`measure`] | one change at a time |
//! | [`search`](mod@search) | beam search, as logic |
//! | [`held_out`] | the search on one slice, the verdict on another |

pub mod held_out;
pub mod journal;
pub mod measure;
pub mod paired;
mod recipe;
pub mod search;
pub mod subject;
pub mod trials;
pub mod variant;
