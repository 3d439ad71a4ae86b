//! Speed and memory at the real model's widths. Writes about 4 GB, so it only runs when asked:
//! `cargo test --release -p bake --test scale -- --ignored --nocapture`
//!
//! `CHIKU_SCALE_DIR` chooses the disk. Every bake syncs its output, so on a disk the disk is what is measured; on a tmpfs it is
//! the arithmetic.

mod common;

use std::path::Path;

use bake::drop_layers::{self, DropLayersOptions};
use bake::inspect::{self, InspectOptions};
use bake::prune_vocab::{self, PruneVocabOptions};
use bake::quantize::{self, QuantizeOptions};
use bake::synth::{self, Shape, SynthOptions};
use bake::{Report, keepset};
use common::*;

/// Peak resident memory of this process so far, in bytes.
fn peak_rss() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn show(what: &str, report: &Report) {
    let rate = |bytes: u64| bytes as f64 / 1e6 / report.seconds;
    println!(
        "{what:<14} {:>8.1} MB in {:>6.2} s: {:>6.0} MB/s written, {:>6.0} MB/s read; peak RSS {:.0} MB",
        report.tensor_bytes as f64 / 1e6,
        report.seconds,
        rate(report.tensor_bytes),
        rate(report.parent_bytes),
        peak_rss() as f64 / 1e6,
    );
}

#[test]
#[ignore = "writes 4 GB"]
fn bakes_run_in_bounded_memory() {
    let disk = std::env::var("CHIKU_SCALE_DIR").unwrap_or_else(|_| env!("CARGO_TARGET_TMPDIR").into());
    let tmp = tempfile::tempdir_in(disk).unwrap();
    let path = |n: &str| tmp.path().join(n);
    let from = |p: &Path| open(p);
    let options = SynthOptions { layers: 9, vocab: 65_536, ..SynthOptions::new(Shape::E4b) };
    show("synth", &synth::run(&path("s"), &options, &quiet()).unwrap());
    let int4 = SynthOptions { int4: Some(bake::Strategy::Group(128)), ..options };
    show("synth int4", &synth::run(&path("s4"), &int4, &quiet()).unwrap());
    std::fs::remove_dir_all(path("s4")).unwrap();
    show("quantize", &quantize::run(&from(&path("s")), &path("q"), &QuantizeOptions::default(), &quiet()).unwrap());
    let drop = DropLayersOptions { layers: vec![1, 2], ..Default::default() };
    show("drop-layers", &drop_layers::run(&from(&path("s")), &path("d"), &drop, &quiet()).unwrap());
    let keep = keepset::from_ids((0..65_536).step_by(5).collect(), 65_536).unwrap();
    let prune = PruneVocabOptions::default();
    show("prune-vocab", &prune_vocab::run(&from(&path("s")), &path("p"), &keep, &prune, &quiet()).unwrap());
    let start = std::time::Instant::now();
    let strict = InspectOptions { strict: true, against: None };
    let report = inspect::run(&from(&path("d")), &strict, &quiet()).unwrap();
    assert_eq!(report.problems, [""; 0]);
    println!("inspect strict {:.2} s; peak RSS {:.0} MB", start.elapsed().as_secs_f64(), peak_rss() as f64 / 1e6);
    print!("{report}");
    assert!(peak_rss() < 300 << 20, "peak RSS {} bytes", peak_rss());
}

/// Time this thread has spent on a core, in seconds: other processes do not count.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1e9
}

#[test]
#[ignore = "measures"]
fn rounding_to_nearest_per_core() {
    use bake::quant::{self, Arithmetic, Bits};
    use half::bf16;
    let inputs = 2560;
    let row: Vec<f32> = (0..inputs).map(|i| bf16::from_f32((i as f32 * 12.9898).sin()).to_f32()).collect();
    let (mut nibbles, mut words) = (vec![0; inputs], vec![0; inputs / 8]);
    let mut scales = vec![bf16::ZERO; inputs / 128];
    for arithmetic in [Arithmetic::Bf16, Arithmetic::F32] {
        let (start, rows) = (cpu_seconds(), 40_000);
        for _ in 0..rows {
            quant::quantise_row(std::hint::black_box(&row), 128, Bits::Four, arithmetic, &mut nibbles, &mut scales)
                .unwrap();
            quant::pack_row(&nibbles, Bits::Four, &mut words);
            std::hint::black_box((&words, &scales));
        }
        let seconds = cpu_seconds() - start;
        println!("{arithmetic:?}: {:.0} M weights/s a core", (rows * inputs) as f64 / 1e6 / seconds);
    }
}
