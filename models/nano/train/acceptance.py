"""How many drafted tokens the target accepts: the drafter with both heads, and a copying control without a model."""
import numpy as np
import torch
import torch.nn.functional as F

from .decoding import greedy, pad_right
from .tokenizer import BOS, ENDTURN, EOS, PAD, encode

NEW_TOKENS = 128
BATCH = 80  # prompts decoded at once


@torch.no_grad()
def accepted_at(target, drafter, sequences, drafts, clustered, batch=32):
    """For every position p of every sequence: how many of `drafts` drafts from anchor p equal the following tokens.

    Sequences are the target's greedy text, so equal means accepted. Returns a list of [T] integer arrays.
    """
    out = []
    for start in range(0, len(sequences), batch):
        ids = pad_right(sequences[start:start + batch])
        state, kv = target.hidden(ids)
        tokens = F.pad(ids[:, 1:], (0, 1))
        right = torch.ones_like(ids, dtype=torch.bool)
        accepted = torch.zeros_like(ids)
        for k in range(1, drafts + 1):
            x, state = drafter.step(target.embed(tokens), state, kv)
            tokens = drafter.head(x, clustered).argmax(-1)
            wanted = F.pad(ids[:, k + 1:], (0, k + 1))
            right &= (tokens == wanted) & (wanted != PAD)
            accepted += right
        out += list(accepted.numpy())
    return out


def copied_at(sequence, end, drafts):
    """The control: sequence[:end] is known; copy what followed the latest earlier occurrence of its last 3, 2 or 1
    tokens. Returns how many of up to `drafts` copied tokens are right."""
    for length in (3, 2, 1):
        tail = sequence[end - length:end]
        for start in range(end - length - 1, -1, -1):
            if sequence[start:start + length] != tail:
                continue
            source = start + length
            right = 0
            while (right < drafts and source + right < end and end + right < len(sequence)
                   and sequence[source + right] == sequence[end + right]):
                right += 1
            return right
    return 0


def loop_flags(sequence, prompt_length):
    """For every token whether it completes a trigram that occurred before in the new text.

    Greedy text of a small model loops, and loops are easy to draft, so figures outside of them are given too.
    """
    seen = set()
    flags = [False] * len(sequence)
    for end in range(prompt_length, len(sequence)):
        trigram = tuple(sequence[end - 2:end + 1])
        flags[end] = trigram in seen
        seen.add(trigram)
    return flags


def count_rounds(prompts, sequences, loops, drafts, accepted):
    """Walk the rounds of speculative decoding; `accepted(i, p)` says how many drafts from anchor p of sequence i hold.

    A round is off-loop if its first drafted position is. Rounds that could run past the end are not counted.
    """
    table = np.zeros((2, 2))  # [off-loop, in a loop] x [rounds, accepted]
    for i, (prompt, sequence) in enumerate(zip(prompts, sequences)):
        anchor = len(prompt) - 1
        while anchor + drafts + 2 <= len(sequence):
            count = int(accepted(i, anchor))
            table[int(loops[i][anchor + 2])] += (1, count)
            anchor += count + 1

    def mean(row):
        return round(float(row[1] / max(1, row[0])), 3)
    return {"all": mean(table.sum(0)), "off_loop": mean(table[0]), "rounds": int(table[:, 0].sum())}


def text_figures(prompts, generated, loops):
    """How long and how repetitive the greedy text is, and how close its second choices are."""
    new_tokens = sum(len(tokens) for tokens, _ in generated)
    margins = np.concatenate([gaps for _, gaps in generated])
    stopped = [tokens[-1] in (EOS, ENDTURN) for tokens, _ in generated]
    return {
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "loop_fraction": round(sum(map(sum, loops)) / new_tokens, 3),
        "stopped_by_eos": round(float(np.mean(stopped)), 3),
        "margin_median": round(float(np.median(margins)), 3),
        "margin_p5": round(float(np.quantile(margins, .05)), 4),
        "margin_p1": round(float(np.quantile(margins, .01)), 4),
        "margin_below_0.01": round(float((margins < .01).mean()), 4),
    }


def evaluate_drafter(target, drafter, records, tokenizer):
    """All figures for one prompt file."""
    prompts = [[BOS] + encode(tokenizer, record["prompt"]) for record in records]
    generated = []
    for start in range(0, len(prompts), BATCH):
        generated += greedy(target, prompts[start:start + BATCH], NEW_TOKENS)
    sequences = [prompt + tokens for prompt, (tokens, _) in zip(prompts, generated)]
    loops = [loop_flags(sequence, len(prompt)) for prompt, sequence in zip(prompts, sequences)]

    result = text_figures(prompts, generated, loops)
    for drafts in (4, 7):
        clustered = accepted_at(target, drafter, sequences, drafts, True)
        full = accepted_at(target, drafter, sequences, drafts, False)
        walks = {
            "centroids": lambda i, p: clustered[i][p],
            "full_head": lambda i, p: full[i][p],
            "ngram_control": lambda i, p: copied_at(sequences[i], p + 2, drafts),
        }
        result[f"K={drafts}"] = {name: count_rounds(prompts, sequences, loops, drafts, accepted)
                                 for name, accepted in walks.items()}
    result["samples"] = [{"prompt": record["prompt"], "greedy": tokenizer.decode(tokens, skip_special_tokens=False)}
                         for record, (tokens, _) in zip(records[:6], generated)]
    return result
