"""Perplexity of the target: on the records of ppl.jsonl, on a split, under int4 rounding, and of two baselines."""
import math
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F

from .decoding import pad_right
from .tokenizer import PAD


def percent(nll, base):
    """Change of perplexity in percent, from mean negative log-likelihoods."""
    return round(100 * (math.exp(nll - base) - 1), 2)


@torch.no_grad()
def nll_records(target, records, drop=(), batch=16):
    """Mean negative log-likelihood of the target tokens of perplexity records, without the layers in `drop`."""
    total, count = 0., 0
    for start in range(0, len(records), batch):
        part = records[start:start + batch]
        ids = pad_right([record["context_token_ids"] + record["target_token_ids"] for record in part])
        logits = target.logits(target.hidden(ids[:, :-1], drop)[0])
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        for row, record in enumerate(part):
            first = len(record["context_token_ids"])
            end = first + len(record["target_token_ids"])
            total += losses[row, first - 1:end - 1].sum().item()
            count += end - first
    return total / count


@torch.no_grad()
def nll_split(target, sequences, batch=16):
    """Mean negative log-likelihood of whole passages from <bos>; sorted by length to keep padding small."""
    total, count = 0., 0
    ordered = sorted(sequences, key=len)
    for start in range(0, len(ordered), batch):
        ids = pad_right([sequence.tolist() for sequence in ordered[start:start + batch]])
        logits = target.logits(target.hidden(ids[:, :-1])[0])
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none", ignore_index=PAD)
        total += losses.sum().item()
        count += (ids[:, 1:] != PAD).sum().item()
    return total / count


def baselines(train_ids, records, vocabulary):
    """Perplexity of the target tokens under the training text's unigrams, and under bigrams mixed with unigrams.

    A model that does not beat them has learnt nothing from more than the last token.
    """
    counts = np.bincount(train_ids, minlength=vocabulary) + .1
    unigram = counts / counts.sum()
    bigram = np.zeros((vocabulary, vocabulary), np.float32)
    np.add.at(bigram, (train_ids[:-1], train_ids[1:]), 1)
    bigram /= np.maximum(bigram.sum(1, keepdims=True), 1)
    previous = np.concatenate([r["context_token_ids"][-1:] + r["target_token_ids"][:-1] for r in records])
    following = np.concatenate([r["target_token_ids"] for r in records])
    mixed = .8 * bigram[previous, following] + .2 * unigram[following]
    return {
        "ppl_unigram": round(float(np.exp(-np.log(unigram[following]).mean())), 2),
        "ppl_bigram_interpolated": round(float(np.exp(-np.log(mixed).mean())), 2),
    }


def fake_int4(weight, group):
    """weight [out, in] after symmetric round-to-nearest int4 in groups of `group` inputs.

    Where the input dimension is not a multiple of `group`, a group is a whole row.
    """
    outputs, inputs = weight.shape
    grouped = weight.view(outputs, -1, group if inputs % group == 0 else inputs)
    scale = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 7
    return (torch.round(grouped / scale).clamp(-8, 7) * scale).view(outputs, inputs)


@contextmanager
def int4_weights(target, group, tables=False):
    """Inside, the projections of `target` (and with `tables` both embedding tables) are rounded to int4."""
    saved = {name: parameter.detach().clone() for name, parameter in target.named_parameters()}
    for name, parameter in target.named_parameters():
        if parameter.dim() == 2 and (tables or "embed_tokens" not in name):
            parameter.data.copy_(fake_int4(saved[name], group))
    try:
        yield
    finally:
        for name, parameter in target.named_parameters():
            parameter.data.copy_(saved[name])
