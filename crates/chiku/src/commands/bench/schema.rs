//! `chiku bench schema`: what a line of a results file looks like.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

#[derive(Args)]
#[command(after_help = "Example:\n  chiku bench schema > results/schema-1.json")]
pub struct SchemaArgs {
    /// The schema is JSON in any case.
    #[arg(long)]
    pub json: bool,
}

pub fn run() -> Result<ExitCode> {
    crate::out!("{}", bench::record::json_schema()?);
    Ok(ExitCode::SUCCESS)
}
