//! `chiku bench run --url`: the protocol on a server.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use bench::environment::{CheckpointHash, Conditions};
use bench::journal::Journal;
use bench::prompts::PromptSet;
use bench::protocol::{self, Monotonic, Output, Protocol};
use bench::record::{Discarded, Record, Setup, TargetInfo};
use bench::server::{Server, ServerOptions};
use bench::stats::BootstrapOptions;
use clap::Args;

use super::measure::{begin, binary, environment, keep, warn};
use crate::interrupt;
use crate::output::{Unit, bar};

/// A server to measure in the place of a checkpoint.
#[derive(Args, Clone)]
pub struct ServedArgs {
    /// Measure an OpenAI-compatible server: chat prompts by /v1/chat/completions, raw ones by /v1/completions.
    #[arg(long, value_name = "URL", conflicts_with_all = ["model", "against", "interleave", "draft", "drafter", "k", "tree",
        "centroids", "draft_convention", "backend", "precision", "threads", "context"])]
    pub url: Option<String>,
    /// Model to ask the server for [default: the first that it lists].
    #[arg(long, requires = "url", value_name = "NAME")]
    pub served_model: Option<String>,
    /// Take each answer as a whole, as the field's timed stage does: no times of steps, no time to the first token.
    #[arg(long, requires = "url")]
    pub no_stream: bool,
    /// Longest time for one request to the server.
    #[arg(long, requires = "url", default_value_t = 600.0, value_parser = super::run::seconds, value_name = "SECONDS")]
    pub timeout: f64,
}

/// Times a server.
pub fn measure(
    args: &ServedArgs,
    url: &str,
    set: &PromptSet,
    protocol: &Protocol,
    (seed, discarded): (u64, &[Discarded]),
    results: &Path,
    quiet: bool,
) -> Result<(Record, Vec<Output>, Option<Journal>)> {
    let cancel = interrupt::flag()?;
    let (stream, timeout) = (!args.no_stream, Duration::from_secs_f64(args.timeout));
    let options = ServerOptions { url: url.into(), model: args.served_model.clone(), stream, timeout };
    let environment = environment();
    let mut server = Server::connect(&options, cancel)?;
    let model = server.model().to_string();
    let mut setup = Setup {
        binary: binary(),
        environment,
        after: Conditions::default(),
        // Where it is stays out of the record: an address names a place.
        target: TargetInfo {
            label: model.clone(),
            backend: "server".into(),
            precision: "unknown".into(),
            threads: 0,
            flags: vec![format!("stream={stream}")],
        },
        configuration: None,
        checkpoint: CheckpointHash::served(&model),
        drafter: None,
        prompts: set.clone(),
        protocol: protocol.clone(),
        discarded: discarded.to_vec(),
    };
    let options = BootstrapOptions { seed, ..Default::default() };
    let begun = begin(results, std::slice::from_ref(&setup), set.prompts.len(), &options)?;
    let (mut journal, mut kept) = (Some(begun), Ok(()));
    let progress = bar("measuring", set.prompts.len() as u64, Unit::Count, quiet);
    let mut show = |p: protocol::Progress<'_>| {
        if let Some(sample) = p.sample {
            progress.set_position(p.done as u64);
            keep(&mut journal, &mut kept, p.label, sample);
        }
    };
    let context = protocol::Context { clock: &Monotonic::start(), cancel, progress: &mut show };
    let mut run = protocol::run(&mut server, &set.texts(), protocol, context)?;
    progress.finish_and_clear();
    warn(kept);
    let outputs = std::mem::take(&mut run.outputs);
    setup.after = Conditions::capture();
    Ok((Record::measured(run, setup, &options)?, outputs, journal))
}
