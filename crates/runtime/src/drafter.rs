//! Drafters: who proposes the tokens that the target then verifies. A drafter can be wrong without harm; it costs speed, never a
//! token. A new kind is one file that implements [`Drafter`].

use crate::engine::Engine;
use crate::error::Result;
use crate::speculate::Shape;

mod mtp;
mod ngram;

pub use mtp::{Convention, HeadLogits, MtpDrafter, MtpOptions, Proposal};
pub use ngram::NgramDrafter;

/// What a drafter sees before a step.
pub struct DraftContext<'a> {
    /// The target, its cache holding everything but the newest token.
    pub engine: &'a Engine,
    /// The sequence: prompt and output, the newest token last.
    pub tokens: &'a [u32],
    /// The target's final-normed state at the position before the newest token, `[target hidden]`.
    pub hidden: &'a [f32],
}

/// A proposal: for each depth the candidates, most probable first. The first is the main chain's draft. Fewer depths than asked for
/// are allowed, none included; further candidates are what branches are taken from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Draft {
    /// Candidates of each depth, from 1; none is empty.
    pub ranked: Vec<Vec<u32>>,
}

/// Proposes continuations.
pub trait Drafter: Send {
    /// Name in reports.
    fn name(&self) -> &'static str;

    /// Proposes at most `shape.depth()` tokens, with candidates for the shape's branches where it has some.
    fn draft(&mut self, context: &DraftContext, shape: &Shape) -> Result<Draft>;
}
