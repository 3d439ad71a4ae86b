//! Records the commit that the program was built from: `CHIKU_COMMIT` where the builder sets it (Nix builds have no `.git`), or
//! what git says; empty where neither knows.

use std::process::Command;

fn main() {
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
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().ok()?;
    if std::path::Path::new(&top).canonicalize().ok()? != here {
        return None;
    }
    let commit = git(&["rev-parse", "HEAD"])?;
    let dirty = git(&["status", "--porcelain", "--untracked-files=no"]).is_none_or(|s| !s.is_empty());
    Some(if dirty { format!("{commit}-dirty") } else { commit })
}
