"""The shape of a model: the fields of the Gemma 4 text config that are used here, under the names of transformers."""
from dataclasses import dataclass, field

from .tokenizer import BOS, EOS, PAD, VOCABULARY

SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass
class Config:
    """The defaults are nano's target; the drafter changes a few of them."""
    vocab_size: int = VOCABULARY
    hidden_size: int = 128
    intermediate_size: int = 192
    num_hidden_layers: int = 12
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    global_head_dim: int = 64
    sliding_window: int = 64
    num_kv_shared_layers: int = 6
    hidden_size_per_layer_input: int = 16
    final_logit_softcapping: float | None = 30.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_theta_sliding: float = 1e4
    rope_theta_full: float = 1e6
    partial_rotary_factor: float = .25
    layer_types: list[str] | None = None
    kv_source: dict[str, int] = field(init=False)

    def __post_init__(self):
        if self.layer_types is None:
            self.layer_types = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(self.num_hidden_layers)]
        # The first layers own K/V; the last of them of each type feeds all later layers of that type.
        self.kv_source = {}
        for i in range(self.num_hidden_layers - self.num_kv_shared_layers):
            self.kv_source[self.layer_types[i]] = i

    def head_size(self, kind):
        return self.global_head_dim if kind == FULL else self.head_dim

    def text_config(self):
        """The `text_config` of a published config.json."""
        per_layer = self.hidden_size_per_layer_input
        return {
            "model_type": "gemma4_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "global_head_dim": self.global_head_dim,
            "num_global_key_value_heads": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "sliding_window": self.sliding_window,
            "layer_types": self.layer_types,
            "final_logit_softcapping": self.final_logit_softcapping,
            "vocab_size_per_layer_input": self.vocab_size if per_layer else 0,
            "hidden_size_per_layer_input": per_layer,
            "num_kv_shared_layers": self.num_kv_shared_layers,
            "attention_k_eq_v": False,
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "bos_token_id": BOS,
            "initializer_range": 0.02,
            "use_bidirectional_attention": None,
            "use_cache": True,
            "dtype": "bfloat16",
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": self.rope_theta_sliding},
                FULL: {"rope_type": "proportional", "partial_rotary_factor": self.partial_rotary_factor,
                       "rope_theta": self.rope_theta_full},
            },
        }
