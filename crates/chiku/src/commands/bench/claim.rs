//! `chiku bench claim`: what the best of N draws is worth.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use bench::claim::{ClaimReport, Evidence, Rules};
use clap::Args;

#[derive(Args)]
#[command(
    after_help = "A claim stands if the best of N public draws beats the best so far and one private re-run is within the gate of it. All \
probabilities are projected from the inputs; say from how many draws these come, and their uncertainty is carried through. A best \
result without the number of draws behind it is refused.

Examples:
  chiku bench claim --public-mean 481.5 --public-sd 6 --private-mean 470 --private-sd 3 --sota 489.66 --gate 0.05 --n 1,4,8,16,32,64
  chiku bench claim --draws draws.csv --group my-config --private-mean 470 --private-sd 3 --private-n 6 --sota 489.66
  chiku bench claim --public-best 509 --public-sd 5 --public-n 34 --private-mean 469 --private-sd 3 --sota 489.66"
)]
pub struct ClaimArgs {
    /// Mean of the public draws in tokens/s.
    #[arg(long, value_name = "TPS", conflicts_with_all = ["public_best", "draws"])]
    pub public_mean: Option<f64>,
    /// Only the best of the public draws is known; needs --public-n.
    #[arg(long, value_name = "TPS", conflicts_with = "draws")]
    pub public_best: Option<f64>,
    /// Standard deviation between public draws.
    #[arg(long, value_name = "TPS", conflicts_with = "draws")]
    pub public_sd: Option<f64>,
    /// Public draws behind mean and sd, or that the best is the best of.
    #[arg(long, value_name = "N", conflicts_with = "draws")]
    pub public_n: Option<usize>,
    /// CSV of public draws (see `bench import draws`), with --group.
    #[arg(long, value_name = "FILE", requires = "group")]
    pub draws: Option<PathBuf>,
    /// Group of --draws.
    #[arg(long, value_name = "NAME", requires = "draws")]
    pub group: Option<String>,
    /// Mean of private draws.
    #[arg(long, value_name = "TPS")]
    pub private_mean: f64,
    /// Standard deviation between private draws.
    #[arg(long, value_name = "TPS")]
    pub private_sd: f64,
    /// Private draws behind mean and sd.
    #[arg(long, value_name = "N")]
    pub private_n: Option<usize>,
    /// Result to beat.
    #[arg(long, value_name = "TPS")]
    pub sota: f64,
    /// Tolerated drop of the re-run, as a fraction of the public result.
    #[arg(long, default_value_t = 0.05, value_name = "FRACTION")]
    pub gate: f64,
    /// Numbers of draws to answer for.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128], value_name = "N,N,...")]
    pub n: Vec<usize>,
    /// Probability of beating and verifying that `draws_needed` reaches.
    #[arg(long, default_value_t = 0.5, value_name = "P")]
    pub target: f64,
    /// Seed of the inputs' uncertainty.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

impl ClaimArgs {
    fn public(&self) -> Result<Evidence> {
        if let (Some(path), Some(group)) = (&self.draws, &self.group) {
            let groups = bench::import::draws::read(path)?;
            let Some((_, draws)) = groups.iter().find(|(name, _)| name == group) else {
                let names: Vec<&str> = groups.iter().map(|(name, _)| name.as_str()).collect();
                bail!("{}: no group `{group}`; there are: {}", path.display(), names.join(", "));
            };
            return Ok(Evidence::Draws(draws.iter().map(|d| d.tps).collect()));
        }
        let n = self.public_n;
        match (self.public_mean, self.public_best, self.public_sd) {
            (Some(mean), None, Some(sd)) => Ok(Evidence::Summary { mean, sd, n }),
            (None, Some(best), Some(sd)) => Ok(Evidence::Best { best, sd, n }),
            // Without N the maximum is refused whatever else is there.
            (None, Some(best), None) if n.is_none() => Ok(Evidence::Best { best, sd: 0.0, n }),
            _ => bail!(
                "the public side is needed: --public-mean and --public-sd, or --public-best, --public-sd and --public-n, or --draws \
                 and --group"
            ),
        }
    }
}

pub fn run(args: &ClaimArgs) -> Result<ExitCode> {
    let private = Evidence::Summary { mean: args.private_mean, sd: args.private_sd, n: args.private_n };
    let rules = Rules { sota: args.sota, gate: args.gate };
    let r = ClaimReport::new(&args.public()?, &private, &rules, &args.n, args.target, args.seed)?;
    if args.json {
        crate::outln!("{}", serde_json::to_string_pretty(&r)?);
        return Ok(ExitCode::SUCCESS);
    }
    crate::outln!(
        "public {:.2} (sd {:.2}), private {:.2} (sd {:.2})",
        r.public.mean,
        r.public.sd,
        r.private.mean,
        r.private.sd
    );
    if let Some(l) = &r.luck {
        let expected = l.expected_luck;
        crate::outln!(
            "best of {}: {:.2} = honest mean {:.2} + luck {:.2} (expected luck {expected:.2})",
            l.n,
            l.best,
            l.honest_mean,
            l.luck
        );
    }
    let interval = r.ceiling_interval.map_or_else(String::new, |[low, high]| format!(" [{low:.1}, {high:.1}]"));
    crate::outln!("ceiling (an average private run still verifies): {:.1}{interval} (projected)", r.ceiling);
    crate::outln!("private result needed: {:.2}", r.private_needed);
    crate::outln!("{:>6} {:>9} {:>7} {:>8} {:>7}", "draws", "best", "beat", "verify", "both");
    for p in &r.curve {
        let interval = p.p_both_interval.map_or_else(String::new, |[low, high]| format!("  [{low:.3}, {high:.3}]"));
        crate::outln!(
            "{:>6} {:>9.2} {:>7.3} {:>8.3} {:>7.3}{interval}",
            p.n,
            p.expected_best,
            p.p_beat,
            p.p_verify,
            p.p_both
        );
    }
    crate::outln!("optimum: {} draws, {:.3}", r.optimum.n, r.optimum.p_both);
    match r.draws_needed {
        Some(n) => crate::outln!("draws needed for {}: {n}", r.target),
        None => crate::outln!("no number of draws reaches {}", r.target),
    }
    if let Some(why) = &r.uncertainty_missing {
        crate::errln!("warning: the inputs count as certain: {why}");
    }
    Ok(ExitCode::SUCCESS)
}
