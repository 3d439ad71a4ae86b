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
/// Largest template source, in bytes; real ones have about twenty thousand.
const SOURCE_LIMIT: usize = 1 << 17;
/// Steps that a rendering may take: a template that loops for ever is an error, not a hang.
const FUEL: u64 = 20_000_000;
/// Stack of the thread that compiles and renders: templates nest as deep as their author likes. Only what is used is ever touched.
const STACK: usize = 512 << 20;

/// Runs `work` on a thread with a large stack.
fn deep<T: Send>(path: &Path, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work);
        let thread = thread.map_err(Error::io(path, "start a thread for the chat template of"))?;
        thread.join().unwrap_or_else(|_| {
            Err(Error::Template { path: path.to_path_buf(), message: "the template engine failed on it".into() })
        })
    })
}

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
        let config = if files::present(&config_path) { files::read_object(&config_path)? } else { Value::Null };
        let template_path = dir.join(TEMPLATE_FILE);
        let (path, source) = match files::read_text_if_present(&template_path)? {
            Some(source) => (template_path, source),
            None => match config.get("chat_template") {
                Some(Value::String(source)) => (config_path, source.clone()),
                None | Some(Value::Null) => return Ok(None),
                Some(_) => {
                    let message =
                        "`chat_template` is not a string; name one template in chat_template.jinja".to_string();
                    return Err(Error::Template { path: config_path, message });
                }
            },
        };
        if source.len() > SOURCE_LIMIT {
            return Err(Error::TooLarge { path, found: source.len() as u64, limit: SOURCE_LIMIT as u64 });
        }
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| error(&path, &e))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<String, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        deep(&path, || environment.add_template_owned(NAME, source).map_err(|e| error(&path, &e)))?;
        let (bos, eos) = (special(&config, "bos_token"), special(&config, "eos_token"));
        Ok(Some(ChatTemplate { environment, path, bos, eos }))
    }

    /// The prompt for `messages`, ending where the model's turn begins. It holds its control tokens, `<bos>` among them.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        deep(&self.path, || self.render_here(messages))
    }

    fn render_here(&self, messages: &[Message]) -> Result<String> {
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
    fn templates_that_never_end_or_nest_without_end_are_errors() {
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}{% endfor %}{% endfor %}";
        let template = with(&[(TEMPLATE_FILE, endless)]).unwrap().unwrap();
        assert!(template.render_user("x").unwrap_err().to_string().contains(TEMPLATE_FILE));
        let deep = format!("{{{{ 1{} }}}}", "+1".repeat(60_000));
        // Refused or rendered, never a crash.
        let _ = with(&[(TEMPLATE_FILE, &deep)]).map(|t| t.unwrap().render_user("x"));
        let large = " ".repeat(SOURCE_LIMIT + 1);
        assert!(matches!(with(&[(TEMPLATE_FILE, &large)]), Err(Error::TooLarge { .. })));
        let list = r#"{"chat_template":[{"name":"default","template":"x"}]}"#;
        assert!(with(&[(CONFIG_FILE, list)]).err().unwrap().to_string().contains("chat_template"));
    }

    #[test]
    fn bad_templates_name_the_file_and_line() {
        let message = with(&[(TEMPLATE_FILE, "a\n{% if %}")]).err().unwrap().to_string();
        assert!(message.contains(TEMPLATE_FILE) && message.contains("line 2"), "{message}");
        assert!(with(&[]).unwrap().is_none());
    }
}
