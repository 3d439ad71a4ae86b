#!/usr/bin/env python3
"""Writes the quantiser's fixtures and holds them to the compressed-tensors library.

    pip install numpy==2.4.1 torch==2.13.0 safetensors==0.8.0 compressed-tensors==0.20.1
    python make_fixtures.py

`08_linears_bf16.safetensors`: the bf16 linears that the oracle's variant 08_int4 was quantised from, drawn again from its
seed. The library's result must equal the oracle's bytes, or this script fails; the Rust test asks the same of our quantiser.

`edge_rows.safetensors`: rows that provoke ties, clamping, zero groups and tiny values, with the library's packed words and
scales: `{bf16,f32}.weight`, `{bf16,f32}.{group32,channel}.{packed,scale}`.

`edge_rows_widths.safetensors`: what the library makes of the first rows of it at 8, 3 and 2 bits, before packing:
`{bf16,f32}.{group32,channel}.int{8,3,2}.{q,scale}`. Not packed, since the library packs int3 across words.
"""
import pathlib
import zlib

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Packer
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
ORACLE = HERE / "../../../runtime/tests/oracle/08_int4/model.safetensors"
SEED = 808


def scales(x, group, bits):
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=True, group_size=group,
                            strategy="group" if group else "channel")
    grouped = x if group is None else x.reshape(x.shape[0], -1, group)
    low, high = grouped.amin(-1, keepdim=group is None), grouped.amax(-1, keepdim=group is None)
    scale, _ = calculate_qparams(low, high, args)
    return args, scale.to(torch.bfloat16).contiguous()


def quantise(x, group):
    args, scale = scales(x, group, 4)
    done = Packer.compress({"weight": x, "weight_scale": scale}, QuantizationScheme(targets=["Linear"], weights=args))
    return done["weight_packed"], scale


def linears():
    oracle, out = load_file(ORACLE), {}
    for key in sorted(oracle):
        if not key.endswith(".weight_shape"):
            continue
        module = key.removesuffix(".weight_shape")
        shape, name = tuple(oracle[key].tolist()), module + ".weight"
        rng = np.random.Generator(np.random.PCG64([SEED, zlib.crc32(name.encode())]))
        x = rng.standard_normal(shape).astype(np.float32) * shape[1] ** -0.5
        if module.endswith("per_layer_model_projection"):
            x = x * 0.02
        x = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(torch.bfloat16)
        packed, scale = quantise(x, None if module == "lm_head" else 32)
        assert torch.equal(packed, oracle[module + ".weight_packed"]), module
        assert torch.equal(scale, oracle[module + ".weight_scale"]), module
        out[name] = x
    return out


def edges():
    rng, out = np.random.Generator(np.random.PCG64(1)), {}
    x = rng.standard_normal((96, 128)).astype(np.float32)
    x[0] = 0
    x[1, :32] = 0
    x[2] = np.linspace(-7.5, 7.5, 128)
    x[3] = np.repeat(np.arange(-8, 8) + 0.5, 8) * 0.03125
    x[4] = 1e-38
    x[5] = -3e38
    x[6, ::2] = -x[6, ::2] * 1e-30
    x[7] = np.abs(x[7])
    x[8] = -np.abs(x[8])
    for name, w in (("bf16", torch.from_numpy(x).to(torch.bfloat16)), ("f32", torch.from_numpy(x))):
        out[f"{name}.weight"] = w
        for strategy, group in (("group32", 32), ("channel", None)):
            out[f"{name}.{strategy}.packed"], out[f"{name}.{strategy}.scale"] = quantise(w, group)
    return out


def widths(rows):
    out = {}
    for name in ("bf16", "f32"):
        w = rows[f"{name}.weight"][:24]
        for strategy, group in (("group32", 32), ("channel", None)):
            for bits in (8, 3, 2):
                args, scale = scales(w, group, bits)
                key = f"{name}.{strategy}.int{bits}"
                out[f"{key}.q"], out[f"{key}.scale"] = quantize(w, scale, None, args, dtype=torch.int8), scale
    return out


if __name__ == "__main__":
    save_file(linears(), HERE / "08_linears_bf16.safetensors", metadata={"format": "pt"})
    rows = edges()
    save_file(rows, HERE / "edge_rows.safetensors", metadata={"format": "pt"})
    save_file(widths(rows), HERE / "edge_rows_widths.safetensors", metadata={"format": "pt"})
