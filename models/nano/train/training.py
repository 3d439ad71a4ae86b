"""Step `train`: train the target. Writes W/target.pt (fp32 weights) and W/train_log.json."""
import json
import time
from pathlib import Path

import numpy as np
import torch

from .config import Config
from .files import load_sequences, write_json
from .model import Target
from .optimizer import Muon
from .tokenizer import BOS, PAD

# Chance that a layer is skipped in a training step: the last layer and the two K/V sources (4, 5) always run. Which
# layers can be removed from the trained model follows from these rates.
LAYER_DROP = [0, .1, .5, .3, 0, 0, .1, .3, .5, .3, .1, 0]

# Highest learning rates of the three kinds of parameters.
MATRIX_RATE = .02
EMBEDDING_RATE = .004
VECTOR_RATE = .006


def rows(sequences, length, rng):
    """One epoch of rows of length + 1 tokens, shuffled.

    They are cut from the shuffled, concatenated passages; every row starts with <bos>, as every text does when the
    model is used, so a row that begins inside a passage gets one put in front.
    """
    stream = torch.cat([sequences[i] for i in rng.permutation(len(sequences))])
    bos = torch.tensor([BOS])
    out = []
    position = 0
    while position + length + 1 < len(stream):
        if stream[position] == BOS:
            out.append(stream[position:position + length + 1])
            position += length
        else:
            out.append(torch.cat([bos, stream[position:position + length]]))
            position += length - 1
    return [out[i] for i in rng.permutation(len(out))]


class Batches:
    """Endless batches [count, T + 1] of rows; the length T may grow between batches."""

    def __init__(self, sequences, count, rng):
        self.sequences = sequences
        self.count = count
        self.rng = rng
        self.length = 0
        self.left = []

    def next(self, length):
        if length != self.length:
            self.length = length
            self.left = []
        if len(self.left) < self.count:
            self.left = rows(self.sequences, length, self.rng)
        batch = torch.stack(self.left[:self.count])
        self.left = self.left[self.count:]
        return batch


def skipped_layers(progress, rng):
    """The layers this training step goes without; the rates grow to full over the first tenth of the run."""
    rates = np.array(LAYER_DROP) * min(1, progress / .1)
    return tuple(np.nonzero(rng.random(len(LAYER_DROP)) < rates)[0].tolist())


def rate_factor(step, progress):
    """30 steps of warm-up, flat for 40 % of the run, then linear to 0."""
    return min(1, step / 30) * (1 if progress < .4 else (1 - progress) / .6)


@torch.no_grad()
def held_out_loss(target, windows):
    """Mean loss of fixed windows [24, 257] of the ppl split, used for watching only."""
    return float(np.mean([target.loss(batch).item() for batch in windows.split(8)]))


class Optimizers:
    """Muon for the projections, AdamW for embeddings and vectors; only the latter two are clipped."""

    def __init__(self, target):
        named = list(target.named_parameters())
        self.target = target
        self.embeddings = [p for name, p in named if "embed_tokens" in name]
        self.vectors = [p for _, p in named if p.dim() == 1]
        self.muon = Muon([p for name, p in named if p.dim() == 2 and "embed_tokens" not in name])
        self.adam = torch.optim.AdamW(
            [dict(params=self.embeddings, lr=0., weight_decay=0.), dict(params=self.vectors, lr=0., weight_decay=0.)],
            betas=(.9, .97), eps=1e-10)

    def step(self, factor):
        torch.nn.utils.clip_grad_norm_(self.embeddings + self.vectors, 1.0)
        self.adam.param_groups[0]["lr"] = EMBEDDING_RATE * factor
        self.adam.param_groups[1]["lr"] = VECTOR_RATE * factor
        self.muon.step(MATRIX_RATE * factor)
        self.adam.step()
        self.target.zero_grad(set_to_none=True)
        with torch.no_grad():  # padding is never an input; the tied head must not learn a row for it either
            self.target.model.embed_tokens.weight[PAD].zero_()


def train(work, steps, rows_per_batch, short, intermediate, seed, threads):
    """`steps` updates of `rows_per_batch` rows: of 128 tokens for the share `short` of the run, then of 256."""
    work = Path(work)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    sequences = load_sequences(work / "train.npz")
    windows = torch.stack(rows(load_sequences(work / "ppl.npz"), 256, np.random.default_rng(0))[:24])
    target = Target(Config(intermediate_size=intermediate))
    print("parameters", sum(p.numel() for p in target.parameters()), flush=True)

    optimizers = Optimizers(target)
    batches = Batches(sequences, rows_per_batch, rng)
    wall, cpu = time.time(), time.process_time()
    mean, tokens, log = None, 0, []
    for step in range(1, steps + 1):
        progress = step / steps
        length = 128 if progress < short else 256
        batch = batches.next(length)
        loss = target.loss(batch, skipped_layers(progress, rng))
        loss.backward()
        optimizers.step(rate_factor(step, progress))

        tokens += rows_per_batch * length
        mean = loss.item() if mean is None else .95 * mean + .05 * loss.item()
        if step % 50 == 0 or step in (1, 10, 20) or step == steps:
            record = {"step": step, "tokens": tokens, "wall": round(time.time() - wall, 1),
                      "cpu": round(time.process_time() - cpu, 1), "loss": round(mean, 4)}
            if step % 200 == 0 or step == steps:
                record["val"] = round(held_out_loss(target, windows), 4)
                torch.save(target.state_dict(), work / "target.pt")
            log.append(record)
            print(json.dumps(record), flush=True)
    write_json(work / "train_log.json", log, indent=None)
