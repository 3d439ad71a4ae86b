//! A bake as data: which tensors the output has, how the bytes of each come about, and what the configuration becomes.
//!
//! Every bake is a function from a checkpoint to a [`Plan`]; [`crate::writer`] carries plans out. A plan is checked as a whole
//! before the first byte is written ([`crate::check`]), so no bake can produce a checkpoint whose tensors contradict its
//! configuration, whatever the bake's own mistakes are.

use std::ops::Range;

use safetensors::Dtype;
use serde_json::Value;

use crate::error::Result;
use crate::lineage::Lineage;
use crate::source::Source;

/// One tensor of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// Full name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
}

impl Output {
    /// A description.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: &[usize]) -> Output {
        Output { name: name.into(), dtype, shape: shape.to_vec() }
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8) as u64
    }

    /// Rows: the first dimension.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.shape.iter().skip(1).product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Makes the rows `rows` of a job's outputs: one buffer an output, each of `rows.len()` rows. Called from many threads, in any
/// order, once a row.
pub type Fill = dyn Fn(Range<usize>, &mut [&mut [u8]]) -> Result<()> + Send + Sync;

/// How bytes come about.
pub enum Work {
    /// The bytes of a tensor of the parent.
    Copy(Source),
    /// These bytes.
    Bytes(Vec<u8>),
    /// Row by row. All outputs of the job have the same number of rows.
    Rows {
        /// Bytes read or generated for a row, beside those written; decides the tile height.
        input_bytes: usize,
        /// The row function.
        fill: Box<Fill>,
    },
}

/// A piece of work that makes one or more tensors.
pub struct Job {
    /// What it makes. `Copy` and `Bytes` make exactly one.
    pub outputs: Vec<Output>,
    /// How.
    pub work: Work,
}

impl Job {
    /// A tensor of the parent under another or the same name.
    pub fn copy(source: &Source, name: impl Into<String>) -> Job {
        Job { outputs: vec![Output::new(name, source.dtype, &source.shape)], work: Work::Copy(source.clone()) }
    }

    /// A small tensor with given content.
    pub fn bytes(output: Output, bytes: Vec<u8>) -> Job {
        Job { outputs: vec![output], work: Work::Bytes(bytes) }
    }

    /// `weight_shape` of a packed linear.
    pub fn weight_shape(name: impl Into<String>, out: usize, inputs: usize) -> Job {
        let bytes = [out as i64, inputs as i64].iter().flat_map(|v| v.to_le_bytes()).collect();
        Job::bytes(Output::new(name, Dtype::I64, &[2]), bytes)
    }

    /// The rows `rows` of a tensor of the parent, in that order.
    pub fn select_rows(source: &Source, name: impl Into<String>, rows: Vec<usize>) -> Job {
        let mut shape = source.shape.clone();
        shape[0] = rows.len();
        let output = Output::new(name, source.dtype, &shape);
        let source = source.clone();
        let width = source.row_bytes();
        let fill = move |range: Range<usize>, buffers: &mut [&mut [u8]]| {
            let mut rest = &mut *buffers[0];
            let mut rows = &rows[range];
            // Consecutive rows are read in one call: a vocabulary that keeps most tokens has long runs.
            while let Some(&first) = rows.first() {
                let run = rows.iter().enumerate().take_while(|&(i, &r)| r == first + i).count();
                let (now, later) = rest.split_at_mut(run * width);
                source.read_rows(first, now)?;
                (rest, rows) = (later, &rows[run..]);
            }
            Ok(())
        };
        Job { outputs: vec![output], work: Work::Rows { input_bytes: 0, fill: Box::new(fill) } }
    }

    /// The byte columns `columns` of every row of a tensor of the parent; `shape` is the result's.
    pub fn select_columns(
        source: &Source,
        name: impl Into<String>,
        shape: &[usize],
        columns: Vec<Range<usize>>,
    ) -> Job {
        let output = Output::new(name, source.dtype, shape);
        let source = source.clone();
        let (width, out_width) = (source.row_bytes(), output.row_bytes());
        let fill = move |range: Range<usize>, buffers: &mut [&mut [u8]]| {
            let mut rows = vec![0; range.len() * width];
            source.read_rows(range.start, &mut rows)?;
            if width == 0 || out_width == 0 {
                return Ok(());
            }
            for (from, to) in rows.chunks_exact(width).zip(buffers[0].chunks_exact_mut(out_width)) {
                let mut at = 0;
                for c in &columns {
                    to[at..at + c.len()].copy_from_slice(&from[c.clone()]);
                    at += c.len();
                }
            }
            Ok(())
        };
        Job { outputs: vec![output], work: Work::Rows { input_bytes: width, fill: Box::new(fill) } }
    }
}

/// A whole bake.
pub struct Plan {
    /// Jobs, in the order of the parent's tensors.
    pub jobs: Vec<Job>,
    /// `config.json` of the output.
    pub config: Value,
    /// What stands before the text model's tensor names.
    pub prefix: String,
    /// Files made by this bake, beside the configuration, by name.
    pub files: Vec<(String, Vec<u8>)>,
    /// Rows of the keepset that is copied from the parent.
    pub inherited_keepset: Option<usize>,
    /// Where the output comes from.
    pub lineage: Lineage,
}
