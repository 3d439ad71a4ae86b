//! Reading tensors of the parent by ranges: from its files, or, in a recipe, from a plan that was not carried out.
//!
//! Bakes read with positional reads into small buffers, not through the memory map: a map of 16 GB counts as resident memory
//! while it is walked, and a file truncated under a map kills the process where a read returns an error.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::bf16;
use runtime::checkpoint::Checkpoint;
use safetensors::Dtype;

use crate::error::{Error, Result};
use crate::plan::{Job, Output, Work};
use crate::quant::{self, Arithmetic};

/// A tensor of a parent.
#[derive(Clone)]
pub struct Source {
    /// Full name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// The file that holds it; of a planned tensor, the parent's directory.
    pub path: PathBuf,
    data: Data,
}

#[derive(Clone)]
enum Data {
    /// `len` bytes of a file, which may have holes, from `offset` on.
    File { file: Arc<File>, offset: u64, len: u64, sparse: bool },
    /// An output of a job, made anew at every read.
    Planned { job: Arc<Job>, output: usize },
}

impl Source {
    /// Opens every tensor of a checkpoint, file by file in the order of their bytes.
    pub fn all(checkpoint: &Checkpoint) -> Result<Vec<Source>> {
        let mut files = HashMap::new();
        for (i, shard) in checkpoint.shards().iter().enumerate() {
            let file = File::open(&shard.path).map_err(Error::io(&shard.path, "open"))?;
            let sparse = file.metadata().is_ok_and(|m| m.blocks() * 512 < m.len());
            let places: HashMap<&str, _> = shard.header.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
            files.insert(&shard.path, (Arc::new(file), sparse, i, places));
        }
        let mut out = Vec::new();
        for tensor in checkpoint.tensors() {
            // Both lookups succeed: the checkpoint lists only tensors of its own shards.
            let Some((file, sparse, shard, places)) = files.get(&tensor.path) else { continue };
            let Some(info) = places.get(tensor.name.as_str()) else { continue };
            let start = checkpoint.shards()[*shard].header.data_start;
            out.push(Source {
                name: tensor.name,
                dtype: tensor.dtype,
                shape: tensor.shape,
                path: tensor.path,
                data: Data::File {
                    file: file.clone(),
                    offset: (start + info.begin) as u64,
                    len: (info.end - info.begin) as u64,
                    sparse: *sparse,
                },
            });
        }
        Ok(out)
    }

    /// An output of a job as a tensor of the next bake; `dir` is for messages. What the job copies is read where it lies.
    pub(crate) fn planned(job: &Arc<Job>, output: usize, dir: &Path) -> Source {
        let description = &job.outputs[output];
        if let Work::Copy(source) = &job.work {
            return Source { name: description.name.clone(), ..source.clone() };
        }
        Source {
            name: description.name.clone(),
            dtype: description.dtype,
            shape: description.shape.clone(),
            path: dir.to_path_buf(),
            data: Data::Planned { job: job.clone(), output },
        }
    }

    /// The job and output of a planned tensor.
    pub(crate) fn job(&self) -> Option<(&Arc<Job>, usize)> {
        match &self.data {
            Data::Planned { job, output } => Some((job, *output)),
            Data::File { .. } => None,
        }
    }

    /// Name, type and shape.
    pub fn output(&self) -> Output {
        Output::new(&self.name, self.dtype, &self.shape)
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match &self.data {
            Data::File { len, .. } => *len,
            Data::Planned { job, output } => job.outputs[*output].bytes(),
        }
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Rows: the first dimension (1 for a scalar).
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of a row.
    pub fn row_elements(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_elements() * self.dtype.bitsize() / 8
    }

    /// The open file and the position of the first byte, for copies inside the kernel; `None` for a planned tensor.
    pub(crate) fn place(&self) -> Option<(&File, u64)> {
        match &self.data {
            Data::File { file, offset, .. } => Some((file, *offset)),
            Data::Planned { .. } => None,
        }
    }

    /// The first part of `range` (bytes of the tensor) that may hold anything but zeros. What lies in a hole of the file is
    /// left out; an answer that the system does not give counts as data.
    pub(crate) fn data_in(&self, range: Range<usize>) -> Option<Range<usize>> {
        use rustix::fs::{SeekFrom, seek};
        if range.is_empty() {
            return None;
        }
        let Data::File { file, offset, len, sparse: true } = &self.data else { return Some(range) };
        let inside = |position: u64| (position.saturating_sub(*offset) as usize).clamp(range.start, range.end);
        // The file's own position moves, and nobody uses it: all reads name theirs.
        let start = match seek(&**file, SeekFrom::Data(offset + range.start as u64)) {
            Ok(position) => inside(position),
            // No data up to the end of the file; a file that has become shorter is for the read to report.
            Err(rustix::io::Errno::NXIO) if file.metadata().is_ok_and(|m| m.len() >= offset + len) => range.end,
            Err(_) => return Some(range),
        };
        let end = match seek(&**file, SeekFrom::Hole(offset + start as u64)) {
            Ok(position) => inside(position),
            Err(_) => range.end,
        };
        (start < end).then_some(start..end)
    }

    /// Fills `buf` from byte `at` of the tensor.
    pub fn read_at(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        match &self.data {
            Data::File { file, offset, .. } => {
                file.read_exact_at(buf, offset + at).map_err(Error::io(&self.path, "read"))
            }
            Data::Planned { job, output } => job.read_at(*output, at, buf),
        }
    }

    /// Fills `buf` with whole rows from row `first` on.
    pub fn read_rows(&self, first: usize, buf: &mut [u8]) -> Result<()> {
        self.read_at(first as u64 * self.row_bytes() as u64, buf)
    }

    /// Type and shape for messages.
    pub fn describe(&self) -> String {
        format!("{} {:?}", self.dtype, self.shape)
    }

    /// The error for a tensor that a bake cannot work on.
    pub fn wrong(&self, expected: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::Tensor {
            path: self.path.clone(),
            tensor: self.name.clone(),
            expected: expected.into(),
            found: self.describe(),
            hint: hint.into(),
        }
    }

    /// How the quantiser treats this element type; refuses all but bf16 and f32.
    pub fn arithmetic(&self) -> Result<Arithmetic> {
        match self.dtype {
            Dtype::BF16 => Ok(Arithmetic::Bf16),
            Dtype::F32 => Ok(Arithmetic::F32),
            _ => Err(self.wrong("BF16 or F32", "only bf16 and f32 weights can be quantised")),
        }
    }

    /// Reads elements `first..first + out.len()` of a bf16 or f32 tensor as f32 and refuses NaN and infinities.
    /// `scratch` is reused between calls.
    pub fn read_f32(&self, first: usize, out: &mut [f32], scratch: &mut Vec<u8>) -> Result<()> {
        let width = match self.arithmetic()? {
            Arithmetic::Bf16 => 2,
            Arithmetic::F32 => 4,
        };
        scratch.resize(out.len() * width, 0);
        self.read_at((first * width) as u64, scratch)?;
        if width == 2 {
            for (o, b) in out.iter_mut().zip(scratch.as_chunks::<2>().0) {
                *o = bf16::from_le_bytes(*b).to_f32();
            }
        } else {
            for (o, b) in out.iter_mut().zip(scratch.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        match quant::find_non_finite(out) {
            None => Ok(()),
            Some((index, value)) => Err(Error::NonFinite {
                path: self.path.clone(),
                tensor: self.name.clone(),
                index: first + index,
                value,
            }),
        }
    }

    /// The two numbers of a `weight_shape` tensor.
    pub fn read_pair(&self) -> Result<[i64; 2]> {
        let mut bytes = [0; 16];
        if self.dtype != Dtype::I64 || self.shape != [2] {
            return Err(self.wrong("I64 [2]", "a weight_shape tensor holds [out, in]"));
        }
        self.read_at(0, &mut bytes)?;
        let pair = bytes.as_chunks::<8>().0;
        Ok([i64::from_le_bytes(pair[0]), i64::from_le_bytes(pair[1])])
    }
}
