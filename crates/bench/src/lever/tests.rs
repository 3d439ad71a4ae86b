use super::*;
use crate::compare::tests::run as timed;
use crate::stats::BootstrapOptions;
use std::sync::atomic::AtomicBool;

fn trial(a: &[f64], b: &[f64], ppl: Option<f64>) -> Trial {
    let options = BootstrapOptions { resamples: 200, ..Default::default() };
    Trial::new("b", "a", Comparison::new(&timed("a", a), &timed("b", b), &options).unwrap(), 0.9, ppl)
}

#[test]
fn a_setting_converts_where_it_is_surely_faster_and_good_enough() {
    let base = [200.0, 300.0, 400.0];
    let faster = [180.0, 270.0, 361.0];
    assert!(trial(&base, &faster, None).converts);
    assert!(trial(&base, &faster, Some(1.05)).converts);
    assert!(!trial(&base, &faster, Some(1.051)).converts, "faster, and another model");
    assert!(!trial(&faster, &base, None).converts);
    assert!(!trial(&base, &[199.0, 298.5, 398.0], None).converts, "half a percent interests nobody");
    assert!(!trial(&base, &[100.0, 400.0, 400.0], None).converts, "not surely");
}

#[test]
fn names_are_those_of_the_mission_and_unique() {
    let names: Vec<&str> = ALL.iter().map(|l| l.name()).collect();
    for name in &names {
        assert_eq!(names.iter().filter(|n| *n == name).count(), 1, "{name}");
        let lever = named(name).unwrap();
        assert!(lever.prediction().len() > 20 && lever.mechanism().len() > 20 && lever.what().len() > 20, "{name}");
    }
    let unknown = named("luck").err().unwrap().to_string();
    assert!(names.iter().all(|name| unknown.contains(name)), "{unknown}");
}

/// Measures on nano what takes no wide model, and what needs none at all.
#[test]
fn verdicts_are_recorded_with_what_they_rest_on() {
    let dir = tempfile::tempdir().unwrap();
    let go = AtomicBool::new(false);
    let options = LabOptions { prompts: 6, tokens: 4, wide_prompts: 6, wide_tokens: 2, threads: 1, seed: 1 };
    let mut said = Vec::new();
    let mut say = |what: &str| said.push(what.to_string());
    let mut lab = Lab::new(options, dir.path(), &go, &mut say).unwrap();
    let binary = Binary { version: "0".into(), commit: None, blake3: None, flake_lock: None };

    let window = run(named("window").unwrap(), &mut lab, &binary).unwrap();
    assert_eq!((window.verdict, window.kind), (Verdict::NeedsGpu, None));
    assert!(window.reason.is_some() && window.subjects.is_empty());

    let luck = run(named("best-of-n").unwrap(), &mut lab, &binary).unwrap();
    assert_eq!((luck.verdict, luck.kind), (Verdict::DoesNotConvert, Some(Kind::Projected)));
    let luck_path = append(dir.path(), &luck).unwrap();
    append(dir.path(), &luck).unwrap();
    let lines = std::fs::read_to_string(luck_path).unwrap();
    let back: Vec<Report> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!((back.len(), back[0].lever.as_str()), (2, "best-of-n"));

    let nano = lab.nano().unwrap();
    let int2 = lab.quantised(&nano, bake::quant::Bits::Two, 32).unwrap();
    let ratio = lab.ppl(&int2).unwrap().unwrap();
    assert!(ratio > 1.5, "int2 by rounding is another model: {ratio}");
    let side = |label: &str, model| lab::Side::plain(label, model);
    let t = lab.trial(Subject::Nano, side("nano", &nano), side("int2", &int2), Some(ratio)).unwrap();
    assert!(!t.converts && t.bytes < 0.5 && t.prompts == 6, "{t:?}");
    assert!(Lab::new(LabOptions { prompts: 5, ..options }, dir.path(), &go, &mut |_| ()).is_err());
    assert_eq!(said, ["nano: int2 against nano"]);
}
