//! A shorter sliding window.

use super::{Evidence, Lab, Lever};
use crate::error::Result;

/// See the module.
pub(super) struct Window;

impl Lever for Window {
    fn name(&self) -> &'static str {
        "window"
    }

    fn what(&self) -> &'static str {
        "the sliding window is shrunk from the trained 512 to 192, 160 or 128 keys"
    }

    fn prediction(&self) -> &'static str {
        "published: +4 % in public at 192, of which 0.8 % is the step; the rest is acceptance on text that repeats itself, and is gone on \
         private prompts; perplexity above the cap from 128 on"
    }

    fn mechanism(&self) -> &'static str {
        "at a mean context of 528 tokens a sliding layer reads at most 512 keys of 1 KB, which is under 1 % of the bytes of a step; a \
         shorter window leaves the target less context, so it repeats itself more, and repetition is easy to draft"
    }

    fn measure(&self, _: &mut Lab) -> Result<Evidence> {
        Ok(Evidence::NeedsGpu(
            "the effect claimed is that of attention kernels beside weights at a GPU's bandwidth; on a CPU attention at these lengths is \
             bound by arithmetic, and a ratio from here would say nothing of it",
        ))
    }
}
