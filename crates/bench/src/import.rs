//! Files of others: the field's draws, boards, runs and step-time logs, and the results of other benchmarks.
//!
//! What always holds here: a number is checked where it enters (finite, positive where it is a time or a rate), a message names the
//! file and the line or field, and nothing is guessed. What comes out is `published`: somebody else measured it.

pub mod board;
pub mod draws;
pub mod engines;
pub mod field_run;
mod json;
pub mod pairs;
pub mod steptime;
mod table;
