//! `chiku bench roofline`: bytes of a step from a checkpoint's headers, and the bound at a device's bandwidth.

use std::process::ExitCode;

use anyhow::{Result, bail};
use bench::roofline::{Bandwidth, Load, Roofline};
use clap::Args;
use kernels::roofline::{DEVICES, DeviceProfile};

use crate::args::model_dir;
use crate::output::megabytes;

#[derive(Args)]
#[command(
    after_help = "Everything that comes out is projected: what the hardware allows, not what an engine reaches. Only headers are read.

Examples:
  chiku bench roofline --model nano --device a10g
  chiku bench roofline --model DIR --drafter DIR --k 7 --centroids 48 --context 528 --device a10g --tokens-per-step 3.58
  chiku bench roofline --model nano --measure"
)]
pub struct RooflineArgs {
    /// A checkpoint directory in Hugging Face layout, or `nano` for the embedded model.
    #[arg(long, value_name = "DIR|nano")]
    pub model: String,
    /// Directory of the drafter, or `nano`.
    #[arg(long, value_name = "DIR|nano")]
    pub drafter: Option<String>,
    /// Drafts a step [default: 7 with a drafter, else 0].
    #[arg(long, value_name = "K")]
    pub k: Option<usize>,
    /// Clusters of the drafter's head to look into; 0 for the full head [default: the drafter's own number].
    #[arg(long, value_name = "N")]
    pub centroids: Option<usize>,
    /// Mean context in tokens.
    #[arg(long, default_value_t = 528, value_name = "TOKENS")]
    pub context: usize,
    /// Tokens of a completion, over which the context grows; 0 for one context.
    #[arg(long, default_value_t = 512, value_name = "TOKENS")]
    pub completion: usize,
    /// Whose bandwidth: a10g, a10, rtx3090 or h200.
    #[arg(long, value_name = "NAME", required_unless_present = "measure", conflicts_with = "measure")]
    pub device: Option<String>,
    /// Measure the read bandwidth of this machine's memory instead.
    #[arg(long)]
    pub measure: bool,
    /// Mean tokens a step.
    #[arg(long, default_value_t = 1.0, value_name = "X")]
    pub tokens_per_step: f64,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &RooflineArgs) -> Result<ExitCode> {
    let drafter = match args.drafter.as_deref() {
        Some("nano") => Some(runtime::nano::directory()?.join("assistant")),
        Some(dir) => Some(model_dir(dir)?),
        None => None,
    };
    let load = Load {
        k: args.k.unwrap_or(if drafter.is_some() { 7 } else { 0 }),
        centroids: args.centroids,
        context: args.context,
        completion: args.completion,
        tokens_per_step: args.tokens_per_step,
    };
    let bandwidth: Bandwidth = match &args.device {
        None => bench::bandwidth::measure()?,
        Some(name) => match DeviceProfile::by_name(name) {
            Some(profile) => profile.into(),
            None => {
                let names: Vec<&str> = DEVICES.iter().map(|d| d.name).collect();
                bail!(
                    "--device: no profile of `{name}`; there are {}, or --measure for this machine",
                    names.join(", ")
                );
            }
        },
    };
    let r = Roofline::new(&model_dir(&args.model)?, drafter.as_deref(), &load, &bandwidth)?;
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&r)?);
    } else {
        print(&r);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(r: &Roofline) {
    let c = &r.components;
    for (name, bytes) in [
        ("body", c.body),
        ("per-layer inputs", c.ple),
        ("head", c.head),
        ("keys and values", c.kv),
        ("norms and rows", c.norms_and_rows),
        ("drafter", c.drafter),
        ("a step", r.bytes_per_step),
    ] {
        crate::outln!("{name:>17} {:>12}", megabytes(bytes));
    }
    crate::outln!("{} ({})", r.device, r.source);
    for (name, b) in &r.bounds {
        let get = |field: &str| b[field].as_f64().unwrap_or(0.0);
        let (gb, floor, tps) = (get("gb_per_s"), get("floor_ms"), get("tps_bound"));
        crate::outln!("{name:>17} {gb:>8.1} GB/s: {floor:.3} ms a step, {tps:.0} tokens/s at most (projected)");
    }
    for column in &r.columns {
        let (step, b) = (megabytes(column.bytes_per_step), column.bound);
        crate::outln!(
            "{:>16}: {step}, {:.3} ms, {:.0} tokens/s (projected)",
            format!("{} bits", column.bits),
            b.floor_ms,
            b.tps_bound
        );
    }
}
