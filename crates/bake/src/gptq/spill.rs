//! Results that wait on disk: linears are quantised in the order of the computation, and written in the order of the file.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::solve::Solved;
use crate::error::{Error, Result};
use crate::method::ByRow;
use crate::quant;
use crate::roles::Linear;

/// Packed words and scales of linears, in a file without a name: it is gone when the process ends, however it ends.
#[derive(Default)]
pub struct Spill {
    file: Arc<OnceLock<File>>,
    bytes: u64,
}

/// Where the results of one linear stand in a [`Spill`]: all its words, then all its scales.
#[derive(Clone)]
pub struct Place {
    linear: Linear,
    file: Arc<OnceLock<File>>,
    words: u64,
    scales: u64,
    /// Bytes of a row of each.
    row: [usize; 2],
}

/// What messages call the file.
const NAME: &str = "temporary file of gptq";

impl Spill {
    /// Makes room for a linear `[rows, inputs]`.
    pub fn reserve(&mut self, linear: Linear, [rows, inputs]: [usize; 2], packing: &ByRow) -> Place {
        let row = [packing.bits.words(inputs) * 4, inputs.checked_div(packing.group).unwrap_or(1) * 2];
        let (words, scales) = (self.bytes, self.bytes + (rows * row[0]) as u64);
        self.bytes = scales + (rows * row[1]) as u64;
        Place { linear, file: self.file.clone(), words, scales, row }
    }

    /// Length of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes the file, in a directory.
    pub fn open(&self, dir: &Path) -> Result<()> {
        let file = tempfile::tempfile_in(dir).map_err(Error::io(dir, "make a temporary file in"))?;
        file.set_len(self.bytes).map_err(Error::io(dir, "extend a temporary file in"))?;
        // A second call would keep the first file, which is as good.
        let _ = self.file.set(file);
        Ok(())
    }
}

impl Place {
    /// Bytes of a row of words and scales.
    pub fn row_bytes(&self) -> usize {
        self.row.iter().sum()
    }

    /// Stores the results.
    pub fn put(&self, solved: &Solved, packing: &ByRow) -> Result<()> {
        let inputs = self.row[1] / 2 * packing.group;
        let mut words = vec![0u32; self.row[0] / 4];
        let mut bytes = Vec::with_capacity(solved.fields.len() / inputs.max(1) * self.row[0]);
        for fields in solved.fields.chunks_exact(inputs.max(1)) {
            quant::pack_row(fields, packing.bits, &mut words);
            bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        }
        let scales: Vec<u8> = solved.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        let file = self.file()?;
        file.write_all_at(&bytes, self.words).map_err(Error::io(Path::new(NAME), "write"))?;
        file.write_all_at(&scales, self.scales).map_err(Error::io(Path::new(NAME), "write"))
    }

    /// Fills two buffers with the words and the scales of some rows.
    pub fn read(&self, rows: Range<usize>, buffers: &mut [&mut [u8]]) -> Result<()> {
        let file = self.file()?;
        for ((buffer, begin), row) in buffers.iter_mut().zip([self.words, self.scales]).zip(self.row) {
            let at = begin + (rows.start * row) as u64;
            file.read_exact_at(buffer, at).map_err(Error::io(Path::new(NAME), "read"))?;
        }
        Ok(())
    }

    fn file(&self) -> Result<&File> {
        self.file.get().ok_or_else(|| Error::Uncalibrated { module: self.linear.module("") })
    }
}
