//! The emulator of `kernels/emulator`, reached over its C interface.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr::{NonNull, null},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{Argument, Buffer, Command, Device, DeviceError, Driver, Handle, Launch, Properties, SHARED_BYTES};

/// L2 cache of an A10G.
const L2_BYTES: usize = 6 << 20;

/// The C side's device.
#[repr(C)]
struct Machine {
    _private: [u8; 0],
}

#[repr(C)]
struct RawLaunch {
    kernel: *const c_char,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    arguments: *const *const c_void,
    argument_bytes: *const u32,
    argument_count: u32,
    checked: u32,
    cooperative: u32,
    seed: u64,
    abort_after: u64,
}

// Declared in kernels/emulator/abi.cpp, which says what each does.
unsafe extern "C" {
    safe fn emulator_supported() -> c_int;
    safe fn emulator_new() -> *mut Machine;
    fn emulator_free(device: *mut Machine);
    fn emulator_allocate(
        device: *mut Machine,
        bytes: usize,
        name: *const c_char,
        constant: *const c_void,
    ) -> *mut c_char;
    fn emulator_release(device: *mut Machine, data: *mut c_char) -> c_int;
    fn emulator_write(device: *mut Machine, at: *mut c_char, from: *const c_void, bytes: usize) -> c_int;
    fn emulator_fill(device: *mut Machine, at: *mut c_char, byte: c_int, bytes: usize) -> c_int;
    fn emulator_read(device: *mut Machine, at: *const c_char, to: *mut c_void, bytes: usize) -> c_int;
    fn emulator_launch(device: *mut Machine, launch: *const RawLaunch, counts: *mut Counts) -> c_int;
    fn emulator_report(device: *mut Machine) -> *const c_char;
    fn emulator_traffic(device: *mut Machine, data: *const c_char, read: *mut u64, written: *mut u64) -> c_int;
}

/// How an emulated device runs kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Emulation {
    /// Every access is checked and counted. Several times slower.
    pub checked: bool,
    /// 0: threads and blocks run in order. Else: a schedule of its own for every value, threads preempted at accesses (checked
    /// launches only).
    pub seed: u64,
    /// Ends each launch at this access, as a fault would (checked launches only); 0: never.
    pub abort_after: u64,
    /// What [`Properties::multiprocessors`] says.
    pub multiprocessors: u32,
}

impl Default for Emulation {
    /// Checked, in order, with the 80 multiprocessors of an A10G.
    fn default() -> Emulation {
        Emulation { checked: true, seed: 0, abort_after: 0, multiprocessors: 80 }
    }
}

/// What one launch did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    /// Threads of the grid.
    pub threads: u64,
    /// Loads, stores, copies, atomics, warp operations and barriers, one a thread (plain loads and stores are seen in checked launches
    /// only). Arithmetic is not seen; `kernels/resources.json` counts instructions.
    pub operations: u64,
    /// Matrix products (mma), one a warp.
    pub products: u64,
    /// Barriers of a block, one a block.
    pub barriers: u64,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u64,
}

/// Bytes that one checked launch moved between global memory and its threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Read, by loads and asynchronous copies.
    pub read: u64,
    /// Written.
    pub written: u64,
}

pub(super) struct Emulated(Mutex<State>);

struct State {
    handle: NonNull<Machine>,
    emulation: Emulation,
    alteration: Option<Alteration>,
    counts: Counts,
}

/// What becomes of a launch before it runs: a mistake that a test plants.
pub type Alteration = Box<dyn Fn(&mut Launch) + Send>;

/// Other kernels in place of some, with their arguments.
pub fn exchange(kernels: &'static [(&'static str, &'static str)]) -> Alteration {
    Box::new(move |launch| {
        if let Some((_, other)) = kernels.iter().find(|(kernel, _)| *kernel == launch.kernel) {
            launch.kernel = other;
        }
    })
}

// SAFETY: the C side keeps no state outside of its device but thread-locals that live for one launch; the mutex admits one thread.
unsafe impl Send for State {}

impl Drop for State {
    fn drop(&mut self) {
        // SAFETY: made by `emulator_new`, freed once.
        unsafe { emulator_free(self.handle.as_ptr()) }
    }
}

impl Device {
    /// The CPU, running the CUDA sources. Needs AVX2, FMA and F16C.
    pub fn emulated(emulation: Emulation) -> Result<Device, DeviceError> {
        if emulator_supported() == 0 {
            return Err(DeviceError::Unavailable("the emulator needs a CPU with AVX2, FMA and F16C".into()));
        }
        let Some(handle) = NonNull::new(emulator_new()) else {
            return Err(DeviceError::Unavailable("the emulator cannot reserve 35 GiB of addresses".into()));
        };
        let state = State { handle, emulation, alteration: None, counts: Counts::default() };
        Ok(Device(Arc::new(Emulated(Mutex::new(state)))))
    }

    /// Changes how an emulated device runs the next launches; `false` on a GPU.
    pub fn emulate(&self, emulation: Emulation) -> bool {
        self.0.as_emulated().map(|e| e.state().emulation = emulation).is_some()
    }

    /// Changes every further launch of an emulated device before it runs, so that a test of launches can be seen to fail; `None` ends that.
    /// `false` on a GPU.
    ///
    /// # Safety
    /// As for [`Device::launch`], of what the launches become. A checked device makes wrong accesses errors.
    pub unsafe fn alter(&self, alteration: Option<Alteration>) -> bool {
        // The one before is dropped without the lock: it may own a buffer of this device.
        self.0.as_emulated().map(|e| std::mem::replace(&mut e.state().alteration, alteration)).is_some()
    }

    /// What the last launch did; nothing on a GPU.
    pub fn counts(&self) -> Option<Counts> {
        self.0.as_emulated().map(|e| e.state().counts)
    }
}

impl Buffer {
    /// What the last launch moved of this buffer; nothing on a GPU.
    pub fn traffic(&self) -> Option<Traffic> {
        let e = self.0.device.0.as_emulated()?;
        let mut traffic = Traffic::default();
        let handle = e.state().handle.as_ptr();
        // SAFETY: a live buffer of this device; the counters outlive the call.
        let known = unsafe {
            emulator_traffic(handle, self.0.address as *const c_char, &mut traffic.read, &mut traffic.written)
        };
        (known != 0).then_some(traffic)
    }
}

impl Emulated {
    // A panic while the lock is held leaves no half-done state on the C side.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Safety
    /// As for [`Device::launch`].
    unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        let mut altered = launch.clone();
        let mut state = self.state();
        if let Some(alteration) = &state.alteration {
            alteration(&mut altered);
        }
        let launch = &altered;
        // Every argument as the bytes that the kernel's parameter has.
        let values: Vec<([u8; 8], u32)> = launch.arguments.iter().map(Argument::to_bytes).collect();
        let pointers: Vec<*const c_void> = values.iter().map(|(value, _)| value.as_ptr().cast()).collect();
        let sizes: Vec<u32> = values.iter().map(|&(_, size)| size).collect();
        let fail = |reason: &str| DeviceError::Launch { launch: launch.describe(), reason: reason.into() };
        let kernel = CString::new(launch.kernel).map_err(|_| fail("a name with a NUL"))?;

        let emulation = state.emulation;
        let raw = RawLaunch {
            kernel: kernel.as_ptr(),
            grid: launch.grid,
            block: [launch.block, 1, 1],
            shared_bytes: launch.shared_bytes,
            arguments: pointers.as_ptr(),
            argument_bytes: sizes.as_ptr(),
            argument_count: launch.arguments.len() as u32,
            checked: emulation.checked.into(),
            cooperative: launch.cooperative.into(),
            seed: emulation.seed,
            abort_after: emulation.abort_after,
        };
        let handle = state.handle.as_ptr();
        // SAFETY: all pointers outlive the call; the caller vouches for what they mean to the kernel.
        let outcome = unsafe { emulator_launch(handle, &raw, &mut state.counts) };
        match outcome {
            0 => Ok(()),
            1 => Err(fail("no such kernel")),
            2 => Err(fail("the kernel takes other arguments, in number or in size")),
            3 => Err(fail("more threads than the kernel's launch bound")),
            4 => Err(fail("no memory for the stacks or the shared memory of so many threads")),
            _ => {
                // SAFETY: a string of the device, which is locked.
                let report = unsafe { CStr::from_ptr(emulator_report(handle)) }.to_string_lossy().into_owned();
                Err(DeviceError::Kernel { launch: launch.describe(), report })
            }
        }
    }
}

/// What the C side says of a copy: it checks ranges once more.
fn accepted(done: c_int) -> Result<(), String> {
    if done != 0 { Ok(()) } else { Err("the emulator has no such range".into()) }
}

impl Driver for Emulated {
    fn properties(&self) -> Properties {
        Properties {
            name: "emulator".into(),
            compute_capability: None,
            multiprocessors: self.state().emulation.multiprocessors,
            shared_bytes: SHARED_BYTES,
            l2_bytes: L2_BYTES,
            memory_bytes: None,
            bus_gb_s: None,
            driver: None,
            emulated: true,
        }
    }

    fn allocate(&self, name: &str, bytes: usize, contents: Option<&[u8]>) -> Option<u64> {
        let name = CString::new(name.replace('\0', "?")).ok()?;
        let contents = contents.map_or(null(), |c| c.as_ptr().cast());
        // SAFETY: the name is copied; `contents`, where there are any, are `bytes` long.
        let data = unsafe { emulator_allocate(self.state().handle.as_ptr(), bytes, name.as_ptr(), contents) };
        (!data.is_null()).then_some(data as u64)
    }

    fn allocate_pinned(&self, name: &str, bytes: usize) -> Option<(u64, *mut u32)> {
        // All of it is the host's memory.
        let address = self.allocate(name, bytes, None)?;
        self.fill(address, 0, bytes).ok()?;
        Some((address, address as *mut u32))
    }

    fn release(&self, address: u64, _host: Option<*mut u32>) {
        // SAFETY: releases what `allocate` gave; the C side checks that.
        unsafe { emulator_release(self.state().handle.as_ptr(), address as *mut c_char) };
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), String> {
        // SAFETY: the range lies in a live buffer that may be written, checked by the caller and again on the C side.
        let done = unsafe {
            emulator_write(self.state().handle.as_ptr(), address as *mut c_char, from.as_ptr().cast(), from.len())
        };
        accepted(done)
    }

    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<(), String> {
        // SAFETY: as for `write`.
        let done =
            unsafe { emulator_fill(self.state().handle.as_ptr(), address as *mut c_char, c_int::from(byte), bytes) };
        accepted(done)
    }

    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), String> {
        // SAFETY: as for `write`.
        let done = unsafe {
            emulator_read(self.state().handle.as_ptr(), address as *const c_char, to.as_mut_ptr().cast(), to.len())
        };
        accepted(done)
    }

    fn open_stream(&self) -> Result<Handle, String> {
        Ok(0)
    }

    fn close_stream(&self, _stream: Handle) {}

    unsafe fn enqueue(&self, _stream: Handle, command: &Command) -> Result<(), DeviceError> {
        let done = match command {
            // SAFETY: passed on.
            Command::Launch(launch) => return unsafe { self.launch(launch) },
            Command::Fill { buffer, offset, bytes, byte } => {
                self.fill(buffer.0.address + *offset as u64, *byte, *bytes)
            }
            Command::Copy { from, from_offset, to, to_offset, bytes } => {
                let mut through = vec![0; *bytes];
                self.read(from.0.address + *from_offset as u64, &mut through)
                    .and_then(|()| self.write(to.0.address + *to_offset as u64, &through))
            }
        };
        done.map_err(|reason| DeviceError::Launch { launch: command.describe(), reason })
    }

    fn wait(&self, _stream: Handle) -> Result<(), String> {
        Ok(())
    }

    fn record_event(&self, _stream: Handle) -> Result<Handle, String> {
        Ok(0)
    }

    fn close_event(&self, _event: Handle) {}

    fn wait_event(&self, _stream: Handle, _event: Handle) -> Result<(), String> {
        Ok(())
    }

    fn event_done(&self, _event: Handle) -> Result<bool, String> {
        Ok(true)
    }

    fn event_ms(&self, _from: Handle, _to: Handle) -> Result<Option<f64>, String> {
        Ok(None)
    }

    unsafe fn record(&self, _commands: &[Command]) -> Result<Option<Handle>, DeviceError> {
        Ok(None)
    }

    fn replay(&self, _stream: Handle, _graph: Handle) -> Result<(), String> {
        Err("an emulated graph is its commands".into())
    }

    fn close_graph(&self, _graph: Handle) {}

    fn as_emulated(&self) -> Option<&Emulated> {
        Some(self)
    }
}
