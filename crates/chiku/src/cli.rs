//! The command line.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::commands::{bake, bench, demo, doctor, generate, gpu_check, logits, ppl, sensitivity, verify};

const HELP: &str =
    "Exit codes: 0 done, 1 a gate failed, 2 usage or input error, 3 the machine lacks what the command needs, 130 \
ended by Ctrl-C.

Examples:
  chiku demo
  chiku generate --model nano --prompt \"Call me\"
  chiku bake quantize --model nano --group 32 --out nano-int4";

/// Decodes Gemma 4 greedily, one request at a time, and proves that it did not break the model.
#[derive(Parser)]
#[command(name = "chiku", version, propagate_version = true, after_help = HELP)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    /// No progress bars and no remarks; results and errors only.
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

#[derive(Subcommand)]
pub enum Command {
    /// The whole story on the embedded model, in a minute, on any machine.
    Demo(demo::DemoArgs),
    /// Checkpoint surgery: quantise, prune the vocabulary, drop layers, look inside.
    #[command(subcommand)]
    Bake(bake::BakeCommand),
    /// Continue a prompt greedily.
    Generate(generate::GenerateArgs),
    /// Logits of given token ids, as safetensors in f32.
    Logits(logits::LogitsArgs),
    /// Perplexity over token records.
    Ppl(ppl::PplArgs),
    /// What a model can do without: layers, bits, and the smallest plan under a perplexity cap.
    #[command(subcommand)]
    Sensitivity(sensitivity::SensitivityCommand),
    /// The gate: perplexity under a cap, and greedy identity between computational paths.
    Verify(verify::VerifyArgs),
    /// Measure tokens per second.
    #[command(subcommand_required = false, args_conflicts_with_subcommands = true)]
    Bench(Box<bench::BenchArgs>),
    /// Test a GPU: are its results what every claim rests on, and how fast is it.
    GpuCheck(gpu_check::GpuCheckArgs),
    /// What this machine can do, and what is missing.
    Doctor(doctor::DoctorArgs),
}

impl Command {
    pub fn run(self, quiet: bool) -> Result<ExitCode> {
        match self {
            Command::Demo(args) => demo::run(&args, quiet),
            Command::Bake(command) => bake::run(&command, quiet),
            Command::Generate(args) => generate::run(&args, quiet),
            Command::Logits(args) => logits::run(&args, quiet),
            Command::Ppl(args) => ppl::run(&args, quiet),
            Command::Sensitivity(command) => sensitivity::run(&command, quiet),
            Command::Verify(args) => verify::run(&args, quiet),
            Command::Bench(args) => bench::run(&args, quiet),
            Command::GpuCheck(args) => gpu_check::run(&args, quiet),
            Command::Doctor(args) => doctor::run(&args),
        }
    }

    /// Whether results go to standard output as JSON.
    pub fn json(&self) -> bool {
        match self {
            Command::Demo(args) => args.json,
            Command::Bake(command) => command.json(),
            Command::Generate(args) => args.json,
            Command::Logits(args) => args.json,
            Command::Ppl(args) => args.json,
            Command::Sensitivity(command) => command.json(),
            Command::Verify(args) => args.json,
            Command::Bench(args) => args.json(),
            Command::GpuCheck(args) => args.json,
            Command::Doctor(args) => args.json,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
