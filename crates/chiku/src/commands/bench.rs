//! `chiku bench`: measure tokens per second, keep the samples, and tell speed from luck.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

mod acceptance;
mod prompts;
mod run;

pub use prompts::PromptArgs;
pub use run::{Side, measure};

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
}

impl BenchArgs {
    pub fn json(&self) -> bool {
        match &self.command {
            Some(BenchCommand::Run(args)) => args.json,
            Some(BenchCommand::Acceptance(args)) => args.json,
            None => self.run.json,
        }
    }
}

pub fn run(args: &BenchArgs, quiet: bool) -> Result<ExitCode> {
    match &args.command {
        Some(BenchCommand::Run(args)) => run::run(args, quiet),
        Some(BenchCommand::Acceptance(args)) => acceptance::run(args, quiet),
        None => run::run(&args.run, quiet),
    }
}
