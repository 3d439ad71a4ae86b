"""The target model: Gemma4ForCausalLM, text only."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from .config import FULL, SLIDING
from .layers import Layer, Weight, linear, norm, rms, rope_table


class Target(nn.Module):
    """Parameters are named as in transformers. `drop` in its methods is a set of layers to remove."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        per_layer = config.hidden_size_per_layer_input
        layers = config.num_hidden_layers

        model = nn.Module()
        model.embed_tokens = Weight(torch.randn(config.vocab_size, hidden) * hidden ** -0.5 * .7)
        model.layers = nn.ModuleList([Layer(config, i) for i in range(layers)])
        model.norm = norm(hidden)
        table = torch.randn(config.vocab_size, layers * per_layer) * per_layer ** -0.5 * .5
        model.embed_tokens_per_layer = Weight(table)
        model.per_layer_model_projection = linear(layers * per_layer, hidden)
        model.per_layer_projection_norm = norm(per_layer)
        self.model = model
        self.cache = {}

    def tables(self, length):
        """(cos, sin, mask) of both layer types for positions 0..length-1. No mask means plain causal attention."""
        if length not in self.cache:
            config = self.config
            i = torch.arange(length)
            local = None
            if length > config.sliding_window:
                seen = (i[None] <= i[:, None]) & (i[None] > i[:, None] - config.sliding_window)
                local = torch.zeros(length, length).masked_fill(~seen, -math.inf)
            self.cache[length] = {
                SLIDING: (*rope_table(i, config, SLIDING), local),
                FULL: (*rope_table(i, config, FULL), None),
            }
        return self.cache[length]

    def embed(self, ids):
        """Scaled token embeddings [B, T, H]."""
        return F.embedding(ids, self.model.embed_tokens.weight) * self.config.hidden_size ** 0.5

    def per_layer(self, ids, embedded):
        """The per-layer inputs [B, T, L, P]: the mean of a table row and a projection of the embedding."""
        model, config = self.model, self.config
        shape = (*ids.shape, config.num_hidden_layers, config.hidden_size_per_layer_input)
        projected = F.linear(embedded, model.per_layer_model_projection.weight) * config.hidden_size ** -0.5
        projected = rms(projected.view(shape), model.per_layer_projection_norm.weight)
        looked_up = F.embedding(ids, model.embed_tokens_per_layer.weight).view(shape)
        looked_up = looked_up * config.hidden_size_per_layer_input ** 0.5
        return (projected + looked_up) * 2 ** -0.5

    def hidden(self, ids, drop=()):
        """Final-norm output [B, T, H] and {layer type: (K, V)} of the two source layers.

        A removed K/V source still computes its K/V, since later layers read them.
        """
        config = self.config
        x = self.embed(ids)
        per_layer = self.per_layer(ids, x)
        tables = self.tables(ids.shape[1])
        kv = {}
        for i, layer in enumerate(self.model.layers):
            source = config.kv_source[layer.kind] == i
            if i in drop and not source:
                continue
            cos, sin, mask = tables[layer.kind]
            if layer.shared:
                k, v = kv[layer.kind]
            else:
                k, v = layer.project_kv(x, cos, sin)
                if source:
                    kv[layer.kind] = (k, v)
            if i not in drop:
                x = layer(x, per_layer[:, :, i], k, v, cos, sin, mask)
        return rms(x, self.model.norm.weight), kv

    def logits(self, h):
        """Soft-capped logits [..., V] of final-norm outputs [..., H]; the head is the embedding table."""
        cap = self.config.final_logit_softcapping
        return torch.tanh(F.linear(h, self.model.embed_tokens.weight) / cap) * cap

    def loss(self, ids, drop=()):
        """Mean next-token loss of rows ids [B, T + 1]."""
        logits = self.logits(self.hidden(ids[:, :-1], drop)[0])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
