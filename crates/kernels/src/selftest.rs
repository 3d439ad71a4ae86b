//! The self-test of a device: what must hold before a claim is made about it, and what its memory and its launches cost.
//!
//! | module | concept |
//! |---|---|
//! | [`vectors`], [`cases`] | test vectors, and what is made of them, that the emulator's tests and the self-test of a GPU share |
//! | `mma` | a row or column of a matrix product has the same bits in every slot, whatever its neighbours hold |
//! | `bandwidth` | measured peak of reads and copies, on contents whose sum is known |
//! | `gemm` | matrix products of every format: accurate, row invariant, and how fast weights come from memory |
//! | `dot` | int8 weights with int8 inputs: exact |
//! | `fused` | what products do beside multiplying: norms, gates, heads, best tokens, a second product |
//! | `attention` | attention: accurate, the same bits in any company and on any grid, blind to stale keys and values |
//! | `rows` | norms, embeddings, heads: accurate, the same bits in any company |
//! | `decide` | choices, scores, acceptance, the branch's move, look-up: those of the rules |
//! | `draft` | the drafter's passes: accurate, and one persistent kernel with the bits of a kernel a phase |
//! | `speed` | attention, a layer with a chain and with a star, the drafter: how long on what no cache holds |
//! | `launches` | the cost of a graph, a kernel boundary and a grid barrier; cooperative launches and pinned memory inside a graph |
//!
//! A family of kernels adds one file here and its checks to [`checks`]. A check runs on a GPU and on the emulator alike: there its shapes are
//! smaller, its schedules checked for races, and no time means anything, so none is taken. A time is taken only of a graph whose replay was
//! seen to change its output, and a rate beyond what the device was measured to reach is an error, not a result.

use std::{cell::Cell, time::Instant};

use crate::{
    device::{Buffer, Command, Device, DeviceError, Graph, Properties},
    step::StepError,
};

mod attention;
mod bandwidth;
pub mod cases;
mod decide;
mod dot;
mod draft;
mod fused;
mod gemm;
mod launches;
mod mma;
#[cfg(all(test, feature = "emulator", target_arch = "x86_64"))]
mod planted;
mod rows;
mod speed;
pub mod vectors;

/// Most of the measured peak that a rate can be: beyond it, the clock or the count of bytes is wrong.
pub const MOST_OF_PEAK: f64 = 1.05;
/// Timed replays of a graph.
const REPLAYS: usize = 20;
/// What a check that times says on the emulator.
const NO_TIMES: &str = "times: an emulator has none";
/// What outputs hold before a replay that must change them.
const UNTOUCHED: u8 = 0xa5;

/// One check.
#[derive(Clone, Copy)]
pub struct Check {
    /// Family and subject, for example `mma bf16`.
    pub name: &'static str,
    /// What it establishes, in a sentence.
    pub what: &'static str,
    /// Whether it takes times; on the emulator, where none means anything, it says that it does not.
    pub timed: bool,
    run: fn(&Subject) -> Result<Vec<Measurement>, Failure>,
}

/// All checks, in the order in which later ones rest on earlier ones.
pub fn checks() -> Vec<Check> {
    let kernels = [
        gemm::CHECKS,
        dot::CHECKS,
        fused::CHECKS,
        attention::CHECKS,
        rows::CHECKS,
        decide::CHECKS,
        draft::CHECKS,
        speed::CHECKS,
    ];
    [&[mma::CHECKS, bandwidth::CHECKS, launches::CHECKS], &kernels[..]].concat().concat()
}

/// A number that a check measured on a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// Of what.
    pub what: String,
    /// The median.
    pub value: f64,
    /// Its unit: `GB/s` (10^9 bytes a second), `us`.
    pub unit: &'static str,
    /// Of a rate, which part of the device's measured peak of reads it is.
    pub of_peak: Option<f64>,
    /// The raw samples, in milliseconds of one replay.
    pub samples_ms: Vec<f64>,
}

/// How a check ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// What it establishes holds.
    Passed,
    /// It does not, or the device failed.
    Failed(String),
}

/// A check and what came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// [`Check::name`].
    pub name: &'static str,
    /// [`Check::what`].
    pub what: &'static str,
    /// How it ended.
    pub outcome: Outcome,
    /// What it measured; nothing on the emulator.
    pub measurements: Vec<Measurement>,
    /// What it would do on a GPU and did not do here.
    pub skipped: Option<&'static str>,
    /// How long it took in seconds.
    pub seconds: f64,
}

/// Why a check did not pass.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// What it should establish does not hold.
    #[error("{0}")]
    Wrong(String),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<StepError> for Failure {
    fn from(error: StepError) -> Failure {
        match error {
            StepError::Device(error) => Failure::Device(error),
            other => Failure::Wrong(other.to_string()),
        }
    }
}

fn wrong<T>(what: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Wrong(what.into()))
}

/// The device under test, and what was learnt of it so far.
pub struct Subject {
    device: Device,
    properties: Properties,
    read_gb_s: Cell<Option<f64>>,
}

impl Subject {
    /// A device about which nothing is known yet.
    pub fn new(device: Device) -> Subject {
        let properties = device.properties();
        Subject { device, properties, read_gb_s: Cell::new(None) }
    }

    /// Runs one check. It never fails itself: a device that does is a finding.
    pub fn run(&self, check: &Check) -> Finding {
        let begin = Instant::now();
        let (outcome, measurements) = match (check.run)(self) {
            Ok(measurements) => (Outcome::Passed, measurements),
            Err(failure) => (Outcome::Failed(failure.to_string()), Vec::new()),
        };
        let Check { name, what, timed, .. } = *check;
        let skipped = (timed && self.properties.emulated).then_some(NO_TIMES);
        Finding { name, what, outcome, measurements, skipped, seconds: begin.elapsed().as_secs_f64() }
    }

    /// `full` on a GPU, `small` on the emulator.
    fn size(&self, full: usize, small: usize) -> usize {
        if self.properties.emulated { small } else { full }
    }

    fn blocks(&self, each: usize) -> u32 {
        self.size(self.properties.multiprocessors as usize * each, 4) as u32
    }

    /// A buffer of zeros.
    fn zeros(&self, name: &str, bytes: usize) -> Result<Buffer, Failure> {
        let buffer = self.device.allocate(name, bytes)?;
        buffer.fill(0)?;
        Ok(buffer)
    }

    /// Replays a graph once, after making sure that every output shows it.
    fn replay_changes(&self, what: &str, graph: &Graph, outputs: &[&Buffer]) -> Result<(), Failure> {
        for output in outputs {
            output.fill(UNTOUCHED)?;
        }
        graph.replay()?;
        for output in outputs {
            let mut bytes = vec![0; output.bytes()];
            output.read(0, &mut bytes)?;
            if bytes.iter().all(|&byte| byte == UNTOUCHED) {
                return wrong(format!("{what}: a replay left {} as it was", output.name()));
            }
        }
        Ok(())
    }

    /// Milliseconds of each of some replays by the device's own clock; nothing on the emulator, where one replay is run for its errors.
    ///
    /// # Errors
    /// A replay that changes no output: what is timed must be seen to run.
    fn time(&self, what: &str, graph: &Graph, outputs: &[&Buffer]) -> Result<Option<Vec<f64>>, Failure> {
        self.replay_changes(what, graph, outputs)?;
        if self.properties.emulated {
            return Ok(None);
        }
        let stream = self.device.stream()?;
        stream.replay(graph)?;
        let mut samples = Vec::with_capacity(REPLAYS);
        for _ in 0..REPLAYS {
            let begin = stream.event()?;
            stream.replay(graph)?;
            let end = stream.event()?;
            stream.synchronize()?;
            samples.extend(end.ms_since(&begin)?);
        }
        Ok(Some(samples))
    }

    /// A rate as a measurement, held against the measured peak of reads where there is one.
    fn rate(&self, what: String, bytes: u64, samples_ms: Vec<f64>) -> Result<Measurement, Failure> {
        let value = bytes as f64 / median(&samples_ms) / 1e6;
        let of_peak = self.read_gb_s.get().map(|peak| within_peak(&what, value, peak)).transpose()?;
        Ok(Measurement { what, value, unit: "GB/s", of_peak, samples_ms })
    }

    /// # Safety
    /// As for [`Device::record`].
    unsafe fn record<C: Into<Command>>(&self, commands: impl IntoIterator<Item = C>) -> Result<Graph, Failure> {
        // SAFETY: passed on.
        Ok(unsafe { self.device.record(commands) }?)
    }
}

/// The part of the peak that a rate is.
fn within_peak(what: &str, gb_s: f64, peak: f64) -> Result<f64, Failure> {
    let part = gb_s / peak;
    if part.is_finite() && part <= MOST_OF_PEAK {
        return Ok(part);
    }
    wrong(format!(
        "{what}: {gb_s:.1} GB/s is {:.1} % of the measured peak of {peak:.1} GB/s; nothing reads faster than memory, so the time or the \
         count of bytes is wrong",
        part * 100.0
    ))
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[half],
        _ => (sorted[half - 1] + sorted[half]) / 2.0,
    }
}

/// A buffer's words.
fn words(buffer: &Buffer) -> Result<Vec<u32>, Failure> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.read(0, &mut bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Argument, Launch};

    #[test]
    fn no_rate_is_beyond_what_was_measured() {
        assert_eq!(within_peak("x", 450.0, 500.0).unwrap(), 0.9);
        assert!(within_peak("x", 525.0, 500.0).is_ok());
        let error = within_peak("gate and up", 526.0, 500.0).unwrap_err().to_string();
        assert!(error.starts_with("gate and up: 526.0 GB/s is 105.2 % of the measured peak"), "{error}");
        assert!(within_peak("x", f64::INFINITY, 500.0).is_err() && within_peak("x", f64::NAN, 500.0).is_err());
    }

    #[test]
    fn the_median_is_that_of_sorted_samples() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[cfg(all(feature = "emulator", target_arch = "x86_64"))]
    mod emulated {
        use super::*;
        use crate::device::Backend;
        use std::sync::atomic::{AtomicUsize, Ordering};

        fn subject() -> Subject {
            Subject::new(Device::open(Backend::Emulated).unwrap())
        }

        #[test]
        fn every_check_passes_on_the_emulator_and_takes_no_time_there() {
            let checks = checks();
            let next = AtomicUsize::new(0);
            let work = || {
                let subject = subject();
                while let Some(check) = checks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let finding = subject.run(check);
                    println!("{:6.2} s  {}", finding.seconds, check.name);
                    assert_eq!(finding.outcome, Outcome::Passed, "{}", check.name);
                    assert_eq!(finding.measurements, [], "{}", check.name);
                    assert_eq!(finding.skipped.is_some(), check.timed, "{}", check.name);
                }
            };
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            std::thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
            let mut names: Vec<&str> = checks.iter().map(|c| c.name).collect();
            assert_eq!(names[..3], ["mma f16", "mma bf16", "mma s8"], "products come first: the rest rests on them");
            names.sort();
            names.dedup();
            assert_eq!(names.len(), checks.len(), "a name stands for one check");
        }

        #[test]
        fn a_replay_that_does_nothing_is_not_timed() {
            let subject = subject();
            let (x, y) = (subject.zeros("x", 16).unwrap(), subject.zeros("y", 16).unwrap());
            let launch = Launch {
                kernel: "probe_count",
                grid: [4, 1, 1],
                block: 256,
                shared_bytes: 0,
                cooperative: false,
                arguments: vec![x.at(0), Argument::U32(1)],
            };
            // SAFETY: four blocks, four words.
            let graph = unsafe { subject.record([launch]) }.unwrap();
            assert!(subject.time("count", &graph, &[&x]).is_ok());
            let error = subject.time("count", &graph, &[&x, &y]).unwrap_err().to_string();
            assert_eq!(error, "count: a replay left y as it was");
        }

        #[test]
        fn a_device_that_fails_is_a_finding() {
            fn broken(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
                let y = subject.zeros("y", 4)?;
                y.write(4, &[0])?;
                Ok(Vec::new())
            }
            let finding = subject().run(&Check { name: "broken", what: "nothing", timed: false, run: broken });
            assert!(
                matches!(&finding.outcome, Outcome::Failed(why) if why.contains("buffer y has 4 bytes")),
                "{finding:?}"
            );
        }
    }
}
