"""Packed sequences: each attended as if it were alone."""

import pytest
import torch

from rectiformer import VARIANTS, ArgumentError, ShapeError, attention, attention_varlen

LENGTHS = {
    "plain": ([3, 4, 2], [4, 2, 5]),
    "empty queries": ([3, 0, 4], [4, 2, 3]),
    "empty keys": ([3, 2, 4], [4, 0, 3]),
    "both empty": ([0, 0, 1], [0, 0, 1]),
    "one": ([5], [5]),
}


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def packed(lengths_q, lengths_k, heads=4, key_heads=2):
    q = torch.randn(sum(lengths_q), heads, 8, requires_grad=True)
    k, v = (torch.randn(sum(lengths_k), key_heads, size, requires_grad=True) for size in (8, 5))
    return q, k, v


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_sequence_is_attended_alone(variant, lengths):
    lengths_q, lengths_k = LENGTHS[lengths]
    q, k, v = packed(lengths_q, lengths_k)
    out = attention_varlen(q, k, v, bounds(lengths_q), bounds(lengths_k), variant, causal=True, window=(2, 0))
    assert out.shape == (sum(lengths_q), 4, 5)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    alone = [
        attention(*(t.transpose(0, 1)[None] for t in part), variant, causal=True, window=(2, 0))[0].transpose(0, 1)
        for part in parts
    ]
    assert torch.equal(out, torch.cat(alone))
    for grad in torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True):
        assert grad is None or grad.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_dropout_is_the_same_for_every_backend_and_differs_between_sequences(backend):
    lengths = [6, 6]
    q, k, v = (torch.ones(12, 2, 4) for _ in range(3))
    call = {"dropout": 0.5, "seed": 7, "backend": backend}
    out = attention_varlen(q, k, v, bounds(lengths), bounds(lengths), **call)
    assert not torch.equal(out[:6], out[6:])
    expected = attention_varlen(q, k, v, bounds(lengths), bounds(lengths), dropout=0.5, seed=7, backend="reference")
    assert torch.allclose(out, expected)


def test_wrong_bounds_are_named():
    q, k, v = packed([3, 2], [3, 2])
    good = bounds([3, 2])
    with pytest.raises(ArgumentError, match=r"cu_seqlens_q runs from 0 to 4; it must rise from 0 to the 5 rows packed"):
        attention_varlen(q, k, v, torch.tensor([0, 3, 4]), good)
    with pytest.raises(ArgumentError, match="cu_seqlens_k runs from 0 to 5; it must rise"):
        attention_varlen(q, k, v, good, torch.tensor([0, 6, 5]))
    with pytest.raises(ShapeError, match=r"cu_seqlens_q is \[3\] but cu_seqlens_k is \[4\]"):
        attention_varlen(q, k, v, good, torch.tensor([0, 1, 3, 5]))
    with pytest.raises(ShapeError, match=r"cu_seqlens_q is \[3\] of torch.float32; it needs whole numbers"):
        attention_varlen(q, k, v, good.float(), good)
    with pytest.raises(ShapeError, match=r"v has N = 4 but k has N = 5; q \[M H D\] is \[5, 4, 8\]"):
        attention_varlen(q, k, v[:4], good, good)
