//! Where the time of a pass goes, op by op.
//!
//! A pass is one sequence of ops; a clock that is given to an engine is read at the end of each, so the ops add up to the pass.
//! Without one, a pass reads no clock.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a pass does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Rows of the embedding table, scaled.
    Embedding,
    /// Projections to queries, keys and values.
    Qkv,
    /// The cache's new rows, and attention.
    Attention,
    /// `o_proj`.
    Output,
    /// Gate, up, and their product.
    GateUp,
    /// `down_proj`.
    Down,
    /// Per-layer inputs: projection and look-up once a pass, gate and projection in each layer.
    PerLayer,
    /// Norms, rotary embeddings, additions to the residual stream.
    Norms,
    /// The head and its softcap.
    Head,
}

impl Op {
    /// Every op, in the order of a pass.
    pub const ALL: [Op; 9] =
        [Op::Embedding, Op::Qkv, Op::Attention, Op::Output, Op::GateUp, Op::Down, Op::PerLayer, Op::Norms, Op::Head];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Op::Embedding => "embedding",
            Op::Qkv => "qkv",
            Op::Attention => "attention",
            Op::Output => "o",
            Op::GateUp => "gate/up",
            Op::Down => "down",
            Op::PerLayer => "per-layer inputs",
            Op::Norms => "norms",
            Op::Head => "head",
        }
    }
}

/// Time spent in each op since the last reset.
#[derive(Debug)]
pub struct OpClock(Mutex<State>);

#[derive(Debug)]
struct State {
    last: Instant,
    spent: [Duration; Op::ALL.len()],
}

impl Default for OpClock {
    fn default() -> OpClock {
        OpClock(Mutex::new(State { last: Instant::now(), spent: Default::default() }))
    }
}

impl OpClock {
    /// Forgets what was spent.
    pub fn reset(&self) {
        self.state(|s| s.spent = Default::default());
    }

    /// Time spent in each op in ms, in the order of [`Op::ALL`].
    pub fn spent_ms(&self) -> [f64; Op::ALL.len()] {
        self.state(|s| s.spent.map(|d| d.as_secs_f64() * 1e3))
    }

    fn state<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        // Nothing in here panics half-way.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The clock of a pass, if it has one.
#[derive(Clone, Copy, Default)]
pub(crate) struct Marks<'a>(Option<&'a OpClock>);

impl<'a> Marks<'a> {
    /// Begins a pass.
    pub fn begin(clock: Option<&'a OpClock>) -> Marks<'a> {
        if let Some(clock) = clock {
            clock.state(|s| s.last = Instant::now());
        }
        Marks(clock)
    }

    /// What was done since the last mark was `op`.
    pub fn mark(self, op: Op) {
        if let Some(clock) = self.0 {
            clock.state(|s| {
                let now = Instant::now();
                s.spent[op as usize] += now - s.last;
                s.last = now;
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_are_indices_of_their_table() {
        for (i, op) in Op::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, i, "{}", op.name());
        }
    }

    #[test]
    fn time_goes_to_the_op_that_was_marked() {
        let clock = OpClock::default();
        let marks = Marks::begin(Some(&clock));
        std::thread::sleep(Duration::from_millis(2));
        marks.mark(Op::Down);
        let spent = clock.spent_ms();
        assert!(spent[Op::Down as usize] >= 2.0 && spent.iter().sum::<f64>() == spent[Op::Down as usize], "{spent:?}");
        clock.reset();
        assert_eq!(clock.spent_ms(), [0.0; 9]);
        Marks::default().mark(Op::Head);
    }
}
