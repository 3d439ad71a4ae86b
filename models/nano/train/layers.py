"""One transformer layer of the Gemma 4 text architecture, used by the target and by the drafter."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from .config import SLIDING


def rms(x, weight=None, eps=1e-6):
    """RMS norm over the last axis; without `weight` (the norm of V) it only scales to unit mean square."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rope_table(positions, config, kind):
    """cos and sin, [T, D] each, of the rotary embedding of one layer type at `positions` [T]."""
    size = config.head_size(kind)
    if kind == SLIDING:
        inverse = 1.0 / config.rope_theta_sliding ** (torch.arange(0, size, 2).float() / size)
    else:
        # "proportional": the exponents run over the whole head, pairs beyond the rotated part get angle 0
        pairs = int(config.partial_rotary_factor * size // 2)
        rotated = 1.0 / config.rope_theta_full ** (torch.arange(0, 2 * pairs, 2).float() / size)
        inverse = torch.cat([rotated, torch.zeros(size // 2 - pairs)])
    angles = positions[:, None].float() * inverse
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rope(x, cos, sin):
    """Rotate x [B, T, heads, D]; pair i of a head is (i, i + D/2)."""
    first, second = x.chunk(2, -1)
    return x * cos[None, :, None] + torch.cat([-second, first], -1) * sin[None, :, None]


class Weight(nn.Module):
    """A module that only holds `weight`, so that parameter names equal those of transformers."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(value)


def linear(outputs, inputs):
    """A projection without bias, [outputs, inputs], that keeps unit variance at the start."""
    return Weight(torch.randn(outputs, inputs) * inputs ** -0.5)


def norm(size, value=1.0):
    return Weight(torch.full((size,), float(value)))


class Layer(nn.Module):
    """Attention, MLP and, in the target, the per-layer input; each is normed on both sides and added to the stream.

    `post` is the start of the norms after each part: below 1, so that a fresh layer changes the stream only a little.
    The order in which parameters are made fixes the random numbers they start from.
    """

    def __init__(self, config, index, post=0.2):
        super().__init__()
        self.kind = config.layer_types[index]
        self.shared = index >= config.num_hidden_layers - config.num_kv_shared_layers
        self.head_size = config.head_size(self.kind)
        hidden = config.hidden_size
        queries = config.num_attention_heads * self.head_size
        keys = config.num_key_value_heads * self.head_size

        attention = nn.Module()
        attention.q_proj = linear(queries, hidden)
        attention.q_norm = norm(self.head_size)
        if not self.shared:
            attention.k_proj = linear(keys, hidden)
            attention.v_proj = linear(keys, hidden)
            # the attention scale is 1.0: start with tame scores
            attention.k_norm = norm(self.head_size, 1.3 * self.head_size ** -0.5)
        attention.o_proj = linear(hidden, queries)
        self.self_attn = attention

        mlp = nn.Module()
        mlp.gate_proj = linear(config.intermediate_size, hidden)
        mlp.up_proj = linear(config.intermediate_size, hidden)
        mlp.down_proj = linear(hidden, config.intermediate_size)
        self.mlp = mlp

        self.input_layernorm = norm(hidden)
        self.post_attention_layernorm = norm(hidden, post)
        self.pre_feedforward_layernorm = norm(hidden)
        self.post_feedforward_layernorm = norm(hidden, post)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        per_layer = config.hidden_size_per_layer_input
        if per_layer:
            self.per_layer_input_gate = linear(per_layer, hidden)
            self.per_layer_projection = linear(hidden, per_layer)
            self.post_per_layer_input_norm = norm(hidden, post)

    def heads(self, x, projection):
        """Project x [B, T, H] to heads [B, T, heads, D]."""
        return F.linear(x, projection.weight).view(*x.shape[:2], -1, self.head_size)

    def project_kv(self, x, cos, sin):
        """K and V of this layer, [B, K/V heads, T, D] each, from its input x [B, T, H]."""
        attention = self.self_attn
        h = rms(x, self.input_layernorm.weight)
        k = rope(rms(self.heads(h, attention.k_proj), attention.k_norm.weight), cos, sin)
        v = rms(self.heads(h, attention.v_proj))
        return k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, x, k, v, cos, sin, mask):
        """Attention output [B, T, H]; without a `mask` it is causal. The scale is 1: q and k are normed."""
        attention = self.self_attn
        h = rms(x, self.input_layernorm.weight)
        q = rope(rms(self.heads(h, attention.q_proj), attention.q_norm.weight), cos, sin).transpose(1, 2)
        repeat = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(repeat, 1)
        v = v.repeat_interleave(repeat, 1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0)
        return F.linear(o.transpose(1, 2).reshape(*x.shape[:2], -1), attention.o_proj.weight)

    def feed_forward(self, x):
        mlp = self.mlp
        h = rms(x, self.pre_feedforward_layernorm.weight)
        gate = F.gelu(F.linear(h, mlp.gate_proj.weight), approximate="tanh")
        return F.linear(gate * F.linear(h, mlp.up_proj.weight), mlp.down_proj.weight)

    def forward(self, x, per_layer, k, v, cos, sin, mask):
        """The stream x [B, T, H] after this layer; `per_layer` [B, T, P] is None in the drafter."""
        x = x + rms(self.attend(x, k, v, cos, sin, mask), self.post_attention_layernorm.weight)
        x = x + rms(self.feed_forward(x), self.post_feedforward_layernorm.weight)
        if per_layer is not None:
            h = F.gelu(F.linear(x, self.per_layer_input_gate.weight), approximate="tanh") * per_layer
            x = x + rms(F.linear(h, self.per_layer_projection.weight), self.post_per_layer_input_norm.weight)
        return x * self.layer_scalar
