//! `bake quantize`: every linear of the text model to symmetric int4, round to nearest.
//!
//! Quantised are q/k/v/o, gate/up/down, the three linears of the per-layer embedding and an untied head; both embedding
//! tables, norms, scalars and the towers stay as they are. The format is `pack-quantized` of compressed-tensors, as in osoi5
//! the arithmetic is [`crate::quant`].
//!
//! A linear whose input width the group size does not divide gets one scale a row (strategy `channel`) in a config group of
//! its own; the lineage names it. Inert keys and values of KV-shared layers, where the parent has them, are quantised like
//! the rest: a checkpoint with both kinds would fit no loader.

use std::ops::Range;
use std::path::Path;

use half::bf16;
use runtime::checkpoint::Checkpoint;
pub use runtime::config::Strategy;
use safetensors::Dtype;
use serde_json::json;

use crate::config_edit::Config;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::lineage::Lineage;
use crate::method::{ByRow, Method, Quantiser};
use crate::parent::Parent;
use crate::plan::{Job, Output, Plan, Work};
use crate::quant::{self, Arithmetic, Bits};
use crate::quant_config::{self, Strategies};
use crate::roles::{Linear, Part, Role, role};
use crate::writer::{self, Report, WriteOptions};

/// Options of [`run`].
#[derive(Debug, Clone, Copy)]
pub struct QuantizeOptions {
    /// Scales of every linear but the head. The field uses `Group(128)`.
    pub strategy: Strategy,
    /// Scales of an untied head. osoi5 uses `Channel`.
    pub head: Strategy,
    /// How to write.
    pub write: WriteOptions,
}

impl Default for QuantizeOptions {
    fn default() -> QuantizeOptions {
        QuantizeOptions { strategy: Strategy::Group(128), head: Strategy::Channel, write: WriteOptions::default() }
    }
}

/// A group is a multiple of this, whatever the width: the kernels expand eight weights at a time.
const GROUP_MULTIPLE: usize = 8;
/// Largest group size accepted: longer groups are better served by a channel.
const GROUP_LIMIT: usize = 4096;

/// Writes the int4 version of a checkpoint to `out`.
///
/// # Errors
/// [`Error::AlreadyQuantised`] for packed input, [`Error::NonFinite`] with file, tensor and index for NaN and infinities,
/// [`Error::Tensor`] for weights that are neither bf16 nor f32, and all errors of the writer.
pub fn run(checkpoint: &Checkpoint, out: &Path, options: &QuantizeOptions, context: &Context) -> Result<Report> {
    let plan = plan(&Parent::open(checkpoint)?, options)?;
    writer::execute(plan, Some(checkpoint), out, options.write, context)
}

/// What [`run`] writes.
pub fn plan(checkpoint: &Parent, options: &QuantizeOptions) -> Result<Plan> {
    check_strategy("group", options.strategy)?;
    check_strategy("head", options.head)?;
    let prefix = checkpoint.prefix();
    let mut strategies = Strategies::new();
    let mut ignore = Vec::new();
    let mut notes = Vec::new();
    let mut jobs = Vec::new();
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
        let wanted = if linear == Linear::Head { options.head } else { options.strategy };
        let strategy = fitting(wanted, inputs);
        if strategy != wanted {
            notes.push(format!(
                "{}: the group size does not divide its {inputs} inputs; it has one scale a row (strategy channel)",
                linear.module(prefix)
            ));
        }
        strategies.insert(linear, strategy);
        let reader = source.clone();
        let read = move |rows: Range<usize>, weights: &mut [f32], scratch: &mut Vec<u8>| {
            reader.read_f32(rows.start * inputs, weights, scratch)
        };
        jobs.extend(packed(linear, prefix, [out, inputs], strategy, arithmetic, read));
    }
    if checkpoint.config().quantization.is_some() {
        let path = checkpoint.dir().to_path_buf();
        return Err(Error::AlreadyQuantised { path, tensor: "quantization_config of config.json".into() });
    }
    if checkpoint.config().tie_word_embeddings {
        ignore.push("lm_head".into());
    }
    let mut config = Config::new(checkpoint);
    let value = quant_config::build(options.strategy, &strategies, &ignore);
    config.root()?.insert("quantization_config".into(), value);
    let knobs = json!({
        "bits": 4,
        "method": "rtn",
        "strategy": describe(options.strategy),
        "head": describe(options.head),
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

/// `group 128` or `channel`.
pub(crate) fn describe(strategy: Strategy) -> String {
    match strategy {
        Strategy::Group(size) => format!("group {size}"),
        Strategy::Channel => "channel".into(),
    }
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

/// The jobs that make a packed linear `[out, in]`. `read(rows, weights, scratch)` gives the rows as f32, finite.
pub(crate) fn packed(
    linear: Linear,
    prefix: &str,
    [out, inputs]: [usize; 2],
    strategy: Strategy,
    arithmetic: Arithmetic,
    read: impl Fn(Range<usize>, &mut [f32], &mut Vec<u8>) -> Result<()> + Send + Sync + 'static,
) -> [Job; 2] {
    let group = match strategy {
        Strategy::Group(size) => size,
        Strategy::Channel => inputs,
    };
    let groups = inputs.checked_div(group).unwrap_or(1);
    let bits = Bits::Four;
    let words = bits.words(inputs);
    let quantiser = ByRow { method: Method::Rtn, bits, group, arithmetic };
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
