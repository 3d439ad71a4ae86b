"""The tokenizer: a byte-fallback BPE of 2048 ids in the layout of Gemma's tokenizer file."""
import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .files import need

VOCABULARY = 2048
PAD, EOS, BOS, UNK, MASK, TURN, ENDTURN = range(7)
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
STOP = (EOS, ENDTURN)

# Published beside tokenizer.json. The template only turns "user text" into "continuation of that text".
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{{ '<|turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\\n' + (m['content'] | trim) + '<turn|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 2048,
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "extra_special_tokens": {"sot_token": "<|turn>", "eot_token": "<turn|>"},
}


def bos_template():
    """The post-processor that puts <bos> before every sequence."""
    def piece(token, sequence):
        return [{"SpecialToken": {"id": "<bos>", "type_id": sequence}},
                {"Sequence": {"id": token, "type_id": sequence}}]
    return {
        "type": "TemplateProcessing",
        "single": piece("A", 0),
        "pair": piece("A", 0) + piece("B", 1),
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
    }


def train_tokenizer(texts):
    """Learn the merges; returns (the tokenizer as trained, the tokenizer as published).

    The merges are learned inside words, single digits and single punctuation marks. So the published file can use
    Gemma's own pre-tokenizer, which does nothing once spaces are U+2581: hardly any text is split differently by it.
    """
    strict = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    strict.normalizer = normalizers.Replace(" ", "▁")
    strict.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split("▁", "merged_with_next"),
        pre_tokenizers.Split(Regex(r"\n|\d|[^\w▁\n]"), "isolated"),
    ])
    strict.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)],
        initial_alphabet=["\n"],
        min_frequency=2,
        max_token_length=16,
        show_progress=False,
    ))
    strict.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])

    layout = json.loads(strict.to_str())
    # byte pieces are ordinary vocabulary, not added tokens
    layout["added_tokens"] = [token for token in layout["added_tokens"] if token["content"] in SPECIAL]
    layout["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "},
                               "behavior": "MergedWithPrevious", "invert": False}
    layout["post_processor"] = bos_template()
    return strict, Tokenizer.from_str(json.dumps(layout))


def load_tokenizer(path, step):
    return Tokenizer.from_file(str(need(path, step)))


def encode(tokenizer, text):
    """The ids of `text` without <bos>."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def turn_format(text, tokenizer, rng):
    """A passage in the chat template, as plain continuation: the user's turn is its first part, the model's the rest.

    <bos><|turn>user\\n{first part}<turn|>\\n<|turn>model\\n{rest}<turn|>\\n
    """
    words = text.split(" ")
    cut = int(rng.integers(len(words) // 4, len(words) * 3 // 4))
    user = encode(tokenizer, "user\n" + " ".join(words[:cut]))
    model = encode(tokenizer, "model\n" + " ".join(words[cut:]))
    newline = encode(tokenizer, "\n")
    return [BOS, TURN] + user + [ENDTURN] + newline + [TURN] + model + [ENDTURN] + newline
