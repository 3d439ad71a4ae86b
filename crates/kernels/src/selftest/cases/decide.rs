//! A sequence that is decoded by given choices instead of a model, and the rules of a step in plain words.

use super::{super::Failure, floats, ids, words};
use crate::{
    device::{Buffer, Device, Launch},
    step::{
        decide::{Ended, Sequence, StepRecord, Tree},
        rows::NO_TOKEN,
    },
};

/// Tokens that end a sequence in these cases.
pub const STOPS: [u32; 2] = [1, 3];

/// A sequence, and everything that a step of it needs beside a model.
pub struct Case {
    /// The device.
    pub device: Device,
    /// The state.
    pub sequence: Sequence,
    /// Rows of a step.
    pub tree: Tree,
    /// [`STOPS`].
    pub stops: Buffer,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
}

/// Runs one launch.
pub fn run(device: &Device, launch: &Launch) -> Result<(), Failure> {
    // SAFETY: typed launches, whose buffers were checked when they were made.
    Ok(unsafe { device.launch(launch) }?)
}

impl Case {
    /// A sequence whose steps have these branches, at each depth.
    pub fn new(device: &Device, branches: &[usize], context: usize, vocabulary: usize) -> Result<Case, Failure> {
        let sequence = Sequence::new(device, context, 4)?;
        let (tree, stops) = (Tree::new(branches)?, ids(device, &STOPS)?);
        Ok(Case { device: device.clone(), sequence, tree, stops, vocabulary })
    }

    /// One step with the choices that `choose` makes for the rows' tokens, by logits that have their peak there.
    pub fn step(&self, choose: impl Fn(&[u32], usize) -> u32) -> Result<(), Failure> {
        run(&self.device, &self.sequence.place(self.tree))?;
        let rows = self.tree.rows();
        let tokens = &words(self.sequence.tokens.buffer())?[..rows];
        let mut logits = vec![-1.0; rows * self.vocabulary];
        for row in 0..rows {
            logits[row * self.vocabulary + choose(tokens, row) as usize] = 2.0;
        }
        let logits = floats(&self.device, &logits)?;
        run(&self.device, &self.sequence.choose(&logits, None, rows, self.vocabulary, Some(30.0))?)?;
        run(&self.device, &self.sequence.accept(self.tree, &self.stops, STOPS.len())?)
    }
}

/// What is chosen by one row of logits, after a softcap of 30, for a head with these tokens; and whether that ends the sequence.
pub fn chosen(device: &Device, logits: &[f32], tokens: Option<&[u32]>) -> Result<(u32, Option<Ended>), Failure> {
    let sequence = Sequence::new(device, 8, 1)?;
    sequence.begin(&[5], 8)?;
    let tree = Tree::new(&[])?;
    run(device, &sequence.place(tree))?;
    let table = tokens.map(|t| ids(device, t)).transpose()?;
    let from = floats(device, logits)?;
    run(device, &sequence.choose(&from, table.as_ref(), 1, logits.len(), Some(30.0))?)?;
    run(device, &sequence.accept(tree, &ids(device, &[0])?, 0)?)?;
    let record = sequence.record(0)?;
    Ok((record.output.first().copied().unwrap_or(NO_TOKEN), record.ended))
}

/// What a step's record must say, where the rows' tokens lead to these choices, at a base, in a context, with room for more tokens.
pub fn accepted(
    branches: &[usize],
    rows: &[u32],
    choices: &[u32],
    (base, context, room): (usize, usize, usize),
) -> StepRecord {
    let main = branches.len();
    let usable = main.min(context - base - 1);
    let n = (0..usable).take_while(|&i| rows[1 + i] == choices[i]).count();
    let depths: Vec<usize> = branches.iter().enumerate().flat_map(|(d, &b)| vec![d + 1; b]).collect();
    let held = |b: &usize| depths[*b] == n + 1 && n < usable && rows[1 + main + b] == choices[n];
    let branch = (0..depths.len()).find(held);
    let last = branch.map_or(n, |b| 1 + main + b);
    let mut emitted = rows[1..=n].to_vec();
    emitted.push(choices[n]);
    emitted.extend(branch.map(|_| choices[last]));
    let stop = emitted.iter().position(|t| STOPS.contains(t)).map_or(usize::MAX, |i| i + 1);
    let kept = emitted.len().min(stop).min(room);
    emitted.truncate(kept);
    let ended = match () {
        _ if kept == stop => Some(Ended::StopToken),
        _ if kept == room => Some(Ended::Length),
        _ if base + kept == context => Some(Ended::Context),
        _ => None,
    };
    let mut padded = rows.to_vec();
    padded.resize(16, 0);
    StepRecord { output: emitted, accepted: n, branch, ended, rows: padded }
}

/// What followed the latest earlier occurrence of the longest suffix of at most three tokens: as runtime's n-gram drafter.
pub fn continuation(tokens: &[u32], count: usize) -> &[u32] {
    for n in (1..=3.min(tokens.len() - 1)).rev() {
        let (earlier, suffix) = (&tokens[..tokens.len() - 1], &tokens[tokens.len() - n..]);
        if let Some(at) = earlier.windows(n).rposition(|w| w == suffix) {
            return &tokens[at + n..tokens.len().min(at + n + count)];
        }
    }
    &[]
}
