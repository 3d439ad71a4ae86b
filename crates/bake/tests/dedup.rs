//! What a store that cuts files into content-defined chunks shares between a parent and its child without some layers: nearly all
//! of the bytes outside the table that is sliced.

mod common;

use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;

use bake::WriteOptions;
use bake::drop_layers::{self, DropLayersOptions};
use bake::synth::{self, Shape, SynthOptions};
use common::*;
use fastcdc::v2020::FastCDC;

/// Chunk sizes of the stores: 64 KiB on average.
const CHUNK: [usize; 3] = [16 << 10, 64 << 10, 256 << 10];

/// Chunks of a file: where they lie, and their hashes.
fn chunks(bytes: &[u8]) -> Vec<(Range<usize>, blake3::Hash)> {
    let [min, average, max] = CHUNK;
    let cut = FastCDC::new(bytes, min, average, max);
    cut.map(|c| (c.offset..c.offset + c.length, blake3::hash(&bytes[c.offset..c.offset + c.length]))).collect()
}

/// Shares of the child's bytes that lie in chunks of the parent: outside the per-layer table, and in all.
fn shared(parent: &Path, child: &Path) -> (f64, f64) {
    let checkpoint = open(parent);
    let known: HashSet<blake3::Hash> = checkpoint
        .shards()
        .iter()
        .flat_map(|s| chunks(&std::fs::read(&s.path).unwrap()).into_iter().map(|(_, hash)| hash))
        .collect();
    let checkpoint = open(child);
    let [shard] = checkpoint.shards() else { panic!("a bake writes one file") };
    let table = shard.header.tensors.iter().find(|t| t.name.contains("embed_tokens_per_layer")).unwrap();
    let table = shard.header.data_start + table.begin..shard.header.data_start + table.end;
    let bytes = std::fs::read(&shard.path).unwrap();
    // [bytes of the table, other bytes]: all, and those in known chunks.
    let mut counts = BTreeMap::from([(false, [0usize; 2]), (true, [0; 2])]);
    for (range, hash) in chunks(&bytes) {
        let inside = range.end.min(table.end).saturating_sub(range.start.max(table.start));
        for known in [false, true].into_iter().take(1 + usize::from(known.contains(&hash))) {
            let count = counts.get_mut(&known).unwrap();
            count[0] += inside;
            count[1] += range.len() - inside;
        }
    }
    let ([table, outside], [known_table, known_outside]) = (counts[&false], counts[&true]);
    assert_eq!(table + outside, bytes.len());
    (known_outside as f64 / outside as f64, (known_outside + known_table) as f64 / (outside + table) as f64)
}

#[test]
fn a_child_without_some_layers_shares_its_parents_chunks() {
    let tmp = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let shape = SynthOptions { layers: 5, vocab: 8192, ..SynthOptions::new(Shape::E2b) };
    let sharded = WriteOptions { shards: NonZeroUsize::new(3), ..Default::default() };
    for (name, options) in [
        ("bf16", shape),
        ("bf16-sharded", SynthOptions { write: sharded, ..shape }),
        ("int4-sharded", SynthOptions { write: sharded, int4: Some(bake::Strategy::Group(128)), ..shape }),
    ] {
        let (parent, child) = (tmp.path().join(name), tmp.path().join(format!("{name}-child")));
        synth::run(&parent, &options, &quiet()).unwrap();
        let drop = DropLayersOptions { layers: vec![1, 3], ..Default::default() };
        drop_layers::run(&open(&parent), &child, &drop, &quiet()).unwrap();
        let (outside, all) = shared(&parent, &child);
        println!(
            "{name}: {:.2} % of the bytes outside the per-layer table, {:.2} % of all",
            outside * 100.0,
            all * 100.0
        );
        assert!(outside >= 0.95, "{name}: {outside}");
        // The rows of the table are shorter than a chunk, and each has lost a piece.
        assert!(all < outside, "{name}");
        std::fs::remove_dir_all(&parent).unwrap();
        std::fs::remove_dir_all(&child).unwrap();
    }
}
