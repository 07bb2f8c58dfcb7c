"""`torch.compile(fullgraph=True)`: one graph, the same numbers, no recompilation when it matters."""

from functools import partial

import pytest
import torch

from rectiformer import VARIANTS, attention, attention_varlen


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def forward_and_gradients(function, tensors):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def assert_same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() <= 64 * torch.finfo(a.dtype).eps * max(1, b.abs().max().item())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_compiles_to_one_graph(variant):
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    lengths, mask = torch.tensor([7, 4]), torch.rand(2, 1, 5, 7) > 0.2

    def call(q, k, v):
        return attention(
            q,
            k,
            v,
            variant,
            causal=True,
            key_lengths=lengths,
            attn_mask=mask,
            attn_bias=mask * 0.5,
            dropout_p=0.2,
            seed=4,
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(forward_and_gradients(compiled, (q, k, v)), forward_and_gradients(call, (q, k, v)))


@pytest.mark.parametrize("variant", ["rela", "sigmoid"])
def test_bfloat16_compiles_to_one_graph(variant):
    tensors = [torch.randn(2, 2, 7, 8, dtype=torch.bfloat16) for _ in range(3)]

    def call(q, k, v):
        return attention(q, k, v, variant, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert_same(forward_and_gradients(compiled, tensors), forward_and_gradients(call, tensors))


def check_any_size(variant, backend):
    """One graph for all sizes and numbers, since torch.compile is told that each may change: forward and backward."""
    numbers = {name: option.default for name, option in VARIANTS[variant].options.items()}

    def call(q, k, v, **arguments):
        return attention(q, k, v, variant, causal=True, seed=4, **arguments)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for queries, keys, scale in ((5, 7, 0.5), (6, 9, 0.25)):
        tensors = torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
        given = {"scale": scale, "dropout_p": 0.2, "window_size": 4, **numbers}
        found, expected = (forward_and_gradients(partial(how, **given), tensors) for how in (compiled, call))
        assert_same(found, expected)


@pytest.mark.parametrize("variant", ["rela", "reluformer", "topk"])
def test_variants_are_traced_to_one_graph_of_any_size(variant):
    check_any_size(variant, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_compiles_to_one_graph_of_any_size(variant):
    check_any_size(variant, "aot_eager")


@pytest.mark.parametrize("variant", ["reluformer", "entmax15"])
def test_the_default_compiler_gives_the_same_numbers(variant):
    """With one sequence whose heads lie as a projection leaves them: strides that a copy of a larger batch would not
    keep."""
    tensors = [torch.randn(1, 9, 2, 8).transpose(1, 2) for _ in range(3)]

    def call(q, k, v):
        return attention(q, k, v, variant, causal=True)

    compiled = torch.compile(call, fullgraph=True)
    assert_same(forward_and_gradients(compiled, tensors), forward_and_gradients(call, tensors))


def test_changing_lengths_compile_at_most_twice():
    """Once for the first length, once for any length."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, "reluformer"), fullgraph=True, backend=counter)
    for length in (8, 9, 13, 31, 64):
        q, k, v = (torch.randn(2, 2, length, 8) for _ in range(3))
        assert torch.allclose(compiled(q, k, v), attention(q, k, v, "reluformer"), atol=1e-6)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("variant", ["rela", "reluformer", "softmax", "sparsemax"])
def test_packed_sequences_compile_to_one_graph(variant):
    q, k, v = torch.randn(7, 2, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 3)
    bounds = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 4, 6, 9])

    def call(q, k, v):
        return attention_varlen(q, k, v, *bounds, variant, causal=True, dropout_p=0.3, seed=2)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(forward_and_gradients(compiled, (q, k, v)), forward_and_gradients(call, (q, k, v)))
