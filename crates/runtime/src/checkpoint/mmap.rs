//! Memory maps: the one module of this crate with `unsafe` in it.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// A file mapped for reading, shared by all who hold a piece of it.
#[derive(Clone)]
pub struct Mapped(Arc<Mmap>);

impl Mapped {
    /// Maps a regular file. The caller checks the length before it trusts an offset.
    pub fn open(path: &Path) -> Result<Mapped> {
        let meta = std::fs::metadata(path).map_err(Error::io(path, "open"))?;
        if !meta.is_file() {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
            return Err(Error::Io { path: path.to_path_buf(), action: "map", source });
        }
        let file = File::open(path).map_err(Error::io(path, "open"))?;
        // SAFETY: the map is read-only and private to this process, and every access goes through a bounds-checked slice.
        // What remains is the usual condition of memory maps: another program that truncates the file while it is mapped
        // makes later reads fault. Bakes never write a checkpoint in place (they write beside it and rename), so this
        // program does not do that to itself.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path, "map"))?;
        Ok(Mapped(Arc::new(map)))
    }

    /// A piece of the file that keeps the map alive.
    ///
    /// The range lies inside the file: [`super::header::parse`] has checked it against the file's length.
    pub fn slice(&self, range: Range<usize>) -> Bytes {
        debug_assert!(range.end <= self.0.len());
        Bytes { storage: Storage::Map(self.clone()), range }
    }
}

impl Deref for Mapped {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes of a mapped file, or of memory; derefs to a slice. Cheap to clone.
#[derive(Clone)]
pub struct Bytes {
    storage: Storage,
    range: Range<usize>,
}

#[derive(Clone)]
enum Storage {
    Map(Mapped),
    Memory(Arc<[u8]>),
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        Bytes { range: 0..bytes.len(), storage: Storage::Memory(bytes.into()) }
    }
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let all: &[u8] = match &self.storage {
            Storage::Map(map) => map,
            Storage::Memory(bytes) => bytes,
        };
        &all[self.range.clone()]
    }
}
