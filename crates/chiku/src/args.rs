//! Arguments that several commands share.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use runtime::checkpoint::Checkpoint;
use runtime::{Engine, EngineOptions, Model, Precision};

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
    /// `f32`: plain code that can be checked by reading. `native`: the fastest with f32 activations. `int8`: activations rounded to int8
    /// where they meet packed weights, fastest for drafts on int4 checkpoints.
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
    Int8,
}

impl From<PrecisionArg> for Precision {
    fn from(p: PrecisionArg) -> Precision {
        match p {
            PrecisionArg::F32 => Precision::F32,
            PrecisionArg::Native => Precision::Native,
            PrecisionArg::Int8 => Precision::Int8,
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
