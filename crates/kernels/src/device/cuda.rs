//! A GPU, through the NVIDIA driver.

use std::{
    collections::HashMap,
    ffi::{CString, c_void},
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};

use super::{Argument, Device, DeviceError, Driver, Launch, Probe, Properties, Replay, probe};

/// The driver's handles are addresses of its own objects, usable from any thread that made the context current.
struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    functions: Mutex<HashMap<&'static str, Handle>>,
    properties: Properties,
}

#[derive(Clone, Copy)]
struct Handle(sys::CUfunction);

// SAFETY: the driver's objects may be used by any thread; every use makes the context current first.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver does its own locking, and the table of functions has a mutex.
unsafe impl Sync for Gpu {}
// SAFETY: as above.
unsafe impl Send for Handle {}

impl Device {
    /// GPU number `ordinal`, with the kernels of `images` (cubins or PTX).
    pub fn cuda(ordinal: usize, images: &[Vec<u8>]) -> Result<Device, DeviceError> {
        let unavailable = |reason: String| DeviceError::Unavailable(reason);
        // The binding panics where the library or one of its functions is missing: probing asks first.
        let devices = match probe() {
            Probe::Available { devices, .. } => devices,
            Probe::Unavailable { reason } => return Err(unavailable(reason)),
        };
        let Some(found) = devices.iter().find(|d| d.ordinal == ordinal) else {
            return Err(unavailable(format!("no GPU {ordinal}: the driver reports {}", devices.len())));
        };
        if found.compute_capability < (8, 0) {
            let (major, minor) = found.compute_capability;
            let reason =
                format!("GPU {ordinal} ({}) is sm_{major}{minor}; the kernels need sm_80 or later", found.name);
            return Err(unavailable(reason));
        }
        let properties = Properties {
            name: found.name.clone(),
            multiprocessors: found.multiprocessors as u32,
            shared_bytes: super::SHARED_BYTES,
            emulated: false,
        };
        let gpu = Gpu::open(ordinal, images, properties);
        gpu.map(|gpu| Device(Arc::new(gpu))).map_err(|e| unavailable(format!("GPU {ordinal}: {e:?}")))
    }
}

impl Gpu {
    fn open(ordinal: usize, images: &[Vec<u8>], properties: Properties) -> Result<Gpu, DriverError> {
        let device = result::device::get(ordinal as i32)?;
        // SAFETY: the device came from the driver just now; released in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        let mut gpu = Gpu {
            device,
            context,
            stream: std::ptr::null_mut(),
            modules: Vec::new(),
            functions: Mutex::default(),
            properties,
        };
        gpu.enter()?;
        gpu.stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        for image in images {
            // PTX is text and ends with a NUL; a cubin says its own length.
            let mut image = image.clone();
            image.push(0);
            // SAFETY: the driver copies the image during the call.
            gpu.modules.push(unsafe { result::module::load_data(image.as_ptr().cast()) }?);
        }
        Ok(gpu)
    }

    fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }
    }

    /// The kernel of that name, ready for as much shared memory as a block may have.
    fn function(&self, name: &'static str) -> Result<sys::CUfunction, String> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Handle(function)) = functions.get(name) {
            return Ok(*function);
        }
        let symbol = || CString::new(name).map_err(|e| e.to_string());
        for &module in &self.modules {
            let symbol = symbol()?;
            // SAFETY: the module is loaded and the name outlives the call.
            let Ok(function) = (unsafe { result::module::get_function(module, symbol) }) else { continue };
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of a loaded module.
            unsafe {
                result::function::set_function_attribute(function, attribute, self.properties.shared_bytes as i32)
            }
            .map_err(text)?;
            functions.insert(name, Handle(function));
            return Ok(function);
        }
        Err("no loaded image has a kernel of that name".into())
    }

    /// # Safety
    /// As for [`Device::launch`].
    unsafe fn enqueue(&self, launch: &Launch) -> Result<(), DeviceError> {
        let fail = |reason: String| DeviceError::Launch { launch: launch.describe(), reason };
        let function = self.function(launch.kernel).map_err(fail)?;
        let mut values: Vec<[u8; 8]> = launch.arguments.iter().map(|a| Argument::to_bytes(a).0).collect();
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|v| v.as_mut_ptr().cast()).collect();
        let [x, y, z] = launch.grid;
        let run = match launch.cooperative {
            true => result::launch_cooperative_kernel,
            false => result::launch_kernel,
        };
        // SAFETY: the driver copies the arguments during the call; the caller vouches for what they mean.
        unsafe { run(function, (x, y, z), (launch.block, 1, 1), launch.shared_bytes, self.stream, &mut pointers) }
            .map_err(|e| fail(text(e)))
    }

    fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream) }
    }
}

fn text(error: DriverError) -> String {
    format!("the driver answers {error:?}")
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Errors have nobody left to hear them: the process or the device is going away.
        let _ = self.enter();
        // SAFETY: each was made in `open` and is given back once; nothing runs, since every launch is waited for.
        unsafe {
            for &module in &self.modules {
                let _ = result::module::unload(module);
            }
            if !self.stream.is_null() {
                let _ = result::stream::destroy(self.stream);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

impl Driver for Gpu {
    fn properties(&self) -> Properties {
        self.properties.clone()
    }

    fn allocate(&self, _name: &str, bytes: usize, contents: Option<&[u8]>) -> Option<u64> {
        self.enter().ok()?;
        // SAFETY: freed in `release`; the driver refuses a size of 0.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.ok()?;
        if let Some(contents) = contents
            && self.write(address, contents).is_err()
        {
            self.release(address);
            return None;
        }
        Some(address)
    }

    fn release(&self, address: u64) {
        let _ = self.enter();
        // SAFETY: what `allocate` gave, once; no launch is under way.
        let _ = unsafe { result::free_sync(address) };
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), String> {
        self.enter().map_err(text)?;
        // SAFETY: the range lies in a live buffer; no launch is under way.
        unsafe { result::memcpy_htod_sync(address, from) }.map_err(text)
    }

    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<(), String> {
        self.enter().map_err(text)?;
        // SAFETY: as for `write`.
        unsafe { result::memset_d8_sync(address, byte, bytes) }.map_err(text)
    }

    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), String> {
        self.enter().map_err(text)?;
        // SAFETY: as for `write`.
        unsafe { result::memcpy_dtoh_sync(to, address) }.map_err(text)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        let fail = |e| DeviceError::Launch { launch: launch.describe(), reason: text(e) };
        self.enter().map_err(fail)?;
        // SAFETY: passed on.
        unsafe { self.enqueue(launch) }?;
        self.wait().map_err(fail)
    }

    unsafe fn record(&self, launches: &[Launch]) -> Result<Option<Box<dyn Replay>>, DeviceError> {
        let fail =
            |e| DeviceError::Launch { launch: format!("a graph of {} launches", launches.len()), reason: text(e) };
        self.enter().map_err(fail)?;
        // Everything that a launch needs is loaded before: capture forbids it.
        for launch in launches {
            let refuse = |reason| DeviceError::Launch { launch: launch.describe(), reason };
            self.function(launch.kernel).map_err(refuse)?;
        }
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is idle; the capture ends below whatever happens.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(fail)?;
        // SAFETY: passed on; captured, not run.
        let enqueued = launches.iter().try_for_each(|launch| unsafe { self.enqueue(launch) });
        // SAFETY: begun above.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        enqueued?;
        let graph = graph.map_err(fail)?;
        // SAFETY: captured just now, and not needed once it is instantiated.
        let instance = unsafe {
            let instance = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            instance
        };
        let instance = instance.map_err(fail)?;
        Ok(Some(Box::new(Instance { instance, context: self.context, stream: self.stream })))
    }
}

/// An instantiated graph. The [`super::Graph`] that holds it also holds the device, which outlives it.
struct Instance {
    instance: sys::CUgraphExec,
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: as for `Gpu`.
unsafe impl Send for Instance {}

impl Replay for Instance {
    fn replay(&self) -> Result<(), String> {
        // SAFETY: the device that made context and stream outlives the graph; the buffers are owned by the graph's launches.
        let run = || unsafe {
            result::ctx::set_current(self.context)?;
            result::graph::launch(self.instance, self.stream)?;
            result::stream::synchronize(self.stream)
        };
        run().map_err(text)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: made in `record`, destroyed once; every replay was waited for.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::graph::exec_destroy(self.instance);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_usable_gpu_gets_a_reason() {
        match Device::cuda(usize::MAX >> 1, &[]) {
            Err(DeviceError::Unavailable(reason)) => assert!(reason.contains("driver"), "{reason}"),
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("there is no such GPU"),
        }
    }
}
