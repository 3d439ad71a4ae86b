//! Text to token ids and back. The tokenizer itself is the `tokenizers` library's; what is added here are errors that name the
//! file, and a stream that never cuts a character in two.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files;

/// File name in a checkpoint directory.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Largest tokenizer file read, in bytes.
const LIMIT: u64 = 256 << 20;

/// A loaded `tokenizer.json`.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
}

impl Tokenizer {
    /// Reads the tokenizer of a checkpoint directory.
    pub fn open(dir: &Path) -> Result<Tokenizer> {
        let path = dir.join(TOKENIZER_FILE);
        let bytes = files::read(&path, LIMIT)?;
        let bad = |message: String| Error::Tokenizer { path: path.clone(), message };
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(&bytes)).map_err(bad)?;
        // A file may carry the truncation and padding of whoever saved it; a prompt is neither cut nor filled up.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| bad(e.to_string()))?;
        let dropout = match inner.get_model() {
            tokenizers::ModelWrapper::BPE(bpe) => bpe.dropout.filter(|&d| d > 0.0),
            _ => None,
        };
        if let Some(dropout) = dropout {
            return Err(bad(format!(
                "its model has a dropout of {dropout}: the same text would give other ids each time"
            )));
        }
        Ok(Tokenizer { inner, path })
    }

    /// Token ids of a text, with `<bos>` or whatever else the tokenizer adds around a document.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    /// Token ids of a text that already holds its control tokens, such as a rendered chat template.
    pub fn encode_verbatim(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, false)
    }

    fn encode_with(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = guarded(|| self.inner.encode(text, add_special)).map_err(|e| self.error(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of a sequence of ids. Control tokens are left out; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut stream = self.stream();
        let mut text = String::new();
        for &id in ids {
            text += &stream.push(id)?;
        }
        Ok(text + &stream.finish())
    }

    /// A decoder for ids that arrive one by one.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, last: None, bytes: Vec::new() }
    }

    /// The id of a token by its exact spelling.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Ids that a pruned vocabulary must keep whatever the text: control tokens and the byte tokens that spell everything else.
    pub fn structural_ids(&self) -> Vec<u32> {
        let control = self.inner.get_added_tokens_decoder().into_keys();
        let bytes = (0..=255u8).filter_map(|b| self.id(&format!("<0x{b:02X}>")));
        let mut ids: Vec<u32> = control.chain(bytes).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The value of a byte-fallback token.
    fn byte(&self, id: u32) -> Option<u8> {
        let token = self.inner.id_to_token(id)?;
        u8::from_str_radix(token.strip_prefix("<0x")?.strip_suffix('>')?, 16).ok()
    }

    fn decode_raw(&self, ids: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(ids, true)).map_err(|e| self.error(e))
    }

    fn error(&self, message: String) -> Error {
        Error::Tokenizer { path: self.path.clone(), message }
    }
}

/// Runs the library, whose code for rare components panics on files that contradict themselves.
fn guarded<T>(work: impl FnOnce() -> std::result::Result<T, tokenizers::Error>) -> std::result::Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
            Err(format!("the tokenizer library fails on it: {}", said.unwrap_or_default()))
        }
    }
}

/// Decodes ids as they arrive. What [`TextStream::push`] returns is whole characters: a character spelled by several byte
/// tokens appears with its last byte.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last token that was not a byte: decoders may treat the first token of a text differently, so a token's text is what
    /// it adds to that of its predecessor.
    last: Option<u32>,
    /// Bytes of a character that is not complete yet; at most three.
    bytes: Vec<u8>,
}

impl TextStream<'_> {
    /// The text that `id` completes; may be empty.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if let Some(byte) = self.tokenizer.byte(id) {
            self.bytes.push(byte);
            return Ok(self.take_whole_characters());
        }
        let mut text = self.finish();
        let both: Vec<u32> = self.last.into_iter().chain([id]).collect();
        let before = self.tokenizer.decode_raw(&both[..both.len() - 1])?;
        let after = self.tokenizer.decode_raw(&both)?;
        match after.strip_prefix(&before) {
            Some(added) => text += added,
            None => text += &self.tokenizer.decode_raw(&[id])?,
        }
        self.last = Some(id);
        Ok(text)
    }

    /// What is left at the end: U+FFFD for a character that never became whole.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned()
    }

    fn take_whole_characters(&mut self) -> String {
        let keep = match std::str::from_utf8(&self.bytes) {
            Ok(_) => self.bytes.len(),
            // Bytes that no continuation can save are given out as U+FFFD at once.
            Err(e) => e.valid_up_to() + e.error_len().unwrap_or(0),
        };
        let rest = self.bytes.split_off(keep);
        String::from_utf8_lossy(&std::mem::replace(&mut self.bytes, rest)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nano() -> Tokenizer {
        Tokenizer::open(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano"))).unwrap()
    }

    fn pieces(t: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut stream = t.stream();
        let mut out: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        out.push(stream.finish());
        out
    }

    #[test]
    fn a_character_of_four_bytes_appears_whole() {
        let t = nano();
        let ids = t.encode("a 🚢!").unwrap();
        let pieces = pieces(&t, &ids);
        assert!(pieces.iter().all(|p| !p.contains('\u{FFFD}')), "{pieces:?}");
        assert_eq!(pieces.concat(), "a 🚢!");
        assert!(pieces.iter().any(|p| p == "🚢"));
    }

    #[test]
    fn broken_bytes_become_replacement_characters_without_losing_neighbours() {
        let t = nano();
        let byte = |b: u8| t.id(&format!("<0x{b:02X}>")).unwrap();
        let the = t.encode("the").unwrap()[1];
        // "é", then the first byte of a character that never comes, then a word.
        assert_eq!(t.decode(&[byte(0xC3), byte(0xA9), byte(0xE2), the]).unwrap(), "é\u{FFFD}the");
        assert_eq!(t.decode(&[byte(0xFF), byte(0x41)]).unwrap(), "\u{FFFD}A");
        assert_eq!(t.decode(&[byte(0xE2), byte(0x82)]).unwrap(), "\u{FFFD}");
    }

    #[test]
    fn control_tokens_are_added_once_and_left_out_of_the_text() {
        let t = nano();
        let ids = t.encode("Call me Ishmael.").unwrap();
        assert_eq!(ids[0], 2);
        assert_eq!(t.encode_verbatim("<bos>Call me Ishmael.").unwrap(), ids);
        assert_eq!(t.decode(&ids).unwrap(), "Call me Ishmael.");
        assert!(t.structural_ids().len() >= 263);
    }

    #[test]
    fn a_bad_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "{", "[]", r#"{"version":"1.0"}"#] {
            std::fs::write(dir.path().join(TOKENIZER_FILE), text).unwrap();
            let message = Tokenizer::open(dir.path()).err().unwrap().to_string();
            assert!(message.contains(TOKENIZER_FILE), "{message}");
        }
    }

    /// nano's tokenizer with one field changed.
    fn edited(field: &str, value: serde_json::Value) -> Result<Tokenizer> {
        let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano/tokenizer.json"));
        let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        *json.pointer_mut(field).unwrap() = value;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(TOKENIZER_FILE), json.to_string()).unwrap();
        Tokenizer::open(dir.path())
    }

    #[test]
    fn a_file_cannot_cut_or_fill_up_a_prompt_or_make_it_random() {
        use serde_json::json;
        let cut = json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
        let filled = json!({"strategy": {"Fixed": 100}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                            "pad_type_id": 0, "pad_token": "<pad>"});
        let text = "Call me Ishmael. Some years ago";
        let want = nano().encode(text).unwrap();
        assert_eq!(edited("/truncation", cut).unwrap().encode(text).unwrap(), want);
        assert_eq!(edited("/padding", filled).unwrap().encode(text).unwrap(), want);
        assert!(edited("/model/dropout", json!(0.5)).err().unwrap().to_string().contains("dropout"));
    }

    #[test]
    fn a_panic_of_the_library_is_an_error_of_the_file() {
        use serde_json::json;
        let broken = edited("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": ""}));
        let result = broken.and_then(|t| t.encode("x").map(|_| ()));
        assert!(result.err().unwrap().to_string().contains(TOKENIZER_FILE));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn any_text_survives_the_round_trip(text in "\\PC{0,40}") {
            // The tokenizer spells a space with U+2581, so a text that holds one comes back with a space.
            let text = text.replace('\u{2581}', " ");
            let t = nano();
            let ids = t.encode(&text).unwrap();
            prop_assert_eq!(t.decode(&ids).unwrap(), text);
        }

        #[test]
        fn any_ids_stream_like_they_decode(ids in prop::collection::vec(0u32..2048, 0..40)) {
            let t = nano();
            prop_assert_eq!(pieces(&t, &ids).concat(), t.decode(&ids).unwrap());
        }
    }
}
