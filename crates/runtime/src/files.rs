//! Reading small files with errors that name them.

use std::path::Path;

use crate::error::{Error, Result};

/// Largest JSON file read. The index of a large model has about one megabyte, a keepset of a whole vocabulary three.
const JSON_LIMIT: u64 = 32 << 20;

/// Whether something stands at `path`, be it a link that leads nowhere: what a directory lists must be readable, never skipped.
pub fn present(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// The whole of a regular file, at most `limit` bytes. A directory, pipe or device is refused before it is opened, since
/// reading one may never end.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let meta = std::fs::metadata(path).map_err(Error::io(path, "open"))?;
    if !meta.is_file() {
        let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
        return Err(Error::Io { path: path.to_path_buf(), action: "read", source });
    }
    if meta.len() > limit {
        return Err(Error::TooLarge { path: path.to_path_buf(), found: meta.len(), limit });
    }
    std::fs::read(path).map_err(Error::io(path, "read"))
}

/// [`read`], of text.
pub fn read_text(path: &Path, limit: u64) -> Result<String> {
    String::from_utf8(read(path, limit)?).map_err(|e| Error::Io {
        path: path.to_path_buf(),
        action: "read as UTF-8",
        source: std::io::Error::new(std::io::ErrorKind::InvalidData, e),
    })
}

/// A JSON file that must hold an object.
pub fn read_object(path: &Path) -> Result<serde_json::Value> {
    match read_json(path)? {
        object @ serde_json::Value::Object(_) => Ok(object),
        other => Err(Error::Field {
            path: path.to_path_buf(),
            field: "(the file)".into(),
            expected: "an object".into(),
            found: other.to_string().chars().take(40).collect(),
        }),
    }
}

/// A JSON file.
pub fn read_json(path: &Path) -> Result<serde_json::Value> {
    let bytes = read(path, JSON_LIMIT)?;
    serde_json::from_slice(&bytes).map_err(|source| Error::Json { path: path.to_path_buf(), source })
}

/// A text file that may be absent.
pub fn read_text_if_present(path: &Path) -> Result<Option<String>> {
    if !present(path) {
        return Ok(None);
    }
    read_text(path, JSON_LIMIT).map(Some)
}
