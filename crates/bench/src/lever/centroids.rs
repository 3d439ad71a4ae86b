//! Clusters of the drafter's head that are looked into.

use std::sync::Arc;

use runtime::Model;
use runtime::drafter::{MtpDrafter, MtpOptions};
use runtime::speculate::Shape;

use super::lab::Side;
use super::{Evidence, Lab, Lever, Subject, synthetic_drafter};
use crate::error::Result;

/// Drafts a step on nano, and on the wide model, whose drafter never hits: few, so that the target's pass stays in view.
const K: [usize; 2] = [7, 2];

/// See the module.
pub(super) struct Centroids;

impl Lever for Centroids {
    fn name(&self) -> &'static str {
        "centroids"
    }

    fn what(&self) -> &'static str {
        "the drafter's head scores the tokens of more or fewer clusters than its own number; on the wide model, with a random drafter, \
         this is the cost alone"
    }

    fn prediction(&self) -> &'static str {
        "published: nothing between 32 and 48 of 2048 clusters, a great loss from 256 on"
    }

    fn mechanism(&self) -> &'static str {
        "fewer clusters are fewer rows of the head and more right tokens that are not among them; the head is a small part of a draft, \
         and a draft of a step"
    }

    fn measure(&self, lab: &mut Lab) -> Result<Evidence> {
        let wide = lab.base(Subject::Wide)?;
        let wide_dir = synthetic_drafter::write(lab.work(), &wide, lab.options().seed)?;
        let nano = lab.nano()?;
        let nano_dir = runtime::nano::directory()?.join("assistant");
        let own = MtpDrafter::load(&nano_dir, &nano, MtpOptions::default())?.centroids().unwrap_or(0);
        let mut out = Vec::new();
        let cases = [
            (Subject::Nano, nano, nano_dir, own, [2, 4, 0], K[0]),
            (Subject::Wide, wide, wide_dir, synthetic_drafter::TOP_K, [8, 256, 0], K[1]),
        ];
        for (subject, model, dir, own, others, k) in cases {
            let side = |model: &Arc<Model>, clusters: usize| -> Result<Side> {
                let options = MtpOptions { centroids: Some(clusters), ..Default::default() };
                let drafter = MtpDrafter::load(&dir, model, options)?;
                let label = if clusters == 0 { "the full head".into() } else { format!("{clusters} clusters") };
                Ok(Side { label, model: model.clone(), draft: Some((Box::new(drafter), Shape::chain(k)?)) })
            };
            let mut trials = Vec::new();
            for other in others {
                trials.push(lab.trial(subject, side(&model, own)?, side(&model, other)?, None)?);
            }
            out.push((subject, trials));
        }
        Ok(Evidence::Trials(out))
    }
}
