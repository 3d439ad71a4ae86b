//! `bake quantize`: every linear of the text model to symmetric integers of 8, 4, 3 or 2 bits.
//!
//! Quantised are q/k/v/o, gate/up/down, the three linears of the per-layer embedding and an untied head; both embedding
//! tables, norms, scalars and the towers stay as they are. A [`PrecisionPlan`] gives single linears another treatment. The
//! format is `pack-quantized` of compressed-tensors, as in osoi5; scales and integers come from a [`crate::method`].
//!
//! A linear whose input width the group size does not divide gets one scale a row (strategy `channel`) in a config group of
//! its own; the lineage names it. Inert keys and values of KV-shared layers, where the parent has them, are quantised like
//! the rest: a checkpoint with both kinds would fit no loader.

use std::ops::Range;
use std::path::Path;

use half::bf16;
use runtime::checkpoint::Checkpoint;
pub use runtime::config::Strategy;
use runtime::names;
use safetensors::Dtype;
use serde_json::json;

use crate::check;
use crate::config_edit::Config;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::gptq::{Gptq, GptqOptions};
use crate::lineage::Lineage;
use crate::method::{ByRow, Method, Quantiser};
use crate::parent::Parent;
use crate::plan::{Job, Output, Plan, Work};
use crate::precision::{Choice, PrecisionPlan, Scheme, Treatment};
use crate::quant::{self, Arithmetic, Bits};
use crate::quant_config::{self, Schemes};
use crate::roles::{Linear, Part, Role, role};
use crate::staging::Staging;
use crate::writer::{self, Report, WriteOptions};

/// Options of [`run`].
#[derive(Debug, Clone)]
pub struct QuantizeOptions {
    /// Width of every linear.
    pub bits: Bits,
    /// Who chooses scales and integers.
    pub method: Method,
    /// Scales of every linear but the head. The field uses `Group(128)`.
    pub strategy: Strategy,
    /// Scales of an untied head. osoi5 uses `Channel`.
    pub head: Strategy,
    /// Linears that are treated otherwise; without rules, none.
    pub precision: PrecisionPlan,
    /// How to calibrate; needed where a linear's method is [`Method::Gptq`], and refused where none is.
    pub gptq: Option<GptqOptions>,
    /// How to write.
    pub write: WriteOptions,
}

impl Default for QuantizeOptions {
    fn default() -> QuantizeOptions {
        QuantizeOptions {
            bits: Bits::Four,
            method: Method::Rtn,
            strategy: Strategy::Group(128),
            head: Strategy::Channel,
            precision: PrecisionPlan::default(),
            gptq: None,
            write: WriteOptions::default(),
        }
    }
}

/// A group is a multiple of this, whatever the width: the kernels expand eight weights at a time.
const GROUP_MULTIPLE: usize = 8;
/// Largest group size accepted: longer groups are better served by a channel.
const GROUP_LIMIT: usize = 4096;

/// Writes the quantised version of a checkpoint to `out`.
///
/// # Errors
/// [`Error::AlreadyQuantised`] for packed input, [`Error::NonFinite`] with file, tensor and index for NaN and infinities,
/// [`Error::Tensor`] for weights that are neither bf16 nor f32, [`Error::PrecisionPlan`] for a pattern that matches no linear,
/// and all errors of the writer.
pub fn run(checkpoint: &Checkpoint, out: &Path, options: &QuantizeOptions, context: &Context) -> Result<Report> {
    let parent = Parent::open(checkpoint)?;
    let plan = match &options.gptq {
        None => plan(&parent, options)?,
        Some(calibration) => {
            let mut gptq = Gptq::new(calibration.clone())?;
            let mut plan = plan_with(&parent, options, Some(&mut gptq))?;
            require_writable(&plan, &gptq, checkpoint, out, options)?;
            let fits = gptq.run(checkpoint, out, context)?;
            plan.lineage.measured.insert("gptq".into(), json!(fits));
            plan
        }
    };
    writer::execute(plan, Some(checkpoint), out, options.write, context)
}

/// Looks at all that the writer will look at: hours of calibration must not end at a target that cannot be written.
fn require_writable(
    plan: &Plan,
    gptq: &Gptq,
    checkpoint: &Checkpoint,
    out: &Path,
    options: &QuantizeOptions,
) -> Result<()> {
    gptq.require_linears()?;
    let staging = Staging::new(out, options.write.force, Some(checkpoint.dir()))?;
    let outputs: u64 = plan.jobs.iter().flat_map(|j| &j.outputs).map(Output::bytes).sum();
    staging.require_space(outputs + gptq.spill_bytes())?;
    match check::plan(plan, out)? {
        problems if problems.is_empty() => Ok(()),
        problems => Err(Error::Inconsistent { problems }),
    }
}

/// What [`run`] writes without calibration.
///
/// # Errors
/// Those of [`run`] but the writer's, and [`Error::Option`] where the method of a linear is [`Method::Gptq`]: that is computed
/// from a checkpoint, which a plan's parent need not be.
pub fn plan(checkpoint: &Parent, options: &QuantizeOptions) -> Result<Plan> {
    plan_with(checkpoint, options, None)
}

fn plan_with(checkpoint: &Parent, options: &QuantizeOptions, mut gptq: Option<&mut Gptq>) -> Result<Plan> {
    check_strategy("group", options.strategy)?;
    check_strategy("head", options.head)?;
    options.precision.strategies().try_for_each(|s| check_strategy("group of the plan", s))?;
    let prefix = checkpoint.prefix();
    let mut treatments = treatments(checkpoint, options)?.into_iter();
    let mut schemes = Schemes::new();
    let mut ignore = Vec::new();
    let mut notes = Vec::new();
    let mut jobs = Vec::new();
    let mut inert = 0;
    for source in checkpoint.sources() {
        let linear = match role(prefix, &source.name) {
            Role::Linear(linear, Part::Dense) => linear,
            Role::Linear(_, _) => {
                let path = checkpoint.dir().to_path_buf();
                return Err(Error::AlreadyQuantised { path, tensor: source.name.clone() });
            }
            Role::Other => {
                // What is a module of class Linear cannot be seen from a file; matrices named `weight` include them all, and
                // other names in the list do no harm.
                ignore.extend(
                    source.name.strip_suffix(".weight").filter(|_| source.shape.len() == 2).map(str::to_string),
                );
                jobs.push(Job::copy(source, &source.name));
                continue;
            }
            _ => {
                jobs.push(Job::copy(source, &source.name));
                continue;
            }
        };
        let [out, inputs] = source.shape[..] else {
            return Err(source.wrong("a matrix [out, in]", "a linear's weight has two dimensions"));
        };
        let arithmetic = source.arithmetic()?;
        // There is one for each dense linear.
        let Some(Treatment::Pack(wanted)) = treatments.next() else {
            ignore.push(linear.module(prefix));
            jobs.push(Job::copy(source, &source.name));
            continue;
        };
        let strategy = fitting(wanted.scheme.strategy, inputs);
        if strategy != wanted.scheme.strategy {
            notes.push(format!(
                "{}: the group size does not divide its {inputs} inputs; it has one scale a row (strategy channel)",
                linear.module(prefix)
            ));
        }
        let scheme = Scheme { strategy, ..wanted.scheme };
        schemes.insert(linear, scheme);
        let reader = source.clone();
        let read = move |rows: Range<usize>, weights: &mut [f32], scratch: &mut Vec<u8>| {
            reader.read_f32(rows.start * inputs, weights, scratch)
        };
        let quantiser = ByRow::new(Choice { scheme, ..wanted }, inputs, arithmetic);
        let calibrated = wanted.method == Method::Gptq;
        match gptq.as_deref_mut() {
            None if calibrated => return Err(without_calibration(linear)),
            Some(gptq) if Gptq::fits(checkpoint.config(), linear) => {
                if calibrated {
                    jobs.push(gptq.calibrate(linear, prefix, source, quantiser));
                    jobs.push(Job::weight_shape(linear.tensor(prefix, Part::Shape), out, inputs));
                    continue;
                }
                gptq.follow(linear, source, quantiser);
            }
            Some(_) if calibrated => inert += 1,
            _ => {}
        }
        jobs.extend(packed(linear, prefix, [out, inputs], scheme, arithmetic, quantiser, read));
    }
    if checkpoint.config().quantization.is_some() {
        let path = checkpoint.dir().to_path_buf();
        return Err(Error::AlreadyQuantised { path, tensor: "quantization_config of config.json".into() });
    }
    if checkpoint.config().tie_word_embeddings {
        ignore.push("lm_head".into());
    }
    if inert > 0 {
        notes.push(format!(
            "{inert} keys and values of KV-shared layers, which nothing reads, have no inputs to be fitted to: method mse"
        ));
    }
    let mut config = Config::new(checkpoint);
    let default = Scheme { bits: options.bits, strategy: options.strategy };
    let value = quant_config::build(default, &schemes, &ignore);
    config.root()?.insert("quantization_config".into(), value);
    let knobs = json!({
        "bits": options.bits.get(),
        "method": options.method.name(),
        "strategy": describe(options.strategy),
        "head": describe(options.head),
        "plan": options.precision.to_json(),
        "gptq": options.gptq.as_ref().map(GptqOptions::to_json),
    });
    Ok(Plan {
        jobs,
        config: config.into_json(),
        prefix: prefix.to_string(),
        files: vec![],
        inherited_keepset: crate::check::keepset_rows(checkpoint.keepset()),
        lineage: Lineage::new("quantize", knobs, notes),
    })
}

fn without_calibration(linear: Linear) -> Error {
    Error::Option {
        option: "method",
        expected: format!(
            "calibration text for {}: `bake quantize --calibration FILE` on a checkpoint; a recipe cannot calibrate",
            linear.module("")
        ),
        found: "gptq without it".into(),
    }
}

/// What becomes of each dense linear, in the order of the tensors.
fn treatments(parent: &Parent, options: &QuantizeOptions) -> Result<Vec<Treatment>> {
    let linears = parent.sources().iter().filter_map(|source| match role(parent.prefix(), &source.name) {
        // Rules name modules without the prefix, whatever the checkpoint's is.
        Role::Linear(linear, Part::Dense) => Some(linear.module("")),
        _ => None,
    });
    options.precision.apply(&linears.collect::<Vec<_>>(), |module| {
        let strategy = if module == names::LM_HEAD { options.head } else { options.strategy };
        Choice { scheme: Scheme { bits: options.bits, strategy }, method: options.method }
    })
}

/// `group 128` or `channel`.
pub(crate) fn describe(strategy: Strategy) -> String {
    strategy.to_string()
}

/// Refuses group sizes that no kernel reads.
pub(crate) fn check_strategy(option: &'static str, strategy: Strategy) -> Result<()> {
    match strategy {
        Strategy::Group(size) if size == 0 || size > GROUP_LIMIT || !size.is_multiple_of(GROUP_MULTIPLE) => {
            let expected = format!("a multiple of {} from {} to {GROUP_LIMIT}", GROUP_MULTIPLE, GROUP_MULTIPLE);
            Err(Error::Option { option, expected, found: size.to_string() })
        }
        _ => Ok(()),
    }
}

/// `wanted`, or `Channel` where the group size does not divide `inputs`.
pub(crate) fn fitting(wanted: Strategy, inputs: usize) -> Strategy {
    match wanted {
        Strategy::Group(size) if !inputs.is_multiple_of(size) => Strategy::Channel,
        other => other,
    }
}

/// Weights that are converted at a time: f32 copies of them stay in a core's second-level cache.
const BATCH: usize = 1 << 16;

/// The jobs that make a packed linear `[out, in]`. `read(rows, weights, scratch)` gives the rows as f32, finite; `arithmetic` is
/// their type in the parent.
pub(crate) fn packed(
    linear: Linear,
    prefix: &str,
    [out, inputs]: [usize; 2],
    scheme: Scheme,
    arithmetic: Arithmetic,
    quantiser: impl Quantiser + 'static,
    read: impl Fn(Range<usize>, &mut [f32], &mut Vec<u8>) -> Result<()> + Send + Sync + 'static,
) -> [Job; 2] {
    let groups = inputs.checked_div(scheme.group(inputs)).unwrap_or(1);
    let bits = scheme.bits;
    let words = bits.words(inputs);
    let fill = move |rows: Range<usize>, buffers: &mut [&mut [u8]]| {
        let [packed, scales] = buffers else { return Ok(()) };
        let batch = (BATCH / inputs.max(1)).max(1);
        let mut weights = vec![0f32; batch.min(rows.len()) * inputs];
        let mut scratch = Vec::new();
        let mut fields = vec![0; inputs];
        let (mut row_words, mut row_scales) = (vec![0u32; words], vec![bf16::ZERO; groups]);
        let mut outputs = packed.chunks_mut((words * 4).max(1)).zip(scales.chunks_mut((groups * 2).max(1)));
        for start in rows.clone().step_by(batch) {
            let now = start..(start + batch).min(rows.end);
            let weights = &mut weights[..now.len() * inputs];
            read(now.clone(), weights, &mut scratch)?;
            for ((n, row), (packed, scales)) in now.zip(weights.chunks_exact(inputs.max(1))).zip(&mut outputs) {
                quantiser.quantise(n, row, &mut fields, &mut row_scales)?;
                quant::pack_row(&fields, bits, &mut row_words);
                for (b, w) in packed.as_chunks_mut::<4>().0.iter_mut().zip(&row_words) {
                    *b = w.to_le_bytes();
                }
                for (b, s) in scales.as_chunks_mut::<2>().0.iter_mut().zip(&row_scales) {
                    *b = s.to_le_bytes();
                }
            }
        }
        Ok(())
    };
    let width = match arithmetic {
        Arithmetic::Bf16 => 2,
        Arithmetic::F32 => 4,
    };
    let rows = Job {
        outputs: vec![
            Output::new(linear.tensor(prefix, Part::Packed), Dtype::I32, &[out, words]),
            Output::new(linear.tensor(prefix, Part::Scale), Dtype::BF16, &[out, groups]),
        ],
        work: Work::Rows { input_bytes: inputs * width, fill: Box::new(fill) },
    };
    [rows, Job::weight_shape(linear.tensor(prefix, Part::Shape), out, inputs)]
}
