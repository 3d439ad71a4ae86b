"""Which buffers a kernel both writes and reads through caches that other blocks' writes do not reach, as its PTX says.

A load by `.nc`, or one that L1 keeps, may see what was there before another block of the same launch wrote. Which parameter an address
stems from is followed through registers, without regard to the order of instructions: a register stems from all that any instruction ever
put into it. Addresses that were loaded from memory stem from nothing; no kernel keeps any there.
"""

import re

# Kernels that the check must find, by name, and one that it must not: they show that it can fail.
PLANTED = """
#include "ptx.cuh"
KERNEL(planted_constant, 32)(const float* x, float* part, float* y, int n) {
    for (int i = 0; i < n; i++) part[blockIdx.x + i] = x[i] + ld_nc(part + i * 2);
    y[threadIdx.x] = 1.0f;
}
KERNEL(planted_cached, 32)(uint32_t* state, const uint32_t* x, uint32_t* y, int n) {
    uint32_t* at = state;
    uint32_t sum = 0;
    for (int i = 0; i < n; i++, at += gridDim.x) sum += *at;
    atomic_add(state + x[0], sum);
    y[0] = sum;
}
KERNEL(planted_nothing, 32)(const float* x, float* part, float* y, int n) {
    for (int i = 0; i < n; i++) part[blockIdx.x + i] = ld_nc(x + i) + ld_cg(part + i * 2);
    y[threadIdx.x] = x[n];
}
"""
COHERENT = (".cg", ".cv", ".acquire", ".relaxed", ".volatile")


def entries(ptx):
    """Name and instructions of every kernel."""
    for entry in re.finditer(r"\.entry\s+(\w+)\s*\((?:.*?)\)(.*?)\n\}", ptx, re.S):
        body = re.sub(r"//[^\n]*", "", entry[2])
        yield entry[1], [line.strip(" \t\n{}") for line in body.split(";")]


def split(instruction):
    """Opcode and operands of an instruction, without its guard and labels."""
    text = re.sub(r"^(?:\s*[$\w]+:\s*)*(?:@!?%p\d+\s+)?", "", instruction).strip()
    opcode, _, operands = text.partition("\t") if "\t" in text else text.partition(" ")
    return opcode, operands.strip()


def stems(instructions):
    """Of every 64-bit register, the parameters that its value may stem from."""
    moves, known = [], {}
    for opcode, operands in map(split, instructions):
        target, _, sources = operands.partition(",")
        if not re.fullmatch(r"%rd\d+", target.strip()):
            continue
        if opcode.startswith("ld.param"):
            known.setdefault(target.strip(), set()).add(re.search(r"\[(.*?)\]", sources)[1])
        elif not opcode.startswith(("ld", "atom")):
            moves.append((target.strip(), re.findall(r"%rd\d+", sources)))
    grown = True
    while grown:
        grown = False
        for target, sources in moves:
            found = set().union(*(known.get(s, set()) for s in sources))
            have = known.setdefault(target, set())
            if not found <= have:
                have |= found
                grown = True
    return known


def stale(ptx):
    """(kernel, parameter, opcode) of every read that may miss a write of the same launch."""
    for kernel, instructions in entries(ptx):
        known, written, read = stems(instructions), set(), []
        for opcode, operands in map(split, instructions):
            parts = opcode.split(".")
            if parts[0] not in ("ld", "st", "atom", "red", "cp") or {"param", "local", "const"} & set(parts[1:2]):
                continue
            addresses = re.findall(r"\[(%rd\d+)", operands)
            if parts[0] == "cp":
                # The second address is global memory's.
                if opcode.startswith("cp.async.ca"):
                    read += [(p, opcode) for p in known.get(addresses[-1], ())]
                continue
            if "shared" in parts or not addresses:
                continue
            parameters = known.get(addresses[0], set())
            if parts[0] != "ld":
                written |= parameters
            elif not any(order in opcode for order in COHERENT):
                read += [(p, opcode) for p in parameters]
        for parameter, opcode in sorted(set(read)):
            if parameter in written:
                yield kernel, parameter.removeprefix(f"{kernel}_param_"), opcode
