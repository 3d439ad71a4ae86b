//! A bake as data: which tensors the output has, how the bytes of each come about, and what the configuration becomes.
//!
//! Every bake is a function from a checkpoint to a [`Plan`]; [`crate::writer`] carries plans out. A plan is checked as a whole
//! before the first byte is written ([`crate::check`]), so no bake can produce a checkpoint whose tensors contradict its
//! configuration, whatever the bake's own mistakes are.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use safetensors::Dtype;
use serde_json::Value;

use crate::error::{Error, Result};
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
    /// Zeros, as a hole in the file: a shape that takes no disk.
    Hole,
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
    /// What it makes. All but `Rows` make exactly one.
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

    /// Fills `buf` with the bytes of an output from byte `at` on. Rows are made whole, so reads of whole rows waste nothing.
    pub(crate) fn read_at(&self, output: usize, at: u64, buf: &mut [u8]) -> Result<()> {
        match &self.work {
            Work::Copy(source) => source.read_at(at, buf),
            Work::Hole => {
                buf.fill(0);
                Ok(())
            }
            Work::Bytes(bytes) => {
                let from = at as usize;
                match bytes.get(from..from + buf.len()) {
                    Some(piece) => buf.copy_from_slice(piece),
                    None => return Err(Error::Inconsistent { problems: vec![self.too_short(output)] }),
                }
                Ok(())
            }
            Work::Rows { fill, .. } => {
                let width = self.outputs[output].row_bytes();
                if buf.is_empty() || width == 0 {
                    return Ok(());
                }
                let (first, end) = (at as usize / width, (at as usize + buf.len()).div_ceil(width));
                if end > self.outputs[output].rows() {
                    return Err(Error::Inconsistent { problems: vec![self.too_short(output)] });
                }
                if self.outputs.len() == 1 && (end - first) * width == buf.len() {
                    return fill(first..end, &mut [buf]);
                }
                let mut made: Vec<Vec<u8>> =
                    self.outputs.iter().map(|o| vec![0; o.row_bytes() * (end - first)]).collect();
                let mut pieces: Vec<&mut [u8]> = made.iter_mut().map(Vec::as_mut_slice).collect();
                fill(first..end, &mut pieces)?;
                let skip = at as usize - first * width;
                buf.copy_from_slice(&made[output][skip..skip + buf.len()]);
                Ok(())
            }
        }
    }

    fn too_short(&self, output: usize) -> String {
        format!("`{}` is read beyond its end", self.outputs[output].name)
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

/// Joins copies of planned tensors that one job makes together: scales and integers of a linear are then made in one go, not
/// once for each.
pub(crate) fn fuse(jobs: Vec<Job>) -> Vec<Job> {
    // Job -> for each of its outputs, the place of the copy.
    let mut copies: HashMap<*const Job, Vec<Option<usize>>> = HashMap::new();
    for (place, job) in jobs.iter().enumerate() {
        if let Work::Copy(source) = &job.work
            && let Some((made_by, output)) = source.job()
        {
            let places = copies.entry(Arc::as_ptr(made_by)).or_insert_with(|| vec![None; made_by.outputs.len()]);
            places[output] = Some(place);
        }
    }
    let mut names: HashMap<*const Job, Vec<String>> = HashMap::new();
    for (&job, places) in &copies {
        // All outputs, or else what is left out would be made for nothing.
        if let Some(places) = places.iter().copied().collect::<Option<Vec<usize>>>() {
            names.insert(job, places.iter().map(|&p| jobs[p].outputs[0].name.clone()).collect());
        }
    }
    let mut out = Vec::with_capacity(jobs.len());
    for job in jobs {
        let made_by = match &job.work {
            Work::Copy(source) => source.job().map(|(made_by, _)| made_by.clone()),
            _ => None,
        };
        let Some(made_by) = made_by
            .filter(|m| matches!(m.work, Work::Rows { .. }) && copies[&Arc::as_ptr(m)].iter().all(Option::is_some))
        else {
            out.push(job);
            continue;
        };
        // The first copy of a job stands for all of them.
        let Some(names) = names.remove(&Arc::as_ptr(&made_by)) else { continue };
        let outputs = made_by.outputs.iter().zip(names).map(|(o, name)| Output { name, ..o.clone() }).collect();
        let input_bytes = match &made_by.work {
            Work::Rows { input_bytes, .. } => *input_bytes,
            _ => 0,
        };
        let fill = move |rows: Range<usize>, buffers: &mut [&mut [u8]]| match &made_by.work {
            Work::Rows { fill, .. } => fill(rows, buffers),
            _ => Ok(()),
        };
        out.push(Job { outputs, work: Work::Rows { input_bytes, fill: Box::new(fill) } });
    }
    out
}
