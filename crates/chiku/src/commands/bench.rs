//! `chiku bench`: measure tokens per second, keep the samples, and tell speed from luck.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

mod acceptance;
mod claim;
mod compare;
mod components;
mod export;
mod gap;
mod history;
mod import;
mod interleave;
mod lever;
mod measure;
mod processes;
mod profile;
mod programs;
mod prompts;
mod report;
mod roofline;
pub mod run;
mod schema;
mod served;
mod simulate;

pub use measure::{Measuring, Side, measure};
pub use prompts::PromptArgs;

#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    #[command(flatten)]
    pub run: run::RunArgs,
}

#[derive(Subcommand)]
pub enum BenchCommand {
    /// Run the protocol and append a record (the default).
    Run(Box<run::RunArgs>),
    /// What a drafter yields: tokens a step and acceptance by depth, in and outside repetition loops.
    Acceptance(Box<acceptance::AcceptanceArgs>),
    /// What a step's time is made of: drafting, the target's pass by op, acceptance, the host.
    Profile(Box<profile::ProfileArgs>),
    /// One knob at a time: predicted, measured, explained, judged.
    Lever(Box<lever::LeverArgs>),
    /// Two sets of records, run in turn: is the second faster?
    Compare(compare::CompareArgs),
    /// What the best of N draws is worth: luck, ceiling, and the chance that it verifies.
    Claim(Box<claim::ClaimArgs>),
    /// Public against private prompts: the gap, what it is made of, and what a gate makes of it.
    Gap(Box<gap::GapArgs>),
    /// Speed over commits: the runs of each configuration, and where their level changes.
    History(history::HistoryArgs),
    /// Everything on one page: a self-contained HTML file.
    Report(Box<report::ReportArgs>),
    /// Bytes of a step by component, and the bound at a device's bandwidth.
    Roofline(Box<roofline::RooflineArgs>),
    /// Synthetic nodes: what an experiment can show before it is paid for.
    Simulate(Box<simulate::SimulateArgs>),
    /// Read files of others: draws, step times, boards, runs, results of other benchmarks.
    #[command(subcommand)]
    Import(import::ImportCommand),
    /// Many runs of one configuration: their interval, and what their spread is made of.
    Components(components::ComponentsArgs),
    /// Write records for other tools.
    Export(export::ExportArgs),
    /// JSON Schema of a record.
    Schema(schema::SchemaArgs),
}

impl BenchArgs {
    pub fn json(&self) -> bool {
        match &self.command {
            Some(BenchCommand::Run(args)) => args.json,
            Some(BenchCommand::Acceptance(args)) => args.json,
            Some(BenchCommand::Profile(args)) => args.json,
            Some(BenchCommand::Lever(args)) => args.json,
            Some(BenchCommand::Compare(args)) => args.json,
            Some(BenchCommand::Claim(args)) => args.json,
            Some(BenchCommand::Gap(args)) => args.json,
            Some(BenchCommand::History(args)) => args.json,
            Some(BenchCommand::Report(args)) => args.json,
            Some(BenchCommand::Roofline(args)) => args.json,
            Some(BenchCommand::Simulate(args)) => args.json,
            Some(BenchCommand::Import(command)) => command.json(),
            Some(BenchCommand::Components(args)) => args.json,
            Some(BenchCommand::Export(args)) => args.json,
            Some(BenchCommand::Schema(_)) => true,
            None => self.run.json,
        }
    }
}

pub fn run(args: &BenchArgs, quiet: bool) -> Result<ExitCode> {
    match &args.command {
        Some(BenchCommand::Run(args)) => run::run(args, quiet),
        Some(BenchCommand::Acceptance(args)) => acceptance::run(args, quiet),
        Some(BenchCommand::Profile(args)) => profile::run(args, quiet),
        Some(BenchCommand::Lever(args)) => lever::run(args, quiet),
        Some(BenchCommand::Compare(args)) => compare::run(args),
        Some(BenchCommand::Claim(args)) => claim::run(args),
        Some(BenchCommand::Gap(args)) => gap::run(args, quiet),
        Some(BenchCommand::History(args)) => history::run(args),
        Some(BenchCommand::Report(args)) => report::run(args, quiet),
        Some(BenchCommand::Roofline(args)) => roofline::run(args),
        Some(BenchCommand::Simulate(args)) => simulate::run(args),
        Some(BenchCommand::Import(command)) => import::run(command),
        Some(BenchCommand::Components(args)) => components::run(args),
        Some(BenchCommand::Export(args)) => export::run(args),
        Some(BenchCommand::Schema(_)) => schema::run(),
        None => run::run(&args.run, quiet),
    }
}
