//! What stands in a checkpoint directory beside weights and configuration.

use runtime::checkpoint::KEEPSET_FILE;

/// Model cards, the first that exists is read. Every bake writes its own.
pub const CARDS: [&str; 2] = ["README.md", "MODEL_CARD.md"];
/// Licence files.
pub const LICENSES: [&str; 3] = ["LICENSE", "LICENSE.txt", "LICENSE.md"];
/// The notices of the parent, with ours on the changes below them.
pub const NOTICE_FILE: &str = "NOTICE";
/// Files of notices.
pub const NOTICES: [&str; 3] = [NOTICE_FILE, "NOTICE.txt", "NOTICE.md"];

/// Files of a checkpoint that describe it without its weights. Those that exist are copied unchanged by every bake. Model cards are
/// not among them: what a card says of the parent (size, type, perplexity) is not true of its child.
pub const SIDE_FILES: [&str; 18] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    KEEPSET_FILE,
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
    "NOTICE.md",
    "USE_POLICY.md",
];
