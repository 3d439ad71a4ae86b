//! Calibration text of `chiku bake quantize --method gptq`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use bake::gptq::{Calibration, DAMPING, GptqOptions, Order};
use clap::{Args, ValueEnum};
use ppl::jsonl::{self, Line};
use runtime::checkpoint::Checkpoint;
use runtime::tokenizer::{TOKENIZER_FILE, Tokenizer};

#[derive(Args)]
pub struct CalibrationArgs {
    /// For gptq: JSONL of sequences like those that the model will see (`token_ids`, `text` or `prompt` in each line); not the
    /// records that the result is judged by.
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Tokens of the file to calibrate on, from its beginning [default: all].
    #[arg(long, value_name = "N", requires = "calibration")]
    pub calibration_tokens: Option<usize>,
    /// Share of the mean energy of a linear's inputs that is added to each of them.
    #[arg(long, default_value_t = DAMPING, value_name = "F", requires = "calibration")]
    pub damping: f64,
    /// Order in which the inputs of a linear are quantised.
    #[arg(long, value_enum, default_value = "natural", requires = "calibration")]
    pub order: OrderArg,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum OrderArg {
    /// As they stand; scales follow the corrected weights.
    Natural,
    /// The one with the most energy first; scales are fixed before.
    Activation,
}

impl CalibrationArgs {
    /// What the options ask for; `None` without a file.
    pub fn read(&self, model: &Checkpoint) -> Result<Option<GptqOptions>> {
        let Some(path) = &self.calibration else { return Ok(None) };
        let mut tokenizer = None;
        let mut sequences = Vec::new();
        for line in jsonl::read(path)? {
            sequences.push(sequence(&line, model, &mut tokenizer)?);
        }
        let tokens = self.calibration_tokens.unwrap_or(sequences.iter().map(Vec::len).sum());
        let origin = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        let order = match self.order {
            OrderArg::Natural => Order::Natural,
            OrderArg::Activation => Order::Activation,
        };
        let calibration = Calibration::new(&origin, sequences, tokens)?;
        Ok(Some(GptqOptions { calibration, damping: self.damping, order }))
    }
}

/// The tokens of a line; text begins as a prompt does.
fn sequence(line: &Line, model: &Checkpoint, tokenizer: &mut Option<Tokenizer>) -> Result<Vec<u32>> {
    if let Some(ids) = line.token_ids("token_ids", Some(model.config().vocab_size))? {
        return Ok(ids);
    }
    let text = match line.text("text")? {
        Some(text) => text,
        None => match line.text("prompt")? {
            Some(text) => text,
            None => return Err(line.bad("token_ids", "`token_ids`, `text` or `prompt`", "none of them").into()),
        },
    };
    let tokenizer = match tokenizer {
        Some(tokenizer) => tokenizer,
        None if model.file(TOKENIZER_FILE).is_none() => {
            bail!("{}: there is no {TOKENIZER_FILE} to read text; give `token_ids` instead", model.dir().display())
        }
        None => tokenizer.insert(Tokenizer::open(model.dir())?),
    };
    Ok(tokenizer.encode(text)?)
}
