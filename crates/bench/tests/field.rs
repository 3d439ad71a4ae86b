//! The field's own files, which are not part of this repository: these tests run where CHIKU_FIELD_DATA names a directory that holds
//! them, and say that they are skipped where it does not.

use std::path::PathBuf;

use bench::export::field;
use bench::import::board::{Board, Verification};
use bench::import::field_run::FieldRun;
use bench::import::{draws, pairs, steptime};
use bench::luck::Group;
use bench::prompts::PromptSet;
use bench::protocol::{Output, PromptSample, Protocol};
use bench::stats::{BootstrapOptions, ratio_se};

fn data() -> Option<PathBuf> {
    let dir = std::env::var_os("CHIKU_FIELD_DATA").map(PathBuf::from);
    if dir.is_none() {
        eprintln!("skipped: CHIKU_FIELD_DATA does not name the field's files");
    }
    dir
}

#[test]
fn trajectories_explain_the_draws() {
    let Some(dir) = data() else { return };
    let groups = draws::read(&dir.join("draws.csv")).unwrap();
    assert_eq!(groups.iter().map(|(_, d)| d.len()).sum::<usize>(), 143);
    let (_, own) = groups.iter().find(|(name, _)| name == "osoi5-w192-ctk48-wb0").unwrap();
    let g = Group::new(own).unwrap();
    assert_eq!((g.n, g.classes), (18, 8));
    assert!((g.mean - 500.39).abs() < 0.005 && (g.sd.unwrap() - 5.17).abs() < 0.01, "{g:?}");
    assert!(g.explained.unwrap() >= 0.98 && (g.within_sd_pct.unwrap() - 0.15).abs() < 0.005, "{g:?}");
    assert!(g.explained_adjusted.unwrap() > 0.95 && g.p.unwrap() < 1e-6, "{g:?}");
}

#[test]
fn the_gap_of_the_exact_pairs() {
    let Some(dir) = data() else { return };
    let r = pairs::read(&dir.join("public_private.csv")).unwrap().report(0.95).unwrap();
    assert_eq!((r.pairs, r.rounded, r.valid, r.invalid), (22, 2, 8, 14));
    assert_eq!(r.pairs + r.rounded + r.one_sided, 43);
    assert!((r.mean_delta_pct - 5.61).abs() < 0.005 && (r.sd - 1.93).abs() < 0.005, "{r:?}");
    assert!((r.valid_max.unwrap() - 4.966).abs() < 0.0005 && (r.invalid_min.unwrap() - 5.432).abs() < 0.0005, "{r:?}");
}

#[test]
fn step_times_and_boards() {
    let Some(dir) = data() else { return };
    let t = steptime::read(&dir.join("runs/steptime-diag-20260623T181321Z/job_logs.txt")).unwrap();
    assert_eq!((t.exec_ms_p50, t.draft_ms_p50, t.n), (6.471, Some(1.416), 34_103));
    let board = Board::read(&dir.join("leaderboard.json")).unwrap();
    let counts = (board.claims.len(), board.count(Verification::Valid), board.count(Verification::Pending));
    assert_eq!(counts, (96, 5, 91));
}

#[test]
fn runs_of_one_trajectory_agree() {
    let Some(dir) = data() else { return };
    let read = |name: &str| FieldRun::read(&dir.join("runs").join(name), &BootstrapOptions::default()).unwrap();
    let [a, b, c] = ["reroll-ctk48-a", "reroll-ctk48-b", "reroll-ctk48-c"].map(read);
    assert!((a.tps - 65_536.0 / 130.31374424399996).abs() < 1e-9 && a.prompts == 128, "{}", a.tps);
    assert_eq!(a.trajectory, b.trajectory);
    assert_ne!(a.trajectory, c.trajectory);
    assert!((a.tps / b.tps - 1.0).abs() < 0.002);
    // A quarter of a second on one second, over 128 prompts: 2.2 %.
    assert!((ratio_se(&a.samples).unwrap() - 0.022).abs() < 0.001);
    let i = a.interval.unwrap();
    assert!(i.low < a.tps && a.tps < i.high);
}

#[test]
fn our_export_has_what_the_field_s_files_have() {
    let Some(dir) = data() else { return };
    let set = PromptSet::read(&dir.join("eval_prompts_sharegpt.json")).unwrap().take(2);
    assert_eq!((set.private, set.count), (false, 128), "the field's own prompts are public");
    let outputs = [Output::Ids(vec![1, 2]), Output::Ids(vec![3, 4])];
    let sample = |(id, output): (&str, &Output)| PromptSample {
        id: id.into(),
        prompt_tokens: 3,
        completion_tokens: 2,
        wall_ms: 20.0,
        prefill_ms: 10.0,
        decode_ms: 5.0,
        step_ms: vec![5.0],
        token_sha256: output.sha256(),
    };
    let samples: Vec<PromptSample> = ["a", "b"].into_iter().zip(&outputs).map(sample).collect();
    let run = field::FieldRun {
        model: "x",
        prompts: &set,
        prompt_ids: None,
        protocol: &Protocol::default(),
        planned: 2,
        samples: &samples,
        outputs: &outputs,
        texts: &["one".into(), "two".into()],
    };
    let out = tempfile::tempdir().unwrap();
    let ours = out.path().join("run");
    run.write(&ours).unwrap();
    let keys = |path: PathBuf| -> Vec<String> {
        let text = std::fs::read_to_string(path).unwrap().replace("Infinity", "null");
        let first = if text.starts_with("{\n") { &text[..] } else { text.lines().next().unwrap() };
        let value: serde_json::Value = serde_json::from_str(first).unwrap();
        value.as_object().unwrap().keys().cloned().collect()
    };
    for file in ["benchmark.jsonl", "decode_outputs.jsonl", "summary.json"] {
        let found = keys(ours.join(file));
        let wanted = keys(dir.join("runs/reroll-ctk48-a").join(file));
        // The perplexity stage writes its own files and adds their names afterwards.
        let missing: Vec<&String> = wanted.iter().filter(|k| !found.contains(k) && !k.starts_with("ppl_")).collect();
        assert!(missing.is_empty(), "{file} lacks {missing:?}");
    }
    assert_eq!(FieldRun::read(&ours, &BootstrapOptions::default()).unwrap().tps, 100.0);
}
