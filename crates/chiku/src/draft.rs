//! Options of speculative decoding, shared by the commands that decode.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use bench::configuration::Configuration;
use bench::environment::CheckpointHash;
use clap::{Args, ValueEnum};
use runtime::Model;
use runtime::drafter::{Convention, Drafter, MtpDrafter, MtpOptions, NgramDrafter};
use runtime::speculate::Shape;

/// How to draft.
#[derive(Args, Clone)]
pub struct DraftArgs {
    /// Who drafts: the MTP drafter of --drafter, look-up in the text so far, or nobody [default: mtp with --drafter, else none].
    #[arg(long, value_enum, value_name = "KIND")]
    pub draft: Option<DraftKind>,
    /// Directory of a Gemma 4 assistant (MTP drafter), or `nano` for the embedded model's.
    #[arg(long, value_name = "DIR|nano")]
    pub drafter: Option<String>,
    /// Drafts a step [default: 7, or as many as --tree has depths]; at most 15.
    #[arg(long, value_name = "K")]
    pub k: Option<usize>,
    /// Branches at each depth of the chain, for example 1,1,1,1,0,0,0; missing depths have none. At most 16 rows a step in all.
    #[arg(long, value_delimiter = ',', value_name = "B,B,...")]
    pub tree: Option<Vec<usize>>,
    /// Position and window of the drafter's query.
    #[arg(long, value_enum, default_value = "hf")]
    pub draft_convention: ConventionArg,
    /// Clusters of the drafter's head to look into; 0 for the full head [default: the drafter's own number].
    #[arg(long, value_name = "N")]
    pub centroids: Option<usize>,
}

/// `--draft`.
#[derive(Clone, Copy, ValueEnum, PartialEq)]
pub enum DraftKind {
    /// The Gemma 4 assistant.
    Mtp,
    /// What followed the last tokens before.
    Ngram,
    /// Plain decoding.
    None,
}

/// `--draft-convention`.
#[derive(Clone, Copy, ValueEnum)]
pub enum ConventionArg {
    /// transformers: the newest token's position, window + 1 keys.
    Hf,
    /// vLLM: the hidden state's position, window keys.
    Vllm,
}

/// A drafter and the shape of its drafts.
pub struct Drafting {
    pub drafter: Box<dyn Drafter>,
    pub shape: Shape,
}

/// Drafts a step where nothing else is said: the field's number.
const DEFAULT_K: usize = 7;

impl DraftArgs {
    /// The embedded model's drafter, in the field's star.
    pub fn nano() -> DraftArgs {
        DraftArgs {
            draft: None,
            drafter: Some("nano".into()),
            k: Some(DEFAULT_K),
            tree: Some(vec![1, 1, 1, 1]),
            draft_convention: ConventionArg::Hf,
            centroids: None,
        }
    }

    fn kind(&self) -> DraftKind {
        match (self.draft, &self.drafter) {
            (Some(kind), _) => kind,
            (None, Some(_)) => DraftKind::Mtp,
            (None, None) => DraftKind::None,
        }
    }

    /// The shape asked for.
    pub fn shape(&self) -> Result<Shape> {
        let mut branches = self.tree.clone().unwrap_or_default();
        let depth = self.k.unwrap_or(if self.tree.is_some() { branches.len() } else { DEFAULT_K });
        if branches.len() > depth {
            bail!("--tree has {} depths, but --k is {depth}; a branch needs a draft beside it", branches.len());
        }
        if depth > runtime::speculate::MAX_DEPTH {
            return Ok(Shape::chain(depth)?);
        }
        branches.resize(depth, 0);
        Ok(Shape::star(branches)?)
    }

    /// The drafter for `model`; `None` for plain decoding, which takes none of the other options.
    pub fn drafting(&self, model: &Model) -> Result<Option<Drafting>> {
        let kind = self.kind();
        if kind != DraftKind::Mtp && (self.drafter.is_some() || self.centroids.is_some()) {
            bail!("--drafter and --centroids belong to --draft mtp");
        }
        if kind == DraftKind::None {
            if self.k.is_some() || self.tree.is_some() {
                bail!("--k and --tree need a drafter: --drafter DIR, or --draft ngram");
            }
            return Ok(None);
        }
        let shape = self.shape()?;
        let drafter: Box<dyn Drafter> = match (kind, &self.drafter) {
            (DraftKind::Ngram, _) => {
                if self.tree.as_ref().is_some_and(|t| t.iter().any(|&b| b > 0)) {
                    bail!("--tree: n-gram look-up has one candidate a depth, so no branches; use --draft mtp");
                }
                Box::new(NgramDrafter)
            }
            (_, None) => bail!("--draft mtp needs the drafter's directory: --drafter DIR"),
            (_, Some(drafter)) => {
                let dir = drafter_dir(drafter)?;
                let convention = match self.draft_convention {
                    ConventionArg::Hf => Convention::Hf,
                    ConventionArg::Vllm => Convention::Vllm,
                };
                Box::new(MtpDrafter::load(&dir, model, MtpOptions { convention, centroids: self.centroids })?)
            }
        };
        Ok(Some(Drafting { drafter, shape }))
    }

    /// The drafter's files by hash; `None` where nobody drafts, or look-up does.
    pub fn checkpoint(&self) -> Result<Option<CheckpointHash>> {
        let Some(drafter) = self.drafter.as_ref().filter(|_| self.kind() == DraftKind::Mtp) else { return Ok(None) };
        let dir = drafter_dir(drafter)?;
        let entries = std::fs::read_dir(&dir).with_context(|| format!("{}: cannot list", dir.display()))?;
        let mut paths = entries.map(|e| e.map(|e| e.path())).collect::<std::io::Result<Vec<PathBuf>>>()?;
        paths.retain(|p| p.extension().is_some_and(|e| e == "safetensors" || e == "json"));
        Ok(Some(CheckpointHash::of_files(drafter.trim_end_matches('/').rsplit('/').next().unwrap_or(drafter), &paths)?))
    }

    /// Adds to a configuration what was set here.
    pub fn describe(&self, configuration: &mut Configuration) {
        configuration.draft = self.draft.and_then(|kind| named(&kind));
        configuration.drafter = self.drafter.clone();
        (configuration.k, configuration.tree, configuration.centroids) = (self.k, self.tree.clone(), self.centroids);
        let vllm = matches!(self.draft_convention, ConventionArg::Vllm);
        configuration.draft_convention = vllm.then(|| named(&self.draft_convention)).flatten();
    }

    /// What a configuration says.
    pub fn configured(configuration: &Configuration) -> Result<DraftArgs> {
        fn value<T: ValueEnum>(field: &str, text: &Option<String>) -> Result<Option<T>> {
            let parse =
                |t: &String| T::from_str(t, false).map_err(|_| anyhow!("{field}: `{t}` is not one of its values"));
            text.as_ref().map(parse).transpose()
        }
        Ok(DraftArgs {
            draft: value("draft", &configuration.draft)?,
            drafter: configuration.drafter.clone(),
            k: configuration.k,
            tree: configuration.tree.clone(),
            draft_convention: value("draft-convention", &configuration.draft_convention)?.unwrap_or(ConventionArg::Hf),
            centroids: configuration.centroids,
        })
    }

    /// For records: what was set, as on the command line.
    pub fn flags(&self, drafting: &Drafting) -> Vec<String> {
        let mut flags = vec![format!("draft={}", drafting.drafter.name()), format!("tree={}", drafting.shape)];
        flags.extend(self.centroids.map(|c| format!("centroids={c}")));
        if self.kind() == DraftKind::Mtp && matches!(self.draft_convention, ConventionArg::Vllm) {
            flags.push("draft-convention=vllm".into());
        }
        flags
    }
}

fn drafter_dir(drafter: &str) -> Result<PathBuf> {
    Ok(match drafter {
        "nano" => runtime::nano::directory()?.join("assistant"),
        dir => PathBuf::from(dir),
    })
}

/// As on the command line.
fn named(value: &impl ValueEnum) -> Option<String> {
    value.to_possible_value().map(|v| v.get_name().to_string())
}
