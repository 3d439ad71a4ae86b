//! The embedded model: `models/nano` compiled into the program and written once under the user's cache, in a folder named by
//! its hash. `--model nano` names it everywhere.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Overrides where the cache lies.
pub const CACHE_VARIABLE: &str = "CHIKU_CACHE";

macro_rules! files {
    ($($name:literal = $path:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../../../", $path)) as &[u8])),*]
    };
}

/// Every embedded file: its name in the folder, its contents.
static FILES: [(&str, &[u8]); 13] = files![
    "config.json" = "models/nano/config.json",
    "generation_config.json" = "models/nano/generation_config.json",
    "model.safetensors" = "models/nano/model.safetensors",
    "tokenizer.json" = "models/nano/tokenizer.json",
    "tokenizer_config.json" = "models/nano/tokenizer_config.json",
    "chat_template.jinja" = "models/nano/chat_template.jinja",
    "MODEL_CARD.md" = "models/nano/MODEL_CARD.md",
    "assistant/config.json" = "models/nano/assistant/config.json",
    "assistant/generation_config.json" = "models/nano/assistant/generation_config.json",
    "assistant/model.safetensors" = "models/nano/assistant/model.safetensors",
    "prompts/public.jsonl" = "prompts/public.jsonl",
    "prompts/heldout.jsonl" = "prompts/heldout.jsonl",
    "prompts/ppl.jsonl" = "prompts/ppl.jsonl",
];

/// The folder with the embedded model; written if it is not there or not whole.
pub fn directory() -> Result<PathBuf> {
    directory_under(&cache_root()?)
}

/// A model as named on the command line: `nano`, or a checkpoint directory (`./nano` for one of that name).
pub fn resolve(model: &str) -> Result<PathBuf> {
    if model == "nano" { directory() } else { Ok(PathBuf::from(model)) }
}

/// The folder that holds the embedded model: `$CHIKU_CACHE`, or `chiku` under the user's cache folder.
pub fn cache_root() -> Result<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(path) = variable(CACHE_VARIABLE) {
        return Ok(path);
    }
    let base = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    base.map(|b| b.join("chiku")).ok_or_else(|| Error::Io {
        path: PathBuf::from("$HOME"),
        action: "find the cache folder (set CHIKU_CACHE)",
        source: std::io::Error::new(
            std::io::ErrorKind::NotFound,
            "neither CHIKU_CACHE, XDG_CACHE_HOME nor HOME is set",
        ),
    })
}

fn directory_under(root: &Path) -> Result<PathBuf> {
    let mut hasher = blake3::Hasher::new();
    for (name, contents) in &FILES {
        hasher.update(name.as_bytes()).update(&(contents.len() as u64).to_le_bytes()).update(contents);
    }
    let target = root.join(format!("nano-{}", &hasher.finalize().to_hex()[..16]));
    if is_whole(&target) {
        return Ok(target);
    }
    std::fs::create_dir_all(root).map_err(Error::io(root, "create the cache folder"))?;
    // One process writes; the others wait and then find it done. The lock ends with the file handle, also if the process is killed.
    let lock_path = root.join(".lock");
    let lock = std::fs::File::create(&lock_path).map_err(Error::io(&lock_path, "write to the cache folder"))?;
    lock.lock().map_err(Error::io(&lock_path, "lock"))?;
    if is_whole(&target) {
        return Ok(target);
    }
    remove_leftovers(root);
    let part = tempfile::Builder::new().prefix("nano-partial-").tempdir_in(root);
    let part = part.map_err(Error::io(root, "write to the cache folder"))?;
    for (name, contents) in &FILES {
        let path = part.path().join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(Error::io(parent, "create the directory"))?;
        }
        std::fs::write(&path, contents).map_err(Error::io(&path, "write"))?;
    }
    // A damaged folder is moved out of the way as a whole, so that no reader ever sees a mixture.
    if target.symlink_metadata().is_ok() {
        let old = tempfile::Builder::new().prefix("nano-damaged-").tempdir_in(root);
        let old = old.map_err(Error::io(root, "write to the cache folder"))?;
        std::fs::rename(&target, old.path().join("nano")).map_err(Error::io(&target, "replace"))?;
    }
    std::fs::rename(part.path(), &target).map_err(Error::io(&target, "write"))?;
    // The name that would be removed now stands for nothing.
    let _ = part.keep();
    Ok(target)
}

/// Removes what killed processes left. Only called under the lock, when nobody is writing.
fn remove_leftovers(root: &Path) {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    for entry in entries.filter(|e| e.file_name().to_string_lossy().starts_with("nano-partial-")) {
        // What cannot be removed is only litter.
        let _ = std::fs::remove_dir_all(entry.path());
    }
}

/// Whether every file is there with the right contents.
fn is_whole(dir: &Path) -> bool {
    FILES.iter().all(|(name, contents)| {
        let path = dir.join(name);
        std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() == contents.len() as u64)
            && std::fs::read(&path).is_ok_and(|found| found == *contents)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_written_once_and_repaired_when_damaged() {
        let root = tempfile::tempdir().unwrap();
        let first = directory_under(root.path()).unwrap();
        let model = first.join("model.safetensors");
        let written = std::fs::metadata(&model).unwrap().modified().unwrap();
        assert_eq!(directory_under(root.path()).unwrap(), first);
        assert_eq!(std::fs::metadata(&model).unwrap().modified().unwrap(), written);

        let mut contents = std::fs::read(&model).unwrap();
        contents[100_000] ^= 1;
        std::fs::write(&model, contents).unwrap();
        assert_eq!(directory_under(root.path()).unwrap(), first);
        assert!(is_whole(&first));
        let mut names: Vec<_> = std::fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [std::ffi::OsStr::new(".lock"), first.file_name().unwrap()], "nothing else is left behind");
    }

    #[test]
    fn many_first_runs_at_once_all_succeed() {
        for damaged in [false, true] {
            let root = tempfile::tempdir().unwrap();
            if damaged {
                let dir = directory_under(root.path()).unwrap();
                std::fs::write(dir.join("config.json"), "{}").unwrap();
            }
            std::thread::scope(|scope| {
                let runs: Vec<_> = (0..8).map(|_| scope.spawn(|| directory_under(root.path()))).collect();
                for run in runs {
                    assert!(is_whole(&run.join().unwrap().unwrap()));
                }
            });
        }
    }
}
