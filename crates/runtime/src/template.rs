//! The chat template of a checkpoint: `chat_template.jinja`, or the `chat_template` of `tokenizer_config.json`.
//!
//! Templates are written for Python's Jinja2 as transformers sets it up (`trim_blocks`, `lstrip_blocks`, Python string
//! methods, `raise_exception`); minijinja runs them with the same settings.

use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, context};
use serde::Serialize;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::files;

const TEMPLATE_FILE: &str = "chat_template.jinja";
const CONFIG_FILE: &str = "tokenizer_config.json";
const NAME: &str = "chat";

/// One turn of a conversation.
#[derive(Debug, Clone, Serialize)]
pub struct Message {
    /// `user`, `assistant` or `system`.
    pub role: String,
    /// Text.
    pub content: String,
}

/// A compiled template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    path: PathBuf,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Reads the template of a checkpoint directory; `None` where it has none.
    pub fn open(dir: &Path) -> Result<Option<ChatTemplate>> {
        let config_path = dir.join(CONFIG_FILE);
        let config = if config_path.exists() { files::read_json(&config_path)? } else { Value::Null };
        let template_path = dir.join(TEMPLATE_FILE);
        let (path, source) = match files::read_text_if_present(&template_path)? {
            Some(source) => (template_path, source),
            None => match config.get("chat_template").and_then(Value::as_str) {
                Some(source) => (config_path, source.to_string()),
                None => return Ok(None),
            },
        };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| error(&path, &e))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<String, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_template_owned(NAME, source).map_err(|e| error(&path, &e))?;
        let (bos, eos) = (special(&config, "bos_token"), special(&config, "eos_token"));
        Ok(Some(ChatTemplate { environment, path, bos, eos }))
    }

    /// The prompt for `messages`, ending where the model's turn begins. It holds its control tokens, `<bos>` among them.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        let template = self.environment.get_template(NAME).map_err(|e| error(&self.path, &e))?;
        let context = context! {
            messages => Serde(messages),
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            add_generation_prompt => true,
        };
        template.render(context).map_err(|e| error(&self.path, &e))
    }

    /// [`ChatTemplate::render`] of one user message.
    pub fn render_user(&self, content: &str) -> Result<String> {
        self.render(&[Message { role: "user".into(), content: content.into() }])
    }
}

/// A special token of `tokenizer_config.json`: a string, or an object with its `content`.
fn special(config: &Value, field: &str) -> String {
    let value = config.get(field);
    let text = value.and_then(|v| v.as_str().or_else(|| v.get("content")?.as_str()));
    text.unwrap_or_default().to_string()
}

fn error(path: &Path, e: &minijinja::Error) -> Error {
    let line = e.line().map(|l| format!(" (line {l})")).unwrap_or_default();
    Error::Template { path: path.to_path_buf(), message: format!("{e}{line}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(files: &[(&str, &str)]) -> Result<Option<ChatTemplate>> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        ChatTemplate::open(dir.path())
    }

    #[test]
    fn nano_wraps_a_turn() {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano"));
        let template = ChatTemplate::open(dir).unwrap().unwrap();
        assert_eq!(template.render_user(" hello ").unwrap(), "<bos><|turn>user\nhello<turn|>\n<|turn>model\n");
    }

    #[test]
    fn python_methods_and_exceptions_work() {
        let config = r#"{"bos_token":{"content":"<b>"},"chat_template":"{{ bos_token }}{% if messages[0]['content'].startswith('x') %}\n{{ raise_exception('no x') }}{% endif %}{{ messages[0]['content'].strip().upper() }}"}"#;
        let template = with(&[(CONFIG_FILE, config)]).unwrap().unwrap();
        assert_eq!(template.render_user(" hi ").unwrap(), "<b>HI");
        assert!(template.render_user("x").unwrap_err().to_string().contains("no x"));
    }

    #[test]
    fn bad_templates_name_the_file_and_line() {
        let message = with(&[(TEMPLATE_FILE, "a\n{% if %}")]).err().unwrap().to_string();
        assert!(message.contains(TEMPLATE_FILE) && message.contains("line 2"), "{message}");
        assert!(with(&[]).unwrap().is_none());
    }
}
