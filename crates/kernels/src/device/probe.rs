//! What GPU this machine has. Nothing here fails hard: a machine without a driver is an answer, not an error.

use cudarc::driver::{result, sys};

/// The oldest CUDA version, as the driver numbers it, that runs this program's code (12.0: drivers from r525 on).
const OLDEST_DRIVER: i32 = 12_000;

/// One CUDA device.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaDevice {
    /// Index.
    pub ordinal: usize,
    /// Marketing name.
    pub name: String,
    /// Compute capability, for example (8, 6).
    pub compute_capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: i32,
    /// Device memory in bytes.
    pub memory_bytes: usize,
}

/// What [`probe`] found.
#[derive(Debug, Clone, PartialEq)]
pub enum Probe {
    /// A usable driver.
    Available {
        /// CUDA version that the driver supports, for example (12, 4).
        driver: (i32, i32),
        /// Its devices; at least one.
        devices: Vec<CudaDevice>,
    },
    /// No GPU can be used.
    Unavailable {
        /// Why, and what to do.
        reason: String,
    },
}

/// Looks for an NVIDIA driver and its devices.
///
/// The binding panics where the library or a symbol is missing, so every call is made only after the library was found, and
/// inside a guard that turns a panic into a reason.
pub fn probe() -> Probe {
    // SAFETY: only opens the library by name and looks whether that worked.
    let present = unsafe { sys::is_culib_present() };
    if !present {
        let reason =
            "no NVIDIA driver: libcuda.so.1 was not found; install one, or point LD_LIBRARY_PATH at its folder";
        return Probe::Unavailable { reason: reason.into() };
    }
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let answer = std::panic::catch_unwind(query);
    std::panic::set_hook(quiet);
    match answer {
        Ok(Ok(probe)) => probe,
        Ok(Err(error)) => Probe::Unavailable { reason: format!("the NVIDIA driver answers with an error: {error:?}") },
        Err(_) => Probe::Unavailable {
            reason: "the NVIDIA driver lacks functions that this program needs; update it to r525 or later".into(),
        },
    }
}

fn query() -> Result<Probe, result::DriverError> {
    result::init()?;
    let mut version = 0;
    // SAFETY: writes one integer, which outlives the call.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    let driver = (version / 1000, version % 1000 / 10);
    if version < OLDEST_DRIVER {
        let (major, minor) = driver;
        let reason = format!("the NVIDIA driver supports CUDA {major}.{minor}; 12.0 or later is needed (driver r525)");
        return Ok(Probe::Unavailable { reason });
    }
    let mut devices = Vec::new();
    for ordinal in 0..result::device::get_count()? {
        let device = result::device::get(ordinal)?;
        // SAFETY: `device` came from the driver just now.
        let attribute = |a| unsafe { result::device::get_attribute(device, a) };
        use sys::CUdevice_attribute::*;
        devices.push(CudaDevice {
            ordinal: ordinal as usize,
            name: result::device::get_name(device)?,
            compute_capability: (
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            // SAFETY: as above.
            memory_bytes: unsafe { result::device::total_mem(device) }?,
        });
    }
    if devices.is_empty() {
        return Ok(Probe::Unavailable { reason: "the NVIDIA driver reports no device".into() });
    }
    Ok(Probe::Available { driver, devices })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probing_never_panics_and_always_answers() {
        match probe() {
            Probe::Available { devices, .. } => assert!(!devices.is_empty()),
            Probe::Unavailable { reason } => assert!(reason.contains("driver"), "{reason}"),
        }
    }
}
