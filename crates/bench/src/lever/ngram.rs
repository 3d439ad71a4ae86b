//! Drafts looked up in the text so far.

use runtime::drafter::NgramDrafter;
use runtime::speculate::Shape;

use super::lab::Side;
use super::{Evidence, Lab, Lever, Subject};
use crate::error::Result;

/// See the module.
pub(super) struct Ngram;

impl Lever for Ngram {
    fn name(&self) -> &'static str {
        "ngram"
    }

    fn what(&self) -> &'static str {
        "what followed the last tokens before is drafted again, in the place of a drafter model, against plain decoding"
    }

    fn prediction(&self) -> &'static str {
        "published: 1.29 to 1.41 tokens a step on the challenge's prompts, at best 90 tokens/s where a drafter model gives 275"
    }

    fn mechanism(&self) -> &'static str {
        "drafting is free and a hit needs text that repeats itself; a step then costs a pass over K + 1 rows, which a processor pays for \
         by the row and a GPU does not"
    }

    fn measure(&self, lab: &mut Lab) -> Result<Evidence> {
        let nano = lab.nano()?;
        let counted = lab.acceptance("ngram", &mut NgramDrafter)?;
        let mut out = Vec::new();
        for subject in [Subject::Nano, Subject::Wide] {
            let mut trials = Vec::new();
            for k in [3, 7] {
                let base = lab.base(subject)?;
                let drafter: Box<dyn runtime::drafter::Drafter> = match subject {
                    Subject::Nano => Box::new(NgramDrafter),
                    Subject::Wide => Box::new(lab.scripted(&counted)?),
                };
                let model = if subject == Subject::Nano { nano.clone() } else { base.clone() };
                let changed =
                    Side { label: format!("n-gram, K = {k}"), model, draft: Some((drafter, Shape::chain(k)?)) };
                trials.push(lab.trial(subject, Side::plain("plain", &base), changed, None)?);
            }
            out.push((subject, trials));
        }
        Ok(Evidence::Trials(out))
    }
}
