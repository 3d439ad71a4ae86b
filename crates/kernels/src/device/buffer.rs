//! Memory that kernels reach.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use super::{Argument, Device, DeviceError};

/// Memory of a device. Cheap to clone: all clones are the same memory, freed with the last one.
#[derive(Clone)]
pub struct Buffer(pub(super) Arc<Allocation>);

pub(super) struct Allocation {
    pub(super) device: Device,
    pub(super) name: String,
    pub(super) address: u64,
    pub(super) bytes: usize,
    pub(super) constant: bool,
    /// Where the host sees it, if it is the host's.
    host: Option<*mut u32>,
}

// SAFETY: `host` is memory that no thread owns and that is only reached through atomics.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

/// Words of the host's memory that kernels read and write while the host does: how a graph hands out tokens without being waited for.
///
/// A kernel writes the data, then `fence_system()`, then the word that says so; the host loads that word, then the data.
pub struct Pinned {
    buffer: Buffer,
}

impl Device {
    /// Memory that nobody has written yet. `name` is what errors call it.
    pub fn allocate(&self, name: &str, bytes: usize) -> Result<Buffer, DeviceError> {
        self.buffer(name, bytes, None)
    }

    /// Memory with contents that never change, such as weights.
    pub fn constant(&self, name: &str, contents: &[u8]) -> Result<Buffer, DeviceError> {
        self.buffer(name, contents.len(), Some(contents))
    }

    fn buffer(&self, name: &str, bytes: usize, contents: Option<&[u8]>) -> Result<Buffer, DeviceError> {
        let address = self.0.allocate(name, bytes, contents);
        let address = address.ok_or_else(|| DeviceError::Memory { name: name.into(), bytes })?;
        let constant = contents.is_some();
        let device = self.clone();
        Ok(Buffer(Arc::new(Allocation { device, name: name.into(), address, bytes, constant, host: None })))
    }

    /// Zeroed words of the host that kernels reach.
    pub fn pinned(&self, name: &str, words: usize) -> Result<Pinned, DeviceError> {
        let bytes = words * 4;
        let (address, host) =
            self.0.allocate_pinned(name, bytes).ok_or_else(|| DeviceError::Memory { name: name.into(), bytes })?;
        let (device, name) = (self.clone(), name.into());
        let allocation = Allocation { device, name, address, bytes, constant: false, host: Some(host) };
        Ok(Pinned { buffer: Buffer(Arc::new(allocation)) })
    }
}

impl Buffer {
    /// What errors call it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// This buffer from byte `offset` on, as an argument.
    pub fn at(&self, offset: usize) -> Argument {
        Argument::Pointer(self.clone(), offset)
    }

    /// Fails where these bytes are not this buffer's, or are to be written and constant.
    pub(super) fn check(&self, offset: usize, bytes: usize, verb: &'static str) -> Result<(), DeviceError> {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.0.bytes);
        if fits && !(self.0.constant && verb == "written") {
            return Ok(());
        }
        let Allocation { name, bytes: size, constant, .. } = &*self.0;
        Err(DeviceError::Range { name: name.clone(), size: *size, constant: *constant, offset, bytes, verb })
    }

    fn failed(&self, reason: String) -> DeviceError {
        DeviceError::Copy { name: self.name().into(), reason }
    }

    /// Copies bytes to the device, after everything that it was asked to do.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, from.len(), "written")?;
        let done = self.0.device.0.write(self.0.address + offset as u64, from);
        done.map_err(|reason| self.failed(reason))
    }

    /// Sets every byte, after everything that the device was asked to do.
    pub fn fill(&self, byte: u8) -> Result<(), DeviceError> {
        self.check(0, self.0.bytes, "written")?;
        let done = self.0.device.0.fill(self.0.address, byte, self.0.bytes);
        done.map_err(|reason| self.failed(reason))
    }

    /// Copies bytes from the device, after everything that it was asked to do.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), DeviceError> {
        self.check(offset, to.len(), "read")?;
        let done = self.0.device.0.read(self.0.address + offset as u64, to);
        done.map_err(|reason| self.failed(reason))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.0.release(self.address, self.host);
    }
}

impl Pinned {
    /// As kernels and copies see it.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// How many words.
    pub fn words(&self) -> usize {
        self.buffer.bytes() / 4
    }

    fn word(&self, index: usize, verb: &'static str) -> Result<&AtomicU32, DeviceError> {
        self.buffer.check(index.saturating_mul(4), 4, verb)?;
        let Some(host) = self.buffer.0.host else {
            return Err(DeviceError::Copy { name: self.buffer.name().into(), reason: "it is not the host's".into() });
        };
        // SAFETY: inside of the allocation, which lives as long as `self`, is aligned, and is never reached but through atomics.
        Ok(unsafe { AtomicU32::from_ptr(host.add(index)) })
    }

    /// The word now. What a kernel wrote before it, with a fence between, is seen by later loads.
    pub fn load(&self, index: usize) -> Result<u32, DeviceError> {
        Ok(self.word(index, "read")?.load(Ordering::Acquire))
    }

    /// Sets a word. Kernels that start later see it; one that polls sees it at some time.
    pub fn store(&self, index: usize, value: u32) -> Result<(), DeviceError> {
        self.word(index, "written")?.store(value, Ordering::Release);
        Ok(())
    }
}
