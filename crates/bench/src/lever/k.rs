//! Drafts a step.

use runtime::speculate::Shape;

use super::lab::Side;
use super::tree::{counted, drafter};
use super::{Evidence, Lab, Lever, Subject};
use crate::error::Result;

/// See the module.
pub(super) struct Depth;

impl Lever for Depth {
    fn name(&self) -> &'static str {
        "k"
    }

    fn what(&self) -> &'static str {
        "K drafts a step, K = 1, 2, 4, 7, against plain decoding; on the wide model a drafter that hits as nano's does and costs nothing"
    }

    fn prediction(&self) -> &'static str {
        "published: tokens a step rise to 3.58 at K = 7, and any smaller K loses 1.4 to 14.7 % on the GPU, where 8 rows cost 1.4 % more \
         than one"
    }

    fn mechanism(&self) -> &'static str {
        "a deeper draft adds a product of acceptances to the tokens of a step and a row to its pass; where a row costs as much as a step \
         of its own, as on a processor, only the surest drafts pay"
    }

    fn measure(&self, lab: &mut Lab) -> Result<Evidence> {
        let counted = counted(lab)?;
        let mut out = Vec::new();
        for subject in [Subject::Nano, Subject::Wide] {
            let mut trials = Vec::new();
            for k in [1, 2, 4, 7] {
                let base = lab.base(subject)?;
                let draft = Some((drafter(lab, subject, &counted)?, Shape::chain(k)?));
                let changed = Side { label: format!("K = {k}"), model: base.clone(), draft };
                trials.push(lab.trial(subject, Side::plain("plain", &base), changed, None)?);
            }
            out.push((subject, trials));
        }
        Ok(Evidence::Trials(out))
    }
}
