"""Every operator over memory layouts: what it tells torch.compile about its results, and the results themselves.

torch.compile plans memory by an operator's fake implementation. Where the real one gives other strides, inductor stops,
or, with its size checks off, reads the wrong numbers.
"""

import importlib
import pkgutil

import pytest
import torch
from closeness import kernel_arguments

import rectiformer.ops
from rectiformer.ops import gpu
from rectiformer.ops.call import UNBOUNDED

for package in (rectiformer.ops, *([gpu] if gpu.TRITON else [])):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")

M, N, D, DV = 3, 5, 4, 6
SIZES = {"batch": (2, 2, 1), "batch of 1": (1, 2, 1), "one head": (2, 1, 1)}
"""Sequences, heads and key heads."""
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "columns first": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[..., :1, :, :].expand(x.shape),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
}


def qkv(B, H, K):
    return [torch.randn(B, H, M, D), torch.randn(B, K, N, D), torch.randn(B, K, N, DV)]


def upstream(B, H, K):
    return torch.randn(B, H, M, DV)


def pointwise(B, H, K):
    tables = [torch.randn(B, H, M, N), torch.rand(B, 1, M, N) > 0.2, torch.arange(N, N - B, -1), torch.tensor(7)]
    return [*qkv(B, H, K), *tables, "relu", 2, 0.5, 0.2, 3, 1, 0, 0]


def limited(B):
    """Lengths, dropout and a window."""
    given = {"key_lengths": torch.arange(N, N - B, -1), "seed": torch.tensor(7), "dropout_p": 0.2}
    return given | {"window_left": 3, "window_right": 1}


def short(B, H, K):
    given = {"head_factors": torch.rand(H) + 0.5, "row_exponent": 0.5}
    return kernel_arguments(*qkv(B, H, K), **given, **limited(B))


def long(B, H, K, bias=True):
    given = {"attn_bias": torch.randn(B, H, M, N) if bias else None, "attn_mask": torch.rand(B, 1, M, N) > 0.2}
    given["head_factors"] = torch.rand(H) + 0.5 if H == K else None
    return kernel_arguments(*qkv(B, H, K), **given, **limited(B))


def decode(B, H, K):
    q, keys, values = qkv(B, H, K)
    new = [torch.randn(B, K, 1, D), torch.randn(B, K, 1, DV)]
    lengths = torch.arange(N, N - B, -1)
    rest = ["relu", 1, "", 0.0, 0.5, 0.5, 1.0, 0.0, UNBOUNDED, 1, False, False, False]
    return [q, keys, values, *new, lengths, *[None] * 5, *rest]


def cache_mix(B, H, K):
    lengths = torch.arange(N, N - B, -1)
    return [torch.randn(B, H, M, N), qkv(B, H, K)[2], lengths, None, UNBOUNDED, 1, torch.bfloat16]


def rowwise(B, H, K):
    return [*qkv(B, H, K), torch.arange(N, N - B, -1), 0.5, "softpick", 3, 1]


def rowwise_backward(B, H, K):
    """No row has a score above 8, and the total of each is 5."""
    rows = torch.stack([torch.full((B, H, M), 8.0), torch.full((B, H, M), 0.2)], 2)
    return [upstream(B, H, K), torch.randn(B, H, M, DV), rows, *rowwise(B, H, K)]


def rms_norm(B, H, K):
    return [torch.randn(B, M, H * DV), torch.randn(H * DV), torch.randn(H * DV), 1e-6]


OPERATORS = {
    "pointwise": pointwise,
    "pointwise_backward": lambda *sizes: [upstream(*sizes), *pointwise(*sizes), True],
    "short": short,
    "short_backward": lambda *sizes: [upstream(*sizes), *short(*sizes)],
    "long": long,
    "long_backward": lambda *sizes: [upstream(*sizes), *long(*sizes)],
    "long_rows": lambda *sizes: long(*sizes, bias=False),
    "long_rows_backward": lambda B, H, K: [upstream(B, H, K), torch.randn(B, H, M, 2), *long(B, H, K, bias=False)],
    "decode": decode,
    "cache_scores": lambda *sizes: [*qkv(*sizes)[:2], torch.full(sizes[:1], N), None, UNBOUNDED],
    "cache_mix": cache_mix,
    "simplex": lambda B, H, K: [torch.randn(B, H, M, N), torch.arange(N, N - B, -1), 0.5, 2, N - M, 3, 1],
    "simplex_backward": lambda B, H, K: [torch.randn(B, H, M, N), torch.rand(B, H, M, N), 0.5, 2],
    "rowwise": rowwise,
    "rowwise_backward": rowwise_backward,
    "rms_norm": rms_norm,
    "rms_norm_backward": lambda B, H, K: [torch.randn(B, M, H * DV), *rms_norm(B, H, K)],
    "add_norm": lambda B, H, K: [*torch.randn(2, B, M, H * DV), *torch.randn(2, H * DV), 1e-6],
}


ON_CPU = [name for name in OPERATORS if name.startswith("pointwise")]


@pytest.mark.skipif(not gpu.TRITON, reason="needs Triton")
def test_no_operator_is_left_out():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("rectiformer::")}
    assert names == {f"rectiformer::{name}" for name in OPERATORS}


def check_layouts(name, sizes, checks, layouts=tuple(LAYOUTS)):
    """opcheck in each layout, and the same numbers from each. Nothing may write to memory that is shared."""
    operator = getattr(torch.ops.rectiformer, name).default
    arguments = OPERATORS[name](*SIZES[sizes])
    for layout in layouts:
        lay = LAYOUTS[layout]
        laid = [
            value
            if not isinstance(value, torch.Tensor) or (about.is_write and layout == "expanded")
            else (lay if value.dim() > 2 else LAYOUTS["sliced"])(value)
            for value, about in zip(arguments, operator._schema.arguments, strict=True)
        ]
        torch.library.opcheck(operator, laid, test_utils=checks)
        dense = [value.contiguous() if isinstance(value, torch.Tensor) else value for value in laid]
        torch.testing.assert_close(operator(*laid), operator(*dense))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ON_CPU)
def test_cpu_operators_keep_their_word_in_every_layout(name, sizes):
    check_layouts(name, sizes, ("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in ON_CPU])
def test_kernel_operators_keep_their_word_at_batch_size_1(name):
    check_layouts(name, "batch of 1", ("test_faketensor",), ("transposed", "expanded"))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_keeps_its_word_in_every_layout(name, sizes):
    check_layouts(name, sizes, ("test_schema", "test_faketensor", "test_autograd_registration"))
