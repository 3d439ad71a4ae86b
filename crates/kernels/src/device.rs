//! The device that runs the kernels of `kernels/`: buffers, launches and graphs behind one interface, so that the code that plans a step
//! is written once.
//!
//! | module | concept |
//! |---|---|
//! | [`probe`] | what GPU and driver this machine has |
//! | `cuda` | the NVIDIA driver |
//! | `emulated` | the same sources, run on the CPU (feature `emulator`, x86-64) |
//!
//! A [`Launch`] owns references to the buffers that it names, so a recorded [`Graph`] can never outlive them.

use std::sync::Arc;

mod cuda;
#[cfg(all(feature = "emulator", target_arch = "x86_64"))]
mod emulated;
mod probe;

#[cfg(all(feature = "emulator", target_arch = "x86_64"))]
pub use emulated::{Counts, Emulation, Traffic};
pub use probe::{CudaDevice, Probe, probe};

/// Most dynamic shared memory of a block on the smallest supported GPU (sm_86: 100 KiB an SM, of which 1 KiB is reserved).
pub const SHARED_BYTES: u32 = 99 << 10;

/// What went wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// This machine lacks what the device needs.
    #[error("{0}")]
    Unavailable(String),
    /// No memory for a buffer.
    #[error("no device memory for buffer {name}: {bytes} bytes")]
    Memory {
        /// The buffer.
        name: String,
        /// Its size.
        bytes: usize,
    },
    /// A copy that does not lie inside its buffer, or writes one that is constant.
    #[error("buffer {name} has {size} bytes{}; {bytes} at offset {offset} cannot be {verb}", if *.constant { " and is constant" } else { "" })]
    Range {
        /// The buffer.
        name: String,
        /// Its size in bytes.
        size: usize,
        /// Whether it may be written at all.
        constant: bool,
        /// First byte.
        offset: usize,
        /// How many.
        bytes: usize,
        /// `read` or `written`.
        verb: &'static str,
    },
    /// A copy that the driver refused.
    #[error("copying to or from buffer {name}: {reason}")]
    Copy {
        /// The buffer.
        name: String,
        /// What the driver said.
        reason: String,
    },
    /// A launch that the device cannot take.
    #[error("{launch}: {reason}")]
    Launch {
        /// Kernel, grid, block and shared memory.
        launch: String,
        /// What does not fit.
        reason: String,
    },
    /// A kernel did something that a GPU does not forgive, or was ended.
    #[error("{launch}: the emulator found\n{report}")]
    Kernel {
        /// Kernel, grid, block and shared memory.
        launch: String,
        /// One line a finding.
        report: String,
    },
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Name.
    pub name: String,
    /// Streaming multiprocessors: how many blocks a schedule plans for.
    pub multiprocessors: u32,
    /// Most dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Whether results come from a GPU.
    pub emulated: bool,
}

/// A device. Cheap to clone.
#[derive(Clone)]
pub struct Device(Arc<dyn Driver>);

/// What a kind of device does. Ranges are checked before they get here.
trait Driver: Send + Sync {
    fn properties(&self) -> Properties;
    /// Address of new memory; `contents`, where there are any, are all of it and final. `None` where there is no more.
    fn allocate(&self, name: &str, bytes: usize, contents: Option<&[u8]>) -> Option<u64>;
    fn release(&self, address: u64);
    fn write(&self, address: u64, from: &[u8]) -> Result<(), String>;
    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<(), String>;
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), String>;
    /// # Safety
    /// As for [`Device::launch`].
    unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError>;
    /// The device's own form of the launches; `None` where replaying is launching them.
    ///
    /// # Safety
    /// As for [`Device::launch`], for every replay.
    unsafe fn record(&self, launches: &[Launch]) -> Result<Option<Box<dyn Replay>>, DeviceError>;
    #[cfg(all(feature = "emulator", target_arch = "x86_64"))]
    fn as_emulated(&self) -> Option<&emulated::Emulated> {
        None
    }
}

/// A graph in a device's own form.
trait Replay: Send {
    fn replay(&self) -> Result<(), String>;
}

/// Memory of a device. Cheap to clone: all clones are the same memory, freed with the last one.
#[derive(Clone)]
pub struct Buffer(Arc<Allocation>);

struct Allocation {
    device: Device,
    name: String,
    address: u64,
    bytes: usize,
    constant: bool,
}

/// One argument of a kernel.
#[derive(Clone)]
pub enum Argument {
    /// The address of a byte of a buffer.
    Pointer(Buffer, usize),
    /// A 32-bit signed integer.
    I32(i32),
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 64-bit unsigned integer.
    U64(u64),
    /// An f32.
    F32(f32),
}

/// One launch of a kernel, complete.
#[derive(Clone)]
pub struct Launch {
    /// Name of the kernel in its .cu.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// All blocks run at once and may wait for each other.
    pub cooperative: bool,
    /// In the order of the kernel's parameters.
    pub arguments: Vec<Argument>,
}

/// Launches recorded once and replayed in order. What changes from replay to replay is read from device words.
pub struct Graph {
    // Before the launches, and so dropped before the buffers that they own.
    recorded: Option<Box<dyn Replay>>,
    device: Device,
    launches: Vec<Launch>,
}

impl Device {
    /// What this device is.
    pub fn properties(&self) -> Properties {
        self.0.properties()
    }

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
        Ok(Buffer(Arc::new(Allocation { device: self.clone(), name: name.into(), address, bytes, constant })))
    }

    /// Runs one kernel and waits for it.
    ///
    /// # Safety
    /// The arguments are what the kernel's parameters are, in type and order, and every access that the kernel makes with them lies inside
    /// the buffers. Typed launches establish that from shapes; on a checked emulated device a mistake is an error all the same.
    pub unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        self.check(launch)?;
        // SAFETY: the caller vouches for the arguments; the buffers are alive, since the launch owns references to them.
        unsafe { self.0.launch(launch) }
    }

    /// What can be known of a launch before it runs.
    fn check(&self, launch: &Launch) -> Result<(), DeviceError> {
        let refuse = |reason: String| Err(DeviceError::Launch { launch: launch.describe(), reason });
        let blocks: u64 = launch.grid.iter().map(|&n| u64::from(n)).product();
        if blocks == 0 || blocks > u64::from(u32::MAX) || launch.block == 0 {
            return refuse("a grid or a block without threads, or with too many".into());
        }
        if launch.shared_bytes > self.properties().shared_bytes {
            return refuse(format!("a block has at most {} bytes of shared memory", self.properties().shared_bytes));
        }
        for argument in &launch.arguments {
            if let Argument::Pointer(buffer, offset) = argument {
                if !std::ptr::addr_eq(Arc::as_ptr(&buffer.0.device.0), Arc::as_ptr(&self.0)) {
                    return refuse(format!("buffer {} belongs to another device", buffer.name()));
                }
                if *offset > buffer.bytes() {
                    return refuse(format!("offset {offset} is past the end of buffer {}", buffer.name()));
                }
            }
        }
        Ok(())
    }

    /// Records launches, to be replayed in this order.
    ///
    /// # Safety
    /// As for [`Device::launch`], for every launch and every replay.
    pub unsafe fn record(&self, launches: Vec<Launch>) -> Result<Graph, DeviceError> {
        launches.iter().try_for_each(|launch| self.check(launch))?;
        // SAFETY: the caller vouches for every replay; the graph owns the launches, and they the buffers.
        let recorded = unsafe { self.0.record(&launches) }?;
        Ok(Graph { recorded, device: self.clone(), launches })
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

    fn check(&self, offset: usize, bytes: usize, verb: &'static str) -> Result<(), DeviceError> {
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

    /// Copies bytes to the device.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, from.len(), "written")?;
        let done = self.0.device.0.write(self.0.address + offset as u64, from);
        done.map_err(|reason| self.failed(reason))
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) -> Result<(), DeviceError> {
        self.check(0, self.0.bytes, "written")?;
        let done = self.0.device.0.fill(self.0.address, byte, self.0.bytes);
        done.map_err(|reason| self.failed(reason))
    }

    /// Copies bytes from the device.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), DeviceError> {
        self.check(offset, to.len(), "read")?;
        let done = self.0.device.0.read(self.0.address + offset as u64, to);
        done.map_err(|reason| self.failed(reason))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.0.release(self.address);
    }
}

impl Argument {
    /// The parameter's bytes, and how many of them count.
    fn to_bytes(&self) -> ([u8; 8], u32) {
        let four = |b: [u8; 4]| ([b[0], b[1], b[2], b[3], 0, 0, 0, 0], 4);
        match self {
            Argument::Pointer(buffer, offset) => ((buffer.0.address + *offset as u64).to_le_bytes(), 8),
            Argument::U64(v) => (v.to_le_bytes(), 8),
            Argument::I32(v) => four(v.to_le_bytes()),
            Argument::U32(v) => four(v.to_le_bytes()),
            Argument::F32(v) => four(v.to_le_bytes()),
        }
    }
}

impl Launch {
    fn describe(&self) -> String {
        let [x, y, z] = self.grid;
        format!("{}<<<({x}, {y}, {z}), {}, {} bytes shared>>>", self.kernel, self.block, self.shared_bytes)
    }
}

impl Graph {
    /// How many launches one replay is.
    pub fn launches(&self) -> usize {
        self.launches.len()
    }

    /// Runs the launches in order and waits for the last.
    pub fn replay(&self) -> Result<(), DeviceError> {
        match &self.recorded {
            Some(recorded) => recorded.replay().map_err(|reason| DeviceError::Launch {
                launch: format!("a graph of {} launches", self.launches.len()),
                reason,
            }),
            // SAFETY: vouched for when they were recorded.
            None => self.launches.iter().try_for_each(|launch| unsafe { self.device.launch(launch) }),
        }
    }
}
