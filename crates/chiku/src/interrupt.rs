//! Ctrl-C as a flag. Long work looks at it between steps, keeps or removes what it has, and returns; a second Ctrl-C ends the
//! program at once.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

static FLAG: AtomicBool = AtomicBool::new(false);

/// Installs the handler and returns the flag. May be called more than once.
pub fn flag() -> Result<&'static AtomicBool> {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if !INSTALLED.swap(true, Ordering::SeqCst) {
        ctrlc::set_handler(|| {
            if FLAG.swap(true, Ordering::SeqCst) {
                std::process::exit(i32::from(crate::exit::INTERRUPTED));
            }
        })
        .context("cannot listen for Ctrl-C")?;
    }
    Ok(&FLAG)
}

/// Whether Ctrl-C was pressed.
pub fn pressed() -> bool {
    FLAG.load(Ordering::SeqCst)
}
