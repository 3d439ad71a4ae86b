//! `chiku bench simulate`: synthetic nodes, to see what an experiment can show before it is paid for.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use bench::simulate::{Scenario, coverage};
use bench::stats::hierarchy::{HierarchyOptions, Prompts, Redraw};
use bench::stats::power::{Design, Plan};
use bench::stats::{BootstrapOptions, Draws};
use clap::Args;
use serde_json::json;

use crate::output::PartialFile;

#[derive(Args)]
#[command(after_help = "Standard deviations are in percent of the rate. The same seed gives the same nodes everywhere.

Examples:
  chiku bench simulate --nodes 20 --prompts 16
  chiku bench simulate --nodes 18 --trajectories 8 --trajectory-sd 1 --node-sd 0 --process-sd 0.15 --out draws.csv
  chiku bench simulate --nodes 8 --random-prompts --json")]
pub struct SimulateArgs {
    /// Nodes.
    #[arg(long, default_value_t = 20, value_name = "N")]
    pub nodes: usize,
    /// Processes of each node.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub processes: usize,
    /// Prompts of each run.
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub prompts: usize,
    /// Median tokens/s.
    #[arg(long, default_value_t = 500.0, value_name = "TPS")]
    pub rate: f64,
    /// Spread between nodes.
    #[arg(long, default_value_t = 1.0, value_name = "PCT")]
    pub node_sd: f64,
    /// Spread between processes of a node.
    #[arg(long, default_value_t = 1.0, value_name = "PCT")]
    pub process_sd: f64,
    /// Spread between trajectories.
    #[arg(long, default_value_t = 0.0, value_name = "PCT")]
    pub trajectory_sd: f64,
    /// Trajectories, of which each process takes one at random.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub trajectories: usize,
    /// Spread between prompts.
    #[arg(long, default_value_t = 5.0, value_name = "PCT")]
    pub prompt_sd: f64,
    /// Spread between repeats.
    #[arg(long, default_value_t = 1.0, value_name = "PCT")]
    pub repeat_sd: f64,
    /// The truth is that of all prompts of the kind, not of the drawn set.
    #[arg(long)]
    pub random_prompts: bool,
    /// Simulated experiments.
    #[arg(long, default_value_t = 2000, value_name = "N")]
    pub experiments: usize,
    /// Resamples of each interval.
    #[arg(long, default_value_t = 400, value_name = "N")]
    pub resamples: usize,
    /// Seed.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Write one experiment's draws, as `bench import draws` reads them, and simulate no more.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &SimulateArgs) -> Result<ExitCode> {
    let scenario = Scenario {
        nodes: args.nodes,
        processes: args.processes,
        prompts: args.prompts,
        rate: args.rate,
        node_sd: args.node_sd / 100.0,
        process_sd: args.process_sd / 100.0,
        trajectory_sd: args.trajectory_sd / 100.0,
        trajectories: args.trajectories,
        prompt_sd: args.prompt_sd / 100.0,
        repeat_sd: args.repeat_sd / 100.0,
        ..Scenario::default()
    };
    if let Some(path) = &args.out {
        let draws = scenario.draws(&mut Draws::new(args.seed))?;
        let mut file = PartialFile::create(path, &[])?;
        let mut text = String::from("group,run,tps,trajectory_cluster\n");
        for (i, d) in draws.iter().enumerate() {
            text += &format!("simulated,{i},{},{}\n", d.tps, d.class.as_deref().unwrap_or(""));
        }
        file.file().write_all(text.as_bytes()).with_context(|| format!("{}: cannot write", path.display()))?;
        file.finish()?;
        if args.json {
            crate::outln!("{}", json!({"draws": draws.len(), "out": path}));
        } else {
            crate::outln!("{} simulated draws: {}", draws.len(), path.display());
        }
        return Ok(ExitCode::SUCCESS);
    }
    let prompts = if args.random_prompts { Prompts::Random } else { Prompts::Fixed };
    let bootstrap = BootstrapOptions { resamples: args.resamples, ..Default::default() };
    let options = HierarchyOptions { bootstrap, prompts, redraw: Redraw::Highest };
    let c = coverage(&scenario, args.experiments, args.seed, &options)?;
    // A comparison of two such experiments: the spread of one node's mean over the fixed prompts.
    let within = scenario.process_sd.powi(2) + scenario.trajectory_sd.powi(2);
    let cells = (args.processes * args.prompts) as f64;
    let variance = scenario.node_sd.powi(2) + within / args.processes as f64 + scenario.repeat_sd.powi(2) / cells;
    let plan = Plan::usual(Design::Independent);
    let detectable = (args.nodes >= 2).then(|| plan.detectable(args.nodes, variance.sqrt() * 100.0)).transpose()?;
    let needed = (variance > 0.0).then(|| plan.draws_needed(1.0, variance.sqrt() * 100.0)).transpose()?;
    if args.json {
        let value = json!({"kind": "projected", "scenario": scenario, "coverage": c, "seed": args.seed,
            "detectable_pct": detectable, "nodes_for_1_pct": needed, "alpha": plan.alpha, "power": plan.power});
        crate::outln!("{}", serde_json::to_string_pretty(&value)?);
        return Ok(ExitCode::SUCCESS);
    }
    crate::outln!(
        "{:.1} % (+-{:.1}) of {} simulated intervals cover the truth; they promise {:.0} %",
        c.covered * 100.0,
        c.standard_error * 100.0,
        c.experiments,
        c.level * 100.0
    );
    crate::outln!("half width: {:.2} % on average", c.half_width_pct);
    if let Some(d) = detectable {
        crate::outln!(
            "two configurations on {} nodes each: effects from {d:.2} % on are seen (power 0.8, alpha 0.05)",
            args.nodes
        );
    }
    if let Some(n) = needed {
        crate::outln!("an effect of 1 % needs {n} nodes a configuration");
    }
    Ok(ExitCode::SUCCESS)
}
