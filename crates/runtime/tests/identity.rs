//! Greedy identity: plain decoding and every shape of draft give the same tokens from logits with the same bits, and leave the same
//! cache behind. The whole matrix is `just identity` (`--ignored`); a spread subset runs with the other tests.

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use kernels::cpu::Isa;
use runtime::drafter::{Draft, DraftContext, Drafter, MtpDrafter, MtpOptions};
use runtime::generate::{GenerateOptions, Generation, StopReason, prefill};
use runtime::speculate::Shape;
use runtime::speculative::speculative_observed;
use runtime::{Engine, EngineOptions, Model, Precision};

/// Shapes with branches: the field's star, a wide one, one that fills all rows.
const STARS: [&[usize]; 4] = [&[1, 1, 1, 1, 0, 0, 0], &[4, 2, 1], &[1, 1, 1, 1, 1, 1, 1], &[0, 3, 0, 2]];

/// A small seeded generator; the tests need no more.
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below
    }
}

/// Knows the true continuation and drafts it with probability 0.7; where it drafts something else, the true token is often among
/// the candidates behind it.
struct Scripted {
    truth: Vec<u32>,
    prompt: usize,
    vocab: usize,
    random: Random,
}

impl Drafter for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn draft(&mut self, context: &DraftContext, shape: &Shape) -> runtime::Result<Draft> {
        let begin = context.tokens.len() - self.prompt;
        let ranked = (0..shape.depth()).map(|d| {
            let truth = self.truth.get(begin + d).copied().unwrap_or(0);
            let mut candidates: Vec<u32> = (0..5).map(|_| self.random.next(self.vocab) as u32).collect();
            let place = if self.random.next(10) < 7 { 0 } else { 1 + self.random.next(6) };
            if place < candidates.len() {
                candidates[place] = truth;
            }
            candidates
        });
        Ok(Draft { ranked: ranked.collect() })
    }
}

/// What plain decoding gives: tokens, and the bits of the logits that each was chosen from.
struct Plain {
    tokens: Vec<u32>,
    bits: Vec<Vec<u32>>,
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|v| v.to_bits()).collect()
}

/// One row a step, without any of the generators.
fn plain(engine: &mut Engine, prompt: &[u32], count: usize) -> Plain {
    engine.reset();
    let mut logits = prefill(engine, prompt, 64).unwrap();
    let mut out = Plain { tokens: vec![], bits: vec![] };
    loop {
        let token = logits.argmax(0).unwrap();
        out.bits.push(bits(logits.row(0)));
        out.tokens.push(token);
        if out.tokens.len() == count {
            return out;
        }
        logits = engine.extend(&[token], 0..1).unwrap();
    }
}

/// Where a speculative run differs from plain decoding, in words; `None` where it does not.
fn difference(
    engine: &mut Engine,
    drafter: &mut dyn Drafter,
    prompt: &[u32],
    shape: &Shape,
    truth: &Plain,
) -> Option<String> {
    let options = GenerateOptions { max_tokens: truth.tokens.len(), ..Default::default() };
    let mut seen: Vec<Vec<u32>> = vec![];
    let mut observe = |index: usize, row: &[f32]| {
        seen.truncate(index);
        seen.push(bits(row));
    };
    let go = |_| ControlFlow::Continue(());
    let (out, _) = speculative_observed(engine, drafter, prompt, shape, &options, go, &mut observe).unwrap();
    seen.truncate(truth.tokens.len());
    match () {
        _ if out.token_ids != truth.tokens => Some("other tokens".into()),
        _ if seen.len() != truth.bits.len() => Some(format!("{} rows of logits", seen.len())),
        _ if engine.len() != prompt.len() + truth.tokens.len() - 1 => Some(format!("a cache of {}", engine.len())),
        _ => seen.iter().zip(&truth.bits).position(|(a, b)| a != b).map(|i| format!("other logits at token {i}")),
    }
}

/// Seeded prompts: the public ones for nano (byte tokens of their text would do as well), random ids for the others.
fn prompts(target: &str, model: &Model, count: usize) -> Vec<Vec<u32>> {
    if target == "nano" {
        let tokenizer = runtime::tokenizer::Tokenizer::open(model.checkpoint().dir()).unwrap();
        let text = std::fs::read_to_string(dir("nano").join("../../prompts/public.jsonl")).unwrap();
        let prompt =
            |l: &str| serde_json::from_str::<serde_json::Value>(l).unwrap()["prompt"].as_str().unwrap().to_string();
        return text.lines().take(count).map(|l| tokenizer.encode(&prompt(l)).unwrap()).collect();
    }
    let mut random = Random(7);
    let vocab = model.config().vocab_size;
    (0..count).map(|i| (0..3 + i % 17).map(|_| random.next(vocab) as u32).collect()).collect()
}

fn drafter(target: &str, model: &Model, truth: &Plain, prompt: &[u32], seed: u64) -> Box<dyn Drafter> {
    if target == "nano" {
        return Box::new(MtpDrafter::load(&dir("nano").join("assistant"), model, MtpOptions::default()).unwrap());
    }
    let (truth, vocab) = (truth.tokens.clone(), model.config().vocab_size);
    Box::new(Scripted { truth, prompt: prompt.len(), vocab, random: Random(seed) })
}

fn shapes(chains: impl IntoIterator<Item = usize>) -> Vec<Shape> {
    let chains = chains.into_iter().map(|k| Shape::chain(k).unwrap());
    chains.chain(STARS.map(|s| Shape::star(s.to_vec()).unwrap())).collect()
}

/// Precisions in which a model is computed in different ways.
fn precisions(model: &Model) -> impl Iterator<Item = Precision> + use<> {
    // Where no weights are packed, int8 is native.
    let packed = model.config().quantization.is_some();
    Precision::ALL.into_iter().filter(move |p| *p != Precision::Int8 || packed)
}

fn check(targets: &[&str], count: usize, tokens: usize, shapes: &[Shape], threads: usize) {
    for target in targets {
        for precision in precisions(&model(target)) {
            check_one(target, precision, count, tokens, shapes, threads);
        }
    }
}

fn check_one(target: &str, precision: Precision, count: usize, tokens: usize, shapes: &[Shape], threads: usize) {
    let model = model(target);
    let prompts = prompts(target, &model, count);
    let mut engine = Engine::new(model.clone(), &EngineOptions { precision, threads, context: None }).unwrap();
    let begun = std::time::Instant::now();
    for (p, prompt) in prompts.iter().enumerate() {
        let truth = engine.on_its_threads(|engine| plain(engine, prompt, tokens));
        for (s, shape) in shapes.iter().enumerate() {
            let mut drafter = drafter(target, &model, &truth, prompt, (p * 100 + s) as u64);
            let found = difference(&mut engine, &mut *drafter, prompt, shape, &truth);
            assert_eq!(found, None, "{target} {precision:?} prompt {p} shape {shape} on {threads} threads");
        }
    }
    let (prompts, shapes, took) = (prompts.len(), shapes.len(), begun.elapsed().as_secs());
    println!("{target}, {precision:?}: {prompts} prompts x {tokens} tokens in {shapes} shapes identical, {took} s");
}

#[test]
fn a_spread_of_shapes_is_identical_on_every_target() {
    check(&TARGETS[..17], 3, 48, &shapes([1, 4, 7, 15]), 1);
    check(&["nano"], 4, 64, &shapes([1, 4, 7, 15]), 1);
}

#[test]
fn any_number_of_threads_is_identical() {
    for threads in [1, 2, 3, 8] {
        check(&["nano", "09b_int4_pruned_head"], 2, 32, &shapes([7]), threads);
    }
}

/// `just identity`: every target, 64 prompts of 256 tokens, chains of 1 to 15 and the stars.
#[test]
#[ignore = "minutes of work: run by `just identity`"]
fn the_whole_matrix_is_identical() {
    let shapes = shapes(1..=15);
    // The longest first, so that cores end at about the same time.
    let pieces: Vec<(&str, Precision)> =
        ["nano"].iter().chain(&TARGETS[..17]).flat_map(|t| precisions(&model(t)).map(|p| (*t, p))).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                while let Some((target, precision)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check_one(target, *precision, 64, 256, &shapes, 1);
                }
            });
        }
    });
}

/// The test of the test.
#[test]
fn a_planted_dependence_on_m_is_caught() {
    let model = model("nano");
    let options = EngineOptions { threads: 1, ..Default::default() };
    let mut engine = Engine::with_isa(model.clone(), &options, Isa::planted_m_dependence()).unwrap();
    let prompt = &prompts("nano", &model, 1)[0];
    let truth = plain(&mut engine, prompt, 24);
    let mut drafter = drafter("nano", &model, &truth, prompt, 1);
    assert!(difference(&mut engine, &mut *drafter, prompt, &Shape::chain(7).unwrap(), &truth).is_some());
}

fn run(
    engine: &mut Engine,
    drafter: &mut dyn Drafter,
    prompt: &[u32],
    shape: &Shape,
    o: &GenerateOptions,
) -> Generation {
    let go = |_| ControlFlow::Continue(());
    speculative_observed(engine, drafter, prompt, shape, o, go, &mut |_, _| {}).unwrap().0
}

/// Stop tokens and limits inside an accepted run: output, reason and cache are those of plain decoding.
#[test]
fn stops_limits_and_context_cut_like_plain_decoding() {
    let model = model("04_global_head_dim");
    let mut engine = engine(&model, Precision::Native);
    let go = |_| ControlFlow::Continue(());
    for (p, prompt) in prompts("04_global_head_dim", &model, 6).iter().enumerate() {
        let truth = plain(&mut engine, prompt, 40);
        for (s, shape) in shapes([1, 7, 15]).iter().enumerate() {
            for case in 0..24usize {
                // Any token of the output as stop token (bonus, branch or main draft), any number of tokens, one included.
                let stop_ids = if case % 2 == 0 { vec![truth.tokens[case]] } else { vec![] };
                let options = GenerateOptions { max_tokens: 1 + case, stop_ids, ..Default::default() };
                let want = runtime::generate::greedy(&mut engine, prompt, &options, go).unwrap();
                let len = engine.len();
                let mut drafter = drafter("x", &model, &truth, prompt, (p * 1000 + s * 50 + case) as u64);
                let got = run(&mut engine, &mut *drafter, prompt, shape, &options);
                assert_eq!(
                    (&got.token_ids, got.stop, engine.len()),
                    (&want.token_ids, want.stop, len),
                    "{shape} {case}"
                );
            }
            let context = Some(prompt.len() + 9);
            let mut small = Engine::new(model.clone(), &EngineOptions { context, ..Default::default() }).unwrap();
            let options = GenerateOptions { max_tokens: 40, ..Default::default() };
            let mut drafter = drafter("x", &model, &truth, prompt, (p * 10 + s) as u64);
            let got = run(&mut small, &mut *drafter, prompt, shape, &options);
            assert_eq!((&got.token_ids[..], got.stop), (&truth.tokens[..10], StopReason::Context));
            assert_eq!(small.len(), small.context());
        }
    }
}

/// After a generation the cache can be continued as if it had been decoded plainly: an accepted branch left the right keys and
/// values behind in every layer.
#[test]
fn the_cache_left_behind_is_that_of_plain_decoding() {
    let model = model("11_e4b_like_sharded");
    let mut engine = engine(&model, Precision::F32);
    let prompt = &prompts("x", &model, 3)[2];
    let truth = plain(&mut engine, prompt, 40);
    let layers = model.config().first_kv_shared();
    let caches = |engine: &Engine| -> Vec<Vec<u32>> {
        (0..layers).flat_map(|l| [bits(engine.cache(l).0), bits(engine.cache(l).1)]).collect()
    };
    let want = caches(&engine);
    let mut salvaged = 0;
    for seed in 0..10 {
        let mut drafter: Box<dyn Drafter> = drafter("x", &model, &truth, prompt, seed);
        let shape = Shape::star(vec![4, 2, 1]).unwrap();
        let options = GenerateOptions { max_tokens: 40, ..Default::default() };
        let go = |_| ControlFlow::Continue(());
        let (_, speculation) =
            speculative_observed(&mut engine, &mut *drafter, prompt, &shape, &options, go, &mut |_, _| {}).unwrap();
        salvaged += speculation.acceptance.salvaged.iter().flatten().sum::<u64>();
        assert!(caches(&engine) == want, "seed {seed}");
    }
    assert!(salvaged > 10, "the test must accept branches: {salvaged}");
    let _ = Arc::strong_count(&model);
}
