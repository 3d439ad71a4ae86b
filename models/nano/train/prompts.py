"""The prompt files: text prompts to continue, and token records to measure perplexity on.

public.jsonl and heldout.jsonl: {"id", "prompt"}; ppl.jsonl: {"id", "context_token_ids", "target_token_ids"}.
"""
import numpy as np

from .corpus import passages
from .tokenizer import encode

PROMPTS = 160
RECORDS = 160
CONTEXT = 64  # ids of a perplexity record that are given, beginning with <bos>


def cut_prompt(text, tokenizer, rng, low=20, high=60):
    """The first words of a passage that make `low` to `high` tokens (without <bos>), or None if no cut does."""
    words = text.split(" ")
    want = int(rng.integers(low, high - 5))
    for count in range(4, len(words)):
        prompt = " ".join(words[:count])
        length = len(encode(tokenizer, prompt))
        if length >= want:
            return prompt if low <= length <= high else None
    return None


def make_prompts(documents, tokenizer, seed, prefix, seen, count=PROMPTS):
    """`count` prompts from the passages of `documents`, in random order.

    `seen` is the whole training text: addresses quote each other, and a prompt that the model was trained on would
    measure memory, so prompts that occur in it are left out.
    """
    rng = np.random.default_rng(seed)
    pool = [passage for name, text in documents for passage in passages(name, text)]
    records = []
    for index in rng.permutation(len(pool)):
        if len(records) == count:
            break
        prompt = cut_prompt(pool[index], tokenizer, rng)
        if prompt and prompt not in seen:
            records.append({"id": f"{prefix}-{len(records):04d}", "prompt": prompt})
    return records


def make_records(sequences, seed=13, count=RECORDS):
    """`count` perplexity records from the token sequences of the ppl split that have 128 to 320 ids."""
    records = []
    for index in np.random.default_rng(seed).permutation(len(sequences)):
        ids = sequences[index].tolist()
        if 128 <= len(ids) <= 320 and len(records) < count:
            records.append({
                "id": f"ppl-{len(records):04d}",
                "context_token_ids": ids[:CONTEXT],
                "target_token_ids": ids[CONTEXT:],
            })
    return records
