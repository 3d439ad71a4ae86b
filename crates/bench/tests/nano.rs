//! A whole run on the repository's nano model: prompts to record.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bench::compare::Comparison;
use bench::engine::{EngineTarget, encode};
use bench::environment::{Binary, CheckpointHash, Conditions, Environment};
use bench::log;
use bench::prompts::{Form, PromptSet};
use bench::protocol::{Context, Failure, Input, Monotonic, Output, Prompt, Protocol, Target, interleave, run};
use bench::record::{Kind, Record, Setup, TargetInfo};
use bench::stats::BootstrapOptions;
use runtime::checkpoint::Checkpoint;
use runtime::template::ChatTemplate;
use runtime::tokenizer::Tokenizer;
use runtime::{Engine, EngineOptions, Model};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn nano() -> PathBuf {
    root().join("models/nano")
}

fn target<'a>(label: &str, model: &Arc<Model>, options: EngineOptions, cancel: &'a AtomicBool) -> EngineTarget<'a> {
    let stop_ids = model.checkpoint().generation().stop_ids.clone();
    EngineTarget::new(label, Engine::new(model.clone(), &options).unwrap(), stop_ids, cancel)
}

#[test]
fn from_prompts_to_a_record() {
    let model = Arc::new(Model::load(Checkpoint::open(&nano()).unwrap()).unwrap());
    let tokenizer = Tokenizer::open(&nano()).unwrap();
    let set = PromptSet::read(&root().join("prompts/public.jsonl")).unwrap().take(4);
    assert_eq!((set.count, set.prompts.len(), set.prompts[0].form), (160, 4, Form::Raw));
    let prompts: Vec<Prompt> = set.encode(|p| encode(p, &tokenizer, None)).unwrap().iter().map(Prompt::from).collect();
    let protocol =
        Protocol { warmup_prompts: 1, warmup_tokens: 2, max_tokens: 12, ignore_eos: true, warmup_limit_ms: 0 };
    let go = AtomicBool::new(false);
    let one = EngineOptions { threads: 1, ..Default::default() };
    let (mut a, mut b) = (
        target("one", &model, one, &go),
        target("two", &model, EngineOptions { threads: 2, ..Default::default() }, &go),
    );
    let clock = Monotonic::start();
    let ctx = Context { clock: &clock, cancel: &go, progress: &mut |_| {} };
    let [ra, rb] = interleave(&mut a, &mut b, &prompts, &protocol, ctx).unwrap();
    assert!(ra.complete && rb.complete, "{:?} {:?}", ra.failure, rb.failure);
    for s in ra.samples.iter().chain(&rb.samples) {
        assert_eq!((s.completion_tokens, s.step_ms.len()), (12, 11));
        // The lap holds its parts.
        assert!(s.prefill_ms > 0.0 && s.wall_ms >= s.prefill_ms + s.decode_ms, "{s:?}");
    }
    let options = BootstrapOptions { resamples: 200, ..Default::default() };
    let comparison = Comparison::new(&ra, &rb, &options).unwrap();
    // Threads change no bit.
    assert_eq!((comparison.pairs, comparison.different_outputs), (4, 0));

    let setup = Setup {
        binary: Binary::running("0.0.0", None, b""),
        environment: Environment::capture(),
        after: Conditions::capture(),
        target: TargetInfo {
            label: ra.label.clone(),
            backend: "cpu".into(),
            precision: "native".into(),
            threads: a.engine().threads(),
            flags: vec![],
        },
        configuration: None,
        checkpoint: CheckpointHash::of("nano", model.checkpoint()).unwrap(),
        drafter: None,
        prompts: set,
        protocol,
        discarded: vec![],
    };
    assert!(setup.checkpoint.files["model.safetensors"].bytes > 4_000_000);
    let mut record = Record::measured(ra, setup, &options).unwrap();
    record.comparison = Some(comparison);
    let dir = tempfile::tempdir().unwrap();
    let path = log::monthly(dir.path(), &record.environment.machine());
    assert_eq!(log::append(&path, &record).unwrap(), None);
    let back = log::read(&path).unwrap();
    assert_eq!((back.records.len(), back.records[0].kind, back.skipped.len()), (1, Kind::Measured, 0));
    let result = back.records[0].result.as_ref().unwrap();
    assert!(result.tokens_per_s > 0.0 && result.interval.is_some() && result.completion_tokens == 48);
}

#[test]
fn a_chat_prompt_goes_through_the_template_and_may_stop() {
    let model = Arc::new(Model::load(Checkpoint::open(&nano()).unwrap()).unwrap());
    let tokenizer = Tokenizer::open(&nano()).unwrap();
    let template = ChatTemplate::open(&nano()).unwrap();
    let set = PromptSet::read(&root().join("prompts/public.jsonl")).unwrap().take(1).with_form(Form::Chat);
    let ids = encode(&set.prompts[0], &tokenizer, template.as_ref()).unwrap();
    let raw = tokenizer.encode(&set.prompts[0].text).unwrap();
    assert!(ids.len() > raw.len() && ids[0] == raw[0] && ids[1] != raw[0], "one <bos>, and the turn's own tokens");
    assert!(encode(&set.prompts[0], &tokenizer, None).unwrap_err().to_string().contains("chat template"));

    let go = AtomicBool::new(false);
    // The engine's own next token as the stop token: the completion then ends after one.
    let ids = Input::Ids(ids);
    let written =
        |target: &mut EngineTarget, tokens, ignore_eos| match target.generate(&ids, tokens, ignore_eos).unwrap().output
        {
            Output::Ids(ids) => ids,
            text => panic!("{text:?}"),
        };
    let first = written(&mut target("x", &model, EngineOptions::default(), &go), 1, true)[0];
    let engine = || Engine::new(model.clone(), &EngineOptions::default()).unwrap();
    let mut stops = EngineTarget::new("x", engine(), vec![first], &go);
    assert_eq!(written(&mut stops, 9, false), [first]);
    assert_eq!(written(&mut stops, 9, true).len(), 9);
}

#[test]
fn a_cancel_ends_a_request_and_a_full_context_is_a_reason() {
    let model = Arc::new(Model::load(Checkpoint::open(&nano()).unwrap()).unwrap());
    let go = AtomicBool::new(true);
    let small = EngineOptions { context: Some(8), ..Default::default() };
    let mut target = target("small", &model, small, &go);
    assert!(matches!(target.generate(&Input::Ids(vec![2, 313]), 4, true), Err(Failure::Cancelled)));
    go.store(false, Ordering::Relaxed);
    let prompt = Prompt { id: "p".into(), input: Input::Ids(vec![2, 313, 635, 668]) };
    let clock = Monotonic::start();
    let ctx = Context { clock: &clock, cancel: &go, progress: &mut |_| {} };
    let run = run(&mut target, &[prompt], &Protocol { warmup_prompts: 0, ..Default::default() }, ctx).unwrap();
    assert!(!run.complete && run.samples.is_empty());
    assert!(
        run.failure.as_deref().unwrap().starts_with("request `p`: the context of 8 was full after 5 tokens"),
        "{run:?}"
    );
}
