#!/usr/bin/env python3
"""Loads a quantised checkpoint with transformers and compares its logits with the library's own decompression.

    pip install torch==2.13.0 transformers==5.24.0 safetensors==0.8.0 compressed-tensors==0.20.1
    cargo run -p bake --example quantize -- models/nano /tmp/nano-int4 128
    python load_with_transformers.py /tmp/nano-int4

Two ways to the same weights: transformers reads `quantization_config` and matches modules to config groups itself; here every
packed tensor is decompressed by name, with the group size that its scales imply. They must agree to the bit, or a pattern in
`config_groups` does not reach the modules it should. Not for pruned heads, which transformers does not know.
"""
import json
import pathlib
import sys
import tempfile

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Packer
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForConditionalGeneration


def decompressed(tensors):
    out = {}
    for name, x in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            scale, shape = tensors[module + ".weight_scale"], tensors[module + ".weight_shape"]
            group = None if scale.shape[1] == 1 else shape[1].item() // scale.shape[1]
            args = QuantizationArgs(num_bits=4, type="int", symmetric=True, group_size=group,
                                    strategy="group" if group else "channel")
            packed = {"weight_packed": x, "weight_scale": scale, "weight_shape": shape}
            scheme = QuantizationScheme(targets=["Linear"], weights=args)
            out[module + ".weight"] = Packer.decompress(packed, scheme)["weight"]
        elif not part.startswith("weight_"):
            out[name] = x
    return out


@torch.no_grad()
def logits(path, ids):
    model = Gemma4ForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    return model.eval()(input_ids=ids).logits


def main(path):
    path = pathlib.Path(path)
    config = json.loads((path / "config.json").read_text())
    ids = torch.arange(3, 67)[None] % config["text_config"]["vocab_size"]
    with tempfile.TemporaryDirectory() as dense:
        config.pop("quantization_config")
        (pathlib.Path(dense) / "config.json").write_text(json.dumps(config))
        weights = decompressed(load_file(path / "model.safetensors"))
        save_file(weights, pathlib.Path(dense) / "model.safetensors", metadata={"format": "pt"})
        want = logits(dense, ids)
    got = logits(path, ids)
    worst = (got - want).abs().max().item()
    print(f"largest difference of {got.numel()} logits: {worst}")
    return 0 if worst == 0 and torch.isfinite(got).all() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
