//! Fewer bits a weight.

use bake::quant::Bits;

use super::lab::{Side, VOCAB};
use super::{Evidence, Lab, Lever, Subject};
use crate::error::Result;

/// See the module.
pub(super) struct Width;

impl Lever for Width {
    fn name(&self) -> &'static str {
        "bits"
    }

    fn what(&self) -> &'static str {
        "every linear at int3 or int2 in the place of int4, rounded to nearest"
    }

    fn prediction(&self) -> &'static str {
        "int3 reads 24 % fewer bytes than int4 and int2 48 %; published: int3 costs 14 % of perplexity on the whole body, int2 all of it; \
         mixed widths, calibrated, keep it under the cap"
    }

    fn mechanism(&self) -> &'static str {
        "time falls with bytes only where bytes are what a step waits for; on a processor three-bit fields cost more to unpack than \
         four-bit ones"
    }

    fn measure(&self, lab: &mut Lab) -> Result<Evidence> {
        let mut out = Vec::new();
        for (subject, group) in [(Subject::Nano, 32), (Subject::Wide, 128)] {
            let dense = match subject {
                Subject::Nano => lab.nano()?,
                Subject::Wide => lab.wide(VOCAB, None)?,
            };
            let base = lab.quantised(&dense, Bits::Four, group)?;
            let mut trials = Vec::new();
            for (label, bits) in [("int3", Bits::Three), ("int2", Bits::Two)] {
                let variant = lab.quantised(&dense, bits, group)?;
                let ppl = if subject == Subject::Nano { lab.ppl(&variant)? } else { None };
                trials.push(lab.trial(subject, Side::plain("int4", &base), Side::plain(label, &variant), ppl)?);
            }
            out.push((subject, trials));
        }
        Ok(Evidence::Trials(out))
    }
}
