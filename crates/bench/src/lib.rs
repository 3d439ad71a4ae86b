//! Is it really faster? The protocol of a run, statistics, and records of what was measured.
//!
//! What always holds here: a number says where it comes from ([`record::Kind`]); raw samples are kept with every run; an
//! interval names its level, and where it is drawn its method and seed; a run that was cut short keeps what is done and says so; results files are
//! only ever appended to.
//!
//! | module | concept |
//! |---|---|
//! | [`prompts`] | prompt sets, raw or chat, by hash |
//! | [`protocol`] | warm-ups, one request at a time, ABBA; what a target is |
//! | [`engine`] | the in-process engine as a target |
//! | [`server`] | an OpenAI-compatible server as a target |
//! | [`stats`] | intervals, tests, variance components, the expected best of n |
//! | [`luck`] | draws of one configuration, classed by trajectory |
//! | [`claim`] | what a best of N draws is worth, and whether it verifies |
//! | [`gap`] | public against private prompt sets |
//! | [`roofline`] | bytes of a step by component, and the bound that follows |
//! | [`simulate`] | synthetic nodes with a known truth |
//! | [`bandwidth`] | read bandwidth of this machine |
//! | [`gpu`] | what the self-test of a GPU found |
//! | [`import`], [`export`] | files of others, and for others |
//! | [`acceptance`] | tokens a step and acceptance by depth, in and outside repetition loops |
//! | [`compare`] | two interleaved runs, paired by prompt |
//! | [`configuration`] | what to measure, as a TOML file; the last good one |
//! | [`profile`] | what a step's time is made of |
//! | [`lever`] | one knob at a time: prediction, measurement, mechanism, verdict |
//! | [`environment`] | machine, program, checkpoint by hash |
//! | [`record`] | a run as one line of JSON |
//! | [`pooled`] | runs of one configuration on many nodes: interval and variance components |
//! | [`in_turn`] | two programs run in turn: faster, slower, same, or not enough data |
//! | [`log`] | results files: append under a lock, read what is whole |
//! | [`journal`] | what a run has finished so far, for the case that it is killed |
//! | [`history`] | speed over commits, and where its level changes |
//! | [`report`] | all of it on one page |
//! | [`merge`] | results files of many nodes brought into one |

#![forbid(unsafe_code)]

pub mod acceptance;
pub mod bandwidth;
pub mod claim;
pub mod compare;
pub mod configuration;
pub mod engine;
pub mod environment;
mod error;
pub mod export;
pub mod gap;
pub mod gpu;
pub mod history;
pub mod import;
pub mod in_turn;
pub mod journal;
pub mod lever;
pub mod log;
pub mod luck;
pub mod merge;
pub mod pooled;
pub mod profile;
pub mod prompts;
pub mod protocol;
pub mod record;
pub mod report;
pub mod roofline;
pub mod server;
pub mod simulate;
pub mod stats;

pub use error::{Error, Result};
