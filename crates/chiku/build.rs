//! Records the commit that the program was built from: `CHIKU_COMMIT` where the builder sets it (Nix builds have no `.git`), or
//! what git says; empty where neither knows. Leaves the `flake.lock` that the program is built beside, or an empty file, where the
//! program embeds it from.

use std::path::Path;
use std::process::Command;

fn main() {
    let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../flake.lock");
    println!("cargo:rerun-if-changed={}", lock.display());
    let place = std::env::var_os("OUT_DIR").map(|dir| Path::new(&dir).join("flake.lock"));
    if let Some(place) = place
        && let Err(e) = std::fs::write(&place, std::fs::read(&lock).unwrap_or_default())
    {
        println!("cargo:warning={}: cannot write: {e}", place.display());
    }

    println!("cargo:rerun-if-env-changed=CHIKU_COMMIT");
    // Any of these can change the answer: another commit, a staged file, an edited source.
    for path in ["../../.git/HEAD", "../../.git/index", "..", "../../Cargo.lock"] {
        println!("cargo:rerun-if-changed={path}");
    }
    let commit = std::env::var("CHIKU_COMMIT").ok().filter(|c| !c.is_empty()).or_else(from_git).unwrap_or_default();
    println!("cargo:rustc-env=CHIKU_BUILD_COMMIT={commit}");
}

fn from_git() -> Option<String> {
    let git = |args: &[&str]| -> Option<String> {
        let output = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
        String::from_utf8(output.stdout).ok().map(|s| s.trim().to_string())
    };
    // A copy of the sources inside somebody else's repository has that repository's commits.
    let top = git(&["rev-parse", "--show-toplevel"])?;
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().ok()?;
    if Path::new(&top).canonicalize().ok()? != here {
        return None;
    }
    let commit = git(&["rev-parse", "HEAD"])?;
    let dirty = git(&["status", "--porcelain", "--untracked-files=no"]).is_none_or(|s| !s.is_empty());
    Some(if dirty { format!("{commit}-dirty") } else { commit })
}
