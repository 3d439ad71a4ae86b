//! The device that runs the kernels of `kernels/`: buffers, launches, streams and graphs behind one interface, so that the code that plans a
//! step is written once.
//!
//! | module | concept |
//! |---|---|
//! | [`probe`] | what GPU and driver this machine has |
//! | `images` | the machine code that was built into this program |
//! | `buffer` | memory: of the device, constant, or of the host and pinned |
//! | `command` | launches, fills and copies, checked before they run |
//! | `stream` | what runs in order and is not waited for: streams, events, graphs |
//! | `cuda` | the NVIDIA driver |
//! | `emulated` | the same sources, run on the CPU (feature `emulator`, x86-64) |
//!
//! What always holds: a [`Launch`] owns references to the buffers that it names, so a recorded [`Graph`] can never outlive them; memory is
//! given back, and read or written by the host, only after the device has done everything that it was asked to.

use std::sync::Arc;

mod buffer;
mod command;
mod cuda;
#[cfg(all(feature = "emulator", target_arch = "x86_64"))]
mod emulated;
mod images;
mod probe;
mod stream;

pub use buffer::{Buffer, Pinned};
pub use command::{Argument, Command, Launch};
#[cfg(all(feature = "emulator", target_arch = "x86_64"))]
pub use emulated::{Alteration, Counts, Emulation, Traffic, exchange};
pub use images::{Image, Target, images};
pub use probe::{CudaDevice, OLDEST_CAPABILITY, Probe, probe};
pub use stream::{Event, Graph, Stream};

/// Most dynamic shared memory of a block on the smallest supported GPU (sm_86: 100 KiB an SM, of which 1 KiB is reserved).
pub const SHARED_BYTES: u32 = 99 << 10;

/// What went wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// This machine, or this build of the program, lacks what the device needs.
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
    /// A launch, a graph or another command that the device cannot take, or that failed while it ran.
    #[error("{launch}: {reason}")]
    Launch {
        /// Kernel, grid, block, shared memory and arguments.
        launch: String,
        /// What does not fit.
        reason: String,
    },
    /// A kernel did something that a GPU does not forgive, or was ended.
    #[error("{launch}: the emulator found\n{report}")]
    Kernel {
        /// Kernel, grid, block, shared memory and arguments.
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
    /// Compute capability, for example (8, 6); `None` of the emulator, which has none.
    pub compute_capability: Option<(u32, u32)>,
    /// Streaming multiprocessors: how many blocks a schedule plans for.
    pub multiprocessors: u32,
    /// Most dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// L2 cache in bytes. The emulator says what an A10G has.
    pub l2_bytes: usize,
    /// Memory in bytes; `None` of the emulator.
    pub memory_bytes: Option<usize>,
    /// What width and clock of the memory bus allow, in GB/s (10^9 bytes a second); `None` of the emulator.
    pub bus_gb_s: Option<u32>,
    /// CUDA version of the driver, for example (12, 4); `None` of the emulator.
    pub driver: Option<(i32, i32)>,
    /// Whether results come from the CPU.
    pub emulated: bool,
}

/// A device. Cheap to clone.
#[derive(Clone)]
pub struct Device(Arc<dyn Driver>);

/// A stream, an event or a graph in a device's own form.
type Handle = u64;

/// What a kind of device does. Ranges are checked before they get here, and handles belong to the device that gave them.
trait Driver: Send + Sync {
    fn properties(&self) -> Properties;
    /// Address of new memory; `contents`, where there are any, are all of it and final. `None` where there is no more.
    fn allocate(&self, name: &str, bytes: usize, contents: Option<&[u8]>) -> Option<u64>;
    /// Zeroed memory of the host, a multiple of 4 bytes: its address for kernels, and for the host.
    fn allocate_pinned(&self, name: &str, bytes: usize) -> Option<(u64, *mut u32)>;
    /// Waits for the device and gives back what either of the two above gave.
    fn release(&self, address: u64, host: Option<*mut u32>);
    // These three wait for everything that the device was asked to do.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), String>;
    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<(), String>;
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), String>;

    /// A stream besides the device's own one, which is 0.
    fn open_stream(&self) -> Result<Handle, String>;
    /// Waits for it and closes it.
    fn close_stream(&self, stream: Handle);
    /// # Safety
    /// As for [`Device::launch`]; the buffers live until the stream was waited for.
    unsafe fn enqueue(&self, stream: Handle, command: &Command) -> Result<(), DeviceError>;
    fn wait(&self, stream: Handle) -> Result<(), String>;

    /// An event behind everything that was enqueued on the stream.
    fn record_event(&self, stream: Handle) -> Result<Handle, String>;
    fn close_event(&self, event: Handle);
    fn wait_event(&self, stream: Handle, event: Handle) -> Result<(), String>;
    fn event_done(&self, event: Handle) -> Result<bool, String>;
    /// Milliseconds between two events that have happened; `None` where time means nothing.
    fn event_ms(&self, from: Handle, to: Handle) -> Result<Option<f64>, String>;

    /// The device's own form of the commands; `None` where replaying is enqueueing them.
    ///
    /// # Safety
    /// As for `enqueue`, for every replay.
    unsafe fn record(&self, commands: &[Command]) -> Result<Option<Handle>, DeviceError>;
    fn replay(&self, stream: Handle, graph: Handle) -> Result<(), String>;
    /// Waits for the device and forgets the graph.
    fn close_graph(&self, graph: Handle);

    #[cfg(all(feature = "emulator", target_arch = "x86_64"))]
    fn as_emulated(&self) -> Option<&emulated::Emulated> {
        None
    }
}

/// Which kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The first supported GPU.
    Cuda,
    /// The emulator.
    Emulated,
}

impl Device {
    /// A device of that kind, with the kernels that were built into this program.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`], with what is missing and what to do.
    pub fn open(backend: Backend) -> Result<Device, DeviceError> {
        match backend {
            Backend::Cuda => Device::gpu(),
            #[cfg(all(feature = "emulator", target_arch = "x86_64"))]
            Backend::Emulated => Device::emulated(Emulation::default()),
            #[cfg(not(all(feature = "emulator", target_arch = "x86_64")))]
            Backend::Emulated => Err(DeviceError::Unavailable(
                "this build has no emulator; build with `--features emulator` on x86-64 (it needs a C++ compiler)"
                    .into(),
            )),
        }
    }

    /// The first supported GPU, with the machine code that was built into this program.
    fn gpu() -> Result<Device, DeviceError> {
        let devices = match probe() {
            Probe::Available { devices, .. } => devices,
            Probe::Unavailable { reason } => return Err(DeviceError::Unavailable(reason)),
        };
        let Some(device) = devices.iter().find(|d| d.supported()) else {
            return Err(DeviceError::Unavailable("the NVIDIA driver reports no supported device".into()));
        };
        let (major, minor) = device.compute_capability;
        let images = images::for_capability(major as u32, minor as u32)?;
        Device::cuda(device.ordinal, &images)
    }

    /// What this device is.
    pub fn properties(&self) -> Properties {
        self.0.properties()
    }

    fn same(&self, other: &Device) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(&other.0))
    }

    /// Runs one kernel and waits for it.
    ///
    /// # Safety
    /// The arguments are what the kernel's parameters are, in type and order, and every access that the kernel makes with them lies inside
    /// the buffers. Typed launches establish that from shapes; on a checked emulated device a mistake is an error all the same.
    pub unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        let command = Command::Launch(launch.clone());
        command.check(self)?;
        // SAFETY: the caller vouches for the arguments; the buffers are alive, since the command owns references to them.
        unsafe { self.0.enqueue(0, &command) }?;
        self.0.wait(0).map_err(|reason| DeviceError::Launch { launch: command.describe(), reason })
    }
}
