//! Fewer layers.

use super::lab::Side;
use super::{Evidence, Lab, Lever, Subject};
use crate::error::Result;

/// Layers that are taken at most.
const MOST: usize = 3;

/// See the module.
pub(super) struct Layers;

impl Lever for Layers {
    fn name(&self) -> &'static str {
        "layers"
    }

    fn what(&self) -> &'static str {
        "layers are removed, one after the other, as the rules of `bake drop-layers` allow"
    }

    fn prediction(&self) -> &'static str {
        "bytes fall in proportion, and so does the time of a step; published: five of 42 layers bring 8 % and cost 19 % of perplexity and \
         most of what the model knows, a sixth breaks the cap"
    }

    fn mechanism(&self) -> &'static str {
        "a step reads every layer once; a removed layer is bytes not read and work not done, and every later layer then sees a residual \
         stream that it was not trained on"
    }

    fn measure(&self, lab: &mut Lab) -> Result<Evidence> {
        let mut out = Vec::new();
        for subject in [Subject::Nano, Subject::Wide] {
            let base = lab.base(subject)?;
            let (mut removed, mut trials) = (Vec::new(), Vec::new());
            while removed.len() < MOST {
                let with = |l: usize| [&removed[..], &[l]].concat();
                let fits = |l: &usize| !removed.contains(l) && base.config().survivors(&with(*l)).is_ok();
                // Early layers are the ones that the field took.
                let Some(next) = (1..base.config().layers.len()).find(fits) else { break };
                removed.push(next);
                let variant = std::sync::Arc::new(base.without_layers(&removed)?);
                let ppl = if subject == Subject::Nano { lab.ppl(&variant)? } else { None };
                let label = format!("without layers {removed:?}");
                trials.push(lab.trial(
                    subject,
                    Side::plain("all layers", &base),
                    Side::plain(&label, &variant),
                    ppl,
                )?);
            }
            out.push((subject, trials));
        }
        Ok(Evidence::Trials(out))
    }
}
