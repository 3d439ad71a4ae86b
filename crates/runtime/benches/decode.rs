//! `cargo bench -p runtime --bench decode`: what a pass over M rows costs at the width of E4B.
//!
//! A synthetic checkpoint (8 layers, int4 g128, 16 k tokens) is written once under the target folder. Each round times one pass
//! at every M and one sweep over a buffer larger than the caches, in turn, so that a slow spell of the machine hits all of them
//! alike. Medians are printed; the raw samples are written as JSON beside the checkpoint.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bake::synth::{Shape, SynthOptions};
use rayon::prelude::*;
use runtime::checkpoint::Checkpoint;
use runtime::{Engine, EngineOptions, Model};
use serde_json::json;

/// Rows of a pass.
const WIDTHS: [usize; 4] = [1, 8, 16, 64];
/// Timed rounds; one more is thrown away to warm up.
const ROUNDS: usize = 15;
/// Cached positions before each pass.
const CONTEXT: usize = 128;
/// Bytes of the buffer whose sweep measures the read bandwidth: well above any L3 cache.
const SWEEP_BYTES: usize = 1 << 29;

fn main() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let dir = folder.join("e4b-8-layers-int4");
    if !dir.exists() {
        let int4 = Some(bake::Strategy::Group(128));
        let options = SynthOptions { layers: 8, vocab: 16_384, int4, inert_kv: false, ..SynthOptions::new(Shape::E4b) };
        bake::synth::run(&dir, &options, &bake::Context::quiet()).expect("the synthetic checkpoint is written");
    }
    let model = Arc::new(Model::load(Checkpoint::open(&dir).expect("it opens")).expect("it loads"));
    let mut engine = Engine::new(model.clone(), &EngineOptions::default()).expect("an engine");
    let tokens: Vec<u32> = (0..CONTEXT as u32 + 64).map(|i| i * 7919 % 16_384).collect();
    engine.extend(&tokens[..CONTEXT], 0..0).expect("prefill");

    let buffer = vec![1u64; SWEEP_BYTES / 8];
    let mut sweeps = Vec::new();
    let mut passes = vec![Vec::new(); WIDTHS.len()];
    for round in 0..=ROUNDS {
        let started = Instant::now();
        let sum: u64 = buffer.par_chunks(1 << 16).map(|c| c.iter().fold(0u64, |a, v| a.wrapping_add(*v))).sum();
        black_box(sum);
        let sweep = started.elapsed().as_secs_f64();
        if round > 0 {
            sweeps.push(sweep);
        }
        for (samples, &m) in passes.iter_mut().zip(&WIDTHS) {
            let rows = &tokens[CONTEXT..CONTEXT + m];
            let started = Instant::now();
            black_box(engine.extend(rows, 0..m).expect("a pass"));
            let elapsed = started.elapsed().as_secs_f64();
            engine.truncate(CONTEXT);
            if round > 0 {
                samples.push(elapsed);
            }
        }
    }

    let bandwidth = SWEEP_BYTES as f64 / median(&sweeps) / 1e9;
    let bytes = model.step_weight_bytes();
    println!(
        "\nE4B width, 8 layers, int4 g128, 16 k tokens: {:.1} MB of weights a pass; {} threads, {}",
        bytes as f64 / 1e6,
        engine.threads(),
        engine.isa()
    );
    println!("measured read bandwidth: {bandwidth:.1} GB/s");
    println!(
        "{:>4} {:>12} {:>12} {:>10} {:>12} {:>10}",
        "M", "ms (median)", "tokens/s", "of M = 1", "weight GB/s", "of read"
    );
    let first = median(&passes[0]);
    for (samples, m) in passes.iter().zip(WIDTHS) {
        let s = median(samples);
        let rate = bytes as f64 / s / 1e9;
        println!(
            "{m:>4} {:>12.2} {:>12.1} {:>10.2} {rate:>12.2} {:>9.0}%",
            s * 1e3,
            m as f64 / s,
            s / first,
            rate / bandwidth * 100.0
        );
    }
    let raw = folder.join("decode-samples.json");
    let record = json!({"kind": "measured", "weight_bytes": bytes, "sweep_bytes": SWEEP_BYTES, "sweep_s": sweeps,
                        "rows": WIDTHS, "pass_s": passes, "threads": engine.threads(), "isa": engine.isa()});
    std::fs::write(&raw, record.to_string()).expect("the samples are written");
    println!("raw samples: {}", raw.display());
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
