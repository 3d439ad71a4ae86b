//! `bake prune-vocab`: a head with rows for some tokens only.
//!
//! The head is untied if it was tied (its rows are those of the embedding), rows are selected, and a side file in the field's
//! format says which token each row stands for; every other token has logit minus infinity from then on. The embedding and
//! the per-layer table keep all rows, and `vocab_size` stays: the input side still knows every token.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use runtime::checkpoint::{Checkpoint, KEEPSET_FILE, Keepset};
use runtime::names;
use serde_json::{Map, Value, json};

use crate::config_edit::Config;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::keepset::{self, Coverage};
use crate::lineage::Lineage;
use crate::parent::Parent;
use crate::plan::{Job, Plan};
use crate::roles::{Linear, Part, Role, role};
use crate::source::Source;
use crate::writer::{self, Report, WriteOptions};

/// Options of [`run`].
#[derive(Debug, Clone, Default)]
pub struct PruneVocabOptions {
    /// Where the keepset comes from, for the lineage: a file name, or how it was built.
    pub origin: String,
    /// Target tokens of evaluations that the keepset was made to hold.
    pub targets: usize,
    /// Control, byte and stop tokens that the keepset leaves out.
    pub missing_structural: usize,
    /// What share of named texts the keepset covers; goes into the lineage.
    pub coverage: BTreeMap<String, Coverage>,
    /// How to write.
    pub write: WriteOptions,
}

/// Writes a checkpoint whose head has the rows of `keep`, in that order, to `out`.
///
/// # Errors
/// [`Error::Keepset`] where the keepset does not fit the model or names a token that an earlier prune removed; all errors of
/// the writer.
pub fn run(
    checkpoint: &Checkpoint,
    out: &Path,
    keep: &Keepset,
    options: &PruneVocabOptions,
    context: &Context,
) -> Result<Report> {
    let plan = plan(&Parent::open(checkpoint)?, keep, options)?;
    writer::execute(plan, Some(checkpoint), out, options.write, context)
}

/// What [`run`] writes.
pub fn plan(checkpoint: &Parent, keep: &Keepset, options: &PruneVocabOptions) -> Result<Plan> {
    let rows = head_rows(checkpoint, keep)?;
    let tied = checkpoint.config().tie_word_embeddings;
    let head = |part: Part| Linear::Head.tensor(checkpoint.prefix(), part);
    let mut jobs = Vec::new();
    for source in checkpoint.sources() {
        match role(checkpoint.prefix(), &source.name) {
            // A tied checkpoint may carry a stale head; the embedding is the one that counts.
            Role::Linear(Linear::Head, _) if tied => {}
            Role::Linear(Linear::Head, Part::Shape) => {
                let [_, inputs] = source.read_pair()?;
                jobs.push(Job::weight_shape(&source.name, rows.len(), usize::try_from(inputs).unwrap_or(0)));
            }
            Role::Linear(Linear::Head, _) => jobs.push(select(source, &source.name, &rows)?),
            Role::Embed if tied => {
                jobs.push(Job::copy(source, &source.name));
                jobs.push(select(source, &head(Part::Dense), &rows)?);
            }
            _ => jobs.push(Job::copy(source, &source.name)),
        }
    }
    let mut config = Config::new(checkpoint);
    config.set_tied(false)?;
    if tied {
        // The new head is dense, also where the body is packed.
        config.ignore_module(names::LM_HEAD)?;
    }
    let file = json!({"keep_ids": keep.ids, "full_vocab": keep.full_vocab});
    let mut keepset_bytes = file.to_string().into_bytes();
    keepset_bytes.push(b'\n');
    let knobs = json!({
        "origin": options.origin,
        "kept": keep.ids.len(),
        "full_vocab": keep.full_vocab,
        "keepset_blake3": blake3::hash(&keepset_bytes).to_hex().as_str(),
    });
    Ok(Plan {
        jobs,
        config: config.into_json(),
        prefix: checkpoint.prefix().to_string(),
        files: vec![(KEEPSET_FILE.into(), keepset_bytes)],
        inherited_keepset: None,
        lineage: Lineage { measured: measured(options), ..Lineage::new("prune-vocab", knobs, notes(options)) },
    })
}

/// Missing tokens that a lineage lists for a text; the rest is counted.
const LISTED: usize = 20;

/// Coverage for the lineage.
fn measured(options: &PruneVocabOptions) -> Map<String, Value> {
    let mut texts = Map::new();
    for (name, c) in &options.coverage {
        let entry = json!({
            "tokens": c.tokens,
            "covered": c.covered,
            "share": c.share(),
            "records": c.records,
            "records_changed": c.records_changed,
            "missing_ids": c.missing.len(),
            "most_missed": c.missing.iter().take(LISTED).collect::<Vec<_>>(),
        });
        texts.insert(name.clone(), entry);
    }
    if texts.is_empty() { Map::new() } else { Map::from_iter([("coverage".to_string(), Value::Object(texts))]) }
}

fn notes(options: &PruneVocabOptions) -> Vec<String> {
    let mut notes = Vec::new();
    for (name, c) in &options.coverage {
        notes.push(format!(
            "{name}: {:.3} % of {} tokens have a row; {} of {} texts hold one that has none",
            c.share() * 100.0,
            c.tokens,
            c.records_changed,
            c.records
        ));
    }
    if options.coverage.is_empty() {
        notes.push("coverage of generated and held-out text was not measured (--coverage)".into());
    }
    if options.targets > 0 {
        let targets = options.targets;
        notes.push(format!(
            "{targets} target tokens of evaluations were kept on purpose: coverage and perplexity on those files say nothing \
             about other text"
        ));
    }
    if options.missing_structural > 0 {
        let n = options.missing_structural;
        notes.push(format!(
            "the keepset leaves out {n} control, byte or stop tokens: the model cannot write them any more"
        ));
    }
    notes
}

/// Row of the parent's head for every kept id.
fn head_rows(checkpoint: &Parent, keep: &Keepset) -> Result<Vec<usize>> {
    let vocab = checkpoint.config().vocab_size;
    keepset::check(&keep.ids, vocab)?;
    if keep.full_vocab != vocab {
        let reason = format!("it was made for {} tokens, the model has {vocab}", keep.full_vocab);
        return Err(Error::Keepset { reason });
    }
    let Some(earlier) = checkpoint.keepset().filter(|_| !checkpoint.config().tie_word_embeddings) else {
        return Ok(keep.ids.iter().map(|&id| id as usize).collect());
    };
    let places: HashMap<u32, usize> = earlier.ids.iter().enumerate().map(|(row, &id)| (id, row)).collect();
    let row = |id: &u32| {
        places.get(id).copied().ok_or_else(|| Error::Keepset {
            reason: format!("token {id} is not among the {} that the parent's head still has", earlier.ids.len()),
        })
    };
    keep.ids.iter().map(row).collect()
}

fn select(source: &Source, name: &str, rows: &[usize]) -> Result<Job> {
    match rows.iter().find(|&&r| r >= source.rows()) {
        None if source.shape.len() == 2 => Ok(Job::select_rows(source, name, rows.to_vec())),
        None => Err(source.wrong("a matrix", "the head has one row a token")),
        Some(row) => Err(source.wrong(
            format!("a row {row}"),
            format!("is a {KEEPSET_FILE} missing beside the checkpoint, or `{}` truncated?", names::LM_HEAD),
        )),
    }
}
