#!/usr/bin/env python3
"""Builds the CUDA kernels and records what they take of the machine. Needs no GPU, no driver and no CUDA installation.

    kernels/build.py --out DIR            cubins for sm_80, sm_86 and sm_90 and compute_80 PTX, one a family
    kernels/build.py --resources          rewrites kernels/resources.json
    kernels/build.py --fetch              only makes sure that the compiler is there
    kernels/build.py --check              compares with kernels/resources.json; exit 1 where anything differs

The compiler is NVRTC 12.4, so that drivers from r525 on load the cubins; the disassembler is a later one, since only wheels of that carry
it. Both are fetched by pip into a cache (--cache, or $XDG_CACHE_HOME/chiku/cuda-12.4) unless they are there.
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.dont_write_bytecode = True
import coherence

HERE = Path(__file__).resolve().parent
WHEELS = ["nvidia-cuda-nvrtc-cu12==12.4.127", "nvidia-cuda-cuobjdump==13.5.37", "nvidia-cuda-nvdisasm==13.5.37"]
ARCHITECTURES = ["sm_80", "sm_86", "sm_90"]
OPTIONS = ["--std=c++17", "--fmad=false", "--device-as-default-execution-space"]
# What the hardware keeps of a block's shared memory, which the disassembler counts in.
RESERVED_SHARED = {"sm_90": 1024}
# What counts as work to turn packed weights into operands.
DEQUANTISE = ("LOP3", "SHF", "PRMT", "HADD2", "HFMA2")
# What else is counted: conversions, special functions, and what addresses are made of.
ARITHMETIC = (*DEQUANTISE, "HMUL2", "FADD", "FMUL", "FFMA", "FMNMX", "MUFU", "I2F", "F2F", "F2FP", "IADD3", "IMAD", "IMNMX", "ISETP", "LEA", "SEL")
# Most dequantising instructions for 8 weights a lane, in the straight pieces of the hot loop that hold matrix products (some of them compute
# addresses), and the weights that a lane has in one iteration: what was reached, with room for a few addresses.
# A kernel's is the first whose name its own begins with. Of the 9.25 of int2 with f16 operands 8.5 expand weights.
LIMITS = {
    "gemm_int2_f16": (9.25, 64),
    "gemm_int3_f16": (14, 64),
    "gemm_int4_f16": (10, 64),
    "gemm_int2": (9.5, 64),
    "gemm_int3": (14.75, 64),
    "gemm_int4": (12, 64),
    "gemm_int8": (14.75, 64),
}
# Where the limits hold: the target and its sibling. On sm_90, which only checks results, the compiler moves more addresses into these pieces.
LIMITED = ("sm_80", "sm_86")


def limit_of(name):
    """Most dequantising instructions for 8 weights, and the weights of an iteration; None for other kernels."""
    return next((limit for family, limit in LIMITS.items() if name.startswith(family)), None)


class Failure(Exception):
    """An error with a message for the user."""


def toolchain(cache):
    """Paths of libnvrtc, cuobjdump and nvdisasm, fetched where they are missing."""
    wanted = {name: None for name in ("libnvrtc.so.12", "cuobjdump", "nvdisasm")}
    locate = lambda: {name: next(cache.rglob(name), None) for name in wanted}
    found = locate() if cache.is_dir() else wanted
    if not all(found.values()):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *WHEELS]
            if subprocess.run(command).returncode:
                raise Failure(f"pip could not fetch {', '.join(WHEELS)}")
            for wheel in Path(folder).glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(cache)
        found = locate()
    for name, path in found.items():
        if path is None:
            raise Failure(f"{cache}: {name} is not there; remove the folder and run this again")
        # Wheels do not keep the bit; a folder that is not ours has it.
        if not name.startswith("lib") and not os.access(path, os.X_OK):
            path.chmod(0o755)
    return found


class Nvrtc:
    """The run-time compiler, which works without a driver."""

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))

    def compile(self, source, architecture):
        """The image of one source: a cubin for sm_NN, PTX for compute_NN."""
        nvrtc, program = self.library, ctypes.c_void_p()
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
        options = [f"--gpu-architecture={architecture}", f"--include-path={HERE}", *OPTIONS]
        array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
        log = self._text(program, "ProgramLog")
        if failed or "warning" in log:
            raise Failure(f"{source.name} for {architecture}:\n{log}")
        image = self._bytes(program, "CUBIN" if architecture.startswith("sm_") else "PTX")
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return image

    def _bytes(self, program, what):
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    def _text(self, program, what):
        return self._bytes(program, what).rstrip(b"\0").decode(errors="replace").strip()


def run(tool, *arguments):
    done = subprocess.run([str(tool), *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"{tool.name} {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout


def usage(tools, cubin, reserved):
    """Registers, stack, static shared and local memory of every kernel of a cubin, in bytes but for the registers."""
    text = run(tools["cuobjdump"], "-res-usage", cubin)
    kernels = {}
    for name, numbers in re.findall(r"Function (\w+):\s+(.*)", text):
        values = dict(re.findall(r"(\w+):(\d+)", numbers))
        kernels[name] = {
            "registers": int(values["REG"]),
            "stack": int(values["STACK"]),
            # Of a kernel without shared memory the hardware keeps nothing.
            "static_shared": max(0, int(values["SHARED"]) - reserved),
            "local": int(values["LOCAL"]),
        }
    if not kernels:
        raise Failure(f"cuobjdump names no kernel of {cubin.name}")
    return kernels


def instructions(tools, cubin):
    """Of every kernel, the lines of its code: (label or None, opcode, target of a branch or None)."""
    kernels, lines = {}, None
    for line in run(tools["nvdisasm"], "-c", cubin).splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            lines = kernels.setdefault(section[1], [])
        elif re.match(r"\s*\.section\s", line):
            lines = None
        elif lines is not None and (label := re.match(r"(\.L_\w+):", line)):
            lines.append((label[1], None, None))
        elif lines is not None and (code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line)):
            target = re.search(r"`\((\.L_\w+)\)", code[2]) if code[1].startswith("BRA") else None
            lines.append((None, code[1], target and target[1]))
    return kernels


def hot_loop(lines):
    """Opcodes of the shortest loop that holds every matrix product, and of its straight pieces that hold any; of nothing where there is
    none."""
    at = {label: i for i, (label, _, _) in enumerate(lines) if label}
    products = [i for i, (_, code, _) in enumerate(lines) if code and "MMA" in code]
    if not products:
        return [], []
    loops = [
        (at[target], i)
        for i, (_, _, target) in enumerate(lines)
        if target and at.get(target, i) < i and at[target] <= products[0] and products[-1] <= i
    ]
    if not loops:
        return [], []
    begin, end = min(loops, key=lambda loop: loop[1] - loop[0])
    pieces = [[]]
    for label, code, target in lines[begin : end + 1]:
        if label:
            pieces.append([])
            continue
        pieces[-1].append(code)
        if target:
            pieces.append([])
    busy = [piece for piece in pieces if any("MMA" in code for code in piece)]
    return sum(pieces, []), sum(busy, [])


def counted(opcodes, names):
    """How often each of these instructions stands among the opcodes, those that do not left out."""
    count = Counter(opcode.split(".")[0] for opcode in opcodes)
    return {name: count[name] for name in names if count[name]}


def global_loads(opcodes):
    """Loads of global memory by what they may miss: `constant` and `cached` ones another block's writes, `coherent` ones and asynchronous
    copies around L1 nothing."""
    kinds = Counter()
    for opcode in opcodes:
        if opcode.split(".")[0] == "LDGSTS":
            kinds["async" if ".BYPASS" in opcode else "cached"] += 1
        elif opcode.split(".")[0] == "LDG":
            kinds["constant" if ".CONSTANT" in opcode else "coherent" if ".STRONG" in opcode else "cached"] += 1
    return {kind: kinds[kind] for kind in ("constant", "cached", "coherent", "async") if kinds[kind]}


def resources(tools, image, architecture):
    """What the kernels of one cubin take, and what their hot loops are made of."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "image.cubin"
        cubin.write_bytes(image)
        kernels = usage(tools, cubin, RESERVED_SHARED.get(architecture, 0))
        code = instructions(tools, cubin)
    for name, record in kernels.items():
        loop, products = hot_loop(code[name])
        opcodes = [opcode for _, opcode, _ in code[name] if opcode]
        record["instructions"] = len(opcodes)
        record["global_loads"] = global_loads(opcodes)
        record["arithmetic"] = counted(opcodes, ARITHMETIC)
        if not loop:
            continue
        count = Counter(opcode.split(".")[0] for opcode in loop)
        work = Counter(opcode.split(".")[0] for opcode in products)
        wide = lambda start: sum(1 for o in loop if o.startswith(start) and ".128" in o)
        record["hot_loop"] = {
            "instructions": len(loop),
            "mma": count["HMMA"] + count["IMMA"],
            "ldmatrix": count["LDSM"],
            "shared_loads_16": wide("LDS"),
            "async_copies_16": wide("LDGSTS"),
            "arithmetic": counted(loop, ARITHMETIC),
            "dequantise": {opcode: work[opcode] for opcode in DEQUANTISE if work[opcode]},
        }
        if limit := limit_of(name):
            total = sum(record["hot_loop"]["dequantise"].values())
            record["hot_loop"]["dequantise_per_8_weights"] = round(total * 8 / limit[1], 2)
    return kernels


def violations(table):
    """What no change may do, whatever the recorded table says."""
    for architecture, kernels in table.items():
        for name, record in kernels.items():
            for what in ("stack", "local", "static_shared"):
                if record[what]:
                    yield f"{name} on {architecture}: {record[what]} bytes of {what}"
            if limit := limit_of(name):
                loop = record.get("hot_loop")
                if not loop or not loop["mma"]:
                    yield f"{name} on {architecture}: no loop with matrix products"
                elif architecture in LIMITED and loop["dequantise_per_8_weights"] > limit[0]:
                    found = loop["dequantise_per_8_weights"]
                    yield f"{name} on {architecture}: {found} dequantising instructions for 8 weights, at most {limit[0]}"


def incoherent(ptx):
    """Reads of kernels that may miss what another block wrote, as messages."""
    for kernel, parameter, opcode in coherence.stale(ptx.decode()):
        yield f"{kernel}: parameter {parameter} is written, and read by {opcode}; use ld_cg, ld_acquire or cp_async16"


def check_the_check(nvrtc):
    """Kernels with planted mistakes must be found, the one without must not."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "planted.cu"
        source.write_text(coherence.PLANTED)
        ptx = nvrtc.compile(source, "compute_80").rstrip(b"\0")
        found = [line.split(":")[0] for line in incoherent(ptx)]
    if sorted(set(found)) != ["planted_cached", "planted_constant"]:
        raise Failure(f"the check of reads is broken: of its planted mistakes it finds {found}")


def fingerprint():
    """What the images are made of: 64-bit FNV-1a over the names and contents of all sources. crates/kernels/build.rs computes it again, so
    that a program never holds machine code of other sources than its own."""
    value = 0xCBF29CE484222325
    for path in sorted([*HERE.glob("*.cu"), *HERE.glob("*.cuh")]):
        for byte in path.name.encode() + b"\0" + path.read_bytes() + b"\0":
            value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return f"{value:016x}"


def build(job):
    """One family: ({architecture: resources}, {name of an image: the image}, what it must not do)."""
    tools, source = job
    nvrtc, table, images = Nvrtc(tools["libnvrtc.so.12"]), {}, {}
    for architecture in ARCHITECTURES:
        image = nvrtc.compile(source, architecture)
        table[architecture] = resources(tools, image, architecture)
        images[f"{source.stem}.{architecture}.cubin"] = image
    images[f"{source.stem}.compute_80.ptx"] = ptx = nvrtc.compile(source, "compute_80").rstrip(b"\0")
    return table, images, list(incoherent(ptx))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the images")
    parser.add_argument("--resources", action="store_true", help="rewrite resources.json")
    parser.add_argument("--check", action="store_true", help="compare with resources.json")
    parser.add_argument("--fetch", action="store_true", help="only fetch the compiler, unless it is there")
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chiku" / "cuda-12.4"
    parser.add_argument("--cache", type=Path, default=default, help="where the compiler is or goes")
    options = parser.parse_args()
    if not (options.out or options.resources or options.check or options.fetch):
        parser.error("nothing to do: --out, --resources, --check or --fetch")

    tools = toolchain(options.cache)
    if not (options.out or options.resources or options.check):
        return
    check_the_check(Nvrtc(tools["libnvrtc.so.12"]))
    table, broken = {architecture: {} for architecture in ARCHITECTURES}, []
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        for kernels, images, found in pool.map(build, [(tools, source) for source in sorted(HERE.glob("*.cu"))]):
            broken += found
            for architecture in ARCHITECTURES:
                table[architecture].update(kernels[architecture])
            if options.out:
                for name, image in images.items():
                    (options.out / name).write_bytes(image)
    # In the order of their names, so that a change to one family is one piece of the diff.
    table = {architecture: dict(sorted(kernels.items())) for architecture, kernels in table.items()}
    if options.out:
        (options.out / "sources").write_text(fingerprint() + "\n")

    broken += violations(table)
    if broken:
        raise Failure("\n".join(broken))
    # What has no parts stands on one line.
    one_line = lambda part: "{" + re.sub(r"\s*\n\s*", " ", part[1].strip()) + "}"
    text = re.sub(r"\{([^{}]*)\}", one_line, json.dumps(table, indent=1)) + "\n"
    recorded = HERE / "resources.json"
    if options.resources:
        recorded.write_text(text)
    if options.check and (not recorded.is_file() or recorded.read_text() != text):
        raise Failure(f"{recorded.name} is not what the sources compile to; run kernels/build.py --resources and look at the diff")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        print(f"build.py: {failure}", file=sys.stderr)
        sys.exit(1)
