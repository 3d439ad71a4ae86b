//! Prompt sets, read from our JSONL (`{"id", "prompt"}` a line) or from the field's sharegpt JSON (a list of
//! `{"id", "conversations": [{"from": "human", "value"}, ...]}`). What the file is decides its first character.
//!
//! A prompt knows its [`Form`]: raw text that the model continues, or a turn of a chat that goes through the chat template. The
//! two files imply one each; a caller may override it. Ids are unique, no prompt is empty, and the order is the file's.
//!
//! A set is *public* if its bytes are those of one that everybody has ([`PUBLIC_SETS`]). Any other is private: outside of it its
//! prompts are known by their number in the file, and a record of it holds neither the file's name nor its ids, only hash and counts.

use std::collections::HashMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::protocol;
use ppl::jsonl;

/// blake3 of the sets that everybody has: this repository's two, and the field's 128 prompts (`eval_prompts_sharegpt.json`).
pub const PUBLIC_SETS: [&str; 3] = [
    "dced8c18d32a1f4539ec21bd866dc97fe8aaa0b2035055540c2289bb6cfc79a1",
    "3a7162661a3608da483f619d38223551bf5682337e358c51922b079842049f83",
    "f0ff12696af7a667bb24b6d150ff47d541034d9dbe18e1aaf543d01daec48275",
];

/// How a prompt becomes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// `<bos>` and the text.
    Raw,
    /// The text as the user's turn of the chat template.
    Chat,
}

/// One prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Identifier, unique in the set.
    pub id: String,
    /// The text.
    pub text: String,
    /// How it becomes tokens.
    pub form: Form,
}

/// A set of prompts with what identifies it. Serializes without the prompts: a private set leaves no trace but its hash and
/// count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PromptSet {
    /// File name, without directories; `private` for a private set.
    pub name: String,
    /// Not one of [`PUBLIC_SETS`].
    #[serde(default)]
    pub private: bool,
    /// blake3 of the file, 64 hexadecimal digits.
    pub blake3: String,
    /// Prompts in the file.
    pub count: usize,
    /// The prompts, in the file's order.
    #[serde(skip)]
    pub prompts: Vec<Prompt>,
}

impl PromptSet {
    /// Reads a file in either format.
    ///
    /// # Errors
    /// Names the file and the line or field: not JSON, no id, an empty or missing text, an id used twice, no prompts.
    pub fn read(path: &Path) -> Result<PromptSet> {
        let text = jsonl::read_text(path)?;
        let prompts = match text.trim_start().as_bytes().first() {
            Some(b'[') => sharegpt(path, &text)?,
            None => return Err(Error::NoPrompts { path: path.to_path_buf() }),
            Some(_) => lines(path, &text)?,
        };
        if prompts.is_empty() {
            return Err(Error::NoPrompts { path: path.to_path_buf() });
        }
        let blake3 = blake3::hash(text.as_bytes()).to_hex().to_string();
        let private = !PUBLIC_SETS.contains(&blake3.as_str());
        let file = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let name = if private { "private".to_string() } else { file };
        Ok(PromptSet { name, private, blake3, count: prompts.len(), prompts })
    }

    /// The same prompts, all in one form.
    pub fn with_form(mut self, form: Form) -> PromptSet {
        self.prompts.iter_mut().for_each(|p| p.form = form);
        self
    }

    /// The first `n` prompts; `count` stays that of the file.
    pub fn take(mut self, n: usize) -> PromptSet {
        self.prompts.truncate(n);
        self
    }

    /// How records name a prompt: its id, or its number in the file where the set is private.
    pub fn label(&self, index: usize) -> String {
        match self.private {
            true => index.to_string(),
            false => self.prompts[index].id.clone(),
        }
    }

    /// Turns every prompt into tokens by the caller's tokenizer and template, under its [`PromptSet::label`].
    ///
    /// # Errors
    /// Of `encode`.
    pub fn encode(&self, mut encode: impl FnMut(&Prompt) -> Result<Vec<u32>>) -> Result<Vec<ppl::paths::Prompt>> {
        let encoded = |(i, p): (usize, &Prompt)| Ok(ppl::paths::Prompt { id: self.label(i), token_ids: encode(p)? });
        self.prompts.iter().enumerate().map(encoded).collect()
    }

    /// The prompts as texts, for a server that has a tokenizer and a template of its own.
    pub fn texts(&self) -> Vec<protocol::Prompt> {
        let text = |(i, p): (usize, &Prompt)| {
            let input = match p.form {
                Form::Raw => protocol::Input::Text(p.text.clone()),
                Form::Chat => protocol::Input::Chat(p.text.clone()),
            };
            protocol::Prompt { id: self.label(i), input }
        };
        self.prompts.iter().enumerate().map(text).collect()
    }
}

fn lines(path: &Path, text: &str) -> Result<Vec<Prompt>> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut prompts = Vec::new();
    for line in jsonl::parse(path, text)? {
        let id = line.key("id")?.ok_or_else(|| line.bad("id", "a string or a number", "nothing"))?;
        let text = line.text("prompt")?.ok_or_else(|| line.bad("prompt", "a string", "nothing"))?.to_string();
        if text.is_empty() {
            return Err(line.bad("prompt", "at least one character", "an empty string").into());
        }
        if let Some(first) = seen.insert(id.clone(), line.number) {
            return Err(line.duplicate(&id, first).into());
        }
        prompts.push(Prompt { id, text, form: Form::Raw });
    }
    Ok(prompts)
}

fn sharegpt(path: &Path, text: &str) -> Result<Vec<Prompt>> {
    let items: Vec<Value> =
        serde_json::from_str(text).map_err(|source| Error::Json { path: path.to_path_buf(), source })?;
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut prompts = Vec::new();
    for (i, item) in items.iter().enumerate() {
        let bad = |field: &str, expected: &'static str, found: Option<&Value>| Error::Field {
            path: path.to_path_buf(),
            field: format!("[{i}]{field}"),
            expected,
            found: found.map_or("nothing".into(), jsonl::describe),
        };
        let id = match item.get("id") {
            Some(Value::String(s)) => s.clone(),
            Some(Value::Number(n)) => n.to_string(),
            other => return Err(bad(".id", "a string or a number", other)),
        };
        // The first turn is the prompt; what follows is an answer of another model, which the protocol ignores.
        let turn = item.get("conversations").and_then(|c| c.get(0));
        let turn = turn.ok_or_else(|| bad(".conversations", "a list with a first turn", item.get("conversations")))?;
        let from = turn.get("from");
        if !matches!(from.and_then(Value::as_str), Some("human" | "user")) {
            return Err(bad(".conversations[0].from", "\"human\" or \"user\"", from));
        }
        let value = turn.get("value");
        let text = value.and_then(Value::as_str).filter(|t| !t.is_empty());
        let text = text.ok_or_else(|| bad(".conversations[0].value", "a text that is not empty", value))?;
        if let Some(first) = seen.insert(id.clone(), i) {
            let found = Value::String(format!("{id}, as in [{first}]"));
            return Err(bad(".id", "an id that no other item has", Some(&found)));
        }
        prompts.push(Prompt { id, text: text.to_string(), form: Form::Chat });
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<PromptSet> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prompts.json");
        std::fs::write(&path, text).unwrap();
        PromptSet::read(&path)
    }

    fn message(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    #[test]
    fn lines_are_raw_text() {
        let set = read("{\"id\": \"a\", \"prompt\": \"One\"}\n{\"id\": 2, \"prompt\": \"Two\\n\"}\n").unwrap();
        let expected = [("a", "One"), ("2", "Two\n")].map(|(id, text)| Prompt {
            id: id.into(),
            text: text.into(),
            form: Form::Raw,
        });
        assert_eq!(set.prompts, expected);
        assert_eq!((set.name.as_str(), set.count), ("private", 2));
        let chat = set.clone().with_form(Form::Chat).take(1);
        assert_eq!((chat.prompts.len(), chat.count, chat.prompts[0].form), (1, 2, Form::Chat));
    }

    #[test]
    fn sharegpt_is_a_chat_and_only_its_first_turn_counts() {
        let set = read(
            r#" [{"id": "a", "conversations": [{"from": "human", "value": "One"}, {"from": "gpt", "value": ""}], "x": 1},
                {"id": 7, "conversations": [{"from": "user", "value": "Two"}]}]"#,
        )
        .unwrap();
        let expected = [("a", "One"), ("7", "Two")].map(|(id, text)| Prompt {
            id: id.into(),
            text: text.into(),
            form: Form::Chat,
        });
        assert_eq!(set.prompts, expected);
    }

    #[test]
    fn the_hash_is_of_the_bytes_of_the_file() {
        let text = "{\"id\": \"a\", \"prompt\": \"One\"}";
        let (a, b) = (read(text).unwrap(), read(&format!("{text}\n")).unwrap());
        assert_eq!(a.blake3, blake3::hash(text.as_bytes()).to_hex().to_string());
        assert_eq!(a.prompts, b.prompts);
        assert_ne!(a.blake3, b.blake3);
    }

    #[test]
    fn a_serialized_set_does_not_hold_its_prompts() {
        let json = serde_json::to_string(&read("{\"id\": \"a\", \"prompt\": \"Secret\"}").unwrap()).unwrap();
        assert!(!json.contains("Secret") && json.contains("\"count\":1"), "{json}");
    }

    #[test]
    fn encoding_keeps_the_order_and_the_ids_of_public_sets_only() {
        let set = read("{\"id\": \"a\", \"prompt\": \"One\"}\n{\"id\": \"b\", \"prompt\": \"Four\"}").unwrap();
        let encoded = |set: &PromptSet| -> Vec<(String, u32)> {
            let prompts = set.encode(|p| Ok(vec![2, p.text.len() as u32])).unwrap();
            prompts.into_iter().map(|p| (p.id, p.token_ids[1])).collect()
        };
        assert!(set.private);
        assert_eq!(encoded(&set), [("0".into(), 3), ("1".into(), 4)]);
        assert_eq!(encoded(&PromptSet { private: false, ..set.clone() }), [("a".into(), 3), ("b".into(), 4)]);
        let texts = set.with_form(Form::Chat).texts();
        assert_eq!((texts[1].id.as_str(), &texts[1].input), ("1", &protocol::Input::Chat("Four".into())));
    }

    #[test]
    fn the_repository_s_sets_are_public() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../prompts");
        for name in ["public.jsonl", "heldout.jsonl"] {
            let set = PromptSet::read(&root.join(name)).unwrap();
            assert_eq!((set.private, set.name.as_str()), (false, name), "{}", set.blake3);
        }
    }

    #[test]
    fn bad_files_are_named_with_the_place() {
        assert!(message("").contains("prompts.json: no prompts"));
        assert!(message("[]").contains("prompts.json: no prompts"));
        assert!(message("[{]").contains("prompts.json: not valid JSON"));
        assert!(message("hello").contains("prompts.json:1: not valid JSON"));
        assert!(message("{\"prompt\": \"x\"}").contains("prompts.json:1: field `id`"));
        assert!(message("{\"id\": \"a\"}").contains("field `prompt`: expected a string, found nothing"));
        assert!(message("{\"id\": \"a\", \"prompt\": \"\"}").contains("an empty string"));
        assert!(
            message("{\"id\": 1, \"prompt\": \"x\"}\n{\"id\": \"1\", \"prompt\": \"x\"}")
                .contains("`1` was already used on line 1")
        );
        assert!(message(r#"[{"conversations": []}]"#).contains("field `[0].id`"));
        assert!(
            message(r#"[{"id": "a"}]"#)
                .contains("field `[0].conversations`: expected a list with a first turn, found nothing")
        );
        assert!(message(r#"[{"id": "a", "conversations": []}]"#).contains("found a list of 0"));
        assert!(
            message(r#"[{"id": "a", "conversations": [{"from": "gpt", "value": "x"}]}]"#)
                .contains("`[0].conversations[0].from`")
        );
        assert!(message(r#"[{"id": "a", "conversations": [{"from": "human", "value": 3}]}]"#).contains("found 3"));
        let item = r#"{"id": "a", "conversations": [{"from": "human", "value": "x"}]}"#;
        assert!(
            message(&format!("[{item}, {item}]")).contains("field `[1].id`: expected an id that no other item has")
        );
    }
}
