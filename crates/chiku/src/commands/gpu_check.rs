//! `chiku gpu-check`: the self-test of a GPU, and a record of it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use bench::gpu::{CheckResult, GpuRecord};
use clap::{Args, ValueEnum};
use kernels::device::{Backend, Device};
use kernels::selftest::{self, Check, Subject};

use super::bench::run::{binary, node_id};
use crate::exit::{GATE_FAILED, INTERRUPTED};
use crate::interrupt;

#[derive(Args)]
#[command(
    after_help = "First whether rows and columns of matrix products are independent of their neighbours, without which no identity is \
claimed; then what memory, launches and barriers cost; then every kernel on the test vectors that it has on the emulator, its bits at every \
number of rows, and its speed on weights that do not fit the cache, as a part of this device's own measured peak. A record is appended to \
results/. Exit code 1: a check failed. 3: there is no GPU, or this program was built without code for one.

Examples:
  chiku gpu-check
  chiku gpu-check --list
  chiku gpu-check --only mma --only gemm --json
  chiku gpu-check --backend emulated"
)]
pub struct GpuCheckArgs {
    /// What to test. On the emulator the same checks run smaller, and nothing is timed.
    #[arg(long, value_enum, default_value = "cuda")]
    pub backend: BackendArg,
    /// Only checks whose name contains this; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub only: Vec<String>,
    /// Print the checks and what each establishes, and run none.
    #[arg(long)]
    pub list: bool,
    /// Name of this machine among like ones, for the record.
    #[arg(long, value_parser = node_id, value_name = "ID")]
    pub node_id: Option<String>,
    /// JSONL file to append the record to [default: results/YEAR/gpu-check/GPU-MONTH.jsonl; none for the emulator].
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print the record as JSON.
    #[arg(long)]
    pub json: bool,
}

/// `--backend`.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum BackendArg {
    /// The first GPU that the kernels run on.
    Cuda,
    /// The same kernels on the CPU, every access checked.
    Emulated,
}

pub fn run(args: &GpuCheckArgs, quiet: bool) -> Result<ExitCode> {
    let all = selftest::checks();
    let wanted =
        |check: &&Check| args.only.is_empty() || args.only.iter().any(|part| check.name.contains(part.as_str()));
    let chosen: Vec<&Check> = all.iter().filter(wanted).collect();
    if let Some(part) = args.only.iter().find(|part| !all.iter().any(|c| c.name.contains(part.as_str()))) {
        bail!("--only {part}: no check has such a name; `chiku gpu-check --list` names them");
    }
    if args.list {
        list(&chosen, args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let device = Device::open(match args.backend {
        BackendArg::Cuda => Backend::Cuda,
        BackendArg::Emulated => Backend::Emulated,
    })?;
    let properties = device.properties();
    let out = match (&args.out, args.backend) {
        (Some(path), _) => Some(path.clone()),
        (None, BackendArg::Cuda) => Some(GpuRecord::path(Path::new("results"), &properties.name)),
        (None, BackendArg::Emulated) => None,
    };
    if let Some(path) = &out {
        bench::log::writable(path)?;
    }

    let cancel = interrupt::flag()?;
    let subject = Subject::new(device);
    let mut results = Vec::new();
    for check in &chosen {
        if cancel.load(std::sync::atomic::Ordering::SeqCst) {
            break;
        }
        let result = CheckResult::from(subject.run(check));
        let silent = args.json || quiet && result.passed;
        if !silent {
            print(&result);
        }
        results.push(result);
    }
    let interrupted = results.len() < chosen.len();
    let complete = results.len() == all.len();
    let failed: Vec<&str> = results.iter().filter(|r| !r.passed).map(|r| r.name).collect();
    let failures = failed.len();
    let identity = !failed.iter().any(|name| name.starts_with("mma"));
    let record = GpuRecord::new(binary(), args.node_id.clone(), properties, results, complete);
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&record)?);
    } else {
        crate::outln!("{} of {} checks hold on {}", record.checks.len() - failures, chosen.len(), record.device.name);
        if !identity {
            crate::outln!(
                "products depend on their neighbours here: no identity of speculative and plain output is claimed"
            );
        }
        if record.checks.iter().any(|c| c.measured.iter().any(|m| m.of_peak.is_some())) {
            for rate in &record.published {
                let percent = rate.of_copy_peak.value * 100.0;
                crate::outln!("published  {percent:5.1} %  {}: {}", rate.what, rate.of_copy_peak.source);
            }
        }
    }
    if let Some(path) = out {
        bench::log::append(&path, &record)?;
        if !quiet {
            crate::errln!("record appended to {}", path.display());
        }
    }
    Ok(match (interrupted, failures) {
        (true, _) => ExitCode::from(INTERRUPTED),
        (false, 0) => ExitCode::SUCCESS,
        (false, _) => ExitCode::from(GATE_FAILED),
    })
}

fn list(checks: &[&Check], json: bool) -> Result<()> {
    if json {
        let checks: Vec<_> = checks.iter().map(|c| serde_json::json!({"name": c.name, "what": c.what})).collect();
        crate::outln!("{}", serde_json::to_string_pretty(&checks)?);
    } else {
        checks.iter().for_each(|c| crate::outln!("{:<20} {}", c.name, c.what));
    }
    Ok(())
}

fn print(result: &CheckResult) {
    let verdict = if result.passed { "ok  " } else { "FAIL" };
    crate::outln!("{verdict} {:<20} {:6.2} s  {}", result.name, result.seconds, result.what);
    if let Some(why) = &result.failure {
        why.lines().for_each(|line| crate::outln!("       {line}"));
    }
    if let Some(skipped) = result.skipped {
        crate::outln!("       skipped {skipped}");
    }
    for m in &result.measured {
        let part = m.of_peak.map_or(String::new(), |part| format!("  {:5.1} % of peak", part * 100.0));
        crate::outln!("       {:10.2} {}{part}  {}", m.value, m.unit, m.what);
    }
}
