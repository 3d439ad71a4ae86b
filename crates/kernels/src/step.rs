//! What a decode step launches beside matrix products, typed: shapes are checked before anything runs.
//!
//! | module | concept |
//! |---|---|
//! | [`kv`] | cached keys and values of all layers, and the side slots of branches |
//! | [`attention`] | attention of 1 to 16 rows (`kernels/attention.cuh`) |
//! | [`rows`] | embeddings, norms, rotary embedding and append, gated products (`kernels/rows.cuh`) |
//! | [`decide`] | best tokens, acceptance, the next step's start (`kernels/decide.cuh`) |
//! | [`layer`] | a decoder layer's launches, in order |
//! | [`draft`] | the drafter's passes, a kernel a phase or one persistent kernel (`kernels/draft.cuh`) |
//!
//! A step's rows stand in a table on the device ([`Rows`]), so that one recorded graph serves every length: a row is its position and
//! where its own key and value are. Chain and branch differ in nothing else.

use crate::device::{Argument, Buffer, Device, DeviceError};

pub mod attention;
pub mod decide;
pub mod draft;
pub mod kv;
pub mod layer;
pub mod rows;

/// Most rows of a step.
pub const MOST_ROWS: usize = 16;

/// Why something cannot be launched.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The device said no.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A number that the kernels do not take.
    #[error("{what} is {found}; the kernels take {expected}")]
    Shape {
        /// Which number.
        what: &'static str,
        /// What is possible.
        expected: String,
        /// What was asked for.
        found: usize,
    },
    /// A buffer that is too short.
    #[error("buffer {name} has {found} bytes; {what} needs {expected}")]
    Short {
        /// The buffer.
        name: String,
        /// Who needs it.
        what: &'static str,
        /// Bytes needed.
        expected: usize,
        /// Bytes there.
        found: usize,
    },
}

/// `Ok` where `ok`, or the error that `what` is `found` and not `expected`.
pub(crate) fn require(
    ok: bool,
    what: &'static str,
    found: usize,
    expected: impl Into<String>,
) -> Result<(), StepError> {
    if ok { Ok(()) } else { Err(StepError::Shape { what, expected: expected.into(), found }) }
}

/// Refuses numbers of rows that no launch takes.
fn require_rows(rows: usize) -> Result<(), StepError> {
    require((1..=MOST_ROWS).contains(&rows), "rows", rows, format!("1 to {MOST_ROWS}"))
}

/// Refuses buffers that `what` would read or write past the end of.
fn require_bytes(what: &'static str, needs: &[(&Buffer, usize)]) -> Result<(), StepError> {
    for &(buffer, expected) in needs {
        if buffer.bytes() < expected {
            return Err(StepError::Short { name: buffer.name().into(), what, expected, found: buffer.bytes() });
        }
    }
    Ok(())
}

/// A count or a size as an argument.
fn int(value: usize) -> Argument {
    Argument::I32(value as i32)
}

/// Where a row's own key and value are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Own {
    /// In the cache at its position: a row of the chain.
    Cached,
    /// In this side slot: a branch.
    Side(usize),
    /// Nowhere: a drafter's query, which sees cached positions only.
    None,
}

/// The table of a step's rows on the device: `[16]` pairs of position and side slot.
#[derive(Clone)]
pub struct Rows(Buffer);

impl Rows {
    /// An empty table.
    pub fn new(device: &Device) -> Result<Rows, DeviceError> {
        Ok(Rows(device.allocate("rows", MOST_ROWS * 8)?))
    }

    /// Writes rows (position, own key) from the host. A row at position p sees the cached positions before p.
    ///
    /// # Errors
    /// [`StepError::Shape`] for more than 16 rows, or a position or a side slot that cannot be.
    pub fn set(&self, rows: &[(usize, Own)]) -> Result<(), StepError> {
        require_rows(rows.len())?;
        let mut bytes = Vec::with_capacity(rows.len() * 8);
        for &(position, own) in rows {
            require(position < 1 << 30, "position", position, "less than 2^30")?;
            let slot = match own {
                Own::Cached => -1,
                Own::Side(slot) => {
                    require(slot < MOST_ROWS, "side slot", slot, format!("0 to {}", MOST_ROWS - 1))?;
                    slot as i32
                }
                Own::None => -2,
            };
            bytes.extend((position as i32).to_le_bytes());
            bytes.extend(slot.to_le_bytes());
        }
        Ok(self.0.write(0, &bytes)?)
    }

    /// The table, for kernels.
    pub fn buffer(&self) -> &Buffer {
        &self.0
    }
}
