//! Speculation as pure logic: the shape of a draft, which of it is accepted, and how the output is cut. No backend in it.
//!
//! A step runs the rows `[base, main 1 .. K, branches]` through the target. `base` is the newest token; main row i is drafted for
//! depth i; a branch is another choice for its depth, sharing the main chain before it. Since the target's forward pass is
//! row invariant, its choice at a row is the one that plain greedy decoding would make there, and so is everything accepted.

use crate::error::{Error, Result};

mod plan;

pub use plan::{Acceptance, Plan, best_plan};

/// Rows of a verify pass, at most: what the GPU's kernels take in one pass.
pub const MAX_ROWS: usize = 16;
/// Depth of the main chain, at most.
pub const MAX_DEPTH: usize = MAX_ROWS - 1;
/// Branches at one depth, at most.
pub const MAX_BRANCHES: usize = 4;

/// The shape of a draft: a chain, or a star of one-token branches around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Branches at each depth; its length is the depth of the chain.
    branches: Vec<usize>,
}

impl Shape {
    /// A chain of `k` drafts without branches.
    pub fn chain(k: usize) -> Result<Shape> {
        Shape::star(vec![0; k])
    }

    /// A chain as deep as `branches` is long, with that many branches at each depth.
    pub fn star(branches: Vec<usize>) -> Result<Shape> {
        let wrong = |what: &'static str, found: usize, limit: usize| Err(Error::Shape { what, found, limit });
        if branches.len() > MAX_DEPTH {
            return wrong("drafts in a chain (--k)", branches.len(), MAX_DEPTH);
        }
        if let Some(&most) = branches.iter().max().filter(|&&b| b > MAX_BRANCHES) {
            return wrong("branches at one depth (--tree)", most, MAX_BRANCHES);
        }
        let shape = Shape { branches };
        if shape.rows() > MAX_ROWS {
            return wrong("rows of a step: 1 + drafts + branches (--tree)", shape.rows(), MAX_ROWS);
        }
        Ok(shape)
    }

    /// Depth of the main chain.
    pub fn depth(&self) -> usize {
        self.branches.len()
    }

    /// Branches at depth `d`, from 1.
    pub fn branches(&self, d: usize) -> usize {
        self.branches[d - 1]
    }

    /// Rows of a step.
    pub fn rows(&self) -> usize {
        1 + self.branches.len() + self.branches.iter().sum::<usize>()
    }

    /// Whether no depth has branches.
    pub fn is_chain(&self) -> bool {
        self.branches.iter().all(|&b| b == 0)
    }

    /// The same shape, no deeper than `depth`.
    pub fn limited(&self, depth: usize) -> Shape {
        Shape { branches: self.branches[..depth.min(self.branches.len())].to_vec() }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts: Vec<String> = self.branches.iter().map(usize::to_string).collect();
        f.write_str(&counts.join(","))
    }
}

/// An alternative to the main chain's token at a depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Branch {
    /// Depth, 1 for the first drafted token.
    pub depth: usize,
    /// The token.
    pub token: u32,
}

/// What a step accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Main drafts accepted.
    pub main: usize,
    /// Index of the accepted branch among the branches.
    pub branch: Option<usize>,
    /// Tokens to emit, in order: the accepted drafts, the accepted branch, and one token of the target's own.
    pub emitted: Vec<u32>,
    /// Row whose logits chose the last of them: the state that the next draft continues from.
    pub last_row: usize,
}

/// Longest-prefix acceptance with salvage. `choices` are the target's tokens after each row: base, main, branches.
///
/// With n main drafts accepted and draft n + 1 rejected, a branch at depth n + 1 that holds the target's choice is accepted
/// instead (the lowest row among equals), and the target's choice after it follows.
pub fn accept(main: &[u32], branches: &[Branch], choices: &[u32]) -> Outcome {
    let n = main.iter().zip(choices).take_while(|(draft, choice)| draft == choice).count();
    let choice = choices[n];
    let mut emitted = main[..n].to_vec();
    emitted.push(choice);
    // With the whole chain accepted no branch stands at depth n + 1.
    let branch = branches.iter().position(|b| b.depth == n + 1 && b.token == choice);
    let last_row = match branch {
        None => n,
        Some(b) => 1 + main.len() + b,
    };
    if branch.is_some() {
        emitted.push(choices[last_row]);
    }
    Outcome { main: n, branch, emitted, last_row }
}

/// How many of `emitted` are output, given the tokens that may still be produced: up to the first stop token, which is the last
/// one output, and never more than `room`.
pub fn cut(emitted: &[u32], stop_ids: &[u32], room: usize) -> usize {
    let stop = emitted.iter().position(|t| stop_ids.contains(t)).map_or(emitted.len(), |i| i + 1);
    stop.min(room)
}

#[cfg(test)]
mod tests;
