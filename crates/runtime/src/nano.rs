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
    if target.exists() {
        let old = tempfile::Builder::new().prefix("nano-damaged-").tempdir_in(root);
        let old = old.map_err(Error::io(root, "write to the cache folder"))?;
        std::fs::rename(&target, old.path().join("nano")).map_err(Error::io(&target, "replace"))?;
    }
    let made = part.keep();
    match std::fs::rename(&made, &target) {
        Ok(()) => Ok(target),
        // Another process was faster.
        Err(_) if is_whole(&target) => {
            std::fs::remove_dir_all(&made).map_err(Error::io(&made, "remove"))?;
            Ok(target)
        }
        Err(e) => Err(Error::io(&target, "write")(e)),
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
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "nothing else is left behind");
    }
}
