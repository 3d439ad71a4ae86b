//! demo
use clap::Args;
use std::process::ExitCode;
/// a
#[derive(Args)]
pub struct DemoArgs {
    #[arg(long)]
    pub json: bool,
}
pub fn run(_: &DemoArgs, _: bool) -> anyhow::Result<ExitCode> {
    Ok(ExitCode::SUCCESS)
}
