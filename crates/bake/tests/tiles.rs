//! Tensors larger than a tile: every piece lands in its place. The other tests' tensors fit into one.

mod common;

use bake::drop_layers::{self, DropLayersOptions};
use bake::prune_vocab::{self, PruneVocabOptions};
use bake::quant::{self, Arithmetic, Bits};
use bake::quantize::{self, QuantizeOptions};
use bake::synth::{self, Shape, SynthOptions};
use bake::{Error, Strategy, inspect, keepset};
use common::{LM, damaged, nano, open, quiet, tensors_of};
use half::bf16;

const VOCAB: usize = 60_000;
/// Of nano.
const HIDDEN: usize = 128;

#[test]
fn large_tables_are_selected_sliced_and_packed_row_by_row() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |n: &str| tmp.path().join(n);
    let options = SynthOptions { layers: 3, vocab: VOCAB, ..SynthOptions::new(Shape::Nano) };
    synth::run(&path("s"), &options, &quiet()).unwrap();
    let source = tensors_of(&path("s"));
    let embed = &source[&format!("{LM}embed_tokens.weight")].2;
    let mut distinct: Vec<&[u8]> = embed.chunks(2 * HIDDEN).collect();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), VOCAB, "a tile written twice would repeat rows");

    // Runs of every length: two of three ids, and none of the last thousand.
    let ids: Vec<u32> = (0..VOCAB as u32 - 1000).filter(|id| id % 3 != 1).collect();
    let keep = keepset::from_ids(ids.clone(), VOCAB).unwrap();
    prune_vocab::run(&open(&path("s")), &path("p"), &keep, &PruneVocabOptions::default(), &quiet()).unwrap();
    let pruned = tensors_of(&path("p"));
    let head = &pruned["lm_head.weight"].2;
    for (row, id) in head.chunks(2 * HIDDEN).zip(&ids) {
        let at = *id as usize * 2 * HIDDEN;
        assert!(row == &embed[at..at + 2 * HIDDEN], "token {id}");
    }

    let options = QuantizeOptions { strategy: Strategy::Group(32), head: Strategy::Group(32), ..Default::default() };
    quantize::run(&open(&path("p")), &path("q"), &options, &quiet()).unwrap();
    let packed = tensors_of(&path("q"));
    let (words, scales) = (&packed["lm_head.weight_packed"].2, &packed["lm_head.weight_scale"].2);
    let (mut n, mut w, mut s) = (vec![0; HIDDEN], vec![0; HIDDEN / 8], vec![bf16::ZERO; HIDDEN / 32]);
    for (r, row) in head.chunks(2 * HIDDEN).enumerate() {
        let row: Vec<f32> = row.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect();
        quant::quantise_row(&row, 32, Bits::Four, Arithmetic::Bf16, &mut n, &mut s).unwrap();
        quant::pack_row(&n, Bits::Four, &mut w);
        let (w, s): (Vec<u8>, Vec<u8>) =
            (w.iter().flat_map(|w| w.to_le_bytes()).collect(), s.iter().flat_map(|s| s.to_le_bytes()).collect());
        assert!(words[r * w.len()..(r + 1) * w.len()] == w, "words of row {r}");
        assert!(scales[r * s.len()..(r + 1) * s.len()] == s, "scales of row {r}");
    }

    let drop = DropLayersOptions { layers: vec![1], ..Default::default() };
    drop_layers::run(&open(&path("s")), &path("d"), &drop, &quiet()).unwrap();
    let name = format!("{LM}embed_tokens_per_layer.weight");
    let (before, after) = (&source[&name].2, &tensors_of(&path("d"))[&name].2);
    let block = 2 * 16;
    for (r, (b, a)) in before.chunks(3 * block).zip(after.chunks(2 * block)).enumerate() {
        assert!(a[..block] == b[..block] && a[block..] == b[2 * block..], "row {r}");
    }
}

#[test]
fn a_damaged_element_far_into_a_tensor_is_named() {
    let tmp = tempfile::tempdir().unwrap();
    let rows = 30_000;
    let index = 25_000 * HIDDEN + 77;
    let parent = damaged(&nano(), &tmp.path().join("parent"), |tensors, config| {
        config["tie_word_embeddings"] = false.into();
        for key in ["vocab_size", "vocab_size_per_layer_input"] {
            config["text_config"][key] = rows.into();
        }
        config["text_config"]["tie_word_embeddings"] = false.into();
        for (name, width) in [("embed_tokens", HIDDEN), ("embed_tokens_per_layer", 12 * 16)] {
            let table = tensors.get_mut(&format!("{LM}{name}.weight")).unwrap();
            table.1[0] = rows;
            table.2.resize(rows * width * 2, 0);
        }
        let mut head = vec![0; rows * HIDDEN * 2];
        head[2 * index..2 * index + 2].copy_from_slice(&bf16::INFINITY.to_le_bytes());
        tensors.insert("lm_head.weight".into(), (safetensors::Dtype::BF16, vec![rows, HIDDEN], head));
    });
    let error =
        quantize::run(&open(&parent), &tmp.path().join("out"), &QuantizeOptions::default(), &quiet()).unwrap_err();
    assert!(matches!(&error, Error::NonFinite { index: i, .. } if *i == index), "{error}");
    let strict = inspect::InspectOptions { strict: true, against: None };
    let problems = inspect::run(&open(&parent), &strict, &quiet()).unwrap().problems;
    assert_eq!(problems, [format!("model.safetensors: `lm_head.weight`: element {index} is inf")]);
}
