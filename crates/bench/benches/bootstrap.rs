//! `cargo bench -p bench`: 10 000 hierarchical resamples of 32 runs x 128 prompts on one core, with a fixed and a random prompt set.

use std::hint::black_box;
use std::time::Instant;

use bench::simulate::Scenario;
use bench::stats::hierarchy::{HierarchyOptions, Prompts, Redraw};
use bench::stats::{BootstrapOptions, Draws};

const ROUNDS: usize = 5;

fn main() {
    let scenario = Scenario { nodes: 32, processes: 1, prompts: 128, ..Scenario::default() };
    let hierarchy = scenario.hierarchy(&mut Draws::new(1)).expect("a possible scenario");
    let bootstrap = BootstrapOptions { resamples: 10_000, ..Default::default() };
    println!("{:>8} {:>8} {:>10} {:>10}", "prompts", "redraw", "min ms", "median");
    for (prompts, redraw) in
        [(Prompts::Fixed, Redraw::Highest), (Prompts::Random, Redraw::Highest), (Prompts::Random, Redraw::Every)]
    {
        let options = HierarchyOptions { bootstrap, prompts, redraw };
        let mut times: Vec<f64> = (0..ROUNDS)
            .map(|_| {
                let started = Instant::now();
                black_box(hierarchy.tokens_per_s(&options).expect("an interval"));
                started.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{:>8} {:>8} {:>10.1} {:>10.1}",
            format!("{prompts:?}"),
            format!("{redraw:?}"),
            times[0],
            times[ROUNDS / 2]
        );
    }
}
