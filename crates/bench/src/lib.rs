//! Is it really faster? The protocol of a run, statistics, and records of what was measured.
//!
//! What always holds here: a number says where it comes from ([`record::Kind`]); raw samples are kept with every result; an
//! interval names its method, level and seed; a run that was cut short keeps what is done and says so; results files are
//! only ever appended to.
//!
//! | module | concept |
//! |---|---|
//! | [`prompts`] | prompt sets, raw or chat, by hash |
//! | [`protocol`] | warm-ups, one request at a time, ABBA; what a target is |
//! | [`engine`] | the in-process engine as a target |
//! | [`stats`] | bootstrap intervals for ratios of sums |
//! | [`acceptance`] | tokens a step and acceptance by depth, in and outside repetition loops |
//! | [`compare`] | two interleaved runs, paired by prompt |
//! | [`environment`] | machine, program, checkpoint by hash |
//! | [`record`] | a run as one line of JSON |
//! | [`log`] | results files: append under a lock, read what is whole |
//! | [`merge`] | results files of many nodes brought into one |

#![forbid(unsafe_code)]

pub mod acceptance;
pub mod compare;
pub mod engine;
pub mod environment;
mod error;
pub mod log;
pub mod merge;
pub mod prompts;
pub mod protocol;
pub mod record;
pub mod stats;

pub use error::{Error, Result};
