//! A narrower drafter.

use super::{Evidence, Lab, Lever};
use crate::error::Result;

/// See the module.
pub(super) struct DrafterBits;

impl Lever for DrafterBits {
    fn name(&self) -> &'static str {
        "drafter-bits"
    }

    fn what(&self) -> &'static str {
        "the drafter's weights at int8, int4 or int3 in the place of bf16"
    }

    fn prediction(&self) -> &'static str {
        "published: int4 is slower at one row, int3 costs 13.7 % and takes tokens a step from 3.30 to 1.40; ceiling +5 %"
    }

    fn mechanism(&self) -> &'static str {
        "a draft pass of 23 MB is bound by the latency of its launches, not by bytes; fewer bytes pay where the weights then stay on chip \
         between passes (11 MB of int8 fit into registers and shared memory, 23 MB of bf16 barely)"
    }

    fn measure(&self, _: &mut Lab) -> Result<Evidence> {
        Ok(Evidence::NeedsGpu(
            "whether the weights stay on chip is the whole question, and a processor's caches answer another one",
        ))
    }
}
