//! Splits of the keys in decode attention.

use super::{Evidence, Lab, Lever};
use crate::error::Result;

/// See the module.
pub(super) struct Split;

impl Lever for Split {
    fn name(&self) -> &'static str {
        "split"
    }

    fn what(&self) -> &'static str {
        "decode attention cuts the keys into 8, 16 or 32 parts that different multiprocessors work on, and merges them"
    }

    fn prediction(&self) -> &'static str {
        "published: 16 parts are best on 80 multiprocessors; the first split brought 420 to 481 tokens/s"
    }

    fn mechanism(&self) -> &'static str {
        "with 2 KV heads and one sequence only 2 blocks would run; parts fill the other multiprocessors, until the merge costs more than \
         another part saves"
    }

    fn measure(&self, _: &mut Lab) -> Result<Evidence> {
        Ok(Evidence::NeedsGpu(
            "a processor's two or sixteen cores are filled by rows and heads alone: there is nothing to split for",
        ))
    }
}
