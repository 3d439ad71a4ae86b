//! The emulator of `kernels/emulator`, reached over its C interface.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr::{NonNull, null},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{Argument, Buffer, Device, DeviceError, Driver, Launch, Properties, Replay, SHARED_BYTES};

/// The C side's device.
#[repr(C)]
struct Handle {
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
    safe fn emulator_new() -> *mut Handle;
    fn emulator_free(device: *mut Handle);
    fn emulator_allocate(
        device: *mut Handle,
        bytes: usize,
        name: *const c_char,
        constant: *const c_void,
    ) -> *mut c_char;
    fn emulator_release(device: *mut Handle, data: *mut c_char) -> c_int;
    fn emulator_write(device: *mut Handle, at: *mut c_char, from: *const c_void, bytes: usize) -> c_int;
    fn emulator_fill(device: *mut Handle, at: *mut c_char, byte: c_int, bytes: usize) -> c_int;
    fn emulator_read(device: *mut Handle, at: *const c_char, to: *mut c_void, bytes: usize) -> c_int;
    fn emulator_launch(device: *mut Handle, launch: *const RawLaunch, counts: *mut Counts) -> c_int;
    fn emulator_report(device: *mut Handle) -> *const c_char;
    fn emulator_traffic(device: *mut Handle, data: *const c_char, read: *mut u64, written: *mut u64) -> c_int;
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
    handle: NonNull<Handle>,
    emulation: Emulation,
    counts: Counts,
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
        let state = State { handle, emulation, counts: Counts::default() };
        Ok(Device(Arc::new(Emulated(Mutex::new(state)))))
    }

    /// Changes how an emulated device runs the next launches; `false` on a GPU.
    pub fn emulate(&self, emulation: Emulation) -> bool {
        self.0.as_emulated().map(|e| e.state().emulation = emulation).is_some()
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
}

/// What the C side says of a copy: it checks ranges once more.
fn accepted(done: c_int) -> Result<(), String> {
    if done != 0 { Ok(()) } else { Err("the emulator has no such range".into()) }
}

impl Driver for Emulated {
    fn properties(&self) -> Properties {
        Properties {
            name: "emulator".into(),
            multiprocessors: self.state().emulation.multiprocessors,
            shared_bytes: SHARED_BYTES,
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

    fn release(&self, address: u64) {
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

    unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        // Every argument as the bytes that the kernel's parameter has.
        let values: Vec<([u8; 8], u32)> = launch.arguments.iter().map(Argument::to_bytes).collect();
        let pointers: Vec<*const c_void> = values.iter().map(|(value, _)| value.as_ptr().cast()).collect();
        let sizes: Vec<u32> = values.iter().map(|&(_, size)| size).collect();
        let fail = |reason: &str| DeviceError::Launch { launch: launch.describe(), reason: reason.into() };
        let kernel = CString::new(launch.kernel).map_err(|_| fail("a name with a NUL"))?;

        let mut state = self.state();
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

    unsafe fn record(&self, _launches: &[Launch]) -> Result<Option<Box<dyn Replay>>, DeviceError> {
        Ok(None)
    }

    fn as_emulated(&self) -> Option<&Emulated> {
        Some(self)
    }
}
