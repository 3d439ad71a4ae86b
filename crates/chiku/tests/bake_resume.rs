//! A bake that is killed, and the one that goes on with it: through the real program, with a real SIGKILL.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

fn chiku(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_chiku"));
    command.args(args).env("CHIKU_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
    // One thread, so that a bake takes long enough to be disturbed on any machine.
    command.env("RAYON_NUM_THREADS", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(code: i32, args: &[&str]) -> (String, String) {
    let Output { status, stdout, stderr } = chiku(args).output().unwrap();
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert_eq!(status.code(), Some(code), "chiku {args:?}\n{stdout}\n{stderr}");
    (stdout, stderr)
}

fn s(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A scratch folder on a disk, and a parent in it whose bake takes seconds.
fn parent() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = dir.path().join("parent");
    run(0, &["bake", "synth", "--shape", "e4b", "--layers", "3", "--vocab", "32768", "--out", s(&model), "-q"]);
    (dir, model)
}

fn partials(dir: &Path) -> Vec<PathBuf> {
    let paths = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    paths.filter(|p| p.file_name().unwrap().to_str().unwrap().contains(".partial-")).collect()
}

/// Lines of a journal after the first: tensors that are done.
fn done(partial: &Path) -> usize {
    std::fs::read(partial.join("bake.journal"))
        .map_or(0, |b| b.iter().filter(|&&b| b == b'\n').count().saturating_sub(1))
}

/// Starts a bake and waits until some tensors are entered in its journal, and it still has work to do.
fn begun(args: &[&str], dir: &Path) -> Child {
    let mut child = chiku(args).spawn().unwrap();
    let start = Instant::now();
    while !partials(dir).iter().any(|p| done(p) > 0) {
        assert!(child.try_wait().unwrap().is_none(), "the bake ended before it could be disturbed");
        assert!(start.elapsed() < Duration::from_secs(300), "no tensor was finished");
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}

fn weights(dir: &Path) -> Vec<u8> {
    std::fs::read(dir.join("model.safetensors")).unwrap()
}

/// `lineage.json` without the time.
fn lineage(dir: &Path) -> Value {
    let mut json: Value = serde_json::from_slice(&std::fs::read(dir.join("lineage.json")).unwrap()).unwrap();
    json.as_object_mut().unwrap().remove("time").unwrap();
    json
}

#[test]
fn a_killed_bake_goes_on_where_it_was() {
    let (dir, model) = parent();
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    let quantize = |out: &Path, more: &[&str]| -> Vec<String> {
        let args = ["bake", "quantize", "--model", s(&model), "--group", "32", "--out", s(out), "--json"];
        args.iter().chain(more).map(|a| a.to_string()).collect()
    };
    let call = |code: i32, out: &Path, more: &[&str]| {
        let args = quantize(out, more);
        run(code, &args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    call(0, &whole, &[]);

    let args = quantize(&out, &[]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut child = begun(&args, dir.path());
    // While it runs, nobody else takes its work over.
    let busy = call(2, &out, &["--resume"]).1;
    assert!(busy.contains("another bake is writing it"), "{busy}");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!out.exists(), "a killed bake leaves nothing under the final name");
    let left = partials(dir.path());
    assert_eq!(left.len(), 1);
    let before = done(&left[0]);
    assert!(before > 0);

    // Another bake is not gone on with, and what is left is not touched.
    for (more, part) in
        [(&["--resume", "--head", "group"][..], "`head`"), (&["--resume", "--drop-towers"], "`drop_towers`")]
    {
        let error = call(2, &out, more).1;
        assert!(error.contains("cannot resume") && error.contains(part), "{error}");
    }
    let other = run(2, &["bake", "drop-layers", "--model", s(&model), "--layers", "1", "--out", s(&out), "--resume"]).1;
    assert!(other.contains("the command quantize"), "{other}");
    assert_eq!(done(&left[0]), before);
    // A torn last line, as a crash may leave it, is not believed.
    let journal = left[0].join("bake.journal");
    let mut bytes = std::fs::read(&journal).unwrap();
    bytes.extend(b"\"model.language_model.embed_tok");
    std::fs::write(&journal, bytes).unwrap();

    let report: Value = serde_json::from_str(&call(0, &out, &["--resume"]).0).unwrap();
    let resumed = report["resumed_bytes"].as_u64().unwrap();
    assert!(resumed > 0 && resumed < report["tensor_bytes"].as_u64().unwrap(), "{resumed}");
    assert!(weights(&out) == weights(&whole), "the same bytes as without the kill");
    assert_eq!(lineage(&out), lineage(&whole));
    let names = |d: &Path| {
        let mut names: Vec<_> = std::fs::read_dir(d).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&out), names(&whole));
    assert!(partials(dir.path()).is_empty());
    let nothing = call(2, &dir.path().join("fresh"), &["--resume"]).1;
    assert!(nothing.contains("there is no unfinished bake"), "{nothing}");

    // Without --resume a leftover is in nobody's way, and is spoken of.
    let mut child = begun(&quantize(&out, &["--force"]).iter().map(String::as_str).collect::<Vec<_>>(), dir.path());
    child.kill().unwrap();
    child.wait().unwrap();
    let report: Value = serde_json::from_str(&call(0, &out, &["--force"]).0).unwrap();
    assert_eq!(report["unfinished"].as_array().unwrap().len(), 1);
    assert_eq!(report["resumed_bytes"], 0);
    // A parent that has changed since is another parent.
    let file = std::fs::OpenOptions::new().write(true).open(model.join("model.safetensors")).unwrap();
    file.set_modified(std::time::SystemTime::now()).unwrap();
    let error = call(2, &out, &["--force", "--resume"]).1;
    assert!(error.contains("the parent's weights"), "{error}");
}

#[test]
fn ctrl_c_keeps_what_is_worth_keeping_and_says_how_to_go_on() {
    let (dir, model) = parent();
    let out = dir.path().join("out");
    let args = ["bake", "quantize", "--model", s(&model), "--out", s(&out), "--json"];
    // The first tensor is the embedding of 168 MB: it is worth keeping.
    let child = begun(&args, dir.path());
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let ended = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(130), "{stderr}");
    assert!(!out.exists());
    let left = partials(dir.path());
    assert_eq!(left.len(), 1, "{stderr}");
    assert!(stderr.contains("--resume") && stderr.contains(s(&left[0])), "{stderr}");
    let report: Value = serde_json::from_str(&run(0, &[&args[..], &["--resume"]].concat()).0).unwrap();
    assert!(report["resumed_bytes"].as_u64().unwrap() > 0);
    assert!(partials(dir.path()).is_empty());
}
