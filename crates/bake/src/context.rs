//! What a long bake needs from its caller: a flag that stops it and somewhere to report progress.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Receives progress. Called from many threads, a few times a second to a few thousand times a second; return quickly.
pub trait Progress: Sync {
    /// `done` of `total` bytes of output are written. `done` never exceeds `total`; calls may arrive out of order.
    fn update(&self, done: u64, total: u64);
}

impl<F: Fn(u64, u64) + Sync> Progress for F {
    fn update(&self, done: u64, total: u64) {
        self(done, total);
    }
}

/// Discards progress.
pub struct Silent;

impl Progress for Silent {
    fn update(&self, _: u64, _: u64) {}
}

/// Handed to every bake.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Set it (from a Ctrl-C handler) and the bake stops at the next tile with [`Error::Cancelled`].
    pub cancel: &'a AtomicBool,
    /// Progress sink.
    pub progress: &'a dyn Progress,
}

static NEVER: AtomicBool = AtomicBool::new(false);

impl Context<'static> {
    /// Neither cancellable nor reporting.
    pub fn quiet() -> Context<'static> {
        Context { cancel: &NEVER, progress: &Silent }
    }
}

impl Context<'_> {
    /// Fails once the flag is set.
    pub(crate) fn check(&self, target: &Path) -> Result<()> {
        match self.cancel.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::Cancelled { target: target.to_path_buf() }),
        }
    }
}

/// Counts bytes and passes the sum on.
pub(crate) struct Meter<'a> {
    done: AtomicU64,
    total: u64,
    progress: &'a dyn Progress,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(context: &Context<'a>, total: u64) -> Meter<'a> {
        context.progress.update(0, total);
        Meter { done: AtomicU64::new(0), total, progress: context.progress }
    }

    pub(crate) fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.progress.update(done, self.total);
    }
}
