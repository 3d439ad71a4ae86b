//! Fewer rows of the head.

use std::sync::Arc;

use bake::prune_vocab::{self, PruneVocabOptions};
use runtime::Model;
use runtime::checkpoint::Checkpoint;

use super::lab::{PPL_RECORDS, SMALL_VOCAB, Side, VOCAB};
use super::{Evidence, Lab, Lever, Subject};
use crate::error::Result;

/// See the module.
pub(super) struct Vocabulary;

impl Lever for Vocabulary {
    fn name(&self) -> &'static str {
        "vocabulary"
    }

    fn what(&self) -> &'static str {
        "the head keeps only tokens that are needed: on nano those of texts that it is not scored on, on the wide model 4096 of 16384"
    }

    fn prediction(&self) -> &'static str {
        "a head of 262144 rows is 336 MB at int4, of 12288 rows 16 MB; published: the prune is most of the way from 118 to 250 tokens/s, \
         and costs 12.6 points of MMLU-Pro"
    }

    fn mechanism(&self) -> &'static str {
        "the head is one matrix product a step with as many rows as tokens; a row that no answer needs is bytes for nothing, and a row \
         that one would have needed is an answer that cannot be given"
    }

    fn measure(&self, lab: &mut Lab) -> Result<Evidence> {
        let nano = lab.nano()?;
        let pruned = pruned_nano(lab, &nano)?;
        let ppl = lab.ppl(&pruned)?;
        let label = format!("{} rows", pruned.head_rows().len());
        let full = format!("{} rows", nano.head_rows().len());
        let on_nano = lab.trial(Subject::Nano, Side::plain(&full, &nano), Side::plain(&label, &pruned), ppl)?;
        let (full, small) = (lab.wide(VOCAB, Some(128))?, lab.wide(SMALL_VOCAB, Some(128))?);
        let sides = (Side::plain("16384 rows", &full), Side::plain("4096 rows", &small));
        let on_wide = lab.trial(Subject::Wide, sides.0, sides.1, None)?;
        Ok(Evidence::Trials(vec![(Subject::Nano, vec![on_nano]), (Subject::Wide, vec![on_wide])]))
    }
}

/// Nano with the rows of the tokens that stand in the perplexity records, but for those that it is then scored on.
fn pruned_nano(lab: &Lab, nano: &Arc<Model>) -> Result<Arc<Model>> {
    let out = lab.work().join("nano-pruned");
    if !out.exists() {
        let vocab = nano.config().vocab_size;
        let records = ppl::records::read(&runtime::nano::directory()?.join("prompts/ppl.jsonl"), vocab)?;
        let counts =
            bake::keepset::count(records.iter().skip(PPL_RECORDS).flat_map(|r| r.token_ids.iter().copied()), vocab)?;
        let keep = bake::keepset::build(&counts, 1, &nano.checkpoint().generation().stop_ids)?;
        let options = PruneVocabOptions {
            origin: "tokens of nano's perplexity records that are not scored".into(),
            ..Default::default()
        };
        prune_vocab::run(nano.checkpoint(), &out, &keep, &options, &bake::Context::quiet())?;
    }
    Ok(Arc::new(Model::load(Checkpoint::open(&out)?)?))
}
