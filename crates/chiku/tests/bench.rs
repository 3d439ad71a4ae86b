//! `chiku bench` from outside, without a run: the doors of the statistics.

use std::path::Path;
use std::process::Output;

use assert_cmd::Command;
use serde_json::{Value, json};

fn run(args: &[&str]) -> Output {
    let mut command = Command::cargo_bin("chiku").unwrap();
    command.env("CHIKU_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
    command.args(args).output().unwrap()
}

fn expect(code: i32, args: &[&str]) -> (String, String) {
    let out = run(args);
    let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert_eq!(out.status.code(), Some(code), "chiku {args:?}\n{stdout}\n{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    (stdout, stderr)
}

fn read(args: &[&str]) -> Value {
    serde_json::from_str(&expect(0, args).0).unwrap()
}

/// A file of a temporary directory.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_string()
    }

    fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.0.path().join(name), text).unwrap();
        self.path(name)
    }
}

const CLAIM: [&str; 10] =
    ["--public-mean", "481.5", "--public-sd", "6", "--private-mean", "470", "--private-sd", "3", "--sota", "489.66"];

#[test]
fn claims_are_judged() {
    let args = [&["bench", "claim", "--json", "--gate", "0.05", "--n", "1,4,32,128"][..], &CLAIM].concat();
    let r = read(&args);
    let both: Vec<f64> = r["curve"].as_array().unwrap().iter().map(|p| p["p_both"].as_f64().unwrap()).collect();
    for (found, expected) in both.iter().zip([0.0639, 0.2193, 0.5339, 0.2858]) {
        assert!((found - expected).abs() < 1e-4, "{both:?}");
    }
    assert_eq!((&r["best_n"], &r["optimum"]["n"], &r["kind"]), (&json!(32), &json!(26), &json!("projected")));
    assert!((r["ceiling"].as_f64().unwrap() - 494.7).abs() < 0.05);
    // Known numbers of draws carry uncertainty into the answer.
    let r = read(&[&args[..], &["--public-n", "18", "--private-n", "6"]].concat());
    let interval: Vec<f64> = serde_json::from_value(r["curve"][2]["p_both_interval"].clone()).unwrap();
    assert!(interval[0] < 0.5339 && 0.5339 < interval[1], "{interval:?}");
    let text = expect(0, &[&["bench", "claim"][..], &CLAIM].concat()).0;
    assert!(text.contains("optimum: 26 draws, 0.540"), "{text}");
}

#[test]
fn a_maximum_without_its_number_is_refused() {
    let tail = &CLAIM[4..];
    for extra in [&["--public-best", "509"][..], &["--public-best", "509", "--public-sd", "5"]] {
        let (stdout, stderr) = expect(2, &[&["bench", "claim", "--json"][..], extra, tail].concat());
        assert!(stderr.contains("refused: a best result says nothing without how many draws"), "{stderr}");
        assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap()["exit_code"], 2);
    }
    let known =
        [&["bench", "claim", "--json", "--public-best", "509", "--public-sd", "5", "--public-n", "34"][..], tail];
    let luck = read(&known.concat())["luck"].clone();
    assert!((luck["honest_mean"].as_f64().unwrap() + luck["luck"].as_f64().unwrap() - 509.0).abs() < 1e-9);
    assert!(expect(2, &[&["bench", "claim"][..], tail].concat()).1.contains("the public side is needed"));
    let bad = [&["bench", "claim", "--gate", "1.5"][..], &CLAIM].concat();
    assert!(expect(2, &bad).1.contains("gate: expected a fraction"));
    let nan = [&["bench", "claim", "--public-mean", "NaN", "--public-sd", "6"][..], tail].concat();
    assert!(expect(2, &nan).1.contains("mean: expected a positive rate below 1e15, found NaN"));
    // Numbers that nobody measures: no panic, no endless work, and no verdict.
    let (files, table) = (Files::new(), "group,tps,trajectory_cluster\na,1e308,x\na,1.7e308,y\n");
    let draws = files.write("draws.csv", table);
    let huge = [&["bench", "claim", "--draws", &draws, "--group", "a"][..], tail].concat();
    assert!(expect(2, &huge).1.contains("a rate of 1000"));
    let many = ["bench", "simulate", "--experiments", "1", "--resamples", "18446744073709551615"];
    assert!(expect(2, &many).1.contains("resamples: expected from 100 to 10000000"));
    let large = ["bench", "simulate", "--nodes", "65535", "--processes", "65535", "--prompts", "65535"];
    assert!(expect(2, &large).1.contains("at most 16777216 requests"));
    let millions =
        [&["bench", "claim", "--public-mean", "480", "--public-sd", "5", "--public-n", "1000000000"][..], tail];
    expect(0, &millions.concat());
    assert!(expect(2, &["bench", "compare", "/dev/zero", "/dev/zero"]).1.contains("not a regular file"));
}

#[test]
fn simulated_draws_are_explained() {
    let files = Files::new();
    let out = files.path("draws.csv");
    let args = "--nodes 18 --trajectories 8 --trajectory-sd 1 --node-sd 0 --process-sd 0.1 --repeat-sd 0 --seed 3";
    let simulate: Vec<&str> = ["bench", "simulate", "--out", &out].into_iter().chain(args.split(' ')).collect();
    expect(0, &simulate);
    let r = read(&["bench", "import", "draws", &out, "--json"]);
    let g = &r["groups"]["simulated"];
    assert_eq!(g["n"], 18);
    assert!(g["explained"].as_f64().unwrap() > 0.95, "{g}");
    assert!((g["within_sd_pct"].as_f64().unwrap() - 0.1).abs() < 0.07, "{g}");
    // The group feeds a claim.
    let claim = ["bench", "claim", "--draws", &out, "--group", "simulated", "--json"];
    let r = read(&[&claim[..], &CLAIM[4..], &["--private-n", "5", "--n", "8"]].concat());
    assert!(r["uncertainty_missing"].is_null() && r["curve"][0]["p_both_interval"].is_array(), "{r}");
    let (_, stderr) = expect(2, &[&["bench", "claim", "--draws", &out, "--group", "x"][..], &CLAIM[4..]].concat());
    assert!(stderr.contains("no group `x`; there are: simulated"), "{stderr}");
    let small = "bench simulate --nodes 5 --experiments 50 --json";
    let r = read(&small.split(' ').collect::<Vec<&str>>());
    assert!(r["coverage"]["covered"].as_f64().unwrap() > 0.8 && r["nodes_for_1_pct"].as_u64().unwrap() > 5, "{r}");
    assert!(expect(2, &["bench", "simulate", "--nodes", "0"]).1.contains("nodes: expected from 1"));
}

#[test]
fn pairs_have_a_gap() {
    let files = Files::new();
    let header = "agent,config,public_tps,private_tps,verdict\n";
    let rows = "a,x,400.0,384.0,valid\nb,x,500.0,470.0,invalid\nc,\"y, z\",509,469,invalid\nd,y,400.5,,valid\n";
    let r = read(&["bench", "gap", "--pairs", &files.write("p.csv", &format!("{header}{rows}")), "--json"]);
    assert_eq!((&r["pairs"], &r["rounded"], &r["one_sided"]), (&json!(2), &json!(1), &json!(1)));
    assert_eq!((&r["mean_delta_pct"], &r["valid_max"], &r["invalid_min"]), (&json!(5.0), &json!(4.0), &json!(6.0)));
    assert!((r["sd"].as_f64().unwrap() - 2f64.sqrt()).abs() < 1e-12);
    for (rows, message) in [
        ("", "no row below the header"),
        ("a,x,400.0,384.0,valid\n", "needs at least 2 samples, and there are 1"),
        ("a,x,NaN,384.0,valid\n", "p.csv:2: column `public_tps`: expected a positive finite number, found NaN"),
        ("a,x,400.0,-1.0,valid\n", "column `private_tps`: expected a positive finite number, found -1.0"),
        ("a,x,400.0,384.0,maybe\n", "column `verdict`: expected valid, invalid or pending, found maybe"),
        ("a,x,400.0\n", "p.csv:2: expected 5 fields as in the header, found 3"),
    ] {
        let path = files.write("p.csv", &format!("{header}{rows}"));
        assert!(expect(2, &["bench", "gap", "--pairs", &path]).1.contains(message), "{message}");
    }
}

#[test]
fn both_prompt_sets_are_measured_by_default() {
    let args = "bench gap --model nano --drafter nano --limit 4 --max-tokens 24 --json";
    let r = read(&args.split(' ').collect::<Vec<&str>>());
    let gap = &r["gap"];
    assert_eq!((&gap["public_prompts"], &gap["private_prompts"]), (&json!(4), &json!(4)));
    let log = |v: &Value| -(1.0 - v["value"].as_f64().unwrap() / 100.0).ln();
    let parts = &gap["parts"];
    let sum = log(&parts["acceptance"]) + log(&parts["context_length"]) + log(&parts["residual"]);
    assert!((sum - log(&gap["delta_pct"])).abs() < 1e-9, "{gap}");
}

#[test]
fn files_of_others_are_read() {
    let files = Files::new();
    let log = "[steptime] raw i=1 kind=exec gap=4 cpu=24 gpu=5.0\n[steptime] raw i=2 kind=draft gap=0 cpu=1 gpu=1.5\n";
    let r = read(&["bench", "import", "steptime", &files.write("log", log), "--json"]);
    assert_eq!((&r["exec_ms_p50"], &r["draft_ms_p50"], &r["n"]), (&json!(5.0), &json!(1.5), &json!(1)));
    let board = r#"{"rows": [{"agent": "a", "tps": 500, "verification": "valid"}], "meta": {"x": NaN}}"#;
    let r = read(&["bench", "import", "board", &files.write("b.json", board), "--json"]);
    assert_eq!((&r["rows"], &r["valid"], &r["pending"]), (&json!(1), &json!(1), &json!(0)));
    let fine = r#"{"results": [{"command": "x", "mean": 1.5, "times": [1, 2]}]}"#;
    let r = read(&["bench", "import", "hyperfine", &files.write("h.json", fine), "--json"]);
    assert_eq!(r["measurements"][0]["mean"], 1.5);
    std::fs::create_dir(files.0.path().join("run")).unwrap();
    let run = r#"{"request_rate": Infinity, "duration": 4.0, "completed": 2, "total_output_tokens": 8, "output_lens": [4, 4], "ttfts": [1.0, 3.0]}"#;
    files.write("run/benchmark.jsonl", run);
    let r = read(&["bench", "import", "run", &files.path("run"), "--json"]);
    assert_eq!(
        (&r["tps"], &r["ms_total"], &r["prompts"], &r["trajectory"]),
        (&json!(2.0), &json!(4000.0), &json!(2), &Value::Null)
    );
    for (args, message) in [
        (["import", "board", &files.write("e.json", "")], "an empty file"),
        (["import", "steptime", &files.write("e.log", "hi\n")], "no step-time entry"),
        (["import", "draws", &files.write("d.csv", "group,tps\nx,1\n")], "no column `trajectory_cluster`"),
        (
            ["import", "draws", &files.write("o.csv", "group,tps,trajectory_cluster\nx,1,a\n")],
            "at least 2 samples, and there are 1",
        ),
        (["import", "draws", &files.write("z.csv", "group,tps,trajectory_cluster\nx,0,a\n")], "found 0"),
        (["import", "vllm", &files.write("v.json", r#"{"output_throughput": Infinity}"#)], "found \"Infinity\""),
        (["import", "run", &files.path("absent")], "absent"),
        (["import", "llama-bench", &files.write("l.json", "{}")], "expected a list"),
    ] {
        let (stdout, stderr) = expect(2, &[&["bench"][..], &args, &["--json"]].concat());
        assert!(stderr.contains(message), "{args:?}: {stderr}");
        assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap()["exit_code"], 2);
    }
}

#[test]
fn a_roofline_is_projected_from_headers() {
    let r = read(&[
        "bench",
        "roofline",
        "--model",
        "nano",
        "--device",
        "a10g",
        "--context",
        "200",
        "--completion",
        "64",
        "--json",
    ]);
    assert_eq!((&r["kind"], &r["components"]["drafter"]), (&json!("projected"), &json!(0)));
    let c = r["components"].as_object().unwrap();
    assert_eq!(r["bytes_per_step"].as_u64().unwrap(), c.values().map(|v| v.as_u64().unwrap()).sum::<u64>());
    let (bytes, floor) = (r["bytes_per_step"].as_f64().unwrap(), r["floor_ms"].as_f64().unwrap());
    assert!((floor - bytes / 517.9e9 * 1e3).abs() < 1e-12);
    assert!((r["tps_bound"].as_f64().unwrap() - 1e3 / floor).abs() < 1e-6);
    let args = "bench roofline --model nano --drafter nano --device h200 --context 200 --completion 64 --tokens-per-step 3 --json";
    let drafted = read(&args.split(' ').collect::<Vec<&str>>());
    assert!(drafted["components"]["drafter"].as_u64().unwrap() > 0);
    let unknown = expect(2, &["bench", "roofline", "--model", "nano", "--device", "h100"]).1;
    assert!(unknown.contains("no profile of `h100`; there are a10g, a10, rtx3090, h200"), "{unknown}");
    expect(2, &["bench", "roofline", "--model", "nano"]);
}

#[test]
fn records_are_exported() {
    let files = Files::new();
    let log = files.path("r.jsonl");
    expect(0, &["bench", "run", "--limit", "2", "--max-tokens", "4", "--warmup", "1", "--out", &log, "-q"]);
    for (format, sign) in [
        ("json", "\"tokens_per_s\""),
        ("jsonl", "\"tokens_per_s\""),
        ("csv", "time,kind,label"),
        ("markdown", "| tokens/s |"),
        ("prometheus", "# TYPE chiku_bench_tokens_per_second gauge"),
        ("github-action-benchmark", "\"unit\": \"tokens/s\""),
        ("bencher", "\"throughput\""),
    ] {
        assert!(expect(0, &["bench", "export", &log, "--format", format]).0.contains(sign), "{format}");
    }
    let out = files.path("out.csv");
    expect(0, &["bench", "export", &log, "--format", "csv", "--out", &out]);
    assert_eq!(std::fs::read_to_string(&out).unwrap().lines().count(), 2);
    // A torn line is reported and skipped; records of several schemas are not mixed.
    let text = std::fs::read_to_string(&log).unwrap();
    let (_, stderr) = expect(0, &["bench", "export", &files.write("torn.jsonl", &format!("{text}{{\"sch"))]);
    assert!(stderr.contains("torn.jsonl: line 2 is skipped: not a whole JSON object"), "{stderr}");
    let newer = text.replacen("\"schema\":1", "\"schema\":9", 1);
    let mixed = files.write("mixed.jsonl", &format!("{text}{newer}"));
    for args in [vec!["bench", "export", &mixed], vec!["bench", "gap", "--public", &mixed, "--private", &log]] {
        assert!(expect(2, &args).1.contains("mixed.jsonl:2: a record of schema 9 among those of schema 1"));
    }
    assert!(expect(2, &["bench", "export", &files.path("absent.jsonl")]).1.contains("absent.jsonl"));
}

/// A file of the repository.
fn of_repository(path: &str) -> String {
    format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn everything_goes_on_one_page() {
    let files = Files::new();
    let data = |name: &str| of_repository(&format!("crates/bench/tests/report/{name}"));
    let (results, board, draws, pairs, log) =
        (of_repository("results"), data("board.json"), data("draws.csv"), data("pairs.csv"), data("steps.log"));
    let (a, b) = (files.path("a.html"), files.path("b.html"));
    let args = |out: &str| -> Vec<String> {
        let all = [
            "bench",
            "report",
            "--json",
            "--results",
            &results,
            "--board",
            &board,
            "--draws",
            &draws,
            "--pairs",
            &pairs,
            "--steptime",
            &log,
            "-o",
            out,
        ];
        all.map(String::from).into()
    };
    let run = |out: &str| read(&args(out).iter().map(String::as_str).collect::<Vec<&str>>());
    let said = run(&a);
    assert_eq!((&said["claims"], said["records"].as_u64() >= Some(2)), (&json!(41), true), "{said}");
    run(&b);
    let page = std::fs::read_to_string(&a).unwrap();
    assert_eq!(page, std::fs::read_to_string(&b).unwrap(), "the same input gives the same bytes");
    assert_eq!(page.len() as u64, said["bytes"].as_u64().unwrap());
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    assert!(!page.contains("<img") && page.matches("<script").count() == 1);

    // Wrong input: the file named, and nothing under the page's name.
    let none = files.path("none.html");
    let wrong = files.write("wrong.json", "{\"rows\": []}");
    for (option, path) in [("--board", wrong.as_str()), ("--results", "no-such-folder"), ("--draws", wrong.as_str())] {
        let (_, stderr) = expect(2, &["bench", "report", option, path, "-o", &none]);
        assert!(stderr.contains(path) && !Path::new(&none).exists(), "{option}: {stderr}");
    }
    let (_, stderr) = expect(2, &["bench", "report", "--results", files.path("").as_str(), "-o", &none]);
    assert!(stderr.contains("no records to report"), "{stderr}");
    // A page never replaces what it is made of.
    let (_, stderr) = expect(2, &["bench", "report", "--board", &board, "-o", &board]);
    assert!(stderr.contains("is one of the files being read"), "{stderr}");
}

#[test]
fn history_finds_where_the_level_changes() {
    let files = Files::new();
    let own = std::fs::read_dir(of_repository("results/2026")).unwrap().map(|e| e.unwrap().path());
    let own = own.filter(|p| p.extension().is_some_and(|e| e == "jsonl")).min().unwrap();
    let text = std::fs::read_to_string(own).unwrap();
    let mut line: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    line["samples"] = json!([]);
    let made = |i: usize| {
        let mut r = line.clone();
        r["time"] = json!(format!("2026-01-01T00:{i:02}:00Z"));
        r["binary"]["commit"] = json!(if i < 10 { "old" } else { "new" });
        let noise = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0][i % 10] * 5e-4;
        let step_ms = (1.0 + noise) * if i < 10 { 1.0 } else { 1.25 };
        r["result"]["step_ms"] = json!(step_ms);
        r["result"]["tokens_per_s"] = json!(1000.0 / step_ms);
        r.to_string() + "\n"
    };
    files.write("a.jsonl", &(0..20).map(made).collect::<String>());
    let h = read(&["bench", "history", "--json", "--results", files.path("").as_str()]);
    let s = &h["series"][0];
    assert_eq!((&s["points"].as_array().unwrap().len(), &h["left_out"]), (&20, &json!(0)), "{h}");
    assert_eq!((&s["changes"][0]["at"], &s["changes"][0]["commit"]), (&json!(10), &json!("new")));
    assert!((s["changes"][0]["change_pct"].as_f64().unwrap() + 20.0).abs() < 0.5, "{s}");
    assert_eq!(s["commits"].as_array().unwrap().len(), 2);
    let (stdout, _) = expect(0, &["bench", "history", "--results", files.path("").as_str()]);
    assert!(stdout.contains("-20.0 % from here"), "{stdout}");
    let (_, stderr) = expect(2, &["bench", "history", "--results", "no-such-folder"]);
    assert!(stderr.contains("no-such-folder: cannot list"), "{stderr}");
}
