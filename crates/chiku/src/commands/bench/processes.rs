//! `chiku bench run --processes N`: the same run in processes of their own, one after the other. A process has luck of its own, which no
//! number of prompts takes out.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use bench::pooled::{Pooled, pooled};
use bench::record::Record;
use bench::stats::BootstrapOptions;
use serde_json::json;

use crate::exit::INTERRUPTED;
use crate::interrupt;
use crate::output::{Unit, bar};

/// Runs this program's command line `count` times, one process each, and pools the records that come of it.
pub fn run(count: usize, path: &Path, seed: u64, json: bool, quiet: bool) -> Result<ExitCode> {
    interrupt::flag()?;
    let program = std::env::current_exe().context("cannot find this program's file")?;
    // Said twice, the last one counts, whatever name the first one went by.
    let mut args: Vec<OsString> = std::env::args_os().skip(1).chain(["--processes=1".into()]).collect();
    if !quiet {
        args.push("--quiet".into());
    }
    let before = if path.is_file() { bench::log::read(path)?.records.len() } else { 0 };
    let progress = bar("processes", count as u64, Unit::Count, quiet);
    let mut failed = None;
    for _ in 0..count {
        let child = Command::new(&program).args(&args).stdout(Stdio::null()).status();
        let status = child.with_context(|| format!("{}: cannot start", program.display()))?;
        progress.inc(1);
        if interrupt::pressed() || !status.success() {
            failed = status.code().filter(|_| !interrupt::pressed());
            break;
        }
    }
    progress.finish_and_clear();
    let records: Vec<Record> = match path.is_file() {
        true => bench::log::read(path)?.records.into_iter().skip(before).collect(),
        false => vec![],
    };
    let whole = records.iter().any(|r| r.complete);
    let together = if whole { Some(pooled(&records, &BootstrapOptions { seed, ..Default::default() })?) } else { None };
    if json {
        let bare: Vec<Record> = records.into_iter().map(|r| Record { samples: vec![], ..r }).collect();
        crate::outln!("{}", serde_json::to_string_pretty(&json!({"records": bare, "pooled": together}))?);
    } else {
        together.iter().for_each(print);
        if !quiet {
            crate::outln!("records: {}", path.display());
        }
    }
    if let Some(code) = failed {
        return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
    }
    Ok(if interrupt::pressed() { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// One line of what runs say together.
pub fn print(p: &Pooled) {
    let i = p.tokens_per_s.interval;
    crate::outln!(
        "{}: {:.1} tokens/s [{:.1}, {:.1}] ({:.0} % over {} and prompts): {} nodes, {} processes, {} prompts, {} trajectories, measured",
        p.label,
        p.tokens_per_s.value,
        i.low,
        i.high,
        i.level * 100.0,
        p.over.as_str(),
        p.nodes,
        p.processes,
        p.prompts,
        p.trajectories
    );
    if p.left_out > 0 {
        crate::outln!("  ({} records are of another configuration or were cut short, and are left out)", p.left_out);
    }
}
