//! Sensitivity on real models: what a variant in memory measures is what its checkpoint would, and a search beats greed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bake::drop_layers::{self, DropLayersOptions};
use bake::in_memory::Quantiser;
use bake::method::Method;
use bake::quantize::{self, QuantizeOptions};
use bake::{Context, Strategy};
use ppl::records::{self, Record};
use ppl::score::ScoreOptions;
use ppl::sensitivity::held_out;
use ppl::sensitivity::journal::{Header, Journal};
use ppl::sensitivity::measure::{self, Study};
use ppl::sensitivity::search::{SearchOptions, Space};
use ppl::sensitivity::subject::Subject;
use ppl::sensitivity::trials::{Progress, Slice, TrialOptions, Trials, halves};
use ppl::sensitivity::variant::{By, Group, Variant};
use runtime::checkpoint::Checkpoint;
use runtime::{EngineOptions, Model};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn load(dir: &Path) -> Arc<Model> {
    Arc::new(Model::load(Checkpoint::open(dir).unwrap()).unwrap())
}

fn nano() -> PathBuf {
    root().join("models/nano")
}

fn oracle(name: &str) -> PathBuf {
    root().join("crates/runtime/tests/oracle").join(name)
}

/// The first perplexity records, short: a 16-token context and 48 scored tokens.
fn short_records(count: usize) -> Vec<Record> {
    let mut records = records::read(&root().join("prompts/ppl.jsonl"), 2048).unwrap();
    records.truncate(count);
    records.iter_mut().for_each(|r| {
        r.token_ids.truncate(64);
        r.scored = 16..64;
    });
    records
}

fn slice(name: &str, records: Vec<Record>) -> Slice {
    Slice { name: name.into(), records }
}

fn group32() -> Quantiser {
    Quantiser::new(Method::Rtn, Strategy::Group(32)).unwrap()
}

fn engine() -> EngineOptions {
    EngineOptions { threads: 1, ..Default::default() }
}

fn with_trials<T>(model: Arc<Model>, journal: Journal, cancel: &AtomicBool, work: impl FnOnce(&mut Trials) -> T) -> T {
    let mut ignore = |_: Progress| {};
    let options = TrialOptions { engine: engine(), score: ScoreOptions::default(), cancel, progress: &mut ignore };
    work(&mut Trials::new(Subject::new(model, group32()), journal, options))
}

fn trials<T>(model: Arc<Model>, work: impl FnOnce(&mut Trials) -> T) -> T {
    with_trials(model, Journal::in_memory(), &AtomicBool::new(false), work)
}

/// Every linear of nano that a bake quantises.
fn uniform(model: &Model, bits: u8) -> Variant {
    let groups = Group::all(model, By::Kind, false);
    groups.into_iter().fold(Variant::unchanged(), |v, g| v.with(g, Some(bits)))
}

#[test]
fn a_variant_scores_as_its_checkpoint_does() {
    let tmp = tempfile::tempdir().unwrap();
    let (packed, smaller) = (tmp.path().join("int4"), tmp.path().join("smaller"));
    let strategy = Strategy::Group(32);
    let options = QuantizeOptions { strategy, head: strategy, ..Default::default() };
    quantize::run(&Checkpoint::open(&nano()).unwrap(), &packed, &options, &Context::quiet()).unwrap();
    let options = DropLayersOptions { layers: vec![2, 7], ..Default::default() };
    drop_layers::run(&Checkpoint::open(&packed).unwrap(), &smaller, &options, &Context::quiet()).unwrap();

    let slice = slice("all", short_records(3));
    let model = load(&nano());
    let variant = uniform(&model, 4).without(2).without(7);
    let (scores, bytes) = trials(model, |t| (t.scores(&slice, &variant).unwrap(), t.subject().step_bytes(&variant)));
    let baked = load(&smaller);
    assert_eq!(bytes, baked.step_device_bytes());
    assert_eq!(scores, trials(baked, |t| t.scores(&slice, &Variant::unchanged()).unwrap()));
}

#[test]
fn bytes_are_counted_without_building() {
    for target in ["11_e4b_like_sharded", "09_pruned_head", "02_kvshare", "08_int4", "nano"] {
        let model = load(&if target == "nano" { nano() } else { oracle(target) });
        let mut subject = Subject::new(model.clone(), group32());
        let mut variants =
            vec![Variant::unchanged(), Variant::unchanged().without(1), Variant::unchanged().without(0).without(3)];
        for by in [By::Kind, By::Layer, By::Linear] {
            let groups = subject.groups(by, true);
            assert_eq!(groups.is_empty(), target == "08_int4", "{target}: packed linears are in no group");
            let mixed = groups.iter().zip([8, 4, 3, 2].into_iter().cycle());
            let mixed = mixed.fold(Variant::unchanged(), |v, (&g, bits)| v.with(g, Some(bits)));
            variants.extend([mixed.without(1), mixed]);
        }
        for variant in variants {
            let built = subject.build(&variant).unwrap();
            assert_eq!(subject.step_bytes(&variant), built.step_device_bytes(), "{target}: {}", variant.key());
        }
    }
}

#[test]
fn a_study_continues_from_its_journal() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("journal.jsonl");
    let slice = slice("all", short_records(2));
    let header = Header::new("nano".into(), &[&slice], "native".into());
    let open = || Journal::open(&path, &header).unwrap();
    let study = Study::Widths { by: By::Kind, widths: vec![4, 2] };
    // Ended by the third variant.
    let cancel = AtomicBool::new(false);
    let mut end = |p: Progress| cancel.store(p.variants == 2, std::sync::atomic::Ordering::Relaxed);
    let options =
        TrialOptions { engine: engine(), score: ScoreOptions::default(), cancel: &cancel, progress: &mut end };
    let mut ended = Trials::new(Subject::new(load(&nano()), group32()), open(), options);
    assert!(matches!(measure::run(&mut ended, &slice, &study), Err(ppl::Error::Cancelled)));
    drop(ended);
    assert_eq!(open().len(), 2, "what was whole is kept");

    let go = AtomicBool::new(false);
    let run = |journal| with_trials(load(&nano()), journal, &go, |t| measure::run(t, &slice, &study).unwrap());
    let continued = run(open());
    let lines = std::fs::read_to_string(&path).unwrap();
    assert_eq!(lines.lines().count(), 1 + 1 + continued.rows.len());
    assert_eq!(continued, run(Journal::in_memory()), "to the bit");
    assert_eq!(continued, run(open()));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), lines, "nothing was measured twice");

    assert_eq!(continued.rows.len(), 22, "nine linears of the layers, the model projection and the tied head");
    assert_eq!(continued.rows.last().unwrap().bits, Some(2), "two bits are the worst");
    assert!(continued.rows.is_sorted_by(|a, b| a.change.ratio <= b.change.ratio));
}

#[test]
fn layers_that_must_stay_are_named() {
    let slice = slice("all", short_records(1));
    let report = trials(load(&nano()), |t| measure::run(t, &slice, &Study::Layers).unwrap());
    assert_eq!(report.rows.len() + report.fixed.len(), 12);
    let fixed: Vec<usize> = report.fixed.iter().map(|f| f.layer).collect();
    // The last layer; and the only full one below the shared region, which layer 11 reads.
    assert_eq!(fixed, [5, 11]);
    assert!(report.fixed[1].reason.contains("last layer must have full attention"), "{}", report.fixed[1].reason);
}

/// The plan to beat has every linear at the best width and as many of the least sensitive layers removed as the cap allows.
#[test]
fn a_search_on_nano_beats_the_least_sensitive_layers() {
    let [a, b] = halves(short_records(8));
    let (a, b) = (slice("a", a), slice("b", b));
    let options = SearchOptions { cap: 1.05, beam: 2, branch: 6, patience: 2, evaluations: 70 };
    let report = trials(load(&nano()), |t| {
        let groups = t.subject().groups(By::Kind, false);
        let space = Space { layers: (0..12).collect(), groups, widths: vec![4, 3] };
        held_out::run(t, [&a, &b], &space, &options, 4).unwrap()
    });
    let (best, greedy) = (&report.finalists[0], &report.least_sensitive);
    assert!(best.search.ratio <= 1.05 && greedy.search.ratio <= 1.05);
    assert!(greedy.step_bytes < report.baseline_search.step_bytes / 2, "{greedy:?}");
    assert!(best.step_bytes < greedy.step_bytes, "{best:?} against {greedy:?}");
    assert!(
        report.finalists.len() <= 4 && report.finalists.iter().rev().skip(1).all(|f| !f.holds),
        "up to the first that holds"
    );
}

#[test]
fn slices_that_share_a_record_are_refused() {
    let (a, b) = (slice("a", short_records(2)), slice("b", short_records(1)));
    let space = Space { layers: vec![2], groups: vec![], widths: vec![] };
    let error =
        trials(load(&nano()), |t| held_out::run(t, [&a, &b], &space, &SearchOptions::default(), 1).unwrap_err());
    assert!(error.to_string().contains("`ppl-0000` in both"), "{error}");
}
