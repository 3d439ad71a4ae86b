"""Step `draft`: distil the drafter from the exported target. Writes OUT/assistant/ and W/draft_log.json.

It learns from the bf16-rounded target, the one it will draft for: on the target's own greedy text, since that is what
it drafts, and on corpus text in every fourth batch, since greedy text loops.
"""
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from .decoding import greedy, pad_right
from .drafter import CLUSTERS, Drafter, save_drafter
from .export import load_target
from .files import InputError, load_sequences, write_json
from .tokenizer import PAD
from .training import rows

CORPUS_LENGTH = 144
GENERATION_BATCH = 128  # prompts continued at once
DISCOUNT = .85          # weight of a later draft against the one before it, since it only counts if that was right


def greedy_texts(target, sequences, count, rng):
    """`count` greedy continuations of 20 to 59 first ids of training passages; those of up to 8 tokens are left out."""
    texts = []
    for _ in range(count // GENERATION_BATCH):
        picked = rng.integers(0, len(sequences), GENERATION_BATCH)
        prompts = [sequences[i][:int(rng.integers(20, 60))].tolist() for i in picked]
        for prompt, (tokens, _) in zip(prompts, greedy(target, prompts, 112)):
            if len(tokens) > 8:
                texts.append(prompt + tokens)
    return texts


class MixedBatches:
    """Batches [count, T] of ids: three of greedy text, then one of corpus text."""

    def __init__(self, texts, sequences, count, rng):
        self.texts = texts
        self.sequences = sequences
        self.count = count
        self.rng = rng
        self.order = []
        self.corpus = []

    def next(self, step):
        if step % 4 == 0:
            if len(self.corpus) < self.count:
                self.corpus = rows(self.sequences, CORPUS_LENGTH, self.rng)
            return torch.stack([self.corpus.pop() for _ in range(self.count)])
        if len(self.order) < self.count:
            self.order = self.rng.permutation(len(self.texts)).tolist()
        return pad_right([self.texts[self.order.pop()] for _ in range(self.count)])


@torch.no_grad()
def start_from_embedding(drafter, embedding):
    """Begin with the principal directions of the target's embedding [V, H]: the output embedding then already fits the
    target's, and the projections in and out of the drafter already match it."""
    directions = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False).Vh
    directions = directions[:drafter.config.hidden_size].T
    drafter.model.embed_tokens.weight.copy_(embedding @ directions)
    drafter.post_projection.weight.copy_(directions)
    drafter.pre_projection.weight.copy_(torch.cat([.15 * directions.T, .7 * directions.T], 1))


def imitation_loss(log_probabilities, best, probabilities):
    """Mean of the loss against the target's choice [n] and against its distribution [n, classes]."""
    choice = F.nll_loss(log_probabilities, best)
    return .6 * choice - .4 * (probabilities * log_probabilities).sum(-1).mean()


def round_loss(drafter, target, ids, clusters, drafts):
    """Loss of `drafts` unrolled drafts at every anchor of ids [B, T], and how often each equals the target's choice.

    The drafter runs over its own states but is given the true tokens. Once there are clusters, the centroids learn the
    target's distribution over them, so that the best clusters hold the target's choice.
    """
    with torch.no_grad():
        state, kv = target.hidden(ids)
        logits = target.logits(state)
        best = logits.argmax(-1)
        probabilities = logits.softmax(-1)
        if clusters is not None:
            over_clusters = torch.zeros(*ids.shape, CLUSTERS).index_add_(-1, clusters, probabilities)
    length = ids.shape[1]
    loss, agreement = 0., []
    for k in range(1, drafts + 1):
        tokens = F.pad(ids[:, k:], (0, k))
        x, state = drafter.step(target.embed(tokens), state, kv)
        live = tokens[:, :length - k] != PAD
        x = x[:, :length - k][live]
        wanted = best[:, k:][live]
        logits = drafter.head(x, clustered=False)
        part = imitation_loss(logits.log_softmax(-1), wanted, probabilities[:, k:][live])
        if clusters is not None:
            scores = drafter.cluster_scores(x).log_softmax(-1)
            part = part + .3 * imitation_loss(scores, clusters[wanted], over_clusters[:, k:][live])
        loss = loss + part * DISCOUNT ** (k - 1)
        agreement.append(round((logits.argmax(-1) == wanted).float().mean().item(), 3))
    return loss, agreement


def draft(work, out, steps, rows_per_batch, generate, unroll, seed, threads):
    """`steps` updates; half-way the output embedding is clustered and the centroids are trained along."""
    work, out = Path(work), Path(out)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    target = load_target(out)
    sequences = load_sequences(work / "train.npz")
    wall = time.time()
    texts = greedy_texts(target, sequences, generate, rng)
    print(f"generated {len(texts)} sequences, {sum(map(len, texts))} tokens, {time.time() - wall:.0f} s", flush=True)
    if len(texts) < rows_per_batch:
        raise InputError(f"only {len(texts)} greedy texts are longer than 8 tokens: give a larger --generate, or run "
                         "`python -m train train` with more steps first")

    drafter = Drafter(target.config)
    start_from_embedding(drafter, target.model.embed_tokens.weight)
    print("drafter parameters", sum(p.numel() for p in drafter.parameters()), flush=True)
    matrices = [p for p in drafter.parameters() if p.dim() == 2]
    vectors = [p for p in drafter.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW([dict(params=matrices, lr=0.), dict(params=vectors, lr=0.)],
                             betas=(.9, .98), weight_decay=0.)
    batches = MixedBatches(texts, sequences, rows_per_batch, rng)
    clusters, log = None, []
    wall, cpu = time.time(), time.process_time()
    for step in range(1, steps + 1):
        progress = step / steps
        factor = min(1, step / 20) * min(1, (1 - progress) / .7)
        adam.param_groups[0]["lr"] = 2e-3 * factor
        adam.param_groups[1]["lr"] = 4e-3 * factor
        ids = batches.next(step)
        if clusters is None and progress > .5:
            drafter.build_clusters()
            clusters = drafter.cluster_of()
        drafts = 4 if progress < .25 else unroll
        loss, agreement = round_loss(drafter, target, ids, clusters, drafts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if step % 25 in (0, 1) or step == steps:
            record = {"step": step, "wall": round(time.time() - wall, 1), "cpu": round(time.process_time() - cpu, 1),
                      "loss": round(loss.item(), 3), "text": "corpus" if step % 4 == 0 else "greedy",
                      "agree": agreement}
            log.append(record)
            print(json.dumps(record), flush=True)
    save_drafter(drafter, target.config, out / "assistant")
    write_json(work / "draft_log.json", log, indent=None)
