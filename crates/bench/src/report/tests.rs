use super::*;
use crate::compare::tests::run;
use crate::import::board::{Board, Claim, Verification};
use crate::log::append;
use crate::luck::Draw;
use crate::profile::{OpBound, OpRoofline, Part, Profile};
use crate::record::tests::setup;
use crate::record::{Figure, Record};
use crate::stats::BootstrapOptions;

fn record(label: &str, minute: usize, wall_ms: &[f64]) -> Record {
    let options = BootstrapOptions { resamples: 100, ..Default::default() };
    let mut r = Record::measured(run(label, wall_ms), setup(), &options).unwrap();
    r.time = format!("2026-01-01T{:02}:{:02}:00Z", minute / 60 % 24, minute % 60);
    r.target.label = label.into();
    let result = r.result.as_mut().unwrap();
    result.bytes_per_step = Some(Figure { kind: Kind::Projected, value: 3.5e6, source: "sizes".into() });
    r
}

fn claim(agent: &str, tps: f64, verification: Verification, description: &str) -> Claim {
    Claim {
        agent: agent.into(),
        tps,
        method: format!("{agent}-method"),
        verification,
        timestamp: "2026-06-20 15:00 UTC".into(),
        description: description.into(),
    }
}

/// A folder of results with these records, read back.
fn results(records: &[Record]) -> Inputs {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("2026/machine-01.jsonl");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    records.iter().for_each(|r| assert_eq!(append(&path, r).unwrap(), None));
    Inputs::read(&Paths { results: Some(dir.path().into()), ..Default::default() }).unwrap()
}

fn full() -> Inputs {
    let mut records: Vec<Record> = (0..4).map(|i| record("plain", i, &[100.0, 110.0 + i as f64, 120.0])).collect();
    let mut private = record("plain", 9, &[108.0, 112.0, 131.0]);
    private.prompts.name = "heldout.jsonl".into();
    records.push(private);
    let mut drafted = record("drafted", 10, &[50.0, 60.0]);
    drafted.result.as_mut().unwrap().tokens_per_step = Some(3.5);
    records.push(drafted);
    let claims = vec![
        claim("fast", 510.0, Verification::Pending, "PPL 2.40, after slow-2"),
        claim("fast", 490.5, Verification::Valid, "PPL 2.393"),
        claim("slow-2", 400.0, Verification::Valid, "no word on it"),
        claim("odd", 300.0, Verification::Invalid, "PPL 2.5"),
    ];
    let draws =
        (0..6).map(|i| Draw { tps: 480.0 + f64::from(i % 3) * 4.0, class: Some(format!("c{}", i % 2)) }).collect();
    let pair = |config: &str, public: f64, private: f64, verdict| crate::gap::pairs::Pair {
        config: config.into(),
        public,
        private,
        verdict: Some(verdict),
    };
    use crate::gap::pairs::Verdict;
    let exact = vec![pair("a", 400.5, 390.25, Verdict::Valid), pair("b", 500.5, 462.5, Verdict::Invalid)];
    Inputs {
        board: Some(("board.json".into(), Board { claims })),
        draws: Some(("draws.csv".into(), vec![("group-x".into(), draws)])),
        pairs: Some(("pairs.csv".into(), crate::gap::pairs::Pairs { exact, rounded: 1, one_sided: 2 })),
        steptime: Some((
            "log.txt".into(),
            crate::import::steptime::StepTimes {
                exec_ms_p50: 6.471,
                draft_ms_p50: Some(1.416),
                n: 34_103,
                basis: crate::import::steptime::Basis::Aggregate,
                exec_ms_p90: None,
                exec_cpu_ms_p50: Some(6.351),
                gap_ms_p50: Some(1.595),
            },
        )),
        acceptance: vec![("mtp".into(), acceptance())],
        profiles: vec![("plain".into(), profile())],
        ..results(&records)
    }
}

fn acceptance() -> crate::acceptance::AcceptanceReport {
    let y = |steps, accept_by_depth| crate::acceptance::Yield { steps, tokens_per_step: None, accept_by_depth };
    let (all, off_loop) = (y(100, vec![0.8, 0.6, 0.5]), y(60, vec![0.7, 0.4, 0.2]));
    crate::acceptance::AcceptanceReport { prompts: 5, all, off_loop, loop_share: 0.4, mismatch: false }
}

fn profile() -> Profile {
    let part = |name: &str, ms: f64| Part { name: name.into(), ms_per_step: ms, percent: ms / 2.0 * 100.0 };
    let parts = vec![part("verify: mlp", 1.5), part("host", 0.25), part("residual", 0.25)];
    Profile {
        kind: Kind::Measured,
        prompts: 4,
        steps: 100,
        wall_ms: 200.0,
        ms_per_step: 2.0,
        tokens_per_step: 1.0,
        prefill_ms: 1.0,
        verify_percent: 75.0,
        parts,
        roofline: None,
    }
}

/// Each figure of a page: its id, its drawing, its rows.
fn figures(page: &str) -> Vec<(String, String, usize)> {
    let of = |text: &str| {
        let id = text[..text.find('"').unwrap()].to_string();
        let svg = text.find("<svg").map_or("", |a| &text[a..text.find("</svg>").unwrap()]);
        let body = &text[text.find("<tbody>").unwrap()..text.find("</tbody>").unwrap()];
        (id, svg.to_string(), body.matches("<tr").count())
    };
    page.split("<figure id=\"").skip(1).map(of).collect()
}

#[test]
fn every_picture_has_its_table_and_every_section_says_something() {
    let page = render(&full()).unwrap();
    let found = figures(&page);
    let ids: Vec<&str> = found.iter().map(|f| f.0.as_str()).collect();
    let expected = [
        "board",
        "configurations-measured",
        "draws-measured",
        "draws-published",
        "claim-curves",
        "pairs",
        "gap-measured",
        "anatomy-measured",
        "profile-measured",
        "anatomy-server",
        "depth",
        "yield-measured",
        "history-measured",
        "frontier",
        "roofline-measured",
    ];
    assert_eq!(ids, expected);
    for (id, svg, rows) in &found {
        assert!(svg.contains(r#"role="img" aria-label=""#) && *rows > 0, "{id}: {rows} rows");
    }
    assert_eq!(page.matches("<section").count(), 8);
    assert!(
        !page.contains("http://")
            || page.matches("http://").count() == page.matches("http://www.w3.org/2000/svg").count()
    );
    assert!(!page.contains("https://") && !page.contains("<link rel=\"stylesheet") && !page.contains("src="));
}

#[test]
fn all_rows_of_a_board_appear_the_hidden_valid_one_among_them() {
    let page = render(&full()).unwrap();
    let (_, svg, rows) = figures(&page).swap_remove(0);
    assert_eq!((rows, svg.matches("class=\"mark ").count()), (4, 4));
    // The slower row of an agent whose faster one is pending, and its own name beside it.
    assert!(svg.contains("490.50 tokens/s, valid (published)") && svg.contains("fast 490.5"), "{svg}");
    assert_eq!(svg.matches("class=\"edge ").count(), 1);
    assert!(page.contains("1 verified claims stand below a faster one"));
}

#[test]
fn a_line_leads_from_a_baked_checkpoint_to_its_parent() {
    let file = |hash: &str| crate::environment::FileHash { bytes: 1, blake3: hash.into() };
    let mut parent = record("parent", 0, &[100.0, 110.0]);
    parent.checkpoint.files = [("config.json".to_string(), file("aa"))].into();
    let mut child = record("child", 1, &[90.0, 95.0]);
    child.checkpoint.files = [("config.json".to_string(), file("bb"))].into();
    child.checkpoint.blake3 = "child".into();
    let edges = |child: &Record| {
        let page = render(&results(&[parent.clone(), child.clone()])).unwrap();
        let (id, svg, _) = figures(&page).swap_remove(0);
        assert_eq!(id, "configurations-measured");
        svg.matches("class=\"edge ").count()
    };
    assert_eq!(edges(&child), 0);
    // An ancestor that no record is of is passed over.
    child.checkpoint.ancestors = vec!["unknown".into(), parent.checkpoint.weights()];
    assert_eq!(edges(&child), 1);
}

#[test]
fn runs_that_were_taken_apart_show_their_share_of_the_roofline() {
    let mut records: Vec<Record> = (0..2).map(|i| record("plain", i, &[100.0, 110.0])).collect();
    for (i, r) in records.iter_mut().enumerate() {
        let ops = vec![OpBound { op: "down".into(), bytes: 5_000_000, floor_ms: 0.5, percent: 41.5 + i as f64 }];
        let read_gb_per_s = Figure { kind: Kind::Measured, value: 10.0, source: "here".into() };
        let roofline = Some(OpRoofline { kind: Kind::Projected, read_gb_per_s, ops });
        r.profile = Some(Profile { roofline, ..profile() });
    }
    let page = render(&results(&records)).unwrap();
    let found = figures(&page);
    let (_, svg, rows) = found.iter().find(|f| f.0 == "op-share").unwrap();
    assert_eq!((*rows, svg.matches("class=\"mark ").count()), (2, 2));
    assert!(svg.contains("plain, down: 41.5 % of 10.00 GB/s") && svg.contains("42.5 %, 5.00 MB"), "{svg}");
    assert!(found.iter().any(|f| f.0 == "profile-measured"));
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    assert_eq!(render(&full()).unwrap(), render(&full()).unwrap());
}

#[test]
fn a_section_without_data_says_what_would_fill_it() {
    let board = Inputs { board: full().board, ..Default::default() };
    let page = render(&board).unwrap();
    assert_eq!(figures(&page).iter().map(|f| f.0.as_str()).collect::<Vec<_>>(), ["board", "frontier"]);
    for id in ["claims", "gap", "anatomy", "acceptance", "roofline"] {
        let section = &page[page.find(&format!("<section id=\"{id}\"")).unwrap()..];
        let section = &section[..section.find("</section>").unwrap()];
        assert!(section.contains("class=\"missing\""), "{id}");
    }
    let page = render(&results(&[record("plain", 0, &[100.0, 110.0])])).unwrap();
    assert!(
        page.contains("--board leaderboard.json") && page.contains("--draws draws.csv") && page.contains("--pairs")
    );
}

#[test]
fn names_never_become_markup() {
    let hostile = "<img src=x onerror=alert(1)>\"'&</script></svg>";
    let mut inputs = full();
    let mut r = record(hostile, 20, &[100.0, 120.0]);
    r.node = Some(hostile.into());
    r.checkpoint.name = hostile.into();
    r.prompts.name = hostile.into();
    r.target.flags = vec![hostile.into()];
    r.binary.commit = Some(hostile.into());
    r.environment.cpu = Some(hostile.into());
    r.result.as_mut().unwrap().bytes_per_step.as_mut().unwrap().source = hostile.into();
    inputs.files.extend(results(&[r]).files);
    inputs.files[1].name = hostile.into();
    if let Some((name, board)) = &mut inputs.board {
        *name = hostile.into();
        board.claims.push(Claim {
            method: hostile.into(),
            timestamp: hostile.into(),
            ..claim(hostile, 1.0, Verification::Valid, hostile)
        });
    }
    if let Some((_, groups)) = &mut inputs.draws {
        groups[0].0 = hostile.into();
        groups[0].1[0].class = Some(hostile.into());
    }
    if let Some((_, pairs)) = &mut inputs.pairs {
        pairs.exact[0].config = hostile.into();
    }
    let page = render(&inputs).unwrap();
    assert!(!page.contains("<img") && !page.contains("'&</"), "a name became markup");
    assert_eq!((page.matches("<script").count(), page.matches("</script>").count()), (1, 1));
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    assert!(page.matches("&lt;img src=x onerror=alert(1)&gt;").count() > 10);
}

#[test]
fn kinds_never_share_a_column_or_a_picture() {
    let mut published = record("theirs", 30, &[10.0, 12.0]);
    published.kind = Kind::Published;
    let mut inputs = full();
    inputs.files.extend(results(&[published]).files);
    let page = render(&inputs).unwrap();
    let found = figures(&page);
    let of = |id: &str| found.iter().find(|f| f.0 == id).map(|f| f.1.clone()).unwrap();
    assert!(of("configurations-published").contains("theirs") && !of("configurations-measured").contains("theirs"));
    assert!(of("history-published").contains("theirs") && !of("history-measured").contains("theirs"));
}

#[test]
fn shared_names_are_told_apart() {
    let a = record("plain", 0, &[100.0, 110.0]);
    let mut b = record("plain", 1, &[100.0, 110.0]);
    b.environment.cpu = Some("Other".into());
    b.environment.cpus = Some(3);
    let mut c = record("plain", 2, &[100.0, 110.0]);
    c.target.threads = 9;
    let inputs = results(&[a.clone(), b, c]);
    let configs = Config::all(&inputs.runs());
    let names: Vec<&str> = configs.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names[1], "plain, other-3t");
    assert!(names[0].starts_with("plain, ") && names[2] == format!("{} (2)", names[0]), "{names:?}");
}

#[test]
fn what_other_commands_printed_is_read_and_wrong_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name)
    };
    let yields = file("mtp.json", &serde_json::to_string(&acceptance()).unwrap());
    let text = serde_json::to_string(&profile()).unwrap();
    let steps = file("nano.json", &text);
    let paths = Paths { acceptance: vec![yields.clone()], profiles: vec![steps], ..Default::default() };
    let page = render(&Inputs::read(&paths).unwrap()).unwrap();
    assert!(page.contains("depth 2: 60.0 % of 100 steps (all steps, measured)") && page.contains("nano, host"));
    let wrong = Inputs::read(&Paths { profiles: vec![yields], ..Default::default() }).unwrap_err().to_string();
    assert!(wrong.contains("mtp.json: not valid JSON") || wrong.contains("mtp.json"), "{wrong}");
    let still = file("still.json", &text.replace("\"ms_per_step\":2.0,", "\"ms_per_step\":0.0,"));
    let error = Inputs::read(&Paths { profiles: vec![still], ..Default::default() }).unwrap_err().to_string();
    assert!(error.contains("still.json: a profile of steps that take 0 ms"), "{error}");
}

#[test]
fn nothing_to_show_and_mixed_schemas_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths { results: Some(dir.path().into()), ..Default::default() };
    assert!(Inputs::read(&paths).unwrap_err().to_string().contains("no records to report"));
    let path = dir.path().join("a.jsonl");
    append(&path, &record("plain", 0, &[1.0, 2.0])).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.clone() + &text.replace("\"schema\":1", "\"schema\":99")).unwrap();
    assert!(Inputs::read(&paths).unwrap_err().to_string().contains("a record of schema 99"));
    // A torn line is told on the page.
    std::fs::write(&path, text.clone() + &text[..50]).unwrap();
    let page = render(&Inputs::read(&paths).unwrap()).unwrap();
    assert!(page.contains("line 2 is left out: not a whole JSON object"));
}
