"""Weights that are a difference: each view is a call of its own, of halves of queries and keys, wherever that runs."""

import pytest
import torch
from closeness import grid_inputs

from rectiformer import MultiheadAttention, RectifiedAttention, attention, attention_stats, attention_weights, explain
from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops import attention as attention_module
from rectiformer.ops import decode as decode_module
from rectiformer.ops.decode import decode_attention
from rectiformer.ops.gpu import plans
from rectiformer.ops.varlen import attention_varlen

SHORT, LONG = (2, 4, 2, 5, 7, 8, 6), (1, 2, 2, 70, 140, 16, 8)
LAM = {4: torch.tensor([0.0, 0.3, 0.5, 1.0]), 2: torch.tensor([0.25, 0.75])}
CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "bias": {"attn_bias": torch.linspace(-1, 1, 7)},
    "dropout": {"dropout_p": 0.5, "seed": 3},
}


def inputs_of(sizes):
    return [tensor.float() for tensor in grid_inputs(*sizes)[:3]]


def by_views(q, k, v, lam, **given):
    """Two calls of `threshold`; both drop the same cells, for they have the same seed."""
    d = q.shape[-1] // 2
    first = attention(q[..., :d], k[..., :d], v, "threshold", **given)
    return first - lam * attention(q[..., d:], k[..., d:], v, "threshold", **given)


@pytest.mark.parametrize("call", CALLS)
def test_it_is_the_difference_of_two_calls(call):
    q, k, v = inputs_of(SHORT)
    lam = LAM[4]
    given = {"beta": 0.25, **CALLS[call]}
    out = attention(q, k, v, "threshold-diff", lam=lam, **given)
    assert torch.equal(out, by_views(q, k, v, lam[:, None, None], **given))
    assert not torch.equal(out, attention(q, k, v, "threshold-diff", lam=0.0, **given))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("sizes", [SHORT, LONG], ids=["short", "long"])
def test_the_kernels_of_the_views_are_those_of_the_variant(sizes, monkeypatch):
    """In eager calls by one plan for each view, from the second call on without another check."""
    monkeypatch.setattr(attention_module, "SHORTCUTS", plans.PlanCache())
    q, k, v = inputs_of(sizes)
    given = {"beta": 0.25, "backend": "fused"}
    _, expected = (by_views(q, k, v, 0.5, **given) for _ in range(2))
    checked, check = [], attention_module.check_call
    monkeypatch.setattr(attention_module, "check_call", lambda *a, **given: checked.append(a[3]) or check(*a, **given))
    _, found = (attention(q, k, v, "threshold-diff", lam=0.5, **given) for _ in range(2))
    assert torch.equal(found, expected)
    assert checked == ["threshold-diff"]
    ways = [explain(q, k, v, variant, backend="fused") for variant in ("threshold", "threshold-diff")]
    assert ways[0].kernel == ways[1].kernel != ""


@pytest.mark.usefixtures("interpreter")
def test_halves_of_tensors_that_are_not_aligned_have_no_plan(monkeypatch):
    """Of two such calls the second half may be aligned in one and not in the other: a launch would take it for so."""
    shortcuts = plans.PlanCache()
    monkeypatch.setattr(attention_module, "SHORTCUTS", shortcuts)
    q, k, v = (torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape) for x in inputs_of(SHORT))
    attention(q, k, v, "threshold-diff", backend="fused")
    assert list(shortcuts.values()) == [None]


def test_zeros_are_cells_that_weigh_nothing_in_either_view():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    weights = attention_weights(q, k, "threshold-diff", beta=0.25)
    views = zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
    first, second = (attention_weights(*view, "threshold", beta=0.25) for view in views)
    assert torch.equal(weights == 0, (first == 0) & (second == 0))
    assert (weights < 0).any()
    stats = attention_stats(q, k, "threshold-diff", beta=0.25)
    assert torch.equal(stats.nonzero, (weights != 0).sum(-1))
    torch.testing.assert_close(stats.mass, weights.sum(-1))
    assert not attention_stats(q, k, "threshold-diff", beta=9.0).nonzero.any()


@pytest.mark.usefixtures("interpreter")
def test_a_step_of_decoding_is_the_last_row_of_the_whole(monkeypatch):
    """By the kernels: each view writes its half of the new key."""
    monkeypatch.setattr(decode_module, "plain_decoding", None)
    q, k, v = inputs_of((2, 4, 2, 7, 7, 8, 6))
    held_k, held_v = (torch.cat([x[:, :, :-1], torch.full_like(x[:, :, :1], torch.nan)], 2) for x in (k, v))
    given = {"beta": 0.25, "lam": LAM[4]}
    out = decode_attention(
        q[:, :, -1:], held_k, held_v, "threshold-diff", key_lengths=torch.tensor([7]),
        new_kv=(k[:, :, -1:], v[:, :, -1:]), **given,
    )  # fmt: skip
    whole = attention(q, k, v, "threshold-diff", causal=True, backend="reference", **given)
    torch.testing.assert_close(out, whole[:, :, -1:])
    assert torch.equal(held_k, k)
    assert torch.equal(held_v, v)


def test_packed_sequences_are_attended_alone():
    q, k, v = inputs_of((1, 4, 2, 9, 9, 8, 6))
    bounds = torch.tensor([0, 4, 4, 9])
    given = {"beta": 0.25, "lam": LAM[4], "causal": True}
    packed = attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), bounds, bounds, "threshold-diff", **given)
    alone = [
        attention(*(x[:, :, span] for x in (q, k, v)), "threshold-diff", **given) for span in (slice(4), slice(4, 9))
    ]
    assert torch.equal(packed, torch.cat(alone, 2)[0].transpose(0, 1))


def test_a_head_size_that_cannot_be_halved_is_refused():
    q, k, v = inputs_of((1, 2, 2, 3, 3, 7, 6))
    packed, bounds = [x[0].transpose(0, 1) for x in (q, k, v)], torch.tensor([0, 3])
    for call in (
        lambda: attention(q, k, v, "threshold-diff"),
        lambda: attention_weights(q, k, "threshold-diff"),
        lambda: attention_varlen(*packed, bounds, bounds, "threshold-diff"),
        lambda: decode_attention(q[:, :, :1], k, v, "threshold-diff", key_lengths=torch.tensor([3])),
        lambda: RectifiedAttention(14, 2, "threshold-diff"),
        lambda: MultiheadAttention(14, 2, variant="threshold-diff"),
    ):
        with pytest.raises(ShapeError, match="head size is 7, but variant 'threshold-diff' has two views and needs an"):
            call()


@pytest.mark.parametrize("lam", [-0.1, 1.1, torch.tensor([0.5, 1.5, 0.0, 1.0])], ids=str)
def test_more_than_all_of_the_second_view_is_refused(lam):
    with pytest.raises(ArgumentError, match="needs a number from 0 to 1"):
        attention(*inputs_of(SHORT), "threshold-diff", lam=lam)
