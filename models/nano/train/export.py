"""Step `export`: W/target.pt -> OUT/, a model folder as transformers reads it; and `load_target`, which reads it back.

The weights are bf16 under the tensor names of the published multimodal checkpoints, without image and audio towers.
"""
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from .config import Config
from .files import load_weights, need, write_json
from .model import Target
from .tokenizer import BOS, CHAT_TEMPLATE, EOS, ENDTURN, PAD, TOKENIZER_CONFIG

PREFIX = "model.language_model."


def model_config(config):
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "text_config": config.text_config(),
        "vision_config": None,
        "audio_config": None,
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": [EOS, ENDTURN],
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    }


def export(work, out):
    work, out = Path(work), Path(out)
    weights = torch.load(need(work / "target.pt", "train"))
    tokenizer = need(work / "tokenizer.json", "prepare")
    config = Config(intermediate_size=weights["model.layers.0.mlp.gate_proj.weight"].shape[0])

    out.mkdir(parents=True, exist_ok=True)
    published = {}
    for name, value in weights.items():
        published[name.replace("model.", PREFIX, 1)] = value.to(torch.bfloat16).contiguous()
    save_file(published, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", model_config(config))
    write_json(out / "generation_config.json", {
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": [EOS, ENDTURN],
        "do_sample": False,
    })
    write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    shutil.copyfile(tokenizer, out / "tokenizer.json")
    print(f"wrote the target to {out}", flush=True)


def load_target(out):
    """The exported target, its bf16 weights computed with in fp32, frozen."""
    out = Path(out)
    text_config = json.loads(need(out / "config.json", "export").read_text(encoding="utf-8"))["text_config"]
    target = Target(Config(intermediate_size=text_config["intermediate_size"]))
    return load_weights(target, out / "model.safetensors", "export", (PREFIX, "model."))
