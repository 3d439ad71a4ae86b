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

use super::{Argument, Command, Device, DeviceError, Driver, Handle, Launch, Probe, Properties, probe};

/// The driver's handles are addresses of its own objects, usable from any thread that made the context current.
struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    functions: Mutex<HashMap<&'static str, Function>>,
    properties: Properties,
}

#[derive(Clone, Copy)]
struct Function(sys::CUfunction);

// SAFETY: the driver's objects may be used by any thread; every use makes the context current first.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver does its own locking, and the table of functions has a mutex.
unsafe impl Sync for Gpu {}
// SAFETY: as above.
unsafe impl Send for Function {}

impl Device {
    /// GPU number `ordinal`, with the kernels of `images` (cubins or PTX).
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`], with the reason that [`probe`] gives, or with what the driver says of the images.
    pub fn cuda(ordinal: usize, images: &[Vec<u8>]) -> Result<Device, DeviceError> {
        let unavailable = |reason: String| DeviceError::Unavailable(reason);
        // The binding panics where the library or one of its functions is missing: probing asks first.
        let (driver, devices) = match probe() {
            Probe::Available { driver, devices } => (driver, devices),
            Probe::Unavailable { reason } => return Err(unavailable(reason)),
        };
        let Some(found) = devices.iter().find(|d| d.ordinal == ordinal) else {
            return Err(unavailable(format!("no GPU {ordinal}: the driver reports {}", devices.len())));
        };
        if !found.supported() {
            return Err(unavailable(found.unsupported()));
        }
        let (major, minor) = found.compute_capability;
        let properties = Properties {
            name: found.name.clone(),
            compute_capability: Some((major as u32, minor as u32)),
            multiprocessors: found.multiprocessors as u32,
            shared_bytes: super::SHARED_BYTES,
            l2_bytes: found.l2_bytes,
            memory_bytes: Some(found.memory_bytes),
            bus_gb_s: Some(found.bus_gb_s).filter(|&rate| rate > 0),
            driver: Some(driver),
            emulated: false,
        };
        let gpu = Gpu::open(ordinal, images, properties);
        gpu.map(|gpu| Device(Arc::new(gpu))).map_err(|e| unavailable(format!("GPU {ordinal}: {}", text(e))))
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

    /// Waits for every stream. Ours do not wait for the driver's default one, on which blocking copies run.
    fn idle(&self) -> Result<(), String> {
        self.enter().and_then(|()| result::ctx::synchronize()).map_err(text)
    }

    fn stream(&self, handle: Handle) -> sys::CUstream {
        if handle == 0 { self.stream } else { handle as sys::CUstream }
    }

    /// The kernel of that name, ready for as much shared memory as a block may have.
    fn function(&self, name: &'static str) -> Result<sys::CUfunction, String> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Function(function)) = functions.get(name) {
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
            functions.insert(name, Function(function));
            return Ok(function);
        }
        Err("no loaded image has a kernel of that name".into())
    }

    /// Blocks that wait for each other must all be there: the driver says only that it is too many, not how many fit.
    fn fits_at_once(&self, function: sys::CUfunction, launch: &Launch) -> Result<(), String> {
        let blocks: u64 = launch.grid.iter().map(|&n| u64::from(n)).product();
        // SAFETY: a function of a loaded module.
        let each = unsafe {
            result::occupancy::max_active_block_per_multiprocessor(
                function,
                launch.block as i32,
                launch.shared_bytes as usize,
            )
        };
        let most = each.map_err(text)? as u64 * u64::from(self.properties.multiprocessors);
        if blocks > most {
            return Err(format!("{blocks} blocks must run at once, and the GPU has room for {most}"));
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Device::launch`].
    unsafe fn enqueue_launch(&self, stream: sys::CUstream, launch: &Launch) -> Result<(), String> {
        let function = self.function(launch.kernel)?;
        let mut values: Vec<[u8; 8]> = launch.arguments.iter().map(|a| Argument::to_bytes(a).0).collect();
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|v| v.as_mut_ptr().cast()).collect();
        let [x, y, z] = launch.grid;
        let run = if launch.cooperative {
            self.fits_at_once(function, launch)?;
            result::launch_cooperative_kernel
        } else {
            result::launch_kernel
        };
        // SAFETY: the driver copies the arguments during the call; the caller vouches for what they mean.
        unsafe { run(function, (x, y, z), (launch.block, 1, 1), launch.shared_bytes, stream, &mut pointers) }
            .map_err(text)
    }
}

fn text(error: DriverError) -> String {
    format!("the driver answers {error:?}")
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Errors have nobody left to hear them: the process or the device is going away.
        let _ = self.idle();
        // SAFETY: each was made in `open` and is given back once; nothing runs any more.
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
            self.release(address, None);
            return None;
        }
        Some(address)
    }

    fn allocate_pinned(&self, _name: &str, bytes: usize) -> Option<(u64, *mut u32)> {
        self.enter().ok()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: freed in `release`; at least a word, page-aligned, zeroed before anybody sees it.
        unsafe {
            let host = result::malloc_host(bytes.max(4), flags).ok()?;
            std::ptr::write_bytes(host.cast::<u8>(), 0, bytes);
            let mut address = 0;
            if sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0).result().is_err() {
                let _ = result::free_host(host);
                return None;
            }
            Some((address, host.cast()))
        }
    }

    fn release(&self, address: u64, host: Option<*mut u32>) {
        let _ = self.idle();
        // SAFETY: what one of the two above gave, once; nothing runs any more that could reach it.
        let _ = unsafe {
            match host {
                Some(host) => result::free_host(host.cast()),
                None => result::free_sync(address),
            }
        };
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), String> {
        self.idle()?;
        // SAFETY: the range lies in a live buffer; nothing else runs.
        unsafe { result::memcpy_htod_sync(address, from) }.map_err(text)?;
        // A copy from pageable memory may return when it is staged.
        self.idle()
    }

    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<(), String> {
        self.idle()?;
        // SAFETY: as for `write`.
        unsafe { result::memset_d8_sync(address, byte, bytes) }.map_err(text)?;
        self.idle()
    }

    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), String> {
        self.idle()?;
        // SAFETY: as for `write`.
        unsafe { result::memcpy_dtoh_sync(to, address) }.map_err(text)
    }

    fn open_stream(&self) -> Result<Handle, String> {
        let open = || {
            self.enter()?;
            result::stream::create(result::stream::StreamKind::NonBlocking)
        };
        open().map(|stream| stream as Handle).map_err(text)
    }

    fn close_stream(&self, stream: Handle) {
        let _ = self.enter();
        let stream = self.stream(stream);
        // SAFETY: opened by `open_stream`, closed once.
        unsafe {
            let _ = result::stream::synchronize(stream);
            let _ = result::stream::destroy(stream);
        }
    }

    unsafe fn enqueue(&self, stream: Handle, command: &Command) -> Result<(), DeviceError> {
        let stream = self.stream(stream);
        let enqueue = || -> Result<(), String> {
            self.enter().map_err(text)?;
            match command {
                // SAFETY: passed on.
                Command::Launch(launch) => unsafe { self.enqueue_launch(stream, launch) },
                Command::Fill { buffer, offset, bytes, byte } => {
                    let at = buffer.0.address + *offset as u64;
                    // SAFETY: the range lies in a buffer that lives until the stream was waited for.
                    unsafe { result::memset_d8_async(at, *byte, *bytes, stream) }.map_err(text)
                }
                Command::Copy { from, from_offset, to, to_offset, bytes } => {
                    let (from, to) = (from.0.address + *from_offset as u64, to.0.address + *to_offset as u64);
                    // SAFETY: as above. Addresses are unified: the driver tells the host's from the device's.
                    unsafe { sys::cuMemcpyAsync(to, from, *bytes, stream) }.result().map_err(text)
                }
            }
        };
        enqueue().map_err(|reason| DeviceError::Launch { launch: command.describe(), reason })
    }

    fn wait(&self, stream: Handle) -> Result<(), String> {
        // SAFETY: the stream is open.
        self.enter().and_then(|()| unsafe { result::stream::synchronize(self.stream(stream)) }).map_err(text)
    }

    fn record_event(&self, stream: Handle) -> Result<Handle, String> {
        self.enter().map_err(text)?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(text)?;
        // SAFETY: both were made by the driver and are open.
        if let Err(error) = unsafe { result::event::record(event, self.stream(stream)) } {
            self.close_event(event as Handle);
            return Err(text(error));
        }
        Ok(event as Handle)
    }

    fn close_event(&self, event: Handle) {
        let _ = self.enter();
        // SAFETY: made by `record_event`, closed once.
        let _ = unsafe { result::event::destroy(event as sys::CUevent) };
    }

    fn wait_event(&self, stream: Handle, event: Handle) -> Result<(), String> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are open.
        let wait = || unsafe { result::stream::wait_event(self.stream(stream), event as sys::CUevent, flags) };
        self.enter().and_then(|()| wait()).map_err(text)
    }

    fn event_done(&self, event: Handle) -> Result<bool, String> {
        // SAFETY: the event is open.
        match self.enter().and_then(|()| unsafe { result::event::query(event as sys::CUevent) }) {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(text(error)),
        }
    }

    fn event_ms(&self, from: Handle, to: Handle) -> Result<Option<f64>, String> {
        // SAFETY: both are open; the driver says so where one has not happened.
        let elapsed = || unsafe { result::event::elapsed(from as sys::CUevent, to as sys::CUevent) };
        self.enter().and_then(|()| elapsed()).map(|ms| Some(f64::from(ms))).map_err(text)
    }

    unsafe fn record(&self, commands: &[Command]) -> Result<Option<Handle>, DeviceError> {
        let fail = |e| unrecorded(commands, text(e));
        self.enter().map_err(fail)?;
        // Everything that a launch needs is loaded before: capture forbids it.
        for command in commands {
            if let Command::Launch(launch) = command {
                let refuse = |reason| DeviceError::Launch { launch: launch.describe(), reason };
                self.function(launch.kernel).map_err(refuse)?;
            }
        }
        let stream = self.open_stream().map_err(|reason| unrecorded(commands, reason))?;
        // SAFETY: as the caller vouches; captured, not run.
        let captured = unsafe { self.capture(stream, commands) };
        self.close_stream(stream);
        let graph = captured?;
        // SAFETY: captured just now, and not needed once it is instantiated.
        let instance = unsafe {
            let instance = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            instance
        };
        Ok(Some(instance.map_err(fail)? as Handle))
    }

    fn replay(&self, stream: Handle, graph: Handle) -> Result<(), String> {
        // SAFETY: the graph is open and owns its buffers.
        let launch = || unsafe { result::graph::launch(graph as sys::CUgraphExec, self.stream(stream)) };
        self.enter().and_then(|()| launch()).map_err(text)
    }

    fn close_graph(&self, graph: Handle) {
        let _ = self.idle();
        // SAFETY: made in `record`, destroyed once, and idle.
        let _ = unsafe { result::graph::exec_destroy(graph as sys::CUgraphExec) };
    }
}

/// That a graph of these commands cannot be made.
fn unrecorded(commands: &[Command], reason: String) -> DeviceError {
    DeviceError::Launch { launch: format!("recording a graph of {} commands", commands.len()), reason }
}

impl Gpu {
    /// # Safety
    /// As for [`Driver::record`].
    unsafe fn capture(&self, stream: Handle, commands: &[Command]) -> Result<sys::CUgraph, DeviceError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is idle; the capture ends below whatever happens.
        unsafe { result::stream::begin_capture(self.stream(stream), mode) }
            .map_err(|e| unrecorded(commands, text(e)))?;
        // SAFETY: passed on.
        let enqueued = commands.iter().try_for_each(|command| unsafe { self.enqueue(stream, command) });
        // SAFETY: begun above.
        let graph = unsafe { result::stream::end_capture(self.stream(stream)) };
        match (enqueued, graph) {
            (Ok(()), graph) => graph.map_err(|e| unrecorded(commands, text(e))),
            (Err(error), graph) => {
                if let Ok(graph) = graph {
                    // SAFETY: captured just now, and given up.
                    let _ = unsafe { result::graph::destroy(graph) };
                }
                Err(error)
            }
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
