//! What the files around the crates say is true of the program: versions, the flake's lock and apps, and every command line that is
//! written down anywhere.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The value of the first `key = "value"` in a TOML file.
fn value<'a>(toml: &'a str, key: &str) -> &'a str {
    let line = toml.lines().find(|l| l.split('=').next().unwrap().trim() == key);
    line.unwrap_or_else(|| panic!("no `{key}`")).split('"').nth(1).unwrap()
}

fn chiku(args: &[&str]) -> (bool, String) {
    let out = Command::new(assert_cmd::cargo::cargo_bin("chiku")).args(args).output().unwrap();
    let text = if out.status.success() { out.stdout } else { out.stderr };
    (out.status.success(), String::from_utf8(text).unwrap())
}

#[test]
fn one_rust_version_everywhere() {
    let (toolchain, workspace) = (text("rust-toolchain.toml"), text("Cargo.toml"));
    let (channel, minimum) = (value(&toolchain, "channel"), value(&workspace, "rust-version"));
    assert!(channel == minimum || channel.strip_prefix(minimum).is_some_and(|rest| rest.starts_with('.')), "{channel}");
    for entry in std::fs::read_dir(root().join("crates")).unwrap() {
        let manifest = std::fs::read_to_string(entry.unwrap().path().join("Cargo.toml")).unwrap();
        assert!(manifest.contains("rust-version.workspace = true"), "{manifest}");
    }
    // A workspace of its own, which inherits nothing.
    assert_eq!(value(&text("fuzz/Cargo.toml"), "rust-version"), minimum);
    // The flake takes its toolchain from the same file, and nothing else names one.
    let flake = text("flake.nix");
    assert!(flake.contains("fromRustupToolchainFile ./rust-toolchain.toml"));
    for (name, text) in [("flake.nix", flake), ("nix/rust.nix", text("nix/rust.nix")), (".ci/run", text(".ci/run"))] {
        for word in ["rust-bin.stable", "rust-bin.nightly", "rustup default", "--toolchain", "cargo +"] {
            assert!(!text.contains(word), "{name} chooses a toolchain of its own: {word}");
        }
    }
}

/// Bytes that a base64 text stands for.
fn base64_bytes(text: &str) -> Option<usize> {
    let digits = text.trim_end_matches('=');
    let padded = text.len() - digits.len();
    let alphabet = digits.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'+' || b == b'/');
    (alphabet && padded <= 2 && text.len().is_multiple_of(4)).then(|| digits.len() * 6 / 8)
}

#[test]
fn the_lock_is_well_formed_and_covers_the_inputs() {
    let lock: Value = serde_json::from_str(&text("flake.lock")).unwrap();
    let nodes = lock["nodes"].as_object().unwrap();
    let root = lock["root"].as_str().unwrap();
    for (name, node) in nodes.iter().filter(|(name, _)| *name != root) {
        let locked = &node["locked"];
        let revision = locked["rev"].as_str().unwrap();
        assert!(revision.len() == 40 && revision.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')), "{name}");
        let hash = locked["narHash"].as_str().unwrap().strip_prefix("sha256-").unwrap();
        assert_eq!(base64_bytes(hash), Some(32), "{name}");
        for part in ["owner", "repo", "type"] {
            assert_eq!(locked[part], node["original"][part], "{name}: locked is not what was asked for");
        }
        for (input, target) in node["inputs"].as_object().into_iter().flatten() {
            let target = target.as_str().or_else(|| target[0].as_str()).unwrap();
            assert!(nodes.contains_key(target), "{name}: its input {input} follows {target}, which is not locked");
        }
    }
    let inputs: BTreeSet<&String> = nodes[root]["inputs"].as_object().unwrap().keys().collect();
    let flake = text("flake.nix");
    let named = flake.lines().filter_map(|l| l.trim().split_once(" = {").or(l.trim().split_once(".url = ")));
    let named: BTreeSet<String> =
        named.map(|(n, _)| n.to_string()).filter(|n| nodes.contains_key(n) && n.as_str() != root).collect();
    assert_eq!(named.iter().collect::<BTreeSet<_>>(), inputs);
}

#[test]
fn the_lock_test_tells_hashes_from_other_text() {
    assert_eq!(base64_bytes("MPaRdVkf6zZP5fCPxYCi8Dr4pZzgmXzg8T9nVEbp3Mw="), Some(32));
    assert_eq!(base64_bytes("MPaRdVkf6zZP5fCPxYCi8Dr4pZzgmXzg8T9nVEbp3M=="), Some(31));
    assert_eq!(base64_bytes("MPaRdVkf6zZP5fCPxYCi8Dr4pZzgmXzg8T9nVEbp3Mw"), None);
    assert_eq!(base64_bytes("MPaRdVkf6zZP5fCPxYCi8Dr4pZzgmXzg8T9nVEbp3M!="), None);
}

#[test]
fn the_flake_has_an_app_for_every_command() {
    let (ok, help) = chiku(&["--help"]);
    assert!(ok);
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    // Wrapped descriptions are indented further.
    let names = commands.lines().filter(|l| l.starts_with("  ") && !l.starts_with("   "));
    let commands: BTreeSet<&str> = names.filter_map(|l| l.split_whitespace().next()).filter(|n| *n != "help").collect();
    let flake = text("flake.nix");
    let block = flake.split("commands = {\n").nth(1).unwrap().split("};\n      app =").next().unwrap();
    let apps: BTreeSet<&str> = block.lines().filter_map(|l| l.trim().split([' ', '.']).next()).collect();
    assert_eq!(apps.into_iter().filter(|a| !a.is_empty()).collect::<BTreeSet<_>>(), commands);
}

/// The driver script, run as the flake's wrapper runs it; its exit code, what it says, and the search path it leaves.
fn find_driver(path: &Path, cache: &Path) -> (Option<i32>, String, String) {
    let script = root().join("nix/driver.sh");
    let mut command = Command::new("bash");
    command.args(["-euc", ". \"$1\"; chiku_need_driver; printf '%s' \"${LD_LIBRARY_PATH-}\"", "bash"]).arg(script);
    command.env("CHIKU_DRIVER_PATH", path).env("CHIKU_CACHE", cache).env_remove("LD_LIBRARY_PATH");
    let out = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.code(), text(out.stderr), text(out.stdout))
}

#[test]
fn a_host_driver_is_linked_alone_and_a_missing_one_is_exit_code_3() {
    let (host, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (code, message, _) = find_driver(host.path(), cache.path());
    assert_eq!(code, Some(3), "{message}");
    assert!(message.contains("no NVIDIA driver") && message.contains("CHIKU_DRIVER_PATH"), "{message}");
    for library in ["libcuda.so.1", "libnvidia-ml.so.1", "libc.so.6"] {
        std::fs::write(host.path().join(library), "").unwrap();
    }
    let (code, message, search) = find_driver(host.path(), cache.path());
    assert_eq!((code, message.as_str()), (Some(0), ""));
    assert_eq!(Path::new(&search), cache.path().join("driver"));
    let entries = std::fs::read_dir(&search).unwrap();
    let linked: BTreeSet<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(linked, ["libcuda.so.1", "libnvidia-ml.so.1"].map(String::from).into());
    assert_eq!(std::fs::read_link(Path::new(&search).join("libcuda.so.1")).unwrap(), host.path().join("libcuda.so.1"));
}

/// Files in which commands of the program are written down.
fn documents() -> Vec<PathBuf> {
    let top =
        ["README.md", "CONTRIBUTING.md", "justfile", "kernels/README.md", "prompts/README.md", "results/README.md"];
    let mut files: Vec<PathBuf> = top.map(|f| root().join(f)).into();
    let mut folders = vec![root().join("contrib"), root().join(".github"), root().join("ci")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.retain(|f| f.is_file());
    files
}

/// The arguments of a call of the program in a line of shell, if there is one.
fn call(line: &str) -> Option<Vec<String>> {
    let starts = ["cargo run --release -- ", "chiku ", "\"$chiku\" "];
    let line = line.trim().trim_start_matches("run: ").trim_start_matches("- ").trim_start_matches("srun ");
    let (app, rest) = match line.strip_prefix("nix run .#") {
        Some(rest) => {
            let (app, rest) = rest.split_once(" -- ").unwrap_or((rest, ""));
            (Some(app.trim()), rest)
        }
        None => (None, starts.iter().find_map(|s| line.strip_prefix(s))?),
    };
    let mut words: Vec<String> =
        app.into_iter().filter(|a| !["default", "cuda"].contains(a)).map(String::from).collect();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in rest.chars() {
        match (c, quote) {
            ('"' | '\'', None) => (quote, word) = (Some(c), Some(word.unwrap_or_default())),
            (c, Some(q)) if c == q => quote = None,
            (' ', None) => words.extend(word.take()),
            // A comment, a redirection, the next command.
            ('#' | '>' | '|' | ';' | '&', None) if word.is_none() => break,
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    // An array stands for arguments that are only known later.
    words.retain(|w| !w.contains("[@]"));
    Some(words)
}

/// Why the program would not take these arguments. A shell variable stands for a value that is only known later; a number does for those that
/// are written down so far.
fn refusal(words: &[String]) -> Option<String> {
    let value = |w: &String| if w.starts_with('$') && !w.contains(['/', '.']) { "8".to_string() } else { w.clone() };
    let args: Vec<String> = words.iter().map(value).chain(["--help".into()]).collect();
    let (ok, message) = chiku(&args.iter().map(String::as_str).collect::<Vec<_>>());
    (!ok).then_some(message)
}

#[test]
fn every_command_that_is_written_down_is_one_that_the_program_takes() {
    let mut found = 0;
    for file in documents() {
        let text = std::fs::read_to_string(&file).unwrap().replace("\\\n", " ");
        for words in text.lines().filter_map(call) {
            // In running text (` `chiku below` is ...`) a name is followed by prose.
            let command = words.first().map(String::as_str).unwrap_or("--help");
            assert_eq!(refusal(&words), None, "{}: chiku {command} ...: {words:?}", file.display());
            found += 1;
        }
    }
    assert!(found > 12, "only {found} commands found");
}

#[test]
fn a_command_that_does_not_exist_is_refused() {
    let call = |line| call(line).unwrap();
    assert_eq!(call("    cargo run --release -- bench run --limit 2  # text"), ["bench", "run", "--limit", "2"]);
    assert_eq!(call("run: nix run .#verify -- --model \"a b\" > x"), ["verify", "--model", "a b"]);
    assert_eq!(refusal(&call("chiku bench run --limit $N \"${more[@]}\"")), None);
    assert!(refusal(&call("chiku verify --cap \"$CAP\" --absent 4")).unwrap().contains("--absent"));
    assert!(refusal(&call("chiku bench run --limit many")).is_some());
    assert!(refusal(&call("chiku bench run --absent")).unwrap().contains("--absent"));
    assert!(refusal(&call("nix run .#absent")).is_some());
}
