//! What stands in a checkpoint directory beside weights and configuration.

use runtime::checkpoint::KEEPSET_FILE;

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
