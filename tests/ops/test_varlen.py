"""Packed sequences: each attended as if it were alone."""

import pytest
import torch
from closeness import OPTIONS, assert_no_worse, grid

from rectiformer import VARIANTS, ArgumentError, ShapeError, attention, attention_varlen
from rectiformer.ops.attention import check_call
from rectiformer.ops.call import Packing
from rectiformer.ops.gpu import short_obstacle

LENGTHS = {
    "plain": ([3, 4, 2], [4, 2, 5]),
    "empty queries": ([3, 0, 4], [4, 2, 3]),
    "empty keys": ([3, 2, 4], [4, 0, 3]),
    "both empty": ([0, 0, 1], [0, 0, 1]),
    "one": ([5], [5]),
}


kernels_run = pytest.mark.usefixtures("interpreter")


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
    out = attention_varlen(q, k, v, bounds(lengths_q), bounds(lengths_k), variant, causal=True, window_size=(2, 0))
    assert out.shape == (sum(lengths_q), 4, 5)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    alone = [
        attention(*(t.transpose(0, 1)[None] for t in part), variant, causal=True, window_size=(2, 0))[0].transpose(0, 1)
        for part in parts
    ]
    assert torch.equal(out, torch.cat(alone))
    for grad in torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True):
        assert grad is None or grad.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_dropout_is_the_same_for_every_backend_and_differs_between_sequences(backend):
    lengths = [6, 6]
    q, k, v = (torch.ones(12, 2, 4) for _ in range(3))
    call = {"dropout_p": 0.5, "seed": 7, "backend": backend}
    out = attention_varlen(q, k, v, bounds(lengths), bounds(lengths), **call)
    assert not torch.equal(out[:6], out[6:])
    expected = attention_varlen(q, k, v, bounds(lengths), bounds(lengths), dropout_p=0.5, seed=7, backend="reference")
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
    with pytest.raises(ShapeError, match=r"cu_seqlens_q is \[2\] of torch.bool; it needs whole numbers"):
        attention_varlen(q[:1], k, v, torch.tensor([False, True]), torch.tensor([0, 5]))
    falling = torch.tensor([0, 4, 3, 5], dtype=torch.uint8)  # whose differences are without a sign too
    with pytest.raises(ArgumentError, match="cu_seqlens_q runs from 0 to 5; it must rise"):
        attention_varlen(q, k, v, falling, torch.tensor([0, 1, 3, 5]))
    with pytest.raises(ShapeError, match=r"v has N = 4 but k has N = 5; q \[M H D\] is \[5, 4, 8\]"):
        attention_varlen(q, k, v[:4], good, good)


def on_grid(lengths_q, lengths_k, heads=2, key_heads=2):
    """q, k, v and an upstream gradient in float64."""
    shapes = [(sum(lengths_q), heads, 4), (sum(lengths_k), key_heads, 4), (sum(lengths_k), key_heads, 3)]
    return [grid(*shape, seed=seed) for seed, shape in enumerate([*shapes, (sum(lengths_q), heads, 3)])]


def results(inputs, lengths, dtype, backend, **call):
    """Output and gradients of one packed call."""
    q, k, v, upstream = (tensor.to(dtype).requires_grad_() for tensor in inputs)
    cu_q, cu_k = (bounds(side).to(torch.int32) for side in lengths)
    most = {"max_seqlen_q": max(lengths[0]), "max_seqlen_k": max(lengths[1])}
    out = attention_varlen(q, k, v, cu_q, cu_k, backend=backend, **most, **call)
    return [out, *torch.autograd.grad(out, (q, k, v), upstream, create_graph=True)], (q, k, v, upstream)


def assert_kernels_match(lengths, key_heads=2, **call):
    call = OPTIONS.get(call["variant"], {}) | call
    inputs = on_grid(*lengths, key_heads=key_heads)
    ways = [(torch.float32, "fused"), (torch.float32, "reference"), (torch.float64, "reference")]
    found = [results(inputs, lengths, dtype, backend, **call)[0] for dtype, backend in ways]
    for name, ours, eager, exact in zip(["out", "d_q", "d_k", "d_v"], *found, strict=True):
        assert_no_worse(name, ours, eager, exact)


@kernels_run
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", ["rela", "reluformer", "relu2", "softmax", "sigmoid", "threshold", "gelu"])
def test_kernels_match_the_reference(variant, lengths):
    assert_kernels_match(LENGTHS[lengths], variant=variant)
    assert_kernels_match(
        LENGTHS[lengths], variant=variant, causal=True, window_size=(3, 0), dropout_p=0.25, seed=2**40 + 7
    )


@kernels_run
@pytest.mark.parametrize("lengths", [([2, 40, 0, 33], [40, 2, 7, 33]), ([3, 32, 1], [3, 32, 64])], ids=str)
@pytest.mark.parametrize("variant", ["rela", "softmax"])
def test_every_length_has_its_launch(variant, lengths):
    """Blocks of 32 and of 64, with keys and queries that fall on either side of the border."""
    assert_kernels_match(lengths, variant=variant, causal=True)


@kernels_run
@pytest.mark.parametrize("variant", ["reluformer", "softmax"])
def test_packed_heads_may_share_keys(variant):
    assert_kernels_match(LENGTHS["empty keys"], key_heads=1, variant=variant, causal=True, dropout_p=0.25, seed=3)


@kernels_run
@pytest.mark.parametrize("variant", ["rela", "softmax", "sigmoid"])
def test_second_derivatives_of_packed_sequences(variant):
    lengths, found = LENGTHS["empty queries"], []
    for dtype, backend in ((torch.float32, "fused"), (torch.float64, "reference")):
        (_, *first), leaves = results(on_grid(*lengths), lengths, dtype, backend, variant=variant)
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves))
    for ours, exact in zip(*found, strict=True):
        # A hundred float32 roundings of the largest entry.
        assert (ours.double() - exact).abs().max() <= 100 * torch.finfo(torch.float32).eps * exact.abs().max()


@kernels_run
@pytest.mark.parametrize(
    ("variant", "option"), [("reluformer", "gamma"), ("threshold", "beta"), ("threshold-diff", "lam")]
)
@pytest.mark.parametrize("lengths", ["both empty", "empty keys"])
def test_a_learned_number_sums_over_packed_sequences(variant, option, lengths):
    lengths, found = LENGTHS[lengths], []
    for dtype, backend in ((torch.float32, "fused"), (torch.float64, "reference")):
        number = torch.tensor([0.125, 0.5], dtype=dtype, requires_grad=True)
        (out, *_), _ = results(on_grid(*lengths), lengths, dtype, backend, variant=variant, **{option: number})
        found.append(torch.autograd.grad(out.square().sum(), number)[0])
    torch.testing.assert_close(found[0].double(), found[1], rtol=100 * torch.finfo(torch.float32).eps, atol=0)


# Seconds, for it compiles.
@kernels_run
def test_other_lengths_compile_nothing_anew():
    from torch._dynamo.testing import CompileCounterWithBackend  # which imports Triton

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def call(q, k, v, cu):
        return attention_varlen(q, k, v, cu, cu, max_seqlen_q=32, max_seqlen_k=32, backend="fused")

    for lengths in ([3, 4, 2], [5, 1, 9], [20, 30, 10]):
        q, k, v, _ = (tensor.float() for tensor in on_grid(lengths, lengths))
        for tensor in (q, k, v):
            torch._dynamo.mark_dynamic(tensor, 0)
        cu = bounds(lengths)
        torch.testing.assert_close(call(q, k, v, cu), attention_varlen(q, k, v, cu, cu, backend="reference"))
    assert counter.frame_count == 1


@kernels_run
@pytest.mark.parametrize(
    ("most", "reason"),
    [
        ((3, None), "it needs max_seqlen_q and max_seqlen_k"),
        ((3, 65), "in torch.float32 it takes up to 64 queries and keys"),
        ((64, 64), ""),
    ],
)
def test_what_short_kernels_cannot_pack_has_a_reason(most, reason):
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in packed([3, 2], [3, 2]))
    call = check_call(q, k, v, "rela")
    obstacle = short_obstacle(q, v, call, Packing(bounds([3, 2]), bounds([3, 2]), *most))
    assert obstacle.startswith(reason)
    assert bool(obstacle) == bool(reason)


@kernels_run
def test_a_forced_backend_that_cannot_pack_is_refused_with_the_reason():
    q, k, v = packed([3, 2], [3, 2])
    with pytest.raises(ArgumentError, match="backend 'fused' cannot run this call: variant 'sparsemax' has no fused"):
        attention_varlen(q, k, v, bounds([3, 2]), bounds([3, 2]), "sparsemax", backend="fused")


def test_a_sequence_longer_than_stated_is_named():
    q, k, v = packed([3, 2], [1, 4])
    with pytest.raises(ArgumentError, match="max_seqlen_k = 3, but a sequence has 4 rows; give at least the longest"):
        attention_varlen(q, k, v, bounds([3, 2]), bounds([1, 4]), max_seqlen_q=3, max_seqlen_k=3)
