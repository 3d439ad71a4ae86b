//! A directory that appears whole or not at all.
//!
//! Files are written to `.NAME.partial-...` beside the target, synced, and renamed as the last act. What ends the bake before
//! that (an error, a cancel flag, a panic) removes the partial directory, unless it was stopped with much of its work done and
//! another run can go on; a killed process leaves it, under a name that says so. The name of the target never stands for
//! something incomplete.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use runtime::checkpoint::{INDEX_FILE, SINGLE_FILE};

use crate::error::{Error, Result};
use crate::layout::is_shard_name;
use crate::lineage::LINEAGE_FILE;
use crate::side_files::SIDE_FILES;

/// Bytes beyond the output that must be free: directory blocks, JSON files.
const RESERVE: u64 = 16_000_000;

/// A partial directory.
pub struct Staging {
    dir: PathBuf,
    target: PathBuf,
    replace: bool,
    /// Leave the directory where it is.
    keep: bool,
}

impl Staging {
    /// Checks the target and makes the partial directory. `parent` is the checkpoint being read, which must not be the target.
    pub fn new(target: &Path, force: bool, parent: Option<&Path>) -> Result<Staging> {
        let replace = check_target(target, force, parent)?;
        Ok(Staging { dir: new_partial(target)?, target: target.to_path_buf(), replace, keep: false })
    }

    /// As [`Staging::new`], in a directory that an earlier bake left unfinished. It is treated as its own from here on.
    pub(crate) fn adopt(dir: PathBuf, target: &Path, force: bool, parent: Option<&Path>) -> Result<Staging> {
        let replace = check_target(target, force, parent)?;
        Ok(Staging { dir, target: target.to_path_buf(), replace, keep: false })
    }

    /// Leaves the directory for another run to go on with, and returns its path.
    pub(crate) fn keep(mut self) -> PathBuf {
        self.keep = true;
        self.dir.clone()
    }

    /// The partial directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Fails unless `bytes` and a reserve are free on the file system of the target.
    pub fn require_space(&self, bytes: u64) -> Result<()> {
        let stat = rustix::fs::statvfs(&self.dir).map_err(|e| Error::io(&self.dir, "ask for free space")(e.into()))?;
        let available = stat.f_bavail.saturating_mul(stat.f_frsize);
        let needed = bytes.saturating_add(RESERVE);
        if available < needed {
            let path = above(&self.target).to_path_buf();
            return Err(Error::DiskSpace { path, needed, available });
        }
        Ok(())
    }

    /// Writes and syncs a small file.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.dir.join(name);
        let mut file = File::create(&path).map_err(Error::io(&path, "create"))?;
        file.write_all(bytes).map_err(Error::io(&path, "write"))?;
        file.sync_all().map_err(Error::io(&path, "sync"))
    }

    /// Copies and syncs a file.
    pub fn copy(&self, from: &Path, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        fs::copy(from, &path).map_err(Error::io(from, "copy"))?;
        File::open(&path).and_then(|f| f.sync_all()).map_err(Error::io(&path, "sync"))
    }

    /// Gives the directory its final name.
    pub fn finish(mut self) -> Result<()> {
        sync_dir(&self.dir)?;
        if self.replace {
            self.swap()?;
        } else {
            fs::rename(&self.dir, &self.target).map_err(Error::io(&self.target, "rename the finished bake to"))?;
        }
        self.keep = true;
        sync_dir(above(&self.target))
    }

    /// Exchanges the names of the old and the new directory in one step, so that the name always stands for one of them,
    /// and removes the old one.
    fn swap(&self) -> Result<()> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        if renameat_with(CWD, &self.dir, CWD, &self.target, RenameFlags::EXCHANGE).is_err() {
            // Not every file system can exchange. Two renames, undone if the second fails.
            let mut aside = self.dir.clone().into_os_string();
            aside.push(".old");
            let aside = PathBuf::from(aside);
            fs::rename(&self.target, &aside).map_err(Error::io(&self.target, "rename"))?;
            if let Err(e) = fs::rename(&self.dir, &self.target) {
                let _ = fs::rename(&aside, &self.target);
                return Err(Error::io(&self.target, "rename the finished bake to")(e));
            }
            return fs::remove_dir_all(&aside).map_err(Error::io(&aside, "remove"));
        }
        fs::remove_dir_all(&self.dir).map_err(Error::io(&self.dir, "remove"))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.keep {
            // Nobody is left to tell if this fails; the name says that the directory is partial.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(Error::io(dir, "sync"))
}

/// The directory that a target stands in.
fn above(target: &Path) -> &Path {
    target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether the target exists and will be replaced; refuses targets that cannot be written.
pub(crate) fn check_target(target: &Path, force: bool, parent: Option<&Path>) -> Result<bool> {
    let bad = |reason: String| Error::Target { path: target.to_path_buf(), reason };
    if target.file_name().is_none() {
        return Err(bad("it has no last component to name the output".into()));
    }
    let above = above(target);
    if !above.is_dir() {
        return Err(bad(format!("the directory {} does not exist; create it first", above.display())));
    }
    if target.symlink_metadata().is_err() {
        return Ok(false);
    }
    // Equal to the target or inside it: replacing the target would delete what is being read.
    let within = |p: &Path| match (p.canonicalize(), target.canonicalize()) {
        (Ok(p), Ok(t)) => p.starts_with(t),
        _ => false,
    };
    if parent.is_some_and(within) {
        return Err(bad("it is or holds the checkpoint being read; choose another name".into()));
    }
    if !force {
        return Err(Error::TargetExists { path: target.to_path_buf() });
    }
    // --force replaces what a bake wrote, not whatever a mistyped path points to.
    match not_a_bake(target) {
        Some(reason) => Err(bad(reason)),
        None => Ok(true),
    }
}

/// What the names of the partial directories of a target begin with.
fn partial_prefix(target: &Path) -> String {
    format!(".{}.partial-", target.file_name().unwrap_or_default().to_string_lossy())
}

/// Partial directories of a target, of running bakes and of ended ones.
pub(crate) fn partials(target: &Path) -> Result<Vec<PathBuf>> {
    let (above, prefix) = (above(target), partial_prefix(target));
    let mut found = Vec::new();
    for entry in fs::read_dir(above).map_err(Error::io(above, "list"))? {
        let entry = entry.map_err(Error::io(above, "list"))?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) && entry.path().is_dir() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Why a target must not be replaced; `None` for an empty directory and for one that holds a bake's files and nothing else.
fn not_a_bake(target: &Path) -> Option<String> {
    if !target.symlink_metadata().is_ok_and(|m| m.is_dir()) {
        return Some("it exists and is not a directory; remove it yourself".into());
    }
    if is_empty(target) {
        return None;
    }
    if !target.join(LINEAGE_FILE).is_file() {
        return Some(format!("it exists and was not baked (no {LINEAGE_FILE}); remove it yourself"));
    }
    // Cards were copied once, and other tools add them.
    let known = [LINEAGE_FILE, "config.json", SINGLE_FILE, INDEX_FILE, "README.md", "MODEL_CARD.md"];
    let foreign = fs::read_dir(target).into_iter().flatten().flatten().map(|e| e.file_name()).find(|name| {
        let name = name.to_string_lossy();
        !known.contains(&&*name) && !SIDE_FILES.contains(&&*name) && !is_shard_name(&name)
    });
    foreign.map(|name| format!("it holds `{}`, which no bake wrote; move that elsewhere first", name.to_string_lossy()))
}

/// A new directory `.NAME.partial-...` beside the target. Its name is nobody else's, also where process ids repeat.
fn new_partial(target: &Path) -> Result<PathBuf> {
    let mut n = 0u32;
    loop {
        let dir = above(target).join(format!("{}{}-{n}", partial_prefix(target), std::process::id()));
        match fs::create_dir(&dir) {
            Ok(()) => return Ok(dir),
            // Of a killed process with this id, or of another bake in this one.
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && n < 1000 => n += 1,
            Err(e) => return Err(Error::io(&dir, "create")(e)),
        }
    }
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_dropped_staging_leaves_nothing() {
        let tmp = tempfile::tempdir().unwrap();
        let staging = Staging::new(&tmp.path().join("out"), false, None).unwrap();
        staging.write("a", b"x").unwrap();
        assert!(names(tmp.path())[0].starts_with(".out.partial-"));
        drop(staging);
        assert!(names(tmp.path()).is_empty());
    }

    #[test]
    fn a_finished_staging_has_the_name_only() {
        let tmp = tempfile::tempdir().unwrap();
        let staging = Staging::new(&tmp.path().join("out"), false, None).unwrap();
        staging.write("a", b"x").unwrap();
        staging.finish().unwrap();
        assert_eq!(names(tmp.path()), ["out"]);
        assert_eq!(fs::read(tmp.path().join("out/a")).unwrap(), b"x");
    }

    #[test]
    fn force_replaces_what_a_bake_wrote_and_nothing_else() {
        let tmp = tempfile::tempdir().unwrap();
        let out = tmp.path().join("out");
        fs::create_dir(&out).unwrap();
        fs::write(out.join("config.json"), "{}").unwrap();
        assert!(matches!(Staging::new(&out, false, None), Err(Error::TargetExists { .. })));
        let refused = |part: &str| {
            let message = Staging::new(&out, true, None).err().expect("it must be refused").to_string();
            assert!(message.contains(part), "{message}");
        };
        refused("was not baked");
        fs::write(out.join(LINEAGE_FILE), "{}").unwrap();
        assert!(matches!(Staging::new(&out, true, Some(&out)), Err(Error::Target { .. })), "the parent itself");
        fs::create_dir(out.join("assistant")).unwrap();
        let inside = Staging::new(&out, true, Some(&out.join("assistant")));
        assert!(matches!(inside, Err(Error::Target { .. })), "a parent inside the target");
        refused("`assistant`");
        fs::remove_dir(out.join("assistant")).unwrap();
        let staging = Staging::new(&out, true, None).unwrap();
        staging.write("config.json", b"new").unwrap();
        staging.finish().unwrap();
        assert_eq!(names(&out), ["config.json"]);
        assert_eq!(names(tmp.path()), ["out"]);
    }

    #[test]
    fn what_a_killed_bake_left_is_in_nobodys_way() {
        let tmp = tempfile::tempdir().unwrap();
        let out = tmp.path().join("out");
        std::mem::forget(Staging::new(&out, false, None).unwrap());
        Staging::new(&out, false, None).unwrap().finish().unwrap();
        assert!(out.is_dir());
    }

    #[test]
    fn a_disk_that_is_too_small_is_refused_before_writing() {
        let tmp = tempfile::tempdir().unwrap();
        let staging = Staging::new(&tmp.path().join("out"), false, None).unwrap();
        staging.require_space(1).unwrap();
        let error = staging.require_space(u64::MAX).unwrap_err();
        assert!(matches!(error, Error::DiskSpace { needed: u64::MAX, .. }), "{error}");
    }

    #[test]
    fn a_target_without_a_directory_above_is_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let error = Staging::new(&tmp.path().join("a/b"), false, None).err().unwrap().to_string();
        assert!(error.contains("does not exist"), "{error}");
    }
}
