//! State of the NVIDIA GPUs, from the driver's management library. That is looked for when the program runs; where there is none, the
//! reason is the answer.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A GPU at one moment. A field that the driver does not tell is `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Gpu {
    /// Product name.
    pub name: Option<String>,
    /// Version of the driver.
    pub driver: Option<String>,
    /// Clock of the multiprocessors in MHz.
    pub sm_mhz: Option<u32>,
    /// The highest one it can have.
    pub sm_mhz_max: Option<u32>,
    /// Clock of the memory in MHz.
    pub memory_mhz: Option<u32>,
    /// Why clocks are lower than they could be, in the driver's words; `GPU_IDLE` is none.
    pub throttle_reasons: Option<Vec<String>>,
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Power drawn in W.
    pub power_w: Option<f64>,
    /// Power limit that is enforced, in W.
    pub power_limit_w: Option<f64>,
    /// Computing processes on it other than this one. Inside a container the driver may count this one, too.
    pub other_processes: Option<usize>,
}

/// Every GPU, or why none can be asked.
pub(super) fn capture() -> Result<Vec<Gpu>, String> {
    let nvml = Nvml::init().map_err(|e| match e {
        NvmlError::LibloadingError(_) => "no NVIDIA driver: its management library (libnvidia-ml) is not found".into(),
        other => format!("the NVIDIA management library does not start: {other}"),
    })?;
    let count = nvml.device_count().map_err(|e| format!("the NVIDIA driver does not count its devices: {e}"))?;
    (0..count).map(|i| gpu(&nvml, i).map_err(|e| format!("the NVIDIA driver does not show device {i}: {e}"))).collect()
}

fn gpu(nvml: &Nvml, index: u32) -> Result<Gpu, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let watts = |milliwatts: Result<u32, NvmlError>| milliwatts.ok().map(|mw| f64::from(mw) / 1e3);
    let reasons = device.current_throttle_reasons().ok();
    let others = device.running_compute_processes().ok();
    let own = std::process::id();
    Ok(Gpu {
        name: device.name().ok(),
        driver: nvml.sys_driver_version().ok(),
        sm_mhz: device.clock_info(Clock::SM).ok(),
        sm_mhz_max: device.max_clock_info(Clock::SM).ok(),
        memory_mhz: device.clock_info(Clock::Memory).ok(),
        throttle_reasons: reasons.map(|r| r.iter_names().map(|(name, _)| name.to_string()).collect()),
        temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
        power_w: watts(device.power_usage()),
        power_limit_w: watts(device.enforced_power_limit()),
        other_processes: others.map(|all| all.iter().filter(|p| p.pid != own).count()),
    })
}
