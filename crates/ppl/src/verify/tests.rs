use super::*;
use crate::forward::toy::Bigram;
use crate::paths::{OneRow, Rescore, VERIFIER_ROWS};
use std::sync::atomic::Ordering;

fn prompts() -> Vec<Prompt> {
    let make = |(id, t): (&str, &[u32])| Prompt { id: id.into(), token_ids: t.to_vec() };
    [("a", &[0, 2][..]), ("b", &[0, 1, 5, 2, 4][..]), ("c", &[0][..])].map(make).to_vec()
}

/// Compares plain decoding with rescoring by a model that is off by `error` in passes of more than one row.
fn compare(error: f32, tokens: usize) -> IdentityReport {
    let mut one = OneRow::new(Bigram::new(6));
    let mut wide = Bigram::new(6);
    wide.wide_error = error;
    let mut rescore = Rescore::new(wide, VERIFIER_ROWS);
    let options = PathOptions { tokens, logits: true };
    let go = AtomicBool::new(false);
    compare_paths(&mut one, &mut [&mut rescore], &prompts(), &options, &go, |_| {}).unwrap()
}

fn ppl_report(ppl: Option<f64>) -> PplReport {
    PplReport {
        ppl,
        mean_record_ppl: ppl,
        num_records: 1,
        num_tokens: 10,
        neg_log_likelihood: ppl.map(|p| p.ln() * 10.0),
        complete: true,
        pruned_targets: Vec::new(),
        duration_s: 0.1,
        records: Vec::new(),
    }
}

#[test]
fn an_invariant_model_is_identical_with_a_delta_of_exactly_zero() {
    let report = compare(0.0, 12);
    assert_eq!((report.status, report.prompts, report.tokens), (Status::GreedyIdentical, 3, 36));
    assert_eq!((report.max_logit_delta, report.divergent_prompts), (Some(0.0), 0));
    assert_eq!((report.paths[0].path.as_str(), report.paths[0].differing_rows), ("rescore-8", 0));
    assert!(report.passed());
}

#[test]
fn a_small_difference_of_logits_is_reported_without_a_divergence() {
    let report = compare(1e-4, 12);
    assert_eq!(report.status, Status::GreedyIdentical);
    let delta = report.max_logit_delta.unwrap();
    assert!((delta - 1e-4).abs() < 1e-6, "{delta}");
    assert!(report.paths[0].differing_rows > 0);
}

#[test]
fn a_divergence_is_found_placed_and_fails() {
    // Token 0 gains enough to win every row of a wide pass.
    let report = compare(100.0, 12);
    assert_eq!((report.status, report.divergent_prompts), (Status::Divergent, 3));
    let first = report.first_divergence.clone().unwrap();
    let expected = Bigram::new(6).next(2);
    assert_ne!(expected, 0, "the test needs a token other than the one that the error favours");
    assert_eq!((first.path.as_str(), first.divergence.key.as_str(), first.divergence.index), ("rescore-8", "a", 0));
    assert_eq!((first.divergence.expected, first.divergence.found), (Some(expected), Some(0)));
    assert!(!report.passed());
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!((json["status"].as_str(), json["first_divergence"]["key"].as_str()), (Some("DIVERGENT"), Some("a")));
    let back: IdentityReport = serde_json::from_value(json).unwrap();
    assert_eq!(back, report);
}

#[test]
fn a_path_that_generates_less_is_a_defect_and_a_nan_is_not_hidden() {
    struct Lazy;
    impl Path for Lazy {
        fn name(&self) -> &str {
            "lazy"
        }
        fn run(&mut self, _: &Case<'_>) -> Result<Trace> {
            Ok(Trace { token_ids: vec![1], logits: Vec::new() })
        }
    }
    let go = AtomicBool::new(false);
    let mut one = OneRow::new(Bigram::new(6));
    let error = compare_paths(&mut one, &mut [&mut Lazy], &prompts(), &PathOptions::default(), &go, |_| {});
    assert!(error.unwrap_err().to_string().starts_with("path `lazy`, prompt `a`: 64 tokens asked for, 1 returned"));
    assert!(row_delta(&[f32::NAN, 1.0], &[0.0, 9.0]).unwrap().is_nan());
    assert!(max_nan(1.0, f64::NAN).is_nan() && max_nan(f64::NAN, 1.0).is_nan());
    assert!(row_delta(&[1.0], &[1.0, 2.0]).unwrap().is_nan());
    assert_eq!((row_delta(&[0.0, 1.0], &[-0.0, 1.0]), row_delta(&[0.5], &[0.5])), (Some(0.0), None));
}

#[test]
fn a_cancel_keeps_what_was_compared_and_does_not_pass() {
    let stop = AtomicBool::new(false);
    let (mut one, mut re) = (OneRow::new(Bigram::new(6)), Rescore::new(Bigram::new(6), 8));
    let options = PathOptions { tokens: 5, logits: false };
    let mut seen = Vec::new();
    let report = compare_paths(&mut one, &mut [&mut re], &prompts(), &options, &stop, |p| {
        seen.push((p.prompts, p.prompts_total, p.divergent));
        stop.store(p.prompts == 2, Ordering::Relaxed);
    })
    .unwrap();
    assert_eq!(seen, [(1, 3, 0), (2, 3, 0)]);
    assert_eq!((report.prompts, report.complete, report.status), (2, false, Status::GreedyIdentical));
    assert_eq!((report.passed(), report.max_logit_delta), (false, None));
    let none = compare_paths(&mut one, &mut [&mut re], &prompts(), &options, &stop, |_| {}).unwrap();
    assert_eq!((none.status, none.passed()), (Status::Incomparable, false));
}

#[test]
fn nothing_to_compare_is_an_error() {
    let go = AtomicBool::new(false);
    let mut one = OneRow::new(Bigram::new(6));
    let mut re = Rescore::new(Bigram::new(6), 8);
    let none = compare_paths(&mut one, &mut [], &prompts(), &PathOptions::default(), &go, |_| {});
    assert!(matches!(none, Err(Error::Nothing { .. })));
    let none = compare_paths(&mut one, &mut [&mut re], &[], &PathOptions::default(), &go, |_| {});
    assert!(matches!(none, Err(Error::Nothing { .. })));
}

#[test]
fn the_cap_is_given_or_derived_and_inclusive() {
    let cap = PplCap::new(None, Some(2.0)).unwrap();
    assert_eq!(cap, PplCap { cap: 2.1, reference: Some(2.0) });
    assert_eq!(PplCap::new(Some(2.42), Some(2.0)).unwrap().cap, 2.42);
    assert!(cap.passes(Some(2.1)) && !cap.passes(Some(2.1f64.next_up())));
    assert!(!cap.passes(None) && !cap.passes(Some(f64::NAN)) && !cap.passes(Some(f64::INFINITY)));
    assert!(matches!(PplCap::new(None, None), Err(Error::Nothing { .. })));
    for bad in [f64::NAN, f64::INFINITY, 0.0, -3.0] {
        assert!(matches!(PplCap::new(Some(bad), None), Err(Error::Option { .. })), "{bad}");
        assert!(matches!(PplCap::new(Some(2.0), Some(bad)), Err(Error::Option { .. })), "{bad}");
    }
}

#[test]
fn the_verdict_needs_both_halves() {
    let cap = PplCap::new(Some(2.0), None).unwrap();
    let good = compare(0.0, 4);
    let verdict = |identity: &IdentityReport, ppl: &PplReport| VerifyReport::new(identity.clone(), ppl, cap);
    let ok = verdict(&good, &ppl_report(Some(2.0)));
    assert!(ok.passed && ok.failures.is_empty());

    let high = verdict(&good, &ppl_report(Some(2.5)));
    assert_eq!(
        (high.passed, high.failures.as_slice()),
        (false, &["perplexity: 2.5000 is above the cap of 2.0000".to_string()][..])
    );
    let nan = verdict(&good, &ppl_report(Some(f64::NAN)));
    assert!(!nan.passed && nan.failures.len() == 1);
    let mut pruned = ppl_report(None);
    pruned.pruned_targets = vec![PrunedTarget { token_id: 3, count: 1, records: vec!["r".into()] }];
    let pruned = verdict(&good, &pruned);
    assert!(!pruned.passed && pruned.failures[0].contains("lacks 1 of the target tokens"));
    let partial = verdict(&good, &PplReport { complete: false, ..ppl_report(Some(1.5)) });
    assert!(!partial.passed && partial.failures[0].contains("stopped after 1 records"));

    let divergent = verdict(&compare(100.0, 4), &ppl_report(Some(1.5)));
    assert!(
        !divergent.passed
            && divergent.failures[0].starts_with("identity: 3 of 3 prompts diverge; first `a` at token 0")
    );
}
