//! `chiku bench run --interleave A B` where a configuration names a program: each side in processes of its own, A B, B A, A B, and so on.
//!
//! Requests of two programs cannot take turns, so whole runs do, and the unit of the comparison is the process ([`bench::in_turn`]).

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use bench::compare::MIN_EFFECT;
use bench::configuration::Configuration;
use bench::in_turn::InTurn;
use bench::record::Record;
use serde_json::json;

use super::run::RunArgs;
use crate::exit::INTERRUPTED;
use crate::interrupt;
use crate::output::{Unit, bar};

/// Pairs of processes where --processes does not say: the fewest that a verdict can rest on.
const PAIRS: u16 = 6;

/// Runs both configurations by their programs, in turn, and judges the second.
pub fn run(args: &RunArgs, sides: &[Configuration], path: &Path, quiet: bool) -> Result<ExitCode> {
    let [a, b] = sides else { bail!("--interleave takes two configurations") };
    if a.threads.unwrap_or(0) != b.threads.unwrap_or(0) {
        bail!("two programs are compared at one number of threads, so that their pairs are of one machine");
    }
    interrupt::flag()?;
    let own = std::env::current_exe().context("cannot find this program's file")?;
    let pairs = args.processes.unwrap_or(PAIRS);
    let progress = bar("processes", 2 * u64::from(pairs), Unit::Count, quiet);
    let mut records: [Vec<Record>; 2] = Default::default();
    let mut failed = None;
    'pairs: for pair in 0..pairs {
        for side in if pair.is_multiple_of(2) { [0, 1] } else { [1, 0] } {
            let before = count(path)?;
            let program = sides[side].binary.as_ref().map_or(own.clone(), Into::into);
            let child = Command::new(&program).args(arguments(args, &sides[side], path)).stdout(Stdio::null()).status();
            let status = child.with_context(|| format!("{}: cannot start", program.display()))?;
            progress.inc(1);
            let label = sides[side].label.as_deref();
            let made = read(path)?.into_iter().skip(before).filter(|r| Some(r.target.label.as_str()) == label);
            records[side].extend(made);
            if interrupt::pressed() || !status.success() {
                failed = status.code().filter(|_| !interrupt::pressed());
                break 'pairs;
            }
        }
    }
    progress.finish_and_clear();
    let [base, head] = &records;
    let judged = match base.len().min(head.len()) {
        0 | 1 => None,
        _ => Some(InTurn::new(base, head, MIN_EFFECT)?),
    };
    if args.json {
        let bare = |r: &Record| Record { samples: vec![], ..r.clone() };
        let all: Vec<Record> = base.iter().chain(head).map(bare).collect();
        crate::outln!("{}", serde_json::to_string_pretty(&json!({"records": all, "in_turn": judged}))?);
    } else {
        if let Some(judged) = &judged {
            let name = |c: &Configuration| c.label.clone().unwrap_or_default();
            crate::outln!("{} against {}:", name(b), name(a));
            super::compare::print(judged);
        }
        if !quiet {
            crate::outln!("records: {}", path.display());
        }
    }
    if let Some(code) = failed {
        return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
    }
    Ok(if interrupt::pressed() { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

fn read(path: &Path) -> Result<Vec<Record>> {
    Ok(if path.is_file() { bench::log::read(path)?.records } else { vec![] })
}

fn count(path: &Path) -> Result<usize> {
    Ok(read(path)?.len())
}

/// The command line of a child: one configuration, run as this run is.
fn arguments(args: &RunArgs, side: &Configuration, path: &Path) -> Vec<String> {
    let mut out: Vec<String> = ["bench", "run", "--quiet"].map(String::from).into();
    let mut set = |name: &str, value: Option<String>| {
        out.extend(value.into_iter().flat_map(|v| [format!("--{name}"), v]));
    };
    let number = |n: Option<usize>| n.map(|n| n.to_string());
    let list = |of: &[usize]| of.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    set("model", Some(side.model.clone()));
    set("label", side.label.clone());
    set("draft", side.draft.clone());
    set("drafter", side.drafter.clone());
    set("k", number(side.k));
    set("tree", side.tree.as_deref().map(list));
    set("centroids", number(side.centroids));
    set("draft-convention", side.draft_convention.clone());
    set("precision", side.precision.clone());
    set("threads", number(side.threads));
    set("context", number(side.context));
    set("prompts", Some(args.prompts.prompts.clone()));
    set("limit", Some(args.limit.to_string()));
    set("max-tokens", Some(args.max_tokens.to_string()));
    set("warmup", Some(args.warmup.to_string()));
    set("warmup-limit", Some(args.warmup_limit.to_string()));
    set("seed", Some(args.seed.to_string()));
    set("node-id", args.node_id.clone());
    set("out", Some(path.display().to_string()));
    args.discarded.iter().for_each(|reason| set("discarded", Some(reason.clone())));
    let flags = [
        ("--chat", args.prompts.chat),
        ("--raw", args.prompts.raw),
        ("--stop-at-eos", args.stop_at_eos),
        ("--profile", args.profile),
    ];
    out.extend(flags.into_iter().filter(|f| f.1).map(|f| f.0.to_string()));
    out
}
