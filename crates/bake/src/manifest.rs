//! SHA-256 sums that a checkpoint brings along, so that a lineage can name files as their publishers do without reading them
//! once more.
//!
//! Looked for, in this order, beside a file `NAME`:
//! - `NAME.sha256`: the sum in hexadecimal, alone or before the name;
//! - `SHA256SUMS`: lines of the sum, a space, a space or `*`, and the name, as `sha256sum` writes and checks them;
//! - `.cache/huggingface/download/NAME.metadata`: what the Hugging Face client leaves in a folder that it downloads to; the
//!   second line is the sum for files of its large-file store (and 40 digits of another hash for others, which are passed over);
//! - the name that a link leads to, in the client's cache: `blobs/` and the sum.
//!
//! Such a sum is what someone said of the file. It is recorded with where it was found, and only `sha256` of
//! [`crate::WriteOptions`] holds the file to it.

use std::path::Path;

use crate::error::{Error, Result};

/// Manifests are small: a line a file.
const LIMIT: u64 = 1 << 20;

/// A sum and where it stands.
#[derive(Debug, PartialEq)]
pub(crate) struct Known {
    /// 64 hexadecimal digits, small letters.
    pub sha256: String,
    /// The file that says so, relative to the checkpoint.
    pub from: String,
}

/// The sum that a checkpoint directory states for one of its files.
pub(crate) fn known(dir: &Path, name: &str) -> Result<Option<Known>> {
    let sums = "SHA256SUMS";
    let download = format!(".cache/huggingface/download/{name}.metadata");
    for (from, pick) in [
        (format!("{name}.sha256"), (|text, _| text.split_whitespace().next().map(str::to_string)) as Pick),
        (sums.to_string(), |text, name| text.lines().find_map(|line| sum_of(line, name))),
        (download, |text, _| text.lines().nth(1).map(|l| l.trim().to_string()).filter(|l| l.len() == 64)),
    ] {
        let path = dir.join(&from);
        if !path.is_file() {
            continue;
        }
        let text = String::from_utf8_lossy(&runtime::files::read(&path, LIMIT)?).into_owned();
        if let Some(sum) = pick(&text, name) {
            let sha256 = checked(&sum).ok_or_else(|| Error::Manifest { path, name: name.into(), found: sum })?;
            return Ok(Some(Known { sha256, from }));
        }
    }
    let link = std::fs::read_link(dir.join(name)).ok();
    let in_blobs = |p: &std::path::PathBuf| p.parent().and_then(Path::file_name).is_some_and(|d| d == "blobs");
    let blob = link.filter(in_blobs).and_then(|p| checked(&p.file_name()?.to_string_lossy()));
    Ok(blob.map(|sha256| Known { sha256, from: "blobs".into() }))
}

type Pick = fn(&str, &str) -> Option<String>;

/// The sum of a line of `sha256sum` that speaks of `name`.
fn sum_of(line: &str, name: &str) -> Option<String> {
    let (sum, rest) = line.split_once(' ')?;
    let file = rest.strip_prefix([' ', '*'])?.trim_end();
    (file.strip_prefix("./").unwrap_or(file) == name).then(|| sum.to_string())
}

fn checked(sum: &str) -> Option<String> {
    (sum.len() == 64 && sum.bytes().all(|b| b.is_ascii_hexdigit())).then(|| sum.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn sums_are_found_where_they_are_kept() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path();
        let sum = |digit: &str| digit.repeat(64);
        let found = || known(dir, "model.safetensors").unwrap().map(|k| (k.sha256, k.from));
        assert_eq!(found(), None);

        let blob = Path::new("../../blobs").join(sum("d"));
        std::os::unix::fs::symlink(blob, dir.join("model.safetensors")).unwrap();
        assert_eq!(found(), Some((sum("d"), "blobs".into())));
        let cache = dir.join(".cache/huggingface/download");
        fs::create_dir_all(&cache).unwrap();
        let metadata = cache.join("model.safetensors.metadata");
        fs::write(&metadata, format!("{}\n{}\n1.5\n", "0".repeat(40), "a".repeat(40))).unwrap();
        assert_eq!(found().unwrap().1, "blobs", "a hash of 40 digits is another one");
        fs::write(&metadata, format!("{}\n{}\n1.5\n", "0".repeat(40), sum("c"))).unwrap();
        assert_eq!(found().unwrap().0, sum("c"));
        fs::write(dir.join("SHA256SUMS"), format!("{}  other\n{} *./model.safetensors\n", sum("1"), sum("B"))).unwrap();
        assert_eq!(found(), Some((sum("b"), "SHA256SUMS".into())));
        fs::write(dir.join("model.safetensors.sha256"), format!("{}  model.safetensors\n", sum("a"))).unwrap();
        assert_eq!(found(), Some((sum("a"), "model.safetensors.sha256".into())));
        fs::write(dir.join("model.safetensors.sha256"), "12345\n").unwrap();
        let error = known(dir, "model.safetensors").unwrap_err().to_string();
        assert!(error.contains("model.safetensors.sha256") && error.contains("12345"), "{error}");
    }
}
