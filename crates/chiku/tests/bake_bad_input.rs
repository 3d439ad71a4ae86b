//! Everything that can be wrong with what a bake is given: one clear error each, exit code 2, and nothing lost. Through the real
//! program.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const GATE: &str = "model.language_model.layers.0.mlp.gate_proj.weight";
const UP: &str = "model.language_model.layers.0.mlp.up_proj.weight";
const CHIKU: &str = env!("CARGO_BIN_EXE_chiku");

/// A copy of an oracle target in a scratch folder, as `parent`; the bake's target is `out` beside it.
struct Case(TempDir);

impl Case {
    fn of(target: &str) -> Case {
        let dir = tempfile::tempdir().unwrap();
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/oracle").join(target);
        let case = Case(dir);
        fs::create_dir(case.0.path().join("parent")).unwrap();
        for entry in fs::read_dir(from).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_file()) {
            fs::copy(&entry, case.parent(entry.file_name().unwrap().to_str().unwrap())).unwrap();
        }
        case
    }

    fn parent(&self, file: &str) -> PathBuf {
        self.0.path().join("parent").join(file)
    }

    fn out(&self) -> PathBuf {
        self.0.path().join("out")
    }

    fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let mut json: Value = serde_json::from_slice(&fs::read(self.parent(file)).unwrap()).unwrap();
        edit(&mut json);
        fs::write(self.parent(file), json.to_string()).unwrap();
    }

    /// Replaces the header's text; the data stays.
    fn edit_header(&self, edit: impl FnOnce(String) -> String) {
        let bytes = fs::read(self.parent(SINGLE)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let text = edit(String::from_utf8(bytes[8..8 + length].to_vec()).unwrap());
        let mut out = (text.len() as u64).to_le_bytes().to_vec();
        out.extend(text.as_bytes());
        out.extend(&bytes[8 + length..]);
        fs::write(self.parent(SINGLE), out).unwrap();
    }

    fn edit_entry(&self, tensor: &str, field: &str, value: impl FnOnce(&Value) -> Value) {
        self.edit_header(|text| {
            let mut header: Value = serde_json::from_str(&text).unwrap();
            header[tensor][field] = value(&header[tensor]);
            header.to_string()
        });
    }

    /// Overwrites the first element of a tensor.
    fn poke(&self, tensor: &str, bf16: [u8; 2]) {
        let mut bytes = fs::read(self.parent(SINGLE)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let at = 8 + length + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
        bytes[at..at + 2].copy_from_slice(&bf16);
        fs::write(self.parent(SINGLE), bytes).unwrap();
    }

    /// Everything in the scratch folder: path, and content or where a link leads.
    fn everything(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        fn walk(dir: &Path, out: &mut BTreeMap<PathBuf, Vec<u8>>) {
            for path in fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
                let kind = path.symlink_metadata().unwrap().file_type();
                if kind.is_dir() {
                    out.insert(path.clone(), vec![]);
                    walk(&path, out);
                } else if kind.is_symlink() {
                    out.insert(path.clone(), fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes());
                } else {
                    out.insert(path.clone(), fs::read(&path).unwrap());
                }
            }
        }
        let mut out = BTreeMap::new();
        walk(self.0.path(), &mut out);
        out
    }

    fn args(&self, bake: &[&str]) -> Vec<String> {
        let (parent, out) = (self.parent(""), self.out());
        let more = ["--model", parent.to_str().unwrap(), "--out", out.to_str().unwrap()];
        ["bake"].iter().chain(bake).chain(&more).map(|a| a.to_string()).collect()
    }

    /// Runs the command and asserts one error line with all `parts`, exit code 2, and a folder in which nothing has changed.
    fn refused(&self, name: &str, mut command: Command, parts: &[&str]) {
        let before = self.everything();
        let Output { status, stdout, stderr } = command.output().unwrap();
        let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
        assert_eq!(status.code(), Some(2), "{name}: {stdout}\n{stderr}");
        assert!(stderr.starts_with("error: ") && stdout.is_empty(), "{name}: {stdout}\n{stderr}");
        assert_eq!(stderr.matches("error: ").count(), 1, "{name}: {stderr}");
        for part in parts {
            assert!(stderr.contains(part), "{name}: expected `{part}` in: {stderr}");
        }
        let after = self.everything();
        assert!(before.keys().eq(after.keys()), "{name}: {:?} became {:?}", before.keys(), after.keys());
        assert!(before == after, "{name}: a file has changed");
    }
}

const DROP: &[&str] = &["drop-layers", "--layers", "1"];
const QUANTIZE: &[&str] = &["quantize", "--group", "16"];

fn chiku(args: &[String]) -> Command {
    let mut command = Command::new(CHIKU);
    command.args(args);
    command
}

#[test]
fn damaged_checkpoints() {
    /// What is wrong, with which oracle target and bake, how it comes about, and what the message says.
    type Row = (&'static str, &'static str, &'static [&'static str], fn(&Case), &'static [&'static str]);
    let cases: &[Row] = &[
        (
            "truncated file",
            "02_kvshare",
            DROP,
            |c| {
                let bytes = fs::read(c.parent(SINGLE)).unwrap();
                fs::write(c.parent(SINGLE), &bytes[..bytes.len() - 7]).unwrap();
            },
            &[SINGLE, "truncated", "7 bytes are missing"],
        ),
        (
            "header over the limit",
            "02_kvshare",
            DROP,
            |c| fs::write(c.parent(SINGLE), [&100_000_001u64.to_le_bytes()[..], b"{}"].concat()).unwrap(),
            &[SINGLE, "100000001 bytes", "limit"],
        ),
        (
            "overlapping offsets",
            "02_kvshare",
            DROP,
            |c| {
                c.edit_entry(GATE, "data_offsets", |e| {
                    json!([e["data_offsets"][0].as_u64().unwrap() - 2, e["data_offsets"][1].as_u64().unwrap() - 2])
                })
            },
            &[SINGLE, GATE, "overlaps"],
        ),
        (
            "offsets out of range",
            "02_kvshare",
            DROP,
            |c| c.edit_entry(GATE, "data_offsets", |_| json!([1u64 << 40, (1u64 << 40) + 4608])),
            &[SINGLE, "tensor `"],
        ),
        (
            "duplicate names",
            "02_kvshare",
            DROP,
            |c| c.edit_header(|text| text.replace(UP, GATE)),
            &[SINGLE, GATE, "twice"],
        ),
        (
            "wrong dtype",
            "02_kvshare",
            DROP,
            |c| c.edit_entry(GATE, "dtype", |_| json!("F16")),
            &[GATE, "F16", "BF16 or F32"],
        ),
        (
            "wrong dtype for the quantiser",
            "02_kvshare",
            QUANTIZE,
            |c| c.edit_entry(GATE, "dtype", |_| json!("F16")),
            &[SINGLE, GATE, "F16", "BF16 or F32"],
        ),
        (
            "missing shard",
            "11_e4b_like_sharded",
            DROP,
            |c| fs::remove_file(c.parent("model-00002-of-00003.safetensors")).unwrap(),
            &["model-00002-of-00003.safetensors", "cannot open"],
        ),
        (
            "index that names an absent tensor",
            "11_e4b_like_sharded",
            DROP,
            |c| c.edit_json(INDEX, |i| i["weight_map"]["ghost"] = json!("model-00001-of-00003.safetensors")),
            &[INDEX, "ghost", "does not hold it"],
        ),
        ("NaN", "02_kvshare", QUANTIZE, |c| c.poke(GATE, [0xC0, 0x7F]), &[SINGLE, GATE, "element 0 is NaN"]),
        ("infinity", "02_kvshare", QUANTIZE, |c| c.poke(UP, [0x80, 0x7F]), &[SINGLE, UP, "element 0 is inf"]),
        (
            "config without text_config",
            "02_kvshare",
            DROP,
            |c| c.edit_json("config.json", |j| drop(j.as_object_mut().unwrap().shift_remove("text_config"))),
            &["config.json", "text_config"],
        ),
        (
            "unknown quant_method",
            "08_int4",
            DROP,
            |c| c.edit_json("config.json", |j| j["quantization_config"]["quant_method"] = json!("other")),
            &["config.json", "quant_method", "other"],
        ),
        (
            "symlink loop",
            "02_kvshare",
            DROP,
            |c| {
                fs::remove_file(c.parent(SINGLE)).unwrap();
                symlink(c.parent(SINGLE), c.parent(SINGLE)).unwrap();
            },
            &[SINGLE, "cannot open", "symbolic links"],
        ),
        (
            "target in a symlink loop",
            "02_kvshare",
            DROP,
            |c| symlink(c.out(), c.out()).unwrap(),
            &["out", "exists", "--force"],
        ),
        (
            "target exists",
            "02_kvshare",
            DROP,
            |c| {
                fs::create_dir(c.out()).unwrap();
                fs::write(c.out().join("kept"), "x").unwrap();
            },
            &["out", "exists", "--force"],
        ),
        (
            "target that no bake wrote",
            "02_kvshare",
            &["drop-layers", "--layers", "1", "--force"],
            |c| {
                fs::create_dir(c.out()).unwrap();
                fs::write(c.out().join("kept"), "x").unwrap();
            },
            &["out", "was not baked"],
        ),
        (
            "another file than its publisher's",
            "02_kvshare",
            &["drop-layers", "--layers", "1", "--sha256"],
            |c| fs::write(c.parent("SHA256SUMS"), format!("{}  {SINGLE}\n", "0".repeat(64))).unwrap(),
            &[SINGLE, "SHA-256", "SHA256SUMS says 000"],
        ),
    ];
    for (name, target, bake, damage, parts) in cases {
        let case = Case::of(target);
        // Undamaged, the command works: what is refused below is the damage.
        let mut works = chiku(&case.args(bake));
        let fine = works.output().unwrap();
        assert!(fine.status.success(), "{name}: {}", String::from_utf8_lossy(&fine.stderr));
        fs::remove_dir_all(case.out()).unwrap();
        damage(&case);
        case.refused(name, chiku(&case.args(bake)), parts);
    }
}

/// The superuser may write anywhere, so the test gives that up where it has it.
#[test]
fn a_folder_that_may_not_be_written() {
    let case = Case::of("02_kvshare");
    let program = case.0.path().join("chiku");
    fs::copy(CHIKU, &program).unwrap();
    fs::set_permissions(case.0.path(), fs::Permissions::from_mode(0o555)).unwrap();
    let args = case.args(DROP);
    let mut command = Command::new(&program);
    command.args(&args);
    if case.0.path().metadata().unwrap().uid() == 0 {
        command.uid(65_534).gid(65_534);
    }
    case.refused("read-only target", command, &["out", "cannot create", "denied"]);
    fs::set_permissions(case.0.path(), fs::Permissions::from_mode(0o755)).unwrap();
}

/// A write that fails in the middle: the size of files is limited, and the system's signal for that is ignored as a full disk
/// sends none.
#[test]
fn a_disk_that_fills_up() {
    let case = Case::of("02_kvshare");
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$@\"", "sh", CHIKU]).args(case.args(DROP));
    case.refused("full disk", command, &["out", "cannot", "too large"]);
}

/// A disk without room is seen before anything is written. Needs the right to mount one, in a namespace of its own.
#[test]
fn a_disk_without_room() {
    let case = Case::of("02_kvshare");
    let small = case.0.path().join("small");
    fs::create_dir(&small).unwrap();
    let mount = format!("mount -t tmpfs -o size=8m none '{}'", small.display());
    let may = Command::new("unshare").args(["-m", "sh", "-c", &mount]).output();
    if !may.is_ok_and(|o| o.status.success()) {
        println!("this user may not mount a small disk: not tested");
        return;
    }
    let mut args = case.args(DROP);
    *args.last_mut().unwrap() = small.join("out").display().to_string();
    let mut command = Command::new("unshare");
    let script = format!("{mount}; \"$@\"; code=$?; [ -z \"$(ls -A '{}')\" ] || exit 99; exit $code", small.display());
    command.args(["-m", "sh", "-c", &script, "sh", CHIKU]).args(&args);
    case.refused("no room", command, &["small", "bytes are needed", "are free"]);
}
