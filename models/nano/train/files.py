"""Reading and writing the files that the steps hand to each other.

A work folder W holds what only training needs (token arrays, fp32 weights, logs), an output folder OUT holds the model
as it is published. Every reader here goes through `need`, so that a missing file always says which step writes it.
"""
import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

SPLITS = ("train", "ppl", "public", "heldout", "reserved")

# How to call the step that writes a file, for the message when that file is missing.
COMMANDS = {
    "prepare": "prepare --corpus DIR --work W",
    "train": "train --work W",
    "export": "export --work W --out OUT",
    "draft": "draft --work W --out OUT",
}


class InputError(Exception):
    """Something the user gave is missing or wrong. The message is all the user sees; the exit code is 2."""


class CheckFailure(Exception):
    """A step ran but what it left is wrong. The exit code is 1."""


def need(path, step):
    """`path`, if it exists; otherwise an InputError that names the step to run first."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} is missing: run `python -m train {COMMANDS[step]}` first")
    return path


def write_json(path, value, indent=2):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


def write_jsonl(path, records):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")


def read_jsonl(path, step="prepare"):
    """The records of a .jsonl file; a file that is not one is an InputError with the line's number."""
    records = []
    with need(path, step).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise InputError(f"{path}, line {number} is not JSON: {error}") from None
    return records


def load_weights(model, path, step, prefix=("", "")):
    """Fill `model` with the weights in `path` and freeze it: bf16 weights, computed with in fp32; integers stay.

    `prefix` is how names begin in the file and in the model.
    """
    try:
        weights = load_file(need(path, step))
        model.load_state_dict({name.replace(*prefix, 1): value if value.dtype == torch.long else value.float()
                               for name, value in weights.items()})
    except (SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} does not hold the weights of this model ({reason}): "
                         f"run `python -m train {COMMANDS[step]}` first") from None
    return model.requires_grad_(False).eval()


def save_sequences(path, sequences):
    """Token sequences as two arrays: all ids in a row, and the length of each sequence. Returns the lengths."""
    lengths = np.array([len(sequence) for sequence in sequences])
    ids = np.concatenate([np.array(sequence, np.int32) for sequence in sequences])
    np.savez(path, ids=ids, lens=lengths.astype(np.int32))
    return lengths


def load_ids(path):
    """All ids of a split in a row, [tokens] int32."""
    return np.load(need(path, "prepare"))["ids"]


def load_sequences(path):
    """The token sequences of a split, a list of [length] int64 tensors."""
    arrays = np.load(need(path, "prepare"))
    ids = torch.from_numpy(arrays["ids"].astype(np.int64))
    return list(ids.split(arrays["lens"].tolist()))
