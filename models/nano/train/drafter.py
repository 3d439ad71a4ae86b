"""The drafter: Gemma4AssistantForCausalLM, which guesses the target's next tokens from the target's own K/V."""
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file

from .config import FULL, SLIDING, Config
from .files import load_weights, write_json
from .layers import Layer, Weight, linear, norm, rms, rope_table
from .tokenizer import BOS, EOS, ENDTURN, PAD

HIDDEN = 64
INTERMEDIATE = 128
LAYERS = 4
CLUSTERS = 64
TOP_CLUSTERS = 8  # so 256 of the 2048 output rows are scored
DRAFTS = 7


class Drafter(nn.Module):
    """Every layer reads the target's K/V; position and K/V are frozen during one round.

    Convention of transformers: the query sits at the newest token's position p + 1, sliding layers see keys p - W .. p.
    """

    def __init__(self, target_config):
        super().__init__()
        kinds = [SLIDING] * (LAYERS - 1) + [FULL]
        self.config = Config(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
                             num_kv_shared_layers=LAYERS, hidden_size_per_layer_input=0, final_logit_softcapping=None,
                             layer_types=kinds)
        vocabulary = self.config.vocab_size
        model = nn.Module()
        model.embed_tokens = Weight(torch.randn(vocabulary, HIDDEN) * HIDDEN ** -.5 * .7)
        model.layers = nn.ModuleList([Layer(self.config, i, post=.4) for i in range(LAYERS)])
        model.norm = norm(HIDDEN)
        self.model = model
        self.pre_projection = linear(HIDDEN, 2 * target_config.hidden_size)
        self.post_projection = linear(target_config.hidden_size, HIDDEN)
        self.masked_embedding = nn.Module()
        self.masked_embedding.centroids = linear(CLUSTERS, HIDDEN)
        self.masked_embedding.token_ordering = nn.Buffer(torch.arange(vocabulary))
        self.cache = {}

    def tables(self, length):
        """(cos, sin, mask) of both layer types when every position 0..length-1 is an anchor p at once."""
        if length not in self.cache:
            i = torch.arange(length)
            seen = (i[None] <= i[:, None]) & (i[None] >= i[:, None] - self.config.sliding_window)
            local = torch.zeros(length, length).masked_fill(~seen, -math.inf)
            self.cache[length] = {
                SLIDING: (*rope_table(i + 1, self.config, SLIDING), local),
                FULL: (*rope_table(i + 1, self.config, FULL), None),
            }
        return self.cache[length]

    def step(self, embedded, state, kv):
        """One draft at all anchors p of a sequence at once: row p uses keys <= p.

        `embedded` [B, T, H] are the target's scaled embeddings of the newest token of each anchor, `state` [B, T, H] is
        the target's final-norm output at first and then what the step before fed back. Returns the output state
        [B, T, HIDDEN] for the head, and the state [B, T, H] to feed back.
        """
        x = F.linear(torch.cat([embedded, state], -1), self.pre_projection.weight)
        tables = self.tables(x.shape[1])
        for layer in self.model.layers:
            x = layer(x, None, *kv[layer.kind], *tables[layer.kind])
        x = rms(x, self.model.norm.weight)
        return x, F.linear(x, self.post_projection.weight)

    def cluster_of(self):
        """The cluster of each id, [V]. `token_ordering` lists the ids cluster by cluster, all of one size."""
        ordering = self.masked_embedding.token_ordering
        clusters = torch.empty_like(ordering)
        clusters[ordering] = torch.arange(len(ordering)) // (len(ordering) // CLUSTERS)
        return clusters

    def cluster_scores(self, x):
        return F.linear(x, self.masked_embedding.centroids.weight)

    def head(self, x, clustered=True):
        """Logits [..., V]; with `clustered`, ids outside the best clusters get minus infinity."""
        logits = F.linear(x, self.model.embed_tokens.weight)
        if not clustered:
            return logits
        scores = self.cluster_scores(x)
        best = scores.topk(TOP_CLUSTERS, -1).indices
        keep = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        return logits.masked_fill(~keep[..., self.cluster_of()], -math.inf)

    @torch.no_grad()
    def build_clusters(self, iterations=12, seed=0):
        """k-means with equal cluster sizes over the directions of the output embedding."""
        embedding = self.model.embed_tokens.weight
        directions = F.normalize(embedding, dim=-1)
        count = len(directions)
        generator = torch.Generator().manual_seed(seed)
        centres = directions[torch.randperm(count, generator=generator)[:CLUSTERS]]
        for _ in range(iterations):
            assigned = assign_evenly(directions @ centres.T)
            means = torch.stack([directions[assigned == k].mean(0) for k in range(CLUSTERS)])
            centres = F.normalize(means, dim=-1)
        centroids = torch.stack([embedding[assigned == k].mean(0) for k in range(CLUSTERS)])
        self.masked_embedding.token_ordering.copy_(torch.argsort(assigned, stable=True))
        self.masked_embedding.centroids.weight.copy_(centroids)


def assign_evenly(similarity):
    """A cluster for each row of similarity [V, clusters], every cluster equally often: best pairs are taken first."""
    count, clusters = similarity.shape
    room = [count // clusters] * clusters
    assigned = [-1] * count
    for pair in similarity.flatten().argsort(descending=True).tolist():
        token, cluster = divmod(pair, clusters)
        if assigned[token] < 0 and room[cluster]:
            assigned[token] = cluster
            room[cluster] -= 1
    return torch.tensor(assigned)


def save_drafter(drafter, target_config, folder):
    """Write the drafter as transformers reads it; weights in bf16, the token ordering as int64."""
    folder.mkdir(parents=True, exist_ok=True)
    published = {}
    for name, value in drafter.state_dict().items():
        value = value if value.dtype == torch.long else value.detach().to(torch.bfloat16)
        published[name] = value.contiguous()
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": "bfloat16",
        "backbone_hidden_size": target_config.hidden_size,
        "use_ordered_embeddings": True,
        "num_centroids": CLUSTERS,
        "centroid_intermediate_top_k": TOP_CLUSTERS,
        "tie_word_embeddings": True,
        "text_config": drafter.config.text_config(),
    })
    write_json(folder / "generation_config.json", {
        "num_assistant_tokens": DRAFTS,
        "num_assistant_tokens_schedule": "constant",
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": [EOS, ENDTURN],
        "do_sample": False,
    })


def load_drafter(out, target_config):
    """The published drafter, its bf16 weights computed with in fp32, frozen."""
    return load_weights(Drafter(target_config), Path(out) / "assistant/model.safetensors", "draft")
