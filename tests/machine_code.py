"""Our kernels compiled for an H100 or H200 on any machine, and their machine code searched for a fault of ptxas.

python tests/machine_code.py PART: one line of JSON for each kernel that PART launches. No GPU is needed: Triton brings
ptxas and a disassembler along. A process of its own is, since tests elsewhere have Triton interpret.

ptxas 12.8.93, which Triton 3.6 has, may compile the address of a matrix product's operand to a uniform register that
nothing has written: the product then reads whatever shared memory that points to, and nothing else tells (docs/log.md).
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import tempfile
from bisect import bisect_right
from itertools import accumulate, product
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)
ADDRESS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")
UNIFORM = re.compile(r"\bUR(\d+)")
WRITERS = re.compile(r"U|R2UR|S2UR|CS2UR|VOTEU|REDUX|LDCU")
"""Instructions whose first operand is written, if that is a uniform register."""
BLOCKS = (16, 32, 64, 128)


def unwritten_registers(code: str) -> list[str]:
    """Instructions that read a uniform register which none before them has written, in the order of the text."""
    written: set[int] = set()
    found = []
    for opcode, text in INSTRUCTION.findall(code):
        operands = re.split(r",\s*(?![^\[]*\])", text)
        wide = opcode.startswith("U") and ".64" in opcode
        writes = WRITERS.match(opcode) and re.fullmatch(r"UR\d+", operands[0])
        read = {
            register
            for operand in operands[1 if writes else 0 :]
            for number in map(int, UNIFORM.findall(operand))
            for register in registers_of(operand, number, operands, wide)
        }
        if not opcode.startswith("ULDC") and read - written:
            found.append(f"{opcode} {text}")
        if writes:
            first = int(operands[0][2:])
            written |= set(range(first, first + (2 if wide or ".WIDE" in opcode else 1)))
    return found


def registers_of(operand: str, number: int, operands: list[str], wide: bool) -> range:
    """What an operand reads: two descriptors of matrices, of which the first is not used if that matrix is in
    registers; one of memory; a wide number; or a register."""
    if operand.startswith("gdesc["):
        return range(number + 2 * bool(re.match(r"R\d", operands[1])), number + 4)
    return range(number, number + (2 if operand.startswith("desc[") or wide else 1))


def instructions_of(binary: bytes) -> bytes:
    """What is executable in a cubin, which is an ELF file of 64 bits."""
    (start,) = struct.unpack_from("<Q", binary, 0x28)
    size, count = struct.unpack_from("<HH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, start + size * index) for index in range(count)]
    return b"".join(binary[at : at + length] for _, _, flags, _, at, length in headers if flags & 4)


def disassemble(binaries: list[bytes]) -> list[str]:
    """The text of each cubin. One process does them all: it takes an eighth of a second to begin, and little longer."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    codes = [instructions_of(binary) for binary in binaries]
    assert all(codes)
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [tool, "--binary", "SM90a", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ends, found = list(accumulate(map(len, codes))), [[] for _ in codes]
    for line in text.splitlines():
        if address := ADDRESS.match(line):
            found[bisect_right(ends, int(address[1], 16))].append(line)
    assert all(found)
    return ["\n".join(lines) for lines in found]


class Hopper:
    """As much of a driver as Triton asks to compile."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_instead_of_launching():
    """From now on a launch compiles its kernel, and that is all; each is kept in the list that is returned."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(Hopper())
    kernels, launch = {}, JITFunction.run

    def run(self, *arguments, grid, warmup, **options):
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        kernels[id(kernel)] = (self.__name__, options, kernel)

    JITFunction.run = run
    return kernels


def attend(how, variant, sizes, dtype="bfloat16", heads=(4, 4), **arguments):
    """Forward and backward pass of one call; nobody computes, so the numbers are of no use."""
    import torch

    from rectiformer.ops.attention import check_call

    M, N, D = sizes
    shapes = (heads[0], M), (heads[1], N), (heads[1], N)
    leaves = [torch.zeros(2, n, h, D, dtype=getattr(torch, dtype)).transpose(1, 2).requires_grad_() for h, n in shapes]
    learned = {"reluformer": "gamma", "threshold": "beta"}
    options = {learned[variant]: torch.ones(heads[0]).requires_grad_()} if variant in learned else {}
    call = check_call(*leaves, variant, seed=3, options=options, **arguments)
    out = how(*leaves, call)
    out.backward(torch.zeros_like(out))


def launch_short():
    """Every pair of block sizes; the features in turn, so that each meets each size of block."""
    from rectiformer.ops.gpu.short import short_attention

    for index, (M, N) in enumerate(product(BLOCKS, BLOCKS)):
        cases = [
            ("softmax", {"key_lengths": [N, N - 3]}),
            ("rela", {"key_lengths": [N, N - 3]}),
            ("reluformer", {"causal": True}),
            ("relu2", {"dropout_p": 0.1}),
            ("sigmoid", {"causal": True}),
            ("threshold", {"key_lengths": [N, N - 3]}),
            ("gelu", {"causal": True}),
        ]
        for variant, arguments in (cases[index % 2], cases[2 + index // 2 % 2], cases[4 + index % 3]):
            attend(short_attention, variant, (M, N, 64), **arguments)
        if max(M, N) == 64:
            attend(short_attention, *cases[index % 2][:1], (M, N, 128))
            attend(short_attention, "softmax", (M, N, 64), "float16")
            attend(short_attention, "rela", (M, N, 64), heads=(4, 2))


def launch_long():
    """What tests/gpu has for long sequences, once each."""
    import torch

    from rectiformer.ops.gpu.long import long_attention

    for D in (64, 128):
        for variant, arguments in (
            ("rela", {}),
            ("rela", {"causal": True}),
            ("relu2", {"key_lengths": [300, 200]}),
            ("reluformer", {"causal": True, "key_lengths": [300, 200], "dropout_p": 0.1}),
            ("relu-seqlen", {"causal": True, "attn_bias": torch.zeros(1, 4, 256, 300)}),
            ("sigmoid", {"causal": True}),  # in pairs, which a bias prevents
            ("sigmoid", {"causal": True, "attn_bias": torch.zeros(1, 4, 256, 300)}),
            ("threshold", {"key_lengths": [300, 200]}),
            ("gelu", {"causal": True}),
        ):
            attend(long_attention, variant, (256, 300, D), **arguments)


def launch_decode():
    """One query and several, few keys and many, one key head for each query head, for a few, and for 64 rows."""
    import torch

    from rectiformer.ops.call import AttentionCall, Visibility
    from rectiformer.ops.gpu.decode import fused_decoding
    from rectiformer.ops.variants import VARIANTS

    shapes = ((8, 8, 1, 32), (8, 2, 1, 500), (4, 4, 4, 40), (8, 8, 1, 4000), (32, 2, 4, 500))
    for variant, (heads, key_heads, queries, capacity) in product(("rela", "softmax", "sigmoid", "threshold"), shapes):
        q = torch.zeros(4, heads, queries, 64, dtype=torch.bfloat16)
        sizes = (64, 32 if capacity == 4000 else 64)  # heads of keys and of values need not be alike
        keys, values = (torch.zeros(4, key_heads, capacity, size, dtype=torch.bfloat16) for size in sizes)
        seen = Visibility(queries, capacity, key_lengths=torch.full((1,), capacity - 3), first=capacity - queries)
        row = VARIANTS[variant]
        fused_decoding(q, keys, values, AttentionCall(row, seen, row.resolve_options({}), 0.125))


def launch_simplex():
    """Rows of one warp and of many, with and without lengths."""
    import torch

    from rectiformer.ops.gpu.simplex import simplex, simplex_backward

    for power, keys in product((1, 2), (17, 500, 2048)):
        scores = torch.zeros(2, 4, 3, keys, dtype=torch.bfloat16)
        for lengths in (None, torch.full((2,), keys - 3)):
            simplex(scores, lengths, 0.125, power, 0, keys, 0)
        simplex_backward(scores, scores, 0.125, power)


def launch_rowwise():
    """Each function of rows, one key head for each query head and one for two, one edge of visibility and all."""
    from rectiformer.ops.gpu.rowwise import rowwise_attention

    attend(rowwise_attention, "sparsemax", (256, 300, 64), heads=(4, 2), causal=True)
    attend(rowwise_attention, "entmax15", (256, 300, 128), window_size=(100, 20), key_lengths=[300, 200])
    attend(rowwise_attention, "softmax1", (256, 300, 128), causal=True)
    attend(rowwise_attention, "self-adjust", (256, 300, 64), window_size=(100, 20), key_lengths=[300, 200])
    attend(rowwise_attention, "softpick", (256, 300, 64), heads=(4, 2), causal=True)


def launch_cached_products():
    """Heads of one size and of two, one key head for each query head and one for two, with and without ancestors."""
    import torch

    from rectiformer.ops.gpu.cached_products import cache_mix, cache_scores

    for dtype, (heads, queries, D, Dv), indexed in product(
        (torch.bfloat16, torch.float32), ((4, 1, 64, 64), (8, 3, 200, 136)), (False, True)
    ):
        q, lengths = torch.zeros(2, heads, queries, D, dtype=dtype), torch.full((2,), 497)
        keys, values = (torch.zeros(2, 4, 500, size, dtype=dtype) for size in (D, Dv))
        ancestors = torch.zeros(2, 500, dtype=torch.int32) if indexed else None
        scores = cache_scores(q, keys, lengths, ancestors, 1 << 30)
        for splits in (1, 2):
            cache_mix(scores, values, lengths, ancestors, 1 << 30, splits, dtype)


PARTS = {
    "short": launch_short,
    "long": launch_long,
    "decode": launch_decode,
    "simplex": launch_simplex,
    "rowwise": launch_rowwise,
    "cached_products": launch_cached_products,
}


if __name__ == "__main__":
    compiled = compile_instead_of_launching()
    PARTS[sys.argv[1]]()
    codes = disassemble([kernel.asm["cubin"] for _, _, kernel in compiled.values()])
    for (name, options, _), code in zip(compiled.values(), codes, strict=True):
        faults = unwritten_registers(code)
        print(json.dumps({"kernel": name, "options": options, "faults": faults}, default=repr))
