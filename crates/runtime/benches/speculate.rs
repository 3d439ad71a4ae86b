//! `cargo bench -p runtime --bench speculate`: what a verify pass costs relative to one row, chain (8 rows) and star (16 rows), on nano
//! and at the width of E4B, int4 both.
//!
//! This is about time; what a draft yields is `chiku bench acceptance`. Passes of all widths and of both precisions take turns, medians are
//! printed, raw samples are written as JSON.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bake::quantize::QuantizeOptions;
use bake::synth::{Shape as SynthShape, SynthOptions};
use bake::{Context, Strategy};
use runtime::checkpoint::Checkpoint;
use runtime::speculate::{Branch, Shape};
use runtime::{Engine, EngineOptions, Model, Precision};
use serde_json::json;

/// Timed rounds; one more warms up.
const ROUNDS: usize = 21;
/// Cached positions before each pass.
const CONTEXT: usize = 128;

fn main() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let e4b = folder.join("e4b-8-layers-int4");
    if !e4b.exists() {
        let int4 = Some(Strategy::Group(128));
        let options =
            SynthOptions { layers: 8, vocab: 16_384, int4, inert_kv: false, ..SynthOptions::new(SynthShape::E4b) };
        bake::synth::run(&e4b, &options, &Context::quiet()).expect("the synthetic checkpoint is written");
    }
    let nano = folder.join("nano-int4");
    if !nano.exists() {
        let parent = Checkpoint::open(&runtime::nano::directory().expect("the embedded model")).expect("it opens");
        let options =
            QuantizeOptions { strategy: Strategy::Group(32), head: Strategy::Group(32), ..Default::default() };
        bake::quantize::run(&parent, &nano, &options, &Context::quiet()).expect("it is quantised");
    }
    let shapes = [
        ("plain", Shape::chain(0)),
        ("chain K=7", Shape::chain(7)),
        ("star 1,1,1,1", Shape::star(vec![1, 1, 1, 1, 0, 0, 0])),
        ("star, 16 rows", Shape::star(vec![2, 2, 1, 1, 1, 1, 0])),
    ];
    let shapes = shapes.map(|(name, shape)| (name, shape.expect("a legal shape")));
    let mut records = Vec::new();
    for (name, dir) in [("nano int4 g32", nano), ("E4B width, 8 layers, int4 g128", e4b)] {
        records.push(measure(name, &dir, &shapes));
    }
    let raw = folder.join("speculate-samples.json");
    std::fs::write(&raw, json!(records).to_string()).expect("the samples are written");
    println!("raw samples: {}", raw.display());
}

fn measure(name: &str, dir: &Path, shapes: &[(&str, Shape)]) -> serde_json::Value {
    let model = Arc::new(Model::load(Checkpoint::open(dir).expect("it opens")).expect("it loads"));
    let vocab = model.config().vocab_size as u32;
    let tokens: Vec<u32> = (0..CONTEXT as u32 + 16).map(|i| i * 7919 % vocab).collect();
    let precisions = [Precision::Native, Precision::Int8];
    let mut engines = precisions.map(|precision| {
        let options = EngineOptions { precision, ..Default::default() };
        let mut engine = Engine::new(model.clone(), &options).expect("an engine");
        engine.extend(&tokens[..CONTEXT], 0..0).expect("prefill");
        engine
    });
    let mut samples = precisions.map(|_| vec![Vec::new(); shapes.len()]);
    for round in 0..=ROUNDS {
        for (engine, samples) in engines.iter_mut().zip(&mut samples) {
            for (samples, (_, shape)) in samples.iter_mut().zip(shapes) {
                let chain = &tokens[CONTEXT..CONTEXT + 1 + shape.depth()];
                let branches: Vec<Branch> = (1..=shape.depth())
                    .flat_map(|depth| (0..shape.branches(depth)).map(move |b| Branch { depth, token: 1 + b as u32 }))
                    .collect();
                let started = Instant::now();
                black_box(engine.verify(chain, &branches).expect("a pass"));
                let elapsed = started.elapsed().as_secs_f64();
                engine.settle(CONTEXT, None);
                if round > 0 {
                    samples.push(elapsed);
                }
            }
        }
    }
    let rows: Vec<usize> = shapes.iter().map(|s| s.1.rows()).collect();
    let mut records = Vec::new();
    for ((engine, samples), precision) in engines.iter().zip(&samples).zip(precisions) {
        let (precision, threads, isa) = (precision.as_str(), engine.threads(), engine.isa());
        println!("\n{name}; precision {precision}; {threads} threads, {isa}, context {CONTEXT}");
        println!("{:>16} {:>5} {:>12} {:>10}", "shape", "rows", "ms (median)", "of one row");
        let first = median(&samples[0]);
        for (samples, (name, shape)) in samples.iter().zip(shapes) {
            let s = median(samples);
            println!("{name:>16} {:>5} {:>12.3} {:>10.2}", shape.rows(), s * 1e3, s / first);
        }
        records.push(json!({
            "kind": "measured", "model": name, "precision": precision, "rows": rows, "pass_s": samples, "threads": threads, "isa": isa,
        }));
    }
    json!(records)
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
