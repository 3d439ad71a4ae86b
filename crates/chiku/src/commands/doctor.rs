//! `chiku doctor`: what this machine can do, and what is missing.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::Args;
use kernels::cpu::Isa;
use kernels::device::{Probe, Target, images, probe};
use serde::Serialize;
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use crate::output::megabytes;

#[derive(Args)]
#[command(after_help = "Example:\n  chiku doctor --json")]
pub struct DoctorArgs {
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Report {
    program: Program,
    cpu: Cpu,
    memory: Memory,
    gpu: Gpu,
    toolchain: Vec<Tool>,
    paths: Vec<Writable>,
}

#[derive(Serialize)]
struct Program {
    version: &'static str,
    build: &'static str,
    /// Commit it was built from; `None` where the builder did not know.
    commit: Option<&'static str>,
    /// What the GPU code inside of it runs on; empty where it was built without any.
    gpu_code: Vec<String>,
}

#[derive(Serialize)]
struct Cpu {
    model: String,
    cores: usize,
    features: Vec<&'static str>,
    /// Instruction set that `--precision native` uses.
    isa: &'static str,
}

#[derive(Serialize)]
struct Memory {
    total_bytes: u64,
    available_bytes: u64,
}

#[derive(Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
enum Gpu {
    Available { driver_cuda: String, devices: Vec<GpuDevice> },
    Unavailable { reason: String },
}

#[derive(Serialize)]
struct GpuDevice {
    name: String,
    compute_capability: String,
    multiprocessors: i32,
    memory_bytes: usize,
    /// Whether the kernels run on it.
    supported: bool,
}

#[derive(Serialize)]
struct Tool {
    name: &'static str,
    /// First line of `--version`; `None` where the tool is not installed.
    version: Option<String>,
    needed_for: &'static str,
}

#[derive(Serialize)]
struct Writable {
    what: &'static str,
    path: PathBuf,
    writable: bool,
}

pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let report = examine();
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print(&report);
    }
    Ok(ExitCode::SUCCESS)
}

fn examine() -> Report {
    // A system that does not tell its memory shows as 0 bytes.
    let system = System::new_with_specifics(RefreshKind::nothing().with_memory(MemoryRefreshKind::everything()));
    let gpu = match probe() {
        Probe::Unavailable { reason } => Gpu::Unavailable { reason },
        Probe::Available { driver: (major, minor), devices } => Gpu::Available {
            driver_cuda: format!("{major}.{minor}"),
            devices: devices
                .into_iter()
                .map(|d| GpuDevice {
                    supported: d.supported(),
                    name: d.name,
                    compute_capability: format!("{}.{}", d.compute_capability.0, d.compute_capability.1),
                    multiprocessors: d.multiprocessors,
                    memory_bytes: d.memory_bytes,
                })
                .collect(),
        },
    };
    let mut paths = vec![writable("working folder (results/)", PathBuf::from("."))];
    if let Ok(cache) = runtime::nano::cache_root() {
        paths.push(writable("model cache", cache));
    }
    paths.push(writable("temporary files", std::env::temp_dir()));
    Report {
        program: Program {
            version: env!("CARGO_PKG_VERSION"),
            build: if cfg!(debug_assertions) { "debug" } else { "release" },
            commit: Some(env!("CHIKU_BUILD_COMMIT")).filter(|c| !c.is_empty()),
            gpu_code: gpu_code(),
        },
        cpu: Cpu { model: cpu_model(), cores: cores(), features: cpu_features(), isa: Isa::best().name() },
        memory: Memory {
            total_bytes: system.as_ref().map_or(0, System::total_memory),
            available_bytes: system.as_ref().map_or(0, System::available_memory),
        },
        gpu,
        toolchain: vec![
            tool("cargo", "building from source"),
            tool("cc", "building from source"),
            tool("git", "recording the commit beside a measurement"),
        ],
        paths,
    }
}

/// The targets of the machine code in this program.
fn gpu_code() -> Vec<String> {
    let mut targets: Vec<Target> = images().iter().map(|image| image.target).collect();
    targets.sort();
    targets.dedup();
    let name = |target| match target {
        Target::Sm(sm) => format!("sm_{sm}"),
        Target::Ptx(compute) => format!("compute_{compute} PTX"),
    };
    targets.into_iter().rev().map(name).collect()
}

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Name of the processor, as the system tells it.
pub fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find_map(|l| l.strip_prefix("model name"));
    line.and_then(|l| l.split_once(':')).map_or_else(|| std::env::consts::ARCH.into(), |(_, name)| name.trim().into())
}

/// Most memory that this process has held so far, from the system's own count; `None` where it keeps none.
pub fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let all = [
            ("avx2", is_x86_feature_detected!("avx2")),
            ("fma", is_x86_feature_detected!("fma")),
            ("f16c", is_x86_feature_detected!("f16c")),
            ("avx512f", is_x86_feature_detected!("avx512f")),
            ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ];
        all.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

fn tool(name: &'static str, needed_for: &'static str) -> Tool {
    let output = Command::new(name).arg("--version").output().ok().filter(|o| o.status.success());
    let version = output.and_then(|o| String::from_utf8_lossy(&o.stdout).lines().next().map(String::from));
    Tool { name, version, needed_for }
}

/// Whether a file can be made in `path`, or in the nearest folder above it that exists.
fn writable(what: &'static str, path: PathBuf) -> Writable {
    // The nearest thing above it that exists must be a folder.
    let existing = path.ancestors().find(|p| p.symlink_metadata().is_ok() || p.as_os_str().is_empty());
    let existing = existing.map(|p| if p.as_os_str().is_empty() { PathBuf::from(".") } else { p.into() });
    let existing = existing.filter(|p| p.is_dir());
    let writable = existing.is_some_and(|dir| tempfile::tempfile_in(dir).is_ok());
    Writable { what, path, writable }
}

fn print(r: &Report) {
    let commit = r.program.commit.unwrap_or("unknown");
    crate::outln!("chiku {} ({} build, commit {commit})", r.program.version, r.program.build);
    crate::outln!("cpu        {}, {} cores, {} -> {}", r.cpu.model, r.cpu.cores, r.cpu.features.join(" "), r.cpu.isa);
    let (total, available) = (megabytes(r.memory.total_bytes), megabytes(r.memory.available_bytes));
    crate::outln!("memory     {available} available of {total}");
    match &r.gpu {
        Gpu::Unavailable { reason } => crate::outln!("gpu        none: {reason}"),
        Gpu::Available { driver_cuda, devices } => {
            for d in devices {
                let (cc, sms, memory) = (&d.compute_capability, d.multiprocessors, megabytes(d.memory_bytes as u64));
                let note = if d.supported { "" } else { "; not used: the kernels need sm 8.0 or later" };
                crate::outln!("gpu        {} (sm {cc}, {sms} SMs, {memory}), driver CUDA {driver_cuda}{note}", d.name);
            }
        }
    }
    let gpu_code = match r.program.gpu_code.as_slice() {
        [] => "none: this program was built without `CHIKU_CUBINS`".into(),
        targets => targets.join(", "),
    };
    crate::outln!("gpu code   {gpu_code}");
    for t in &r.toolchain {
        let version = t.version.as_deref().unwrap_or("not installed");
        crate::outln!("tool       {:<6} {version} (for {})", t.name, t.needed_for);
    }
    for p in &r.paths {
        crate::outln!(
            "path       {} {} ({})",
            if p.writable { "writable" } else { "NOT writable" },
            p.path.display(),
            p.what
        );
    }
}
