//! Synthetic checkpoints: valid, the same everywhere, and packed as the quantiser packs.

mod common;

use bake::quantize::{self, QuantizeOptions};
use bake::synth::{self, Shape, SynthOptions};
use bake::{Strategy, inspect};
use common::*;

fn nano_like() -> SynthOptions {
    SynthOptions { layers: 7, vocab: 96, seed: 3, ..SynthOptions::new(Shape::Nano) }
}

#[test]
fn every_depth_passes_the_strict_inspection() {
    let tmp = tempfile::tempdir().unwrap();
    for layers in [1, 2, 6, 7, 12, 13] {
        for (int4, inert_kv, towers, sparse) in
            [(None, true, false, false), (Some(Strategy::Group(32)), false, true, false), (None, true, true, true)]
        {
            let out = tmp.path().join(format!("{layers}-{inert_kv}-{sparse}"));
            let options = SynthOptions { layers, int4, inert_kv, towers, sparse, ..nano_like() };
            synth::run(&out, &options, &quiet()).unwrap();
            let options = inspect::InspectOptions { strict: true, against: None };
            let r = inspect::run(&open(&out), &options, &quiet()).unwrap();
            assert_eq!(r.problems, [""; 0], "{layers} {int4:?}");
            assert_eq!(r.layers, layers);
        }
    }
}

/// At nano's depth and vocabulary, names, types and shapes are nano's own.
#[test]
fn the_shape_is_that_of_the_model() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    synth::run(&out, &SynthOptions { inert_kv: false, ..SynthOptions::new(Shape::Nano) }, &quiet()).unwrap();
    let shapes = |t: Tensors| t.into_iter().map(|(n, (d, s, _))| (n, d, s)).collect::<Vec<_>>();
    assert_eq!(shapes(tensors_of(&out)), shapes(tensors_of(&nano())));
    assert_eq!(open(&out).config().layers, open(&nano()).config().layers);
}

#[test]
fn packed_output_is_what_the_quantiser_makes_of_the_dense_one() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    for strategy in [Strategy::Group(32), Strategy::Channel] {
        let name = format!("{strategy:?}");
        synth::run(&path("dense"), &SynthOptions { write: bake::WriteOptions::force(), ..nano_like() }, &quiet())
            .unwrap();
        let options = SynthOptions { int4: Some(strategy), ..nano_like() };
        synth::run(&path(&name), &options, &quiet()).unwrap();
        let quantised = path(&format!("{name}-q"));
        let options = QuantizeOptions { strategy, ..Default::default() };
        quantize::run(&open(&path("dense")), &quantised, &options, &quiet()).unwrap();
        assert_same(&tensors_of(&path(&name)), &tensors_of(&quantised));
        assert_eq!(open(&path(&name)).config_json(), open(&quantised).config_json());
    }
}

#[test]
fn bytes_depend_on_the_seed_and_on_nothing_else() {
    let tmp = tempfile::tempdir().unwrap();
    let file = |name: &str, seed: u64, threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let out = tmp.path().join(name);
        pool.install(|| synth::run(&out, &SynthOptions { seed, ..nano_like() }, &quiet())).unwrap();
        std::fs::read(out.join("model.safetensors")).unwrap()
    };
    let one = file("a", 1, 1);
    assert!(one == file("b", 1, 3), "threads must not matter");
    assert!(one != file("c", 2, 1), "the seed must");
}

#[test]
fn sizes_out_of_range_are_refused() {
    let tmp = tempfile::tempdir().unwrap();
    for (layers, vocab, option) in [(0, 8, "layers"), (5000, 8, "layers"), (2, 0, "vocab"), (2, 1 << 21, "vocab")] {
        let error = synth::run(&tmp.path().join("x"), &SynthOptions { layers, vocab, ..nano_like() }, &quiet());
        assert!(error.unwrap_err().to_string().contains(option));
    }
}

#[test]
fn shards_hold_what_the_one_file_holds() {
    let tmp = tempfile::tempdir().unwrap();
    let (one, many) = (tmp.path().join("one"), tmp.path().join("many"));
    synth::run(&one, &nano_like(), &quiet()).unwrap();
    let write = bake::WriteOptions { shards: std::num::NonZeroUsize::new(3), ..Default::default() };
    synth::run(&many, &SynthOptions { write, ..nano_like() }, &quiet()).unwrap();
    assert_eq!(open(&many).shards().len(), 3);
    assert_same(&tensors_of(&many), &tensors_of(&one));
    // The order of all tensors is that of the one file, and a child of the shards is a child of the file.
    let order = |dir: &std::path::Path| open(dir).tensors().map(|t| t.name).collect::<Vec<_>>();
    assert_eq!(order(&many), order(&one));
    let quantised = |from: &std::path::Path| {
        let out = tmp.path().join("q");
        let write = bake::WriteOptions::force();
        let options = QuantizeOptions { strategy: Strategy::Group(32), write, ..Default::default() };
        quantize::run(&open(from), &out, &options, &quiet()).unwrap();
        std::fs::read(out.join("model.safetensors")).unwrap()
    };
    assert!(quantised(&many) == quantised(&one));
    // A sharded target can be replaced, too.
    synth::run(&many, &SynthOptions { write: bake::WriteOptions::force(), ..nano_like() }, &quiet()).unwrap();
    assert_eq!(open(&many).shards().len(), 1);
}

/// Widths of E2B: the MLP of shared layers is twice as wide, and there is one head of keys and values.
#[test]
fn e2b_is_double_wide_where_it_shares() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    let options = SynthOptions { sparse: true, towers: true, ..SynthOptions::new(Shape::E2b) };
    let report = synth::run(&out, &options, &quiet()).unwrap();
    assert!(report.tensor_bytes > 9_000_000_000, "{}", report.tensor_bytes);
    let checkpoint = open(&out);
    let config = checkpoint.config();
    assert_eq!((config.layers.len(), config.num_kv_shared_layers, config.hidden_size), (35, 20, 1536));
    for (l, layer) in config.layers.iter().enumerate() {
        assert_eq!(layer.intermediate_size, if l < 15 { 6144 } else { 12_288 });
        assert_eq!(layer.kv_heads, 1);
    }
}
