//! Longer groups of a scale.

use bake::quant::Bits;

use super::lab::{Side, VOCAB};
use super::{Evidence, Lab, Lever, Subject};
use crate::error::Result;

/// See the module.
pub(super) struct Group;

impl Lever for Group {
    fn name(&self) -> &'static str {
        "group"
    }

    fn what(&self) -> &'static str {
        "int4 with one scale for 64 or 128 weights in the place of 32"
    }

    fn prediction(&self) -> &'static str {
        "scales are 12.5 % of the bytes at 32 and 3 % at 128; published: groups of 128 brought 118 to 127 tokens/s for 1 % of perplexity, \
         groups of 256 cost 20 % of acceptance"
    }

    fn mechanism(&self) -> &'static str {
        "a scale is 16 bits that a group shares; a longer group reads fewer of them, and its largest weight coarsens more others"
    }

    fn measure(&self, lab: &mut Lab) -> Result<Evidence> {
        let mut out = Vec::new();
        let nano = lab.nano()?;
        let base = lab.quantised(&nano, Bits::Four, 32)?;
        let mut trials = Vec::new();
        for group in [64, 128] {
            let variant = lab.quantised(&nano, Bits::Four, group)?;
            let ppl = lab.ppl(&variant)?;
            let sides = (Side::plain("group 32", &base), Side::plain(&format!("group {group}"), &variant));
            trials.push(lab.trial(Subject::Nano, sides.0, sides.1, ppl)?);
        }
        out.push((Subject::Nano, trials));
        let (base, variant) = (lab.wide(VOCAB, Some(32))?, lab.wide(VOCAB, Some(128))?);
        let sides = (Side::plain("group 32", &base), Side::plain("group 128", &variant));
        out.push((Subject::Wide, vec![lab.trial(Subject::Wide, sides.0, sides.1, None)?]));
        Ok(Evidence::Trials(out))
    }
}
