"""Step `prepare`: corpus -> splits, passages, tokenizer, token arrays, prompt files.

Writes W/tokenizer.json, W/{split}.npz, W/prompts/{public,heldout,ppl}.jsonl and W/prepare.json (the figures).
"""
import json
from pathlib import Path

import numpy as np

from .corpus import load_documents, passages, split_of
from .files import SPLITS, CheckFailure, load_sequences, save_sequences, write_json, write_jsonl
from .prompts import make_prompts, make_records
from .tokenizer import BOS, EOS, encode, train_tokenizer, turn_format

TURN_SHARE = .12  # of the training passages are written in the chat template


def tokenize_split(split, documents, tokenizer, strict, rng):
    """Token sequences of a split, one a passage, and figures about them.

    A passage is <bos> text <eos>, so that the end of a text is learnt. `strict` is the tokenizer as trained; the
    figures say for how many passages the published pre-tokenizer changes the ids.
    """
    sequences = []
    characters = 0
    changed = 0
    for name, text in documents:
        for passage in passages(name, text):
            ids = encode(tokenizer, passage)
            changed += ids != encode(strict, passage)
            if tokenizer.decode(ids, skip_special_tokens=False) != passage:
                raise CheckFailure(f"the tokenizer does not give back a passage of {name}")
            characters += len(passage)
            if split == "train" and rng.random() < TURN_SHARE:
                sequences.append(turn_format(passage, tokenizer, rng))
            else:
                sequences.append([BOS] + ids + [EOS])
    figures = {"documents": len(documents), "passages": len(sequences), "chars": characters,
               "tokenizations_changed_by_pretokenizer": int(changed)}
    return sequences, figures


def prepare(corpus, work, seed):
    work = Path(work)
    documents = load_documents(corpus)
    work.mkdir(parents=True, exist_ok=True)
    by_split = {split: [d for d in documents if split_of(d[0]) == split] for split in SPLITS}

    strict, tokenizer = train_tokenizer([p for document in by_split["train"] for p in passages(*document)])
    tokenizer.save(str(work / "tokenizer.json"))

    figures = {"vocab": tokenizer.get_vocab_size()}
    rng = np.random.default_rng(seed)
    for split, members in by_split.items():
        sequences, figures[split] = tokenize_split(split, members, tokenizer, strict, rng)
        lengths = save_sequences(work / f"{split}.npz", sequences)
        figures[split]["tokens"] = int(lengths.sum())
        figures[split]["mean_passage_tokens"] = round(float(lengths.mean()), 1)

    seen = "\n".join(text for _, text in by_split["train"])
    folder = work / "prompts"
    write_jsonl(folder / "public.jsonl", make_prompts(by_split["public"], tokenizer, 11, "pub", seen))
    write_jsonl(folder / "heldout.jsonl", make_prompts(by_split["heldout"], tokenizer, 12, "held", seen))
    records = make_records(load_sequences(work / "ppl.npz"))
    write_jsonl(folder / "ppl.jsonl", records)

    figures["ppl_records"] = len(records)
    figures["ppl_target_tokens"] = sum(len(record["target_token_ids"]) for record in records)
    print(json.dumps(figures, indent=1), flush=True)
    figures["documents_by_split"] = {split: [name for name, _ in members]
                                     for split, members in by_split.items() if split != "train"}
    write_json(work / "prepare.json", figures, indent=1)
