"""Greedy decoding of many prompts at once, with a K/V cache."""
import torch

from .config import FULL, SLIDING
from .layers import rms, rope_table
from .tokenizer import PAD, STOP


def pad_right(sequences):
    """Sequences of ids as one [B, T] tensor, filled up with <pad>."""
    length = max(map(len, sequences))
    return torch.tensor([list(sequence) + [PAD] * (length - len(sequence)) for sequence in sequences])


class Decoder:
    """The target with a K/V cache over left-padded prompts.

    Positions only enter relatively, so that padding on the left needs a mask and no other position numbers.
    """

    def __init__(self, target, prompts, new):
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        self.target = target
        self.ids = torch.tensor([[PAD] * pad + list(prompt) for pad, prompt in zip(padding, prompts)])
        self.padding = torch.tensor(padding)[:, None, None]
        self.positions = torch.arange(longest + new)
        kinds = set(target.config.layer_types)
        self.rope = {kind: rope_table(self.positions, target.config, kind) for kind in kinds}
        self.cache = {}
        self.start = 0

    def masks(self, length):
        """{layer type: [B, 1, length, keys]}: which keys the next `length` positions see.

        A padded position sees itself, so that no row of the softmax is empty.
        """
        query = self.positions[self.start:self.start + length, None]
        key = self.positions[None, :self.start + length]
        seen = (key <= query)[None] & ((key >= self.padding) | (key == query)[None])
        near = seen & (key > query - self.target.config.sliding_window)[None]
        return {FULL: seen[:, None], SLIDING: near[:, None]}

    def forward(self, ids):
        """Logits [B, V] after the next ids [B, T]."""
        target = self.target
        length = ids.shape[1]
        masks = self.masks(length)
        x = target.embed(ids)
        per_layer = target.per_layer(ids, x)
        kv = {}
        for i, layer in enumerate(target.model.layers):
            cos, sin = (table[self.start:self.start + length] for table in self.rope[layer.kind])
            if layer.shared:
                k, v = kv[layer.kind]
            else:
                k, v = layer.project_kv(x, cos, sin)
                if i in self.cache:
                    k = torch.cat([self.cache[i][0], k], 2)
                    v = torch.cat([self.cache[i][1], v], 2)
                self.cache[i] = (k, v)
                if target.config.kv_source[layer.kind] == i:
                    kv[layer.kind] = (k, v)
            x = layer(x, per_layer[:, :, i], k, v, cos, sin, masks[layer.kind])
        self.start += length
        return target.logits(rms(x[:, -1], target.model.norm.weight))


@torch.no_grad()
def greedy(target, prompts, new, stop=STOP):
    """Continue each prompt by up to `new` tokens.

    Returns per prompt the new tokens, up to and including a stop id, and for each the top-1 minus top-2 logit.
    """
    decoder = Decoder(target, prompts, new)
    current = decoder.ids
    done = torch.zeros(len(prompts), dtype=torch.bool)
    tokens, margins = [], []
    for _ in range(new):
        top = decoder.forward(current).topk(2, -1)
        chosen = top.indices[:, 0]
        tokens.append(chosen)
        margins.append(top.values[:, 0] - top.values[:, 1])
        current = chosen[:, None]
        if stop:
            done |= torch.isin(chosen, torch.tensor(stop, dtype=torch.long))
            if bool(done.all()):
                break
    out = []
    for row, gaps in zip(torch.stack(tokens, 1).tolist(), torch.stack(margins, 1).tolist()):
        end = next((i + 1 for i, token in enumerate(row) if token in stop), len(row))
        out.append((row[:end], gaps[:end]))
    return out
