//! `chiku bench components`: what the spread of runs is made of.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use bench::pooled::{components, pooled};
use bench::stats::BootstrapOptions;
use clap::Args;
use serde_json::json;

use super::processes::print;

#[derive(Args)]
#[command(
    after_help = "The runs are those of the configuration of the last record. Their interval is over nodes, else processes, else \
prompts; the variance is that of the logarithm of each request's tokens/s.

Examples:
  chiku bench run --processes 5 --limit 32 --out draws.jsonl
  chiku bench components draws.jsonl"
)]
pub struct ComponentsArgs {
    /// Results files.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Seed of the interval's resampling.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Print as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &ComponentsArgs) -> Result<ExitCode> {
    let mut records = Vec::new();
    for path in &args.files {
        let log = bench::log::read_uniform(path)?;
        for skipped in &log.skipped {
            crate::errln!("warning: {}: line {} is skipped: {}", path.display(), skipped.line, skipped.reason);
        }
        records.extend(log.records);
    }
    let together = pooled(&records, &BootstrapOptions { seed: args.seed, ..Default::default() })?;
    let parts = components(&records)?;
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&json!({"pooled": together, "components": parts}))?);
        return Ok(ExitCode::SUCCESS);
    }
    print(&together);
    for c in &parts {
        match (c.variance, c.share, &c.confounded) {
            (Some(variance), Some(share), _) => crate::outln!(
                "  {:>10}: {:5.1} % of the variance, sd {:.2} % ({} levels)",
                c.name,
                share * 100.0,
                variance.sqrt() * 100.0,
                c.levels
            ),
            (_, _, why) => crate::outln!("  {:>10}: cannot be told: {}", c.name, why.as_deref().unwrap_or("unknown")),
        }
    }
    Ok(ExitCode::SUCCESS)
}
