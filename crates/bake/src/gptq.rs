//! `gptq`: each rounding error is made up for by the weights that are not rounded yet, as far as the inputs of real text allow.
//!
//! Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022); the form
//! computed here, with factors of the Hessian instead of its inverse, is LDLQ of Chee et al., "QuIP" (2023), which they show
//! to be the same. [`hessian`] and [`solve`] have the arithmetic.
//!
//! All calibration sequences go through the model side by side ([`runtime::staged`]). Where they stand at the input of linears,
//! its second moments are summed, the linears are quantised, and the sequences go on through the quantised ones: every linear
//! is fitted to the inputs that it will have, in one forward pass over the calibration text. Linears that read the same input
//! share a Hessian (q/k/v, gate/up). Those that another method quantises are replaced as well. Keys and values stored for
//! KV-shared layers have no input, since nothing reads them; they are rounded by `mse`.
//!
//! What it costs, with k inputs, n outputs and T calibration tokens: a linear takes `T k^2 / 2` multiply-adds for its Hessian,
//! `k^3 / 6` for the factors and `1.5 n k^2` for the rows. Memory, unlike that of other bakes, grows with the width and with T:
//! `12 k^2` bytes for the widest linear (1.3 GB for the 10240 inputs of E4B's down projections; 1.7 GB in order of activation),
//! four times its f32 weights, and about 110 KB a token at E4B's width, 1.8 GB for 16384. Packed results wait in an unnamed file
//! beside the target, as large as what is quantised.

use std::ops::Range;
use std::path::Path;

use kernels::cpu::{Data, Matrix};
use rayon::prelude::*;
use runtime::checkpoint::Checkpoint;
use runtime::config::ModelConfig;
use runtime::model::{Model, Weights};
use runtime::staged::StagedPass;
use runtime::{Stage, names};
use safetensors::Dtype;
use serde::Serialize;
use serde_json::{Value, json};

use crate::context::{Context, Meter};
use crate::error::{Error, Result};
use crate::method::{ByRow, Quantiser};
use crate::plan::{Job, Output, Work};
use crate::quant;
use crate::roles::{Linear, Part};
use crate::source::Source;

pub mod hessian;
mod parts;
pub mod solve;
mod spill;

use hessian::Hessian;
pub use solve::Errors;
use solve::Solved;
use spill::{Place, Spill};

/// In which order the inputs of a linear are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// As they stand. Scales are searched where a group begins, with all earlier errors known.
    #[default]
    Natural,
    /// The input with the largest second moment first. Scales are those of the weights alone.
    Activation,
}

impl Order {
    /// Name on the command line and in the lineage.
    pub fn name(self) -> &'static str {
        match self {
            Order::Natural => "natural",
            Order::Activation => "activation",
        }
    }
}

/// How to calibrate.
#[derive(Debug, Clone)]
pub struct GptqOptions {
    /// Text.
    pub calibration: Calibration,
    /// Share of the mean second moment of the inputs that is added to each of them.
    pub damping: f64,
    /// Order of the inputs.
    pub order: Order,
}

impl GptqOptions {
    /// For the lineage.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "calibration": self.calibration.origin,
            "tokens": self.calibration.tokens(),
            "blake3": self.calibration.digest(),
            "damping": self.damping,
            "order": self.order.name(),
        })
    }
}

/// Share of [`GptqOptions::damping`] that suits most models.
pub const DAMPING: f64 = 0.01;
/// Fewest calibration tokens.
const LEAST_TOKENS: usize = 128;
/// Longest calibration sequence; longer ones are cut.
const LONGEST: usize = 2048;

/// Token sequences that stand for the text that the model will see.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// Where they come from, for the lineage: a file's name.
    pub origin: String,
    sequences: Vec<Vec<u32>>,
}

impl Calibration {
    /// The first `tokens` tokens of some sequences. Sequences of more than 2048 tokens are cut.
    ///
    /// # Errors
    /// [`Error::Calibration`] where there are fewer, [`Error::Option`] where fewer than 128 are asked for.
    pub fn new(origin: &str, sequences: impl IntoIterator<Item = Vec<u32>>, tokens: usize) -> Result<Calibration> {
        if tokens < LEAST_TOKENS {
            let expected = format!("at least {LEAST_TOKENS}");
            return Err(Error::Option { option: "calibration-tokens", expected, found: tokens.to_string() });
        }
        let mut taken = Vec::new();
        let mut missing = tokens;
        for sequence in sequences {
            for piece in sequence.chunks(LONGEST.min(missing.max(1))) {
                let piece = &piece[..piece.len().min(missing)];
                if !piece.is_empty() {
                    taken.push(piece.to_vec());
                }
                missing -= piece.len();
            }
            if missing == 0 {
                return Ok(Calibration { origin: origin.to_string(), sequences: taken });
            }
        }
        Err(Error::Calibration { origin: origin.to_string(), wanted: tokens, found: tokens - missing })
    }

    /// blake3 of the sequences, so that two texts of one name differ.
    fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for sequence in &self.sequences {
            hasher.update(&(sequence.len() as u64).to_le_bytes());
            for id in sequence {
                hasher.update(&id.to_le_bytes());
            }
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(Vec::len).sum()
    }
}

/// A linear that the model computes with, and how it is quantised.
struct Task {
    linear: Linear,
    /// Dense weights, `[outputs, inputs]`.
    source: Source,
    packing: ByRow,
    /// Where its results go; `None` for a linear that its packing's method quantises alone.
    place: Option<Place>,
}

/// The calibrated part of a bake: linears are named one by one, their jobs go into the plan, and [`Gptq::run`] must come before
/// the plan is carried out.
pub struct Gptq {
    options: GptqOptions,
    tasks: Vec<Task>,
    spill: Spill,
}

/// What became of the outputs of a linear: mean squared errors over calibration tokens, relative to the outputs' mean square.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fit {
    /// Module, without the prefix.
    pub module: String,
    /// Rounded to nearest.
    pub nearest: f64,
    /// As written.
    pub gptq: f64,
}

impl Gptq {
    /// Of no linears yet.
    ///
    /// # Errors
    /// [`Error::Option`] for a damping outside (0, 1].
    pub fn new(options: GptqOptions) -> Result<Gptq> {
        check_damping(options.damping)?;
        Ok(Gptq { options, tasks: Vec::new(), spill: Spill::default() })
    }

    /// Refuses to calibrate nothing.
    pub fn require_linears(&self) -> Result<()> {
        match self.tasks.iter().any(|t| t.place.is_some()) {
            true => Ok(()),
            false => Err(Error::Option {
                option: "calibration",
                expected: "a linear whose method is gptq".into(),
                found: "none".into(),
            }),
        }
    }

    /// Length of the temporary file.
    pub fn spill_bytes(&self) -> u64 {
        self.spill.bytes()
    }

    /// Whether a linear has inputs to be fitted to: all but keys and values stored for KV-shared layers, and what a file holds of layers
    /// that the configuration does not know, which the plan refuses.
    pub fn fits(config: &ModelConfig, linear: Linear) -> bool {
        match linear {
            Linear::Layer(l, name) => config
                .layers
                .get(l)
                .is_some_and(|layer| layer.kv_source.is_none() || !names::KV_MODULES.contains(&name)),
            Linear::ModelProjection | Linear::Head => true,
        }
    }

    /// A linear to be calibrated, `[outputs, inputs]`; its method is what each row is held against. The job writes its packed
    /// words and scales.
    pub fn calibrate(&mut self, linear: Linear, prefix: &str, source: &Source, packing: ByRow) -> Job {
        let (rows, inputs) = (source.rows(), source.row_elements());
        let place = self.spill.reserve(linear, [rows, inputs], &packing);
        let groups = inputs.checked_div(packing.group).unwrap_or(1);
        let outputs = vec![
            Output::new(linear.tensor(prefix, Part::Packed), Dtype::I32, &[rows, packing.bits.words(inputs)]),
            Output::new(linear.tensor(prefix, Part::Scale), Dtype::BF16, &[rows, groups]),
        ];
        self.tasks.push(Task { linear, source: source.clone(), packing, place: Some(place.clone()) });
        let input_bytes = place.row_bytes();
        let fill = move |rows: Range<usize>, buffers: &mut [&mut [u8]]| place.read(rows, buffers);
        Job { outputs, work: Work::Rows { input_bytes, fill: Box::new(fill) } }
    }

    /// A linear that is quantised without calibration, which others must know of: their inputs go through it.
    pub fn follow(&mut self, linear: Linear, source: &Source, packing: ByRow) {
        self.tasks.push(Task { linear, source: source.clone(), packing, place: None });
    }

    /// Computes all results, to a temporary file beside `target`.
    ///
    /// # Errors
    /// Those of reading the model, [`Error::Option`] where the damping does not make a Hessian positive definite.
    pub fn run(&self, checkpoint: &Checkpoint, target: &Path, context: &Context) -> Result<Vec<Fit>> {
        let above = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        self.spill.open(above)?;
        let mut model = Model::load(Checkpoint::open(checkpoint.dir())?)?;
        let sequences = &self.options.calibration.sequences;
        let mut passes: Vec<StagedPass> =
            sequences.iter().map(|tokens| StagedPass::new(&model, tokens)).collect::<runtime::Result<_>>()?;
        let meter = Meter::new(context, self.tasks.iter().map(|t| t.source.len()).sum());
        let mut fits = Vec::new();
        let calibrated = self.tasks.iter().filter(|t| t.place.is_some()).count();
        while fits.len() < calibrated {
            let stage = passes.first().map_or(Stage::FinalNorm, StagedPass::stage);
            let modules = stage.modules();
            let here: Vec<&Task> = self.tasks.iter().filter(|t| modules.contains(&t.linear.module(""))).collect();
            let factor = match here.iter().find(|t| t.place.is_some()) {
                Some(task) => Some(self.factor(task, &passes)?),
                None => None,
            };
            let mut originals = Vec::new();
            for task in here {
                context.check(target)?;
                let module = task.linear.module("");
                let Some(original) = model.weights(&module).cloned() else { continue };
                let weights = read(&task.source)?;
                let solved = match factor.as_ref().zip(task.place.as_ref()) {
                    Some((factor, place)) => {
                        let solved = solve::solve(factor, &weights, &task.packing)?;
                        place.put(&solved, &task.packing)?;
                        fits.push(Fit::new(&module, solved.errors));
                        solved
                    }
                    None => rounded(&weights, original.cols(), &task.packing)?,
                };
                model.set_weights(&module, dense(&solved, [original.rows(), original.cols()], &task.packing)?)?;
                originals.push((module, original));
                meter.add(task.source.len());
            }
            if stage == Stage::FinalNorm {
                break;
            }
            passes.par_iter_mut().try_for_each(|pass| {
                context.check(target)?;
                pass.advance(&model);
                Ok::<(), Error>(())
            })?;
            // Nobody comes back here: the replacements need not be held.
            for (module, original) in originals {
                model.set_weights(&module, original)?;
            }
        }
        Ok(fits)
    }

    fn factor(&self, task: &Task, passes: &[StagedPass]) -> Result<hessian::Factor> {
        let mut hessian = Hessian::new(task.source.row_elements());
        passes.iter().for_each(|pass| hessian.add(pass.values()));
        hessian.factor(self.options.damping, self.options.order).map_err(|input| Error::Option {
            option: "damping",
            expected: format!(
                "more: the second moments of the inputs of {} are singular at input {input}",
                task.linear.module("")
            ),
            found: self.options.damping.to_string(),
        })
    }
}

/// Refuses a damping that is no share.
fn check_damping(damping: f64) -> Result<()> {
    if damping > 0.0 && damping <= 1.0 {
        return Ok(());
    }
    Err(Error::Option { option: "damping", expected: "above 0, at most 1".into(), found: damping.to_string() })
}

fn read(source: &Source) -> Result<Vec<f32>> {
    let mut weights = vec![0.0; source.rows() * source.row_elements()];
    source.read_f32(0, &mut weights, &mut Vec::new())?;
    Ok(weights)
}

fn rounded(weights: &[f32], inputs: usize, packing: &ByRow) -> Result<Solved> {
    let groups = weights.len() / packing.group;
    let mut solved =
        Solved { fields: vec![0; weights.len()], scales: vec![half::bf16::ZERO; groups], errors: Errors::default() };
    let rows = solved.fields.par_chunks_mut(inputs).zip(solved.scales.par_chunks_mut(inputs / packing.group));
    rows.zip(weights.par_chunks(inputs))
        .enumerate()
        .try_for_each(|(r, ((fields, scales), row))| packing.quantise(r, row, fields, scales))?;
    Ok(solved)
}

/// The weights that packed ones stand for, as the forward pass takes them.
fn dense(solved: &Solved, [rows, inputs]: [usize; 2], packing: &ByRow) -> Result<Weights> {
    let mut bytes = vec![0; rows * inputs * 4];
    let scales = solved.scales.par_chunks(inputs / packing.group);
    bytes.par_chunks_mut(inputs * 4).zip(solved.fields.par_chunks(inputs)).zip(scales).for_each(
        |((bytes, fields), scales)| {
            let mut row = vec![0.0; inputs];
            quant::dequantise_row(fields, scales, packing.group, packing.bits, &mut row);
            bytes.as_chunks_mut::<4>().0.iter_mut().zip(&row).for_each(|(b, w)| *b = w.to_le_bytes());
        },
    );
    Matrix::new(rows, inputs, Data::F32(bytes.into())).map_err(|e| Error::Option {
        option: "group",
        expected: "a packing of the linear's own shape".into(),
        found: e.to_string(),
    })
}

impl Fit {
    fn new(module: &str, errors: Errors) -> Fit {
        let share = |error: f64| if errors.signal > 0.0 { error / errors.signal } else { 0.0 };
        Fit { module: module.to_string(), nearest: share(errors.nearest), gptq: share(errors.gptq) }
    }
}

#[cfg(test)]
mod tests;
