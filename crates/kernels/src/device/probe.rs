//! What GPU this machine has. Nothing here fails hard: a machine without a driver is an answer, not an error.

use cudarc::driver::{result, sys};

/// The oldest CUDA version, as the driver numbers it, that runs this program's code (12.0: drivers from r525 on).
const OLDEST_DRIVER: i32 = 12_000;

/// The oldest compute capability that the kernels run on: asynchronous copies and bf16 products came with it.
pub const OLDEST_CAPABILITY: (i32, i32) = (8, 0);

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
    /// L2 cache in bytes.
    pub l2_bytes: usize,
    /// Device memory in bytes.
    pub memory_bytes: usize,
    /// What width and clock of the memory bus allow, in GB/s (10^9 bytes a second): two transfers a clock. 0 where the driver does not say.
    pub bus_gb_s: u32,
}

impl CudaDevice {
    /// Whether the kernels run on it.
    pub fn supported(&self) -> bool {
        self.compute_capability >= OLDEST_CAPABILITY
    }

    /// Why they do not.
    pub(super) fn unsupported(&self) -> String {
        let (major, minor) = self.compute_capability;
        format!("GPU {} ({}) is sm_{major}{minor}; the kernels need sm_80 or later", self.ordinal, self.name)
    }
}

/// What [`probe`] found.
#[derive(Debug, Clone, PartialEq)]
pub enum Probe {
    /// A usable driver, and a GPU that the kernels run on.
    Available {
        /// CUDA version that the driver supports, for example (12, 4).
        driver: (i32, i32),
        /// Its devices; at least one is supported.
        devices: Vec<CudaDevice>,
    },
    /// No GPU can be used.
    Unavailable {
        /// Why, and what to do.
        reason: String,
    },
}

/// What to do where there is no driver. A folder of all the host's libraries on the search path would replace the program's own.
const NO_DRIVER: &str = "no NVIDIA driver: libcuda.so.1 was not found. Install the driver; where it is installed and not found, as by a \
program from the Nix store on another system, put links to its libcuda.so.1 and libnvidia-ml.so.1 into a folder of their own and that \
folder on LD_LIBRARY_PATH";

/// Looks for an NVIDIA driver and its devices.
///
/// The binding panics where the library or a symbol is missing, so every call is made only after the library was found, and
/// inside a guard that turns a panic into a reason.
pub fn probe() -> Probe {
    // SAFETY: only opens the library by name and looks whether that worked.
    let present = unsafe { sys::is_culib_present() };
    if !present {
        return Probe::Unavailable { reason: NO_DRIVER.into() };
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
    match result::init() {
        Err(result::DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(judge(0, None)),
        initialised => initialised?,
    }
    let mut version = 0;
    // SAFETY: writes one integer, which outlives the call.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    // An old driver may lack what the rest asks for.
    let devices = if version < OLDEST_DRIVER { None } else { Some(devices()?) };
    Ok(judge(version, devices))
}

/// What a driver of this version with these devices is good for; no devices where it was not asked for them.
fn judge(version: i32, devices: Option<Vec<CudaDevice>>) -> Probe {
    let driver = (version / 1000, version % 1000 / 10);
    let reason = match devices {
        None if version > 0 => {
            let (major, minor) = driver;
            format!("the NVIDIA driver supports CUDA {major}.{minor}; 12.0 or later is needed: update it to r525 or later")
        }
        Some(devices) if devices.iter().any(CudaDevice::supported) => return Probe::Available { driver, devices },
        Some(devices) if !devices.is_empty() => {
            let each: Vec<String> = devices.iter().map(CudaDevice::unsupported).collect();
            each.join("; ")
        }
        _ => "the NVIDIA driver reports no device: is a GPU passed to this machine or container, and CUDA_VISIBLE_DEVICES not empty?".into(),
    };
    Probe::Unavailable { reason }
}

fn devices() -> Result<Vec<CudaDevice>, result::DriverError> {
    let mut devices = Vec::new();
    for ordinal in 0..result::device::get_count()? {
        let device = result::device::get(ordinal)?;
        // SAFETY: `device` came from the driver just now.
        let attribute = |a| unsafe { result::device::get_attribute(device, a) };
        use sys::CUdevice_attribute::*;
        let clock_khz = f64::from(attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?);
        let bus_bytes = f64::from(attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?) / 8.0;
        devices.push(CudaDevice {
            ordinal: ordinal as usize,
            name: result::device::get_name(device)?,
            compute_capability: (
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.max(0) as usize,
            // SAFETY: as above.
            memory_bytes: unsafe { result::device::total_mem(device) }?,
            bus_gb_s: (2.0 * clock_khz * bus_bytes / 1e6) as u32,
        });
    }
    Ok(devices)
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

    fn device(capability: (i32, i32)) -> CudaDevice {
        CudaDevice {
            ordinal: 0,
            name: "Some GPU".into(),
            compute_capability: capability,
            multiprocessors: 80,
            l2_bytes: 6 << 20,
            memory_bytes: 24 << 30,
            bus_gb_s: 600,
        }
    }

    fn reason(version: i32, devices: Option<Vec<CudaDevice>>) -> String {
        match judge(version, devices) {
            Probe::Unavailable { reason } => reason,
            available => panic!("{available:?}"),
        }
    }

    #[test]
    fn what_cannot_be_used_is_told_apart() {
        assert!(reason(11_080, None).contains("supports CUDA 11.8; 12.0 or later is needed"));
        assert!(reason(0, None).contains("no device") && reason(12_040, Some(vec![])).contains("no device"));
        let old = reason(12_040, Some(vec![device((7, 5))]));
        assert_eq!(old, "GPU 0 (Some GPU) is sm_75; the kernels need sm_80 or later");
    }

    #[test]
    fn one_supported_device_is_enough() {
        for capability in [(8, 0), (8, 6), (9, 0), (12, 0)] {
            let devices = vec![device((7, 5)), device(capability)];
            let found = judge(12_040, Some(devices.clone()));
            assert_eq!(found, Probe::Available { driver: (12, 4), devices }, "{capability:?}");
        }
    }
}
