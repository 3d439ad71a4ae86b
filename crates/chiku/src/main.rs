//! The program `chiku`: one thin subcommand per job. The work is done by the libraries; what lives here are arguments, progress
//! bars, tables and exit codes.

#![forbid(unsafe_code)]

mod args;
mod cli;
mod commands;
mod draft;
mod exit;
mod interrupt;
mod output;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    bake::lineage::set_tool_commit(env!("CHIKU_BUILD_COMMIT"));
    let cli = cli::Cli::parse();
    let json = cli.command.json();
    if cfg!(feature = "planted-slow-step") {
        errln!("warning: this build is slowed on purpose (feature planted-slow-step)");
    }
    match cli.command.run(cli.quiet) {
        Ok(code) => code,
        Err(error) => exit::report(&error, json),
    }
}
