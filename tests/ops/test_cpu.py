"""The blocked implementation against the reference: values and gradients, any shape, any feature, bounded memory."""

import time
from dataclasses import replace

import pytest
import torch
from closeness import (
    assert_beta_gets_its_gradients,
    assert_matches_reference,
    grid_inputs,
    outputs_and_gradients,
    peak_allocation,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import rectiformer.ops.cpu as cpu
from rectiformer import VARIANTS, attention
from rectiformer.ops.activations import FUNCTIONS, Pointwise

POINTWISE = [name for name, variant in VARIANTS.items() if "blocked" in variant.implementations]
RECTIFIED = [name for name in POINTWISE if VARIANTS[name].rectified]
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 3)},
    "causal window": {"causal": True, "window_size": (4, 0)},
    "dropout": {"dropout_p": 0.25, "seed": 11},
    "negative scale": {"scale": -0.5},
    "zero scale": {"scale": 0.0},
}


@pytest.fixture(params=["shipped blocks", "tiny blocks"])
def block_size(request, monkeypatch):
    """Small inputs fit in one block as shipped, so the block edges are tested with blocks of a few cells too."""
    if request.param == "tiny blocks":
        monkeypatch.setattr(cpu, "block_sizes", lambda scores, buffers: (3, 4, 5))


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("variant", POINTWISE)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_match_the_reference(variant, features, dtype):
    assert_matches_reference(grid_inputs(2, 4, 2, 13, 17, 8, 5), dtype, "blocked", variant, **FEATURES[features])


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("power", [1, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_new_row_may_have_any_function_and_power(function, power, bias, monkeypatch):
    """As CONTRIBUTING.md promises; the rows of the table have few of these pairs."""
    row = replace(VARIANTS["relu2"], name="new", pointwise=Pointwise(function, power=power))
    monkeypatch.setitem(VARIANTS, "new", row)
    features = {"attn_bias": torch.randint(-3, 4, (2, 4, 13, 17)) / 4} if bias else {"causal": True, "dropout_p": 0.25}
    features |= {"key_lengths": torch.tensor([17, 6]), "seed": 11}
    assert_matches_reference(grid_inputs(2, 4, 2, 13, 17, 8, 5), torch.float32, "blocked", "new", **features)


def test_functions_are_those_of_the_table():
    assert set(cpu.FUNCTIONS) == set(FUNCTIONS)
    x = torch.linspace(-3, 3, 25, dtype=torch.float64)
    for name, function in cpu.FUNCTIONS.items():
        exact = FUNCTIONS[name]
        assert torch.equal(function.weigh(x.clone()), exact(x)), name
        assert function.at_zero == exact(torch.zeros(())).item(), name
        assert function.homogeneous == torch.allclose(exact(3 * x), 3 * exact(x)), name


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("features", [{}, {"causal": True, "key_lengths": [17, 6]}], ids=["full", "causal, padded"])
def test_a_learned_shift_gets_its_gradients(features):
    assert_beta_gets_its_gradients(grid_inputs(2, 4, 2, 13, 17, 8, 5), "blocked", **features)


def test_only_what_wants_a_gradient_has_its_sum_over_keys(monkeypatch):
    """The shift of sigmoid's rows is a bias without a gradient."""
    q, k, v, upstream = (tensor.float().requires_grad_() for tensor in grid_inputs(2, 4, 2, 13, 17, 8, 5))
    shapes, add = [], cpu.pointwise_backward

    def watch(*arguments):
        shapes.append(add(*arguments)[3].shape)
        return add(*arguments)

    monkeypatch.setattr(cpu, "pointwise_backward", watch)
    torch.autograd.grad(attention(q, k, v, "sigmoid"), (q, k, v), upstream)
    bias = torch.zeros(13, 17, requires_grad=True)
    torch.autograd.grad(attention(q, k, v, "sigmoid", attn_bias=bias), bias, upstream)
    assert shapes == [(0,), (1, 1, 13, 17)] or shapes == [(0,), (2, 1, 13, 17)]


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("bias_shape", [(2, 4, 13, 17), (1, 4, 1, 17), (13, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", ["reluformer", "threshold", "sigmoid", "gelu"])
def test_bias_mask_and_lengths_together(variant, bias_shape, causal):
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(2, 1, 13, 17, generator=generator) > 0.3
    mask[0, 0, 4] = False
    bias = torch.randint(-3, 4, bias_shape, generator=generator) / 4
    for dtype in (torch.float32, torch.bfloat16):
        assert_matches_reference(
            grid_inputs(2, 4, 2, 13, 17, 8, 5),
            dtype,
            "blocked",
            variant,
            causal=causal,
            attn_mask=mask,
            attn_bias=bias,
            key_lengths=torch.tensor([17, 6]),
        )


@settings(max_examples=80)
@given(
    variant=st.sampled_from(POINTWISE),
    M=st.one_of(st.integers(1, 40), st.sampled_from([97, 128, 199, 300])),
    N=st.one_of(st.integers(1, 40), st.sampled_from([97, 128, 199, 257, 300])),
    D=st.sampled_from([16, 40, 64, 80, 111, 256]),
    Dv=st.sampled_from([1, 16, 33]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(st.integers(0, 50), st.integers(0, 50))),
    lengths=st.booleans(),
    hide=st.sampled_from(["nothing", "cells", "all"]),
    seed=st.integers(0, 1000),
)
def test_any_call_matches_the_reference(variant, M, N, D, Dv, heads, dtype, causal, window, lengths, hide, seed):
    generator = torch.Generator().manual_seed(seed)
    arguments = {"causal": causal, "window_size": window, "scale": 2.0**-3}
    if lengths:
        arguments["key_lengths"] = torch.randint(0, N + 1, (2,), generator=generator)
    if hide != "nothing":
        share = 0.5 if hide == "cells" else 0.0
        arguments["attn_mask"] = torch.rand(2, 1, M, N, generator=generator) < share
    H, K = heads
    assert_matches_reference(grid_inputs(2, H, K, M, N, D, Dv, seed), dtype, "blocked", variant, **arguments)


@pytest.mark.parametrize("length", [600, 1100])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_that_need_several_shipped_blocks(length, causal):
    """Long enough for the single-matrix path and for several blocks of keys and queries, as shipped."""
    for dtype in (torch.float32, torch.bfloat16):
        assert_matches_reference(
            grid_inputs(1, 2, 1, length, length, 16, 16), dtype, "blocked", "rela", causal=causal, scale=0.25
        )


@pytest.mark.parametrize(
    ("variant", "dtype", "heads"),
    [
        ("rela", torch.float32, 2),
        ("reluformer", torch.bfloat16, 8),
        ("sigmoid", torch.float32, 2),
        ("threshold", torch.float32, 2),
    ],
)
def test_extra_memory_stays_under_a_tenth_of_the_scores(variant, dtype, heads):
    """Peak memory of forward and backward beyond inputs, outputs and gradients, at 4,096 tokens.

    The more heads, the less a block weighs: two are the harder case, but in bfloat16 a block spans all keys.
    """
    q, k, v = (torch.randn(1, heads, 4096, 64, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.ones_like(q)
    peak = peak_allocation(lambda: torch.autograd.grad(attention(q, k, v, variant), (q, k, v), upstream))
    results = 4 * q.nbytes  # the output and three gradients
    dense = heads * 4096 * 4096 * q.element_size()
    assert peak - results < dense / 10


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("features", [{}, {"causal": True, "key_lengths": [17, 6]}], ids=["full", "causal, padded"])
def test_autocast_leaves_float32_alone(features):
    inputs = [tensor.float() / 3 for tensor in grid_inputs(2, 4, 2, 13, 17, 8, 5)]
    expected = outputs_and_gradients(inputs, torch.float32, "blocked", "rela", **features)
    with torch.autocast("cpu", torch.bfloat16):
        found = outputs_and_gradients(inputs, torch.float32, "blocked", "rela", **features)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "features", [{"key_lengths": torch.tensor([17, 6]), "dropout_p": 0.25}, {"key_lengths": [17, 6]}]
)
@pytest.mark.parametrize("variant", ["sigmoid", "softmax"])
def test_tensors_on_the_cpu_need_no_other_device(variant, features):
    q, k, v, upstream = (tensor.requires_grad_() for tensor in grid_inputs(2, 4, 2, 13, 17, 8, 5))
    with torch.device("meta"):
        out = attention(q, k, v, variant, causal=True, **features)
        torch.autograd.grad(out, (q, k, v), upstream)
    assert out.device.type == "cpu"


def test_fresh_memory_is_never_read():
    """With NaN in every fresh tensor, values and gradients are still finite."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        q, k, v, upstream = (tensor.float().requires_grad_() for tensor in grid_inputs(2, 4, 2, 40, 50, 16, 16))
        bias = torch.zeros(40, 50, requires_grad=True)
        for arguments in ({}, {"attn_bias": bias}, {"causal": True, "key_lengths": [0, 20]}, {"dropout_p": 0.5}):
            out = attention(q, k, v, "relu2", backend="blocked", **arguments)
            assert out.isfinite().all()
            wanted = (q, k, v, bias) if "attn_bias" in arguments else (q, k, v)
            assert all(grad.isfinite().all() for grad in torch.autograd.grad(out, wanted, upstream))
    finally:
        torch.use_deterministic_algorithms(False)


def test_reruns_are_bitwise_equal():
    q, k, v, upstream = (tensor.float().requires_grad_() for tensor in grid_inputs(2, 4, 2, 130, 140, 64, 64))
    runs = [torch.autograd.grad(attention(q, k, v, causal=True), (q, k, v), upstream) for _ in range(5)]
    for later in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], later, strict=True))


@pytest.mark.parametrize("empty", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
@pytest.mark.parametrize("variant", ["rela", "reluformer", "softmax", "sparsemax", "topk"])
def test_empty_axes_give_empty_or_zero_results(variant, empty):
    B, H, M, N = empty
    q = torch.randn(B, max(H, 1) if H else 1, M, 4, requires_grad=True)
    k, v = (torch.randn(B, q.shape[1], N, 4, requires_grad=True) for _ in range(2))
    out = attention(q, k, v, variant)
    assert out.shape == q.shape
    assert (out == 0).all() or N
    out.sum().backward()
    assert (q.grad == 0).all() or N


@pytest.mark.parametrize("empty", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
@pytest.mark.parametrize("variant", ["rela", "sigmoid", "softmax"])
def test_empty_axes_have_first_and_second_derivatives(variant, empty):
    B, H, M, N = empty
    leaves = tuple(torch.randn(*shape, 4, requires_grad=True) for shape in ((B, 2 * H, M), (B, H, N), (B, H, N)))
    first = torch.autograd.grad(attention(*leaves, variant).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves, allow_unused=True)
    for leaf, *found in zip(leaves, first, second, strict=True):
        assert all(grad is None or (grad.shape == leaf.shape and not grad.any()) for grad in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_query_without_keys_is_zero_whatever_it_holds(dtype):
    q, k, v = (torch.full((1, 2, length, 4), torch.nan, dtype=dtype) for length in (3, 0, 0))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v)
    assert out.dtype == dtype
    assert not out.any()


def test_operators_are_well_formed():
    q, k, v, upstream = (tensor.float().requires_grad_() for tensor in grid_inputs(2, 4, 2, 5, 7, 8, 3))
    bias = torch.randn(1, 4, 5, 7, requires_grad=True)
    rest = (None, torch.tensor([7, 3]), None, "relu", 1, 0.5, 0.0, 3, 0, 0, 0)
    forward, backward = torch.ops.rectiformer.pointwise.default, torch.ops.rectiformer.pointwise_backward.default
    torch.library.opcheck(forward, (q, k, v, bias, *rest))
    torch.library.opcheck(forward, (q, k, v, None, *rest))
    for wants_bias in (True, False):
        torch.library.opcheck(backward, (upstream.detach(), q, k, v, bias, *rest, wants_bias))


def test_gaps_between_rows_cost_no_more_than_a_copy():
    """oneDNN takes hundreds of times longer for a second factor with gaps between its rows."""
    packed = torch.randn(1, 1024, 3, 1, 64)
    strided = [packed[:, :, part].transpose(1, 2) for part in range(3)]
    dense = [tensor.contiguous() for tensor in strided]

    def seconds(tensors):
        start = time.process_time()
        attention(*tensors, backend="blocked")
        return time.process_time() - start

    best = [min(seconds(tensors) for _ in range(3)) for tensors in (strided, dense)]
    assert best[0] < 20 * best[1]
