//! `cargo bench -p bake`: bakes against the disk they run on.
//!
//! Every round times, in turn and so under the same load: `drop-layers` of a parent that is in no cache, the same without
//! hashing the parent, and `cp --reflink=never` of the child, also cold. All three end with their bytes synced; for `cp` the
//! time before the sync is shown, too. Speed is bytes of output a second. Then rounding to nearest on one core, in processor time
//! of the thread, so that other work on the machine does not count.
//!
//! The parent is E4B with 6 layers and 32 k tokens; `CHIKU_BENCH_FULL=1` takes the whole 16 GB, and then writes it anew for each
//! round and removes it before `cp` runs, so that 32 GB of disk are enough.
//! `CHIKU_BENCH_DIR` chooses the disk, `CHIKU_BENCH_ROUNDS` the rounds (3). The raw samples are printed as one line of JSON.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use bake::drop_layers::{self, DropLayersOptions};
use bake::parent::Parent;
use bake::plan::Work;
use bake::quantize::{self, QuantizeOptions};
use bake::synth::{self, Shape, SynthOptions};
use bake::{Context, WriteOptions, writer};
use runtime::checkpoint::Checkpoint;
use serde_json::json;

fn main() {
    let disk = std::env::var("CHIKU_BENCH_DIR").unwrap_or_else(|_| env!("CARGO_TARGET_TMPDIR").into());
    let rounds = std::env::var("CHIKU_BENCH_ROUNDS").map_or(3, |n| n.parse().expect("CHIKU_BENCH_ROUNDS is a number"));
    let full = std::env::var_os("CHIKU_BENCH_FULL").is_some();
    let tmp = tempfile::tempdir_in(disk).expect("a scratch folder");
    let parent = tmp.path().join("parent");
    let mut options = SynthOptions { towers: full, ..SynthOptions::new(Shape::E4b) };
    if !full {
        (options.layers, options.vocab) = (6, 32_768);
    }
    let made = synth::run(&parent, &options, &Context::quiet()).expect("the parent is written");
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    println!(
        "\nparent: E4B, {} layers, {} tokens, bf16, {:.2} GB; synth wrote {:.0} MB/s; {} threads",
        options.layers,
        options.vocab,
        gigabytes(made.tensor_bytes),
        made.tensor_bytes as f64 / 1e6 / made.seconds,
        rayon::current_num_threads()
    );
    let rounding = rounding(&parent, rounds);
    let layers = if full { vec![2, 3, 4, 36, 37] } else { vec![2, 3] };
    let copies = copies(tmp.path(), &parent, full.then_some(&options), layers, rounds);
    println!("{}", json!({"parent_bytes": made.tensor_bytes, "copies": copies, "rtn": rounding}));
}

/// Drop-layers with and without hashing, and `cp`, from cold caches. `again`: the parent is removed for `cp` and made anew.
fn copies(
    dir: &Path,
    parent: &Path,
    again: Option<&SynthOptions>,
    layers: Vec<usize>,
    rounds: usize,
) -> serde_json::Value {
    let drop = DropLayersOptions { layers, ..Default::default() };
    let (child, copy) = (dir.join("child"), dir.join("copy"));
    let mut samples = Vec::new();
    println!(
        "{:>5} {:>6} {:>12} {:>12} {:>10} {:>10}   MB/s of output",
        "round", "load", "drop-layers", "no hashing", "cp + sync", "cp"
    );
    for round in 0..rounds {
        if let Some(options) = again.filter(|_| !parent.exists()) {
            synth::run(parent, options, &Context::quiet()).expect("the parent is written");
        }
        let checkpoint = Checkpoint::open(parent).expect("it opens");
        evict(parent);
        let started = Instant::now();
        let plan = drop_layers::plan(&Parent::open(&checkpoint).expect("it opens"), &drop).expect("a plan");
        writer::execute(plan, None, &child, WriteOptions::default(), &Context::quiet()).expect("a bake");
        let unhashed = started.elapsed().as_secs_f64();
        fs::remove_dir_all(&child).expect("it goes");

        evict(parent);
        let started = Instant::now();
        let report = drop_layers::run(&checkpoint, &child, &drop, &Context::quiet()).expect("a bake");
        let hashed = started.elapsed().as_secs_f64();

        if again.is_some() {
            std::mem::drop(checkpoint);
            fs::remove_dir_all(parent).expect("it goes");
        }
        evict(&child);
        let started = Instant::now();
        let status = Command::new("cp").args(["-r", "--reflink=never"]).arg(&child).arg(&copy).status().expect("cp");
        assert!(status.success());
        let unsynced = started.elapsed().as_secs_f64();
        File::open(copy.join("model.safetensors")).and_then(|f| f.sync_all()).expect("it syncs");
        let synced = started.elapsed().as_secs_f64();
        fs::remove_dir_all(&child).expect("it goes");
        fs::remove_dir_all(&copy).expect("it goes");

        let speed = |seconds: f64| report.tensor_bytes as f64 / 1e6 / seconds;
        let load = load();
        println!(
            "{round:>5} {load:>6} {:>12.0} {:>12.0} {:>10.0} {:>10.0}   drop-layers / cp + sync {:.2}, / cp {:.2}",
            speed(hashed),
            speed(unhashed),
            speed(synced),
            speed(unsynced),
            synced / hashed,
            unsynced / hashed,
        );
        samples.push(json!({
            "load": load, "bytes": report.tensor_bytes, "drop_layers_s": hashed, "drop_layers_unhashed_s": unhashed,
            "cp_synced_s": synced, "cp_s": unsynced,
        }));
    }
    let median = |key: &str| {
        let mut v: Vec<f64> = samples.iter().filter_map(|s| s[key].as_f64()).collect();
        v.sort_by(f64::total_cmp);
        v[v.len() / 2]
    };
    println!(
        "medians: drop-layers at {:.2} of cp + sync, {:.2} of cp; hashing takes {:+.1} % longer",
        median("cp_synced_s") / median("drop_layers_s"),
        median("cp_s") / median("drop_layers_s"),
        (median("drop_layers_s") / median("drop_layers_unhashed_s") - 1.0) * 100.0
    );
    json!(samples)
}

/// int4 g128, round to nearest, of some linears of the parent on this thread: reading, rounding, packing.
fn rounding(parent: &Path, rounds: usize) -> serde_json::Value {
    const TILE_ROWS: usize = 256;
    const JOBS: usize = 12;
    let checkpoint = Checkpoint::open(parent).expect("it opens");
    let plan =
        quantize::plan(&Parent::open(&checkpoint).expect("it opens"), &QuantizeOptions::default()).expect("a plan");
    let mut samples = Vec::new();
    for _ in 0..=rounds {
        let (started, mut bytes) = (cpu_seconds(), 0);
        let rows = plan.jobs.iter().filter_map(|j| match &j.work {
            Work::Rows { input_bytes, fill } => Some((j, *input_bytes, fill)),
            _ => None,
        });
        for (job, input_bytes, fill) in rows.take(JOBS) {
            let count = job.outputs[0].rows();
            for start in (0..count).step_by(TILE_ROWS) {
                let tile = start..(start + TILE_ROWS).min(count);
                let mut buffers: Vec<Vec<u8>> =
                    job.outputs.iter().map(|o| vec![0; o.row_bytes() * tile.len()]).collect();
                let mut pieces: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
                bytes += tile.len() * input_bytes;
                fill(tile, &mut pieces).expect("rows");
            }
        }
        samples.push(bytes as f64 / 1e6 / (cpu_seconds() - started));
    }
    // The first round warms the cache.
    samples.remove(0);
    let shown: Vec<String> = samples.iter().map(|s| format!("{s:.0}")).collect();
    println!("RTN int4 g128 of bf16: {} MB/s of input a core", shown.join(", "));
    json!(samples)
}

/// Time that this thread has spent on a core, in seconds.
fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts");
    stat.split_whitespace().next().and_then(|n| n.parse::<f64>().ok()).expect("a number") / 1e9
}

/// Processes that wanted a core in the last minute, on average.
fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("?").to_string()
}

/// Puts the files of a directory out of the page cache. They must be synced, else their pages stay.
fn evict(dir: &Path) {
    for entry in fs::read_dir(dir).expect("it is there") {
        let file = File::open(entry.expect("an entry").path()).expect("it opens");
        file.sync_all().expect("it syncs");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("the system takes advice");
    }
}
