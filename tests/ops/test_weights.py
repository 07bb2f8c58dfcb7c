"""Weights out of a call: dense, sparse, and as statistics that never hold all of them."""

import math

import pytest
import torch

import rectiformer.ops.weights as weights_module
from rectiformer import VARIANTS, ArgumentError, attention, attention_stats, attention_weights

WEIGHTED = [name for name, variant in VARIANTS.items() if variant.has_weights]


@pytest.fixture
def few_rows(monkeypatch):
    """Blocks of one query row, so that joining blocks is tested on small inputs."""
    monkeypatch.setattr(weights_module, "BLOCK_CELLS", 1)


def inputs(B=2, H=4, K=2, M=5, N=7, D=6):
    return torch.randn(B, H, M, D), torch.randn(B, K, N, D), torch.randn(B, K, N, 3)


@pytest.mark.parametrize("variant", WEIGHTED)
def test_weights_mix_values_into_the_output(variant):
    q, k, v = inputs()
    arguments = {"causal": True, "key_lengths": [7, 4], "attn_bias": torch.randn(5, 7)}
    mixed = attention_weights(q, k, variant, **arguments) @ v.repeat_interleave(2, 1)
    assert torch.allclose(mixed, attention(q, k, v, variant, **arguments), atol=1e-5)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("variant", WEIGHTED)
def test_sparse_weights_are_the_dense_ones(variant):
    q, k, _ = inputs()
    dense = attention_weights(q, k, variant, causal=True)
    sparse = attention_weights(q, k, variant, causal=True, sparse=True)
    assert sparse.layout == torch.sparse_csr
    assert torch.allclose(sparse.to_dense().view(dense.shape), dense, atol=1e-6)  # rows summed in another order
    assert len(sparse.values()) == (dense != 0).sum()


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("variant", WEIGHTED)
def test_statistics_count_what_the_weights_hold(variant):
    q, k, _ = inputs()
    arguments = {"causal": True, "key_lengths": [7, 1]}
    dense = attention_weights(q, k, variant, **arguments)
    stats = attention_stats(q, k, variant, **arguments)
    visible = torch.tensor([[3, 4, 5, 6, 7], [1, 1, 1, 1, 1]])[:, None].expand(2, 4, 5)
    assert torch.equal(stats.visible, visible)
    assert torch.equal(stats.nonzero, (dense != 0).sum(-1))
    assert torch.allclose(stats.mass, dense.sum(-1), atol=1e-5)
    assert torch.equal(stats.null, (dense == 0).all(-1))
    zeros = visible.sum((0, 2)) - (dense != 0).sum((0, 2, 3))
    assert torch.allclose(stats.sparsity, zeros / visible.sum((0, 2)))
    assert torch.allclose(stats.null_rate, (dense == 0).all(-1).float().mean((0, 2)))


def test_statistics_are_printed_as_shares_per_head():
    scores = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    stats = attention_stats(scores.reshape(1, 1, 2, 2), torch.eye(2).reshape(1, 1, 2, 2), "rela", scale=1.0)
    assert repr(stats) == "AttentionStats([1, 1, 2], per head: sparsity [0.75], null_rate [0.5])"


def test_entropy_in_closed_form():
    """Equal weights over n keys have entropy log n; one key alone has none; a null row has none."""
    q = torch.ones(1, 1, 3, 1)
    k = torch.tensor([1.0, 1.0, 1.0, 1.0]).view(1, 1, 4, 1)
    assert attention_stats(q, k, "rela").entropy.flatten().tolist() == pytest.approx([math.log(4)] * 3)
    k = torch.tensor([1.0, -1.0, -1.0, -1.0]).view(1, 1, 4, 1)
    assert (attention_stats(q, k, "rela").entropy == 0).all()
    assert (attention_stats(q, -k.abs(), "rela").entropy == 0).all()
    assert attention_stats(q, k * 0, "softmax").entropy.flatten().tolist() == pytest.approx([math.log(4)] * 3)


def test_a_query_that_sees_no_key_is_not_null():
    stats = attention_stats(torch.randn(2, 1, 3, 4), -torch.rand(2, 1, 5, 4), "rela", key_lengths=[5, 0])
    assert not stats.null[1].any()
    assert (stats.visible[1] == 0).all()
    blind = attention_stats(torch.randn(2, 1, 3, 4), torch.randn(2, 1, 5, 4), "rela", key_lengths=[0, 0])
    assert blind.sparsity.tolist() == blind.null_rate.tolist() == [0]


def test_statistics_of_a_long_document_never_hold_all_weights():
    """At 4,096 tokens the dense weights of two heads are 128 MiB; the statistics hold a few blocks of 4 MiB."""
    q, k = (torch.randn(1, 2, 4096, 16) for _ in range(2))
    largest = []
    original = weights_module.reference_weights

    def watched(*arguments):
        result = original(*arguments)
        largest.append(result.numel())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_module, "reference_weights", watched)
        stats = attention_stats(q, k, "rela", causal=True)
    assert stats.mass.shape == (1, 2, 4096)
    assert max(largest) <= weights_module.BLOCK_CELLS


@pytest.mark.parametrize("function", [attention_weights, attention_stats])
def test_a_variant_without_weights_says_so(function):
    q, k, _ = inputs()
    with pytest.raises(ArgumentError, match="'inhibitor' subtracts instead of weighing, so it has no weights"):
        function(q, k, "inhibitor")


def test_no_keys_at_all():
    q, k, _ = inputs(N=0)
    assert attention_weights(q, k, "softmax").shape == (2, 4, 5, 0)
    assert attention_weights(q, k, "rela", sparse=True).shape == (40, 0)
    assert (attention_stats(q, k, "sparsemax").mass == 0).all()


def test_dense_weights_have_gradients():
    q, k, _ = inputs()
    q.requires_grad_()
    attention_weights(q, k, "rela").sum().backward()
    assert (q.grad != 0).any()
