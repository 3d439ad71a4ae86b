//! `chiku bench lever`: one knob at a time.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use bench::lever::{self, Lab, LabOptions, Lever, Report};
use clap::Args;
use serde_json::json;

use super::measure::{binary, environment};
use crate::exit::INTERRUPTED;
use crate::interrupt;

#[derive(Args)]
#[command(
    after_help = "A lever converts where whole requests are faster for it, by at least 1 % with the interval on one side and a perplexity \
of at most 1.05 times the original's, on nano and at the width of E4B (8 random layers, written to a temporary folder). Each report is \
appended to OUT/LEVER.jsonl, whatever it says.

Examples:
  chiku bench lever list
  chiku bench lever k
  chiku bench lever all --prompts 8 --tokens 32 --wide-tokens 4"
)]
pub struct LeverArgs {
    /// A lever's name, `all`, or `list`.
    #[arg(value_name = "NAME|list|all")]
    pub name: String,
    /// Prompts of a trial on nano, from the held-out set; at least 6.
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub prompts: usize,
    /// Tokens of each.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub tokens: usize,
    /// Prompts of a trial at the width of E4B; at least 6.
    #[arg(long, default_value_t = 6, value_name = "N")]
    pub wide_prompts: usize,
    /// Tokens of each.
    #[arg(long, default_value_t = 12, value_name = "N")]
    pub wide_tokens: usize,
    /// Threads; 0 for one each core.
    #[arg(long, default_value_t = 0, value_parser = crate::args::threads, value_name = "N")]
    pub threads: usize,
    /// Seed of intervals, random weights and scripted drafts.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Folder of the records.
    #[arg(long, default_value = "results/levers", value_name = "DIR")]
    pub out: PathBuf,
    /// Print the reports as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &LeverArgs, quiet: bool) -> Result<ExitCode> {
    if args.name == "list" {
        list(args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let levers: Vec<&dyn Lever> = match args.name.as_str() {
        "all" => lever::ALL.to_vec(),
        name => vec![lever::named(name)?],
    };
    let cancel = interrupt::flag()?;
    let options = LabOptions {
        prompts: args.prompts,
        tokens: args.tokens,
        wide_prompts: args.wide_prompts,
        wide_tokens: args.wide_tokens,
        threads: args.threads,
        seed: args.seed,
    };
    // Beside the embedded model: a temporary folder of the system may be in memory.
    let root = runtime::nano::cache_root()?;
    std::fs::create_dir_all(&root).with_context(|| format!("{}: cannot create it", root.display()))?;
    let work = tempfile::Builder::new().prefix("levers-").tempdir_in(&root);
    let work = work.with_context(|| format!("{}: cannot create a folder", root.display()))?;
    let mut say = |what: &str| {
        if !quiet && !args.json {
            crate::errln!("  {what}");
        }
    };
    environment();
    let mut lab = Lab::new(options, work.path(), cancel, &mut say)?;
    let (binary, mut reports) = (binary(), Vec::new());
    for lever in levers {
        if !quiet && !args.json {
            crate::errln!("{}", lever.name());
        }
        let report = match lever::run(lever, &mut lab, &binary) {
            // What is done is recorded already.
            Err(_) if interrupt::pressed() => break,
            other => other?,
        };
        let path = lever::append(&args.out, &report)?;
        if !args.json {
            print(&report);
            if !quiet {
                crate::outln!("  record: {}", path.display());
            }
        }
        reports.push(report);
    }
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&reports)?);
    }
    Ok(if interrupt::pressed() { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

fn list(json: bool) -> Result<()> {
    if json {
        let entry = |l: &dyn Lever| json!({"name": l.name(), "what": l.what(), "prediction": l.prediction(), "mechanism": l.mechanism()});
        let all: Vec<_> = lever::ALL.into_iter().map(entry).collect();
        crate::outln!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    for lever in lever::ALL {
        crate::outln!("{:>13}  {}", lever.name(), lever.what());
    }
    Ok(())
}

fn print(r: &Report) {
    let kind = r.kind.map_or_else(String::new, |k| format!(", {}", format!("{k:?}").to_lowercase()));
    crate::outln!("{}: {}{kind}", r.lever, r.verdict);
    crate::outln!("  predicted: {}", r.prediction);
    for s in &r.subjects {
        crate::outln!("  {}: {}", s.subject, s.verdict);
        for t in &s.trials {
            let i = t.speedup.interval;
            let ppl = match t.ppl {
                None => String::new(),
                Some(p) if p > 1e300 => ", perplexity infinite".into(),
                Some(p) => format!(", perplexity x {p:.3}"),
            };
            let typical = t
                .typical
                .map_or_else(String::new, |s| format!(", typical prompt {:.3} [{:.3}, {:.3}]", s.value, s.low, s.high));
            let tokens =
                t.tokens_per_step.as_ref().map_or_else(String::new, |e| format!(", tokens a step x {:.2}", e.value));
            crate::outln!(
                "    {} against {}: {:.3} [{:.3}, {:.3}] times as fast ({:.0} % over prompts){typical}, bytes x {:.3}{tokens}{ppl}",
                t.setting,
                t.base,
                t.speedup.value,
                i.low,
                i.high,
                i.level * 100.0,
                t.bytes
            );
        }
    }
    if let Some(reason) = &r.reason {
        crate::outln!("  {reason}");
    }
    crate::outln!("  why: {}", r.mechanism);
}
