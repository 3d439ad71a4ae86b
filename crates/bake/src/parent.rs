//! What a bake works on: a checkpoint on disk, or the result of a plan that was not carried out.
//!
//! A recipe chains bakes: each step is planned against the [`Parent`] that the step before describes, and only the last plan is
//! carried out. No intermediate checkpoint is written, and memory stays that of one bake.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use runtime::checkpoint::{Checkpoint, KEEPSET_FILE, Keepset};
use runtime::config::ModelConfig;
use serde_json::Value;

use crate::error::Result;
use crate::plan::Plan;
use crate::source::Source;

/// The input of a bake.
pub struct Parent {
    dir: PathBuf,
    config: ModelConfig,
    json: Value,
    prefix: String,
    keepset: Option<Keepset>,
    stop_ids: Vec<u32>,
    sources: Vec<Source>,
}

impl Parent {
    /// A checkpoint on disk.
    pub fn open(checkpoint: &Checkpoint) -> Result<Parent> {
        Ok(Parent {
            dir: checkpoint.dir().to_path_buf(),
            config: checkpoint.config().clone(),
            json: checkpoint.config_json().clone(),
            prefix: checkpoint.prefix().to_string(),
            keepset: checkpoint.keepset().cloned(),
            stop_ids: checkpoint.generation().stop_ids.clone(),
            sources: Source::all(checkpoint)?,
        })
    }

    /// What `plan`, made for `before`, describes.
    pub fn planned(plan: Plan, before: &Parent) -> Result<Parent> {
        let config = ModelConfig::from_json(&plan.config, &before.dir.join("config.json"))?;
        let made = plan.files.iter().find(|(name, _)| name == KEEPSET_FILE);
        let keepset = match made {
            Some((name, bytes)) => Some(Keepset::from_bytes(bytes, Path::new(name))?),
            None => before.keepset.clone().filter(|_| plan.inherited_keepset.is_some()),
        };
        let jobs = plan.jobs.into_iter().map(Arc::new);
        let sources = jobs
            .flat_map(|job| (0..job.outputs.len()).map(|o| Source::planned(&job, o, &before.dir)).collect::<Vec<_>>());
        Ok(Parent {
            dir: before.dir.clone(),
            config,
            prefix: plan.prefix,
            json: plan.config,
            keepset,
            stop_ids: before.stop_ids.clone(),
            sources: sources.collect(),
        })
    }

    /// The directory on disk, for side files and messages.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The resolved configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// `config.json`.
    pub fn config_json(&self) -> &Value {
        &self.json
    }

    /// What stands before the text model's tensor names.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The keepset of a pruned head.
    pub fn keepset(&self) -> Option<&Keepset> {
        self.keepset.as_ref()
    }

    /// Tokens that end a generation.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Every tensor, in order.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }
}
