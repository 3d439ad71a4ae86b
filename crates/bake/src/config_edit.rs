//! Edits of `config.json` that more than one bake makes. Fields that no edit touches keep their value and place.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::parent::Parent;

/// A configuration under edit.
pub(crate) struct Config {
    path: PathBuf,
    json: Value,
}

impl Config {
    pub(crate) fn new(parent: &Parent) -> Config {
        Config { path: parent.dir().join("config.json"), json: parent.config_json().clone() }
    }

    pub(crate) fn into_json(self) -> Value {
        self.json
    }

    fn wrong(&self, field: &str, expected: &'static str) -> Error {
        Error::Config { path: self.path.clone(), field: field.to_string(), expected }
    }

    pub(crate) fn root(&mut self) -> Result<&mut Map<String, Value>> {
        let error = self.wrong("(top)", "an object");
        self.json.as_object_mut().ok_or(error)
    }

    /// The object that holds the text fields: `text_config`, or the top of a text-only configuration.
    pub(crate) fn text(&mut self) -> Result<&mut Map<String, Value>> {
        let error = self.wrong("text_config", "an object");
        let root = self.root()?;
        if !root.contains_key("text_config") {
            return Ok(root);
        }
        root.get_mut("text_config").and_then(Value::as_object_mut).ok_or(error)
    }

    /// `tie_word_embeddings`, in both places.
    pub(crate) fn set_tied(&mut self, tied: bool) -> Result<()> {
        self.root()?.insert("tie_word_embeddings".into(), tied.into());
        self.text()?.insert("tie_word_embeddings".into(), tied.into());
        Ok(())
    }

    /// Adds a dense module to the ignore list of `quantization_config`, where there is one.
    pub(crate) fn ignore_module(&mut self, module: &str) -> Result<()> {
        let q = self.root()?.get_mut("quantization_config").and_then(Value::as_object_mut);
        if let Some(list) = q.and_then(|q| q.get_mut("ignore")).and_then(Value::as_array_mut)
            && !list.iter().any(|m| m == module)
        {
            list.push(module.into());
        }
        Ok(())
    }

    /// Every module name or pattern of `quantization_config`: ignore list and targets. `edit` returns what becomes of one, which
    /// may be nothing or several.
    pub(crate) fn edit_modules(&mut self, edit: impl Fn(&str) -> Vec<String>) -> Result<()> {
        let Some(q) = self.root()?.get_mut("quantization_config").and_then(Value::as_object_mut) else {
            return Ok(());
        };
        let edit_list = |list: Option<&mut Value>| {
            if let Some(list) = list.and_then(Value::as_array_mut) {
                let old = std::mem::take(list);
                list.extend(old.into_iter().flat_map(|v| match v.as_str() {
                    Some(s) => edit(s).into_iter().map(Value::from).collect(),
                    None => vec![v],
                }));
            }
        };
        edit_list(q.get_mut("ignore"));
        if let Some(groups) = q.get_mut("config_groups").and_then(Value::as_object_mut) {
            for group in groups.values_mut() {
                edit_list(group.get_mut("targets"));
            }
            // A group that lost all its targets would stand for nothing.
            groups.retain(|_, g| g.get("targets").and_then(Value::as_array).is_none_or(|t| !t.is_empty()));
        }
        Ok(())
    }
}
