//! The command line.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use runtime::checkpoint::Checkpoint;
use runtime::{Engine, EngineOptions, Model, Precision};

use crate::commands::{bake, bench, demo, doctor, generate, logits, ppl, verify};

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
    /// The gate: perplexity under a cap, and greedy identity between computational paths.
    Verify(verify::VerifyArgs),
    /// Measure tokens per second.
    #[command(subcommand_required = false, args_conflicts_with_subcommands = true)]
    Bench(Box<bench::BenchArgs>),
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
            Command::Verify(args) => verify::run(&args, quiet),
            Command::Bench(args) => bench::run(&args, quiet),
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
            Command::Verify(args) => args.json,
            Command::Bench(args) => args.json(),
            Command::Doctor(args) => args.json,
        }
    }
}

/// Which model, and how to run it.
#[derive(Args, Clone)]
pub struct ModelArgs {
    /// A checkpoint directory in Hugging Face layout, or `nano` for the embedded model.
    #[arg(long, value_name = "DIR|nano")]
    pub model: String,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// How to run a model.
#[derive(Args, Clone)]
pub struct EngineArgs {
    /// Where to compute. `auto` takes the best there is.
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: Backend,
    /// `f32`: plain code that can be checked by reading. `native`: the fastest code for this machine.
    #[arg(long, value_enum, default_value = "native")]
    pub precision: PrecisionArg,
    /// Threads; 0 for one each core. Changes speed, never a bit.
    #[arg(long, default_value_t = 0, value_parser = threads, value_name = "N")]
    pub threads: usize,
    /// Most positions of a sequence [default: what the model allows].
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
}

/// A number of threads. More than any machine has would take minutes to start.
pub fn threads(text: &str) -> Result<usize, String> {
    const MOST: usize = 1024;
    text.parse().ok().filter(|&n| n <= MOST).ok_or_else(|| format!("a whole number up to {MOST} is needed"))
}

/// A token id; spaces around it are allowed.
pub fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| format!("`{}` is not a token id (a whole number from 0 on)", text.trim()))
}

/// Where to compute.
#[derive(Clone, Copy, ValueEnum, PartialEq)]
pub enum Backend {
    /// The best there is; the CPU in this version.
    Auto,
    /// The processor.
    Cpu,
}

/// `--precision`.
#[derive(Clone, Copy, ValueEnum)]
pub enum PrecisionArg {
    F32,
    Native,
}

impl From<PrecisionArg> for Precision {
    fn from(p: PrecisionArg) -> Precision {
        match p {
            PrecisionArg::F32 => Precision::F32,
            PrecisionArg::Native => Precision::Native,
        }
    }
}

impl EngineArgs {
    /// An engine for a loaded model.
    pub fn engine(&self, model: &Arc<Model>) -> Result<Engine> {
        let options = EngineOptions { precision: self.precision.into(), threads: self.threads, context: self.context };
        Ok(Engine::new(model.clone(), &options)?)
    }
}

impl ModelArgs {
    /// The directory.
    pub fn dir(&self) -> Result<PathBuf> {
        model_dir(&self.model)
    }

    /// The loaded model.
    pub fn load(&self) -> Result<Arc<Model>> {
        Ok(Arc::new(Model::load(Checkpoint::open(&self.dir()?)?)?))
    }
}

/// The directory of a model as named on the command line.
pub fn model_dir(model: &str) -> Result<PathBuf> {
    let dir = runtime::nano::resolve(model)?;
    if !dir.exists() {
        bail!(
            "{}: no such directory; give a checkpoint directory (hub names are not fetched), or `nano`",
            dir.display()
        );
    }
    Ok(dir)
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
