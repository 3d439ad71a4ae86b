//! Ctrl-C as a flag. Long work looks at it between steps, keeps or removes what it has, and returns; a second Ctrl-C ends the
//! program at once.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

static FLAG: AtomicBool = AtomicBool::new(false);
/// Nothing would be lost: the first Ctrl-C may end the program.
static AT_ONCE: AtomicBool = AtomicBool::new(false);

/// Says whether the first Ctrl-C may end the program at once, as it may while a prompt is read and nothing has been written yet.
pub fn at_once(yes: bool) {
    AT_ONCE.store(yes, Ordering::SeqCst);
}

/// Installs the handler and returns the flag. May be called more than once.
pub fn flag() -> Result<&'static AtomicBool> {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if !INSTALLED.swap(true, Ordering::SeqCst) {
        ctrlc::set_handler(|| {
            if FLAG.swap(true, Ordering::SeqCst) || AT_ONCE.load(Ordering::SeqCst) {
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
