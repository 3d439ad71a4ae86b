//! The library without the program: `cargo run -p bake --example quantize -- PARENT TARGET [GROUP]`.

use std::path::PathBuf;

use bake::inspect::{self, InspectOptions};
use bake::quantize::{self, QuantizeOptions, Strategy};
use bake::{Context, Result};
use runtime::checkpoint::Checkpoint;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(parent), Some(target)) = (args.next().map(PathBuf::from), args.next().map(PathBuf::from)) else {
        eprintln!("usage: quantize PARENT TARGET [GROUP]");
        return Ok(());
    };
    let strategy = args.next().and_then(|g| g.parse().ok()).map_or(Strategy::Channel, Strategy::Group);
    let options = QuantizeOptions { strategy, ..Default::default() };
    let report = quantize::run(&Checkpoint::open(&parent)?, &target, &options, &Context::quiet())?;
    for note in &report.lineage.notes {
        println!("note: {note}");
    }
    let strict = InspectOptions { strict: true, against: None };
    print!("{}", inspect::run(&Checkpoint::open(&target)?, &strict, &Context::quiet())?);
    Ok(())
}
