//! What the self-test of a GPU found, as one line of JSON beside the records of runs.
//!
//! Every number of a record is measured on its device; what others published stands apart, with its source.

use std::path::{Path, PathBuf};

use kernels::device::Properties;
use kernels::selftest::{Finding, Measurement, Outcome};
use serde::Serialize;

use crate::environment::{Binary, Environment};
use crate::log::monthly;
use crate::record::{Figure, Kind, SCHEMA};

/// The device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceInfo {
    /// `cuda` or `emulated`.
    pub backend: &'static str,
    /// Name.
    pub name: String,
    /// For example `8.6`.
    pub compute_capability: Option<String>,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// L2 cache in bytes.
    pub l2_bytes: usize,
    /// Memory in bytes.
    pub memory_bytes: Option<usize>,
    /// What width and clock of its memory bus allow, in GB/s, as the driver says.
    pub bus_gb_s: Option<u32>,
    /// CUDA version of the driver, for example `12.4`.
    pub driver_cuda: Option<String>,
}

impl From<Properties> for DeviceInfo {
    fn from(p: Properties) -> DeviceInfo {
        DeviceInfo {
            backend: if p.emulated { "emulated" } else { "cuda" },
            name: p.name,
            compute_capability: p.compute_capability.map(|(major, minor)| format!("{major}.{minor}")),
            multiprocessors: p.multiprocessors,
            l2_bytes: p.l2_bytes,
            memory_bytes: p.memory_bytes,
            bus_gb_s: p.bus_gb_s,
            driver_cuda: p.driver.map(|(major, minor)| format!("{major}.{minor}")),
        }
    }
}

/// A measured number of a check.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// Of what.
    pub what: String,
    /// The median.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// Of a rate, which part of this device's measured peak of reads it is.
    pub of_peak: Option<f64>,
    /// Milliseconds of each timed replay.
    pub samples_ms: Vec<f64>,
}

impl From<Measurement> for Measured {
    fn from(m: Measurement) -> Measured {
        let Measurement { what, value, unit, of_peak, samples_ms } = m;
        Measured { what, value, unit, of_peak, samples_ms }
    }
}

/// One check of the self-test.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckResult {
    /// Its name.
    pub name: &'static str,
    /// What it establishes.
    pub what: &'static str,
    /// Whether that holds.
    pub passed: bool,
    /// Why not.
    pub failure: Option<String>,
    /// What it measured.
    pub measured: Vec<Measured>,
    /// What it would do on a GPU and did not do here: on an emulator nothing is timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<&'static str>,
    /// How long it took in seconds.
    pub seconds: f64,
}

impl From<Finding> for CheckResult {
    fn from(f: Finding) -> CheckResult {
        let failure = match f.outcome {
            Outcome::Passed => None,
            Outcome::Failed(why) => Some(why),
        };
        CheckResult {
            name: f.name,
            what: f.what,
            passed: failure.is_none(),
            failure,
            measured: f.measurements.into_iter().map(Measured::from).collect(),
            skipped: f.skipped,
            seconds: f.seconds,
        }
    }
}

/// A part of peak that somebody published, to stand beside measured ones and never among them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PublishedRate {
    /// Of what.
    pub what: &'static str,
    /// Part of the copy peak that was measured with it.
    pub of_copy_peak: Figure,
}

/// One self-test.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// `measured`: the numbers of [`GpuRecord::checks`] are this device's.
    pub kind: Kind,
    /// What the line is: `gpu-check`. Readers of runs skip it.
    pub record: &'static str,
    /// When: RFC 3339, UTC.
    pub time: String,
    /// The program.
    pub binary: Binary,
    /// The machine.
    pub environment: Environment,
    /// Which of many like machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The device.
    pub device: DeviceInfo,
    /// Every check was run, and what it establishes holds.
    pub passed: bool,
    /// Every check was run.
    pub complete: bool,
    /// Each that was.
    pub checks: Vec<CheckResult>,
    /// What others published of matrix products with one row.
    pub published: Vec<PublishedRate>,
}

impl GpuRecord {
    /// A record of checks that were run just now; `complete` where none was left out.
    pub fn new(
        binary: Binary,
        node: Option<String>,
        device: Properties,
        checks: Vec<CheckResult>,
        complete: bool,
    ) -> Self {
        GpuRecord {
            schema: SCHEMA,
            kind: Kind::Measured,
            record: "gpu-check",
            time: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            binary,
            environment: Environment::capture(),
            node,
            device: device.into(),
            passed: complete && checks.iter().all(|c| c.passed),
            complete,
            checks,
            published: published(),
        }
    }

    /// Where this record belongs: `{results}/{year}/gpu-check/{gpu}-{month}.jsonl`.
    pub fn path(results: &Path, gpu: &str) -> PathBuf {
        let words = gpu.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
        let name = words.collect::<Vec<_>>().join("-").to_ascii_lowercase();
        monthly(results, &format!("gpu-check/{}", if name.is_empty() { "gpu" } else { &name }))
    }
}

/// Marlin on an A10G: int4, groups of 128, one row, graph replay, of the 481 GB/s that a copy reached on the same card.
pub fn published() -> Vec<PublishedRate> {
    let rate = |what, value, us| PublishedRate {
        what,
        of_copy_peak: Figure {
            kind: Kind::Published,
            value,
            source: format!(
                "Marlin, {us} us on an A10G, copy peak 481 GB/s (jonpol01, KERNEL-V0); weights may have come from L2"
            ),
        },
    };
    vec![
        rate("int4 [10240, 2560], 1 row", 0.898, 31.3),
        rate("int4 [2560, 10240], 1 row", 0.877, 32.1),
        rate("int4 [16384, 2048], 1 row", 0.857, 42.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(outcome: Outcome) -> CheckResult {
        let measurements = vec![Measurement {
            what: "reads".into(),
            value: 517.0,
            unit: "GB/s",
            of_peak: Some(1.0),
            samples_ms: vec![2.0],
        }];
        Finding { name: "read", what: "all is read", outcome, measurements, skipped: None, seconds: 0.5 }.into()
    }

    fn record(checks: Vec<CheckResult>, complete: bool) -> GpuRecord {
        let properties = Properties {
            name: "NVIDIA A10G".into(),
            compute_capability: Some((8, 6)),
            multiprocessors: 80,
            shared_bytes: 101_376,
            l2_bytes: 6 << 20,
            memory_bytes: Some(24 << 30),
            bus_gb_s: Some(600),
            driver: Some((12, 4)),
            emulated: false,
        };
        GpuRecord::new(
            Binary { version: "0.1.0".into(), commit: None, blake3: None, flake_lock: None },
            None,
            properties,
            checks,
            complete,
        )
    }

    #[test]
    fn a_record_passes_when_every_check_ran_and_held() {
        assert!(record(vec![finding(Outcome::Passed)], true).passed);
        assert!(!record(vec![finding(Outcome::Passed)], false).passed);
        assert!(!record(vec![finding(Outcome::Passed), finding(Outcome::Failed("no".into()))], true).passed);
    }

    #[test]
    fn what_was_measured_and_what_was_published_stand_apart() {
        let line = serde_json::to_value(record(vec![finding(Outcome::Passed)], true)).unwrap();
        assert_eq!((&line["kind"], &line["record"]), (&"measured".into(), &"gpu-check".into()));
        assert_eq!(
            (&line["device"]["backend"], &line["device"]["compute_capability"]),
            (&"cuda".into(), &"8.6".into())
        );
        assert_eq!(line["checks"][0]["measured"][0]["value"], 517.0);
        for rate in line["published"].as_array().unwrap() {
            assert_eq!(rate["of_copy_peak"]["kind"], "published");
        }
        assert!(!line["checks"].to_string().contains("published"));
    }

    #[test]
    fn a_file_is_named_after_the_gpu() {
        let path = GpuRecord::path(Path::new("results"), "NVIDIA A10G");
        let path = path.to_str().unwrap();
        assert!(path.starts_with("results/20") && path.contains("/gpu-check/nvidia-a10g-"), "{path}");
        assert!(GpuRecord::path(Path::new("r"), "../..").to_str().unwrap().contains("/gpu-check/gpu-"));
    }
}
