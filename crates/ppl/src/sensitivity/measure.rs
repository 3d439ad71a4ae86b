//! One change at a time: each layer removed, each group of linears at each width, everything else as it is.

use serde::Serialize;

use super::paired::{Change, Scores};
use super::trials::{Slice, Trials};
use super::variant::{By, Variant};
use crate::error::{Error, Result};

/// What is changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Study {
    /// Each layer removed.
    Layers,
    /// Each group at each of these widths.
    Widths {
        /// What is a group.
        by: By,
        /// Bits.
        widths: Vec<u8>,
    },
}

/// One change and what it does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The layer, or the group.
    pub item: String,
    /// Bits of the group; absent for a removed layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits: Option<u8>,
    /// Bytes of weights that a decode step reads then.
    pub step_bytes: u64,
    /// What it does to the perplexity.
    #[serde(flatten)]
    pub change: Change,
}

/// A layer that cannot be removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fixed {
    /// The layer.
    pub layer: usize,
    /// Why.
    pub reason: String,
}

/// The unchanged model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Baseline {
    /// Perplexity.
    pub ppl: f64,
    /// Records scored.
    pub records: usize,
    /// Tokens scored.
    pub tokens: usize,
    /// Bytes of weights that a decode step reads.
    pub step_bytes: u64,
}

/// What a study found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The unchanged model.
    pub baseline: Baseline,
    /// Each change, the least harmful first.
    pub rows: Vec<Row>,
    /// Layers that no valid model lacks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fixed: Vec<Fixed>,
}

/// Runs a study on a slice of records.
///
/// # Errors
/// [`Error::Nothing`] for a model without anything to change; as [`Trials::scores`].
pub fn run(trials: &mut Trials, slice: &Slice, study: &Study) -> Result<Report> {
    let mut items: Vec<(String, Option<u8>, Variant)> = Vec::new();
    let mut fixed = Vec::new();
    let unchanged = Variant::unchanged();
    match study {
        Study::Layers => {
            let config = trials.subject().model().config();
            for layer in 0..config.layers.len() {
                match config.survivors(&[layer]) {
                    Ok(_) => items.push((format!("layer {layer}"), None, unchanged.without(layer))),
                    Err(runtime::Error::Layers { reason, .. }) => fixed.push(Fixed { layer, reason }),
                    Err(e) => return Err(Error::Model { id: format!("-{layer}"), source: e.into() }),
                }
            }
            if items.is_empty() {
                return Err(Error::Nothing { what: "no layer of this model can be removed" });
            }
        }
        Study::Widths { by, widths } => {
            for group in trials.subject().groups(*by, true) {
                let variants = widths.iter().map(|&w| (group.to_string(), Some(w), unchanged.with(group, Some(w))));
                items.extend(variants);
            }
            if items.is_empty() {
                return Err(Error::Nothing {
                    what: "the model has no dense linear to quantise; start from a bf16 one",
                });
            }
        }
    }
    trials.planned = items.len() + 1;
    let (baseline, scores) = baseline(trials, slice)?;
    let tokens = slice.tokens();
    let mut rows = Vec::with_capacity(items.len());
    for (item, bits, variant) in items {
        let change = trials.scores(slice, &variant)?.against(&scores, &tokens);
        rows.push(Row { item, bits, step_bytes: trials.subject().step_bytes(&variant), change });
    }
    rows.sort_by(|a, b| a.change.ratio.total_cmp(&b.change.ratio));
    Ok(Report { baseline, rows, fixed })
}

/// The unchanged model on a slice.
pub(super) fn baseline(trials: &mut Trials, slice: &Slice) -> Result<(Baseline, Scores)> {
    let unchanged = Variant::unchanged();
    let tokens = slice.tokens();
    let scores = trials.scores(slice, &unchanged)?;
    let baseline = Baseline {
        ppl: scores.ppl(&tokens),
        records: tokens.len(),
        tokens: tokens.iter().sum(),
        step_bytes: trials.subject().step_bytes(&unchanged),
    };
    Ok((baseline, scores))
}
