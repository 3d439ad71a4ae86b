#!/usr/bin/env python3
"""Bakes nano in the standard formats and holds transformers and `chiku logits` to the library's own decompression.

    pip install torch==2.13.0 transformers==5.24.0 safetensors==0.8.0 compressed-tensors==0.20.1
    cargo build --release
    python load_with_transformers.py ../../../../target/release/chiku

The reference: every packed tensor is decompressed by compressed-tensors, with the config group that the library's own matching
finds for the module, and the dense checkpoint is run by transformers. Three things are compared with it:

1. `chiku logits --precision f32`: within the tolerance of two f32 programs that sum in different orders.
2. transformers' direct load in f32: to the bit.
3. transformers' direct load in bf16, with a reference decompressed in bf16: to the bit.

Why a direct load can give other logits than a decompressed copy of the same directory. The library multiplies integers and
scales in the type that the *scales* have when it decompresses. `from_pretrained(dtype=X)` converts the scales to X first, so
that the same files stand for two sets of weights: with X = float32 the exact products (an int4 times a bf16 scale has up to 12
significant bits, an int8 up to 16), with X = bfloat16 the products rounded to 8 bits. A copy decompressed in bf16 and then run in
f32 therefore differs from a direct load in f32. This program multiplies exactly, in f32; the bf16 distance
that is printed below is what rounding the weights costs.

Not for pruned heads, which transformers does not know, and not for int3, which the library packs across words.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Packer
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import is_match, match_targets
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForConditionalGeneration

# As the tolerance of the oracle for an f32 program.
TOLERANCE = 5e-4
PLAN = """
[[rule]]
modules = "layers.0.*"
keep = true
[[rule]]
modules = ["*.self_attn.*", "per_layer_model_projection"]
bits = 8
channel = true
[[rule]]
modules = "*.mlp.{gate,up}_proj"
method = "mse"
group = 64
"""
BAKES = {
    "int4-g32": ["--bits", "4", "--group", "32"],
    # Does not divide two of nano's widths, which then have a config group with one scale a row.
    "int4-g128": ["--bits", "4", "--group", "128"],
    "int4-channel": ["--bits", "4", "--per-channel"],
    "int8-g32": ["--bits", "8", "--group", "32"],
    "int8-channel-mse": ["--bits", "8", "--per-channel", "--method", "mse"],
    "mixed": ["--bits", "4", "--group", "32", "--plan", "plan.toml"],
}
IDS = list(range(3, 67))


def decompressed(directory, dtype):
    """All tensors, dense; products of integers and scales in `dtype`."""
    groups = json.loads((directory / "config.json").read_text())["quantization_config"]
    schemes = {t: g for g in groups["config_groups"].values() for t in g["targets"]}
    linear = torch.nn.Linear(1, 1)
    tensors, out = load_file(directory / "model.safetensors"), {}
    for name, x in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            assert not is_match(module, linear, groups["ignore"]), f"{module} is packed and ignored"
            scheme = QuantizationScheme(**schemes[match_targets(module, linear, schemes)[0]])
            packed = {p: tensors[f"{module}.{p}"] for p in ("weight_packed", "weight_shape", "weight_scale")}
            packed["weight_scale"] = packed["weight_scale"].to(dtype)
            out[module + ".weight"] = Packer.decompress(packed, scheme)["weight"].contiguous()
        elif not part.startswith("weight_"):
            out[name] = x
    return out


@torch.no_grad()
def logits(path, dtype):
    model = Gemma4ForConditionalGeneration.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.eval()(input_ids=torch.tensor([IDS])).logits[0].float()


def reference(directory, dtype):
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config")
    with tempfile.TemporaryDirectory() as dense:
        (pathlib.Path(dense) / "config.json").write_text(json.dumps(config))
        save_file(decompressed(directory, dtype), pathlib.Path(dense) / "model.safetensors", metadata={"format": "pt"})
        return logits(dense, dtype)


def ours(chiku, directory):
    out = directory / "logits.safetensors"
    ids = ",".join(map(str, IDS))
    subprocess.run([chiku, "-q", "logits", "--model", directory, "--token-ids", ids, "--precision", "f32", "--out", out],
                   check=True)
    got = load_file(out)["logits"]
    out.unlink()
    return got


def main(chiku):
    failed = 0
    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        (tmp / "plan.toml").write_text(PLAN)
        for name, options in BAKES.items():
            directory = tmp / name
            subprocess.run([chiku, "-q", "bake", "quantize", "--model", "nano", "--out", directory, *options],
                           check=True, cwd=tmp)
            want, rounded = reference(directory, torch.float32), reference(directory, torch.bfloat16)
            distance = {
                "chiku": (ours(chiku, directory) - want).abs().max().item(),
                "direct f32": (logits(directory, torch.float32) - want).abs().max().item(),
                "direct bf16": (logits(directory, torch.bfloat16) - rounded).abs().max().item(),
            }
            # A comparison with NaN is false, and so is a failure.
            good = distance["chiku"] <= TOLERANCE and distance["direct f32"] == 0 and distance["direct bf16"] == 0
            failed += not good
            told = ", ".join(f"{k} {v:.2e}" for k, v in distance.items())
            print(f"{'ok  ' if good else 'FAIL'} {name:<17} {told}; bf16 weights and arithmetic: "
                  f"{(rounded - want).abs().mean().item():.2e} on average", flush=True)
    print(f"{len(BAKES) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
