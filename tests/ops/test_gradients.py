"""Derivatives in float64: first, second and forward-mode, over the whole table and every implementation."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from rectiformer import VARIANTS, attention

# The fused kernels take neither float64 nor a bias; test_fused.py differentiates them.
BACKENDS = [
    (name, backend)
    for name, variant in VARIANTS.items()
    for backend in variant.implementations
    if backend not in ("fused", "sdpa")
]
FEATURES = {
    "plain": {},
    "masked": {"causal": True, "key_lengths": [5, 3], "window_size": (3, 1)},
    "dropped": {"dropout_p": 0.3, "seed": 5, "scale": -0.7},
}


def leaves(*shapes):
    return tuple(torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def arguments(variant, features):
    return {**FEATURES[features], **({"keep": 2} if variant == "topk" else {})}


@pytest.mark.parametrize(("variant", "backend"), BACKENDS)
@pytest.mark.parametrize("features", FEATURES)
def test_first_and_second_derivatives(variant, backend, features):
    """Grouped heads, more keys than queries, values of another width, and a bias.

    In random directions (fast_mode); the formulas written by hand are checked entry by entry below.
    """
    call = arguments(variant, features)
    inputs = leaves((2, 2, 3, 4), (2, 1, 5, 4), (2, 1, 5, 3), (2, 1, 3, 5))

    def run(q, k, v, bias):
        return attention(q, k, v, variant, attn_bias=bias, backend=backend, **call)

    assert gradcheck(run, inputs, fast_mode=True)
    assert gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("variant", [name for name, backend in BACKENDS if backend == "blocked"])
def test_derivatives_without_a_bias(variant):
    """Without a bias the blocked path keeps the scale outside a ReLU: another formula, the same derivatives."""
    inputs = leaves((1, 2, 4, 6), (1, 2, 4, 6), (1, 2, 4, 2))
    assert gradcheck(lambda *qkv: attention(*qkv, variant, causal=True, backend="blocked"), inputs)
    assert gradgradcheck(lambda *qkv: attention(*qkv, variant, causal=True, backend="blocked"), inputs)


@pytest.mark.parametrize("shape", [(2, 1, 3, 5), (1, 1, 1, 5), (2, 2, 3, 1), (1, 1, 1, 1), (5,)], ids=str)
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_a_bias_of_any_shape_receives_its_gradient(shape, backend):
    q, k, v, bias = leaves((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3), shape)
    assert gradcheck(lambda bias: attention(q, k, v, "relu2", attn_bias=bias, backend=backend), (bias,))
    assert gradgradcheck(lambda bias: attention(q, k, v, "relu2", attn_bias=bias, backend=backend), (bias,))


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_mode(variant):
    """The default backend steps aside for plain operations when duals or torch.func are at work."""
    inputs = leaves((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 3))
    call = {"causal": True, **arguments(variant, "plain")}
    checks = {"check_forward_ad": True, "check_backward_ad": False, "fast_mode": True}
    assert gradcheck(lambda *qkv: attention(*qkv, variant, **call), inputs, **checks)
    tangents = tuple(torch.randn_like(tensor) for tensor in inputs)
    _, derivative = torch.func.jvp(lambda *qkv: attention(*qkv, variant, **call), inputs, tangents)
    out = attention(*inputs, variant, **call)
    probe = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, probe)
    by_reverse = sum((grad * tangent).sum() for grad, tangent in zip(grads, tangents, strict=True))
    assert torch.allclose((derivative * probe).sum(), by_reverse, rtol=1e-9)


@pytest.mark.parametrize(
    ("variant", "option"),
    [
        ("reluformer", "gamma"),
        ("entmax", "alpha"),
        ("threshold", "beta"),
        ("threshold-diff", "beta"),
        ("threshold-diff", "lam"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_learnable_options_receive_gradients(variant, option, size):
    q, k, v = leaves((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3))
    low = 1.3 if option in ("gamma", "alpha") else 0.2  # a high threshold would leave nothing
    value = (torch.rand(size, dtype=torch.float64) * 0.5 + low).requires_grad_()
    given = {"causal": True} | ({"beta": 0.2} if option == "lam" else {})
    assert gradcheck(lambda value: attention(q, k, v, variant, **given, **{option: value}), (value,))
    assert gradgradcheck(lambda value: attention(q, k, v, variant, **given, **{option: value}), (value,))


@pytest.mark.parametrize("variant", ["rela", "reluformer", "sparsemax"])
def test_key_lengths_go_through_vmap(variant):
    """One length a sample and sequence, or the same for all samples."""
    q, k, v = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 2, 2, 7, 8), torch.randn(3, 2, 2, 7, 8)
    lengths = torch.tensor([[7, 3], [2, 7], [0, 5]])

    def call(q, k, v, lengths):
        return attention(q, k, v, variant, key_lengths=lengths, causal=True)

    for axis, given in ((0, lengths), (None, lengths[0])):
        mapped = torch.vmap(call, in_dims=(0, 0, 0, axis))(q, k, v, given)
        samples = [call(q[i], k[i], v[i], given if axis is None else given[i]) for i in range(3)]
        torch.testing.assert_close(mapped, torch.stack(samples))


def test_per_sample_gradients_by_vmap():
    q, k, v = (torch.randn(3, 2, 4, 8) for _ in range(3))
    per_sample = torch.vmap(lambda q, k, v: torch.func.grad(lambda q: attention(q, k, v).square().sum())(q))(
        q[:, None], k[:, None], v[:, None]
    )
    for b in range(3):
        leaf = q[b : b + 1].clone().requires_grad_()
        (expected,) = torch.autograd.grad(attention(leaf, k[b : b + 1], v[b : b + 1]).square().sum(), leaf)
        assert torch.allclose(per_sample[b], expected, atol=1e-5)
