//! Branches beside the chain.

use runtime::drafter::{Drafter, MtpDrafter, MtpOptions};
use runtime::speculate::{Acceptance, Shape};

use super::lab::Side;
use super::{Evidence, Lab, Lever, Subject};
use crate::error::Result;

/// The chain that branches are put beside: the field's.
const K: usize = 7;

/// See the module.
pub(super) struct Tree;

impl Lever for Tree {
    fn name(&self) -> &'static str {
        "tree"
    }

    fn what(&self) -> &'static str {
        "a star around the chain of 7: the drafter's next candidates as rows of the same pass, against the chain alone"
    }

    fn prediction(&self) -> &'static str {
        "published: the best shape of 12 rows nets 1.3 %; the trees that were built lost 45 %, for want of attention that takes them"
    }

    fn mechanism(&self) -> &'static str {
        "a branch saves the token after a rejection, so it adds at most a rejection's share to the tokens of a step, and a row to its \
         pass whether it is needed or not"
    }

    fn measure(&self, lab: &mut Lab) -> Result<Evidence> {
        let counted = counted(lab)?;
        let mut out = Vec::new();
        for subject in [Subject::Nano, Subject::Wide] {
            let mut trials = Vec::new();
            for (label, branches) in [("star 1", [1, 0, 0, 0, 0, 0, 0]), ("star 1,1,1,1", [1, 1, 1, 1, 0, 0, 0])] {
                let model = lab.base(subject)?;
                let mut side = |label: &str, shape: Shape| -> Result<Side> {
                    Ok(Side {
                        label: label.into(),
                        model: model.clone(),
                        draft: Some((drafter(lab, subject, &counted)?, shape)),
                    })
                };
                let (base, changed) = (side("chain", Shape::chain(K)?)?, side(label, Shape::star(branches.to_vec())?)?);
                trials.push(lab.trial(subject, base, changed, None)?);
            }
            out.push((subject, trials));
        }
        Ok(Evidence::Trials(out))
    }
}

fn nano_drafter(lab: &mut Lab) -> Result<MtpDrafter> {
    let dir = runtime::nano::directory()?.join("assistant");
    Ok(MtpDrafter::load(&dir, &*lab.nano()?, MtpOptions::default())?)
}

/// How often nano's drafter hits.
pub(super) fn counted(lab: &mut Lab) -> Result<Acceptance> {
    let mut drafter = nano_drafter(lab)?;
    lab.acceptance("mtp", &mut drafter)
}

/// Nano's own, or one for the wide model that hits as often.
pub(super) fn drafter(lab: &mut Lab, subject: Subject, counted: &Acceptance) -> Result<Box<dyn Drafter>> {
    Ok(match subject {
        Subject::Nano => Box::new(nano_drafter(lab)?),
        Subject::Wide => Box::new(lab.scripted(counted)?),
    })
}
