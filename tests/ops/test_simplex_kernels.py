"""The kernels of sparsemax and 1.5-entmax, run by Triton's interpreter, against the definition."""

from functools import partial

import pytest
import torch
from closeness import assert_matches_reference, grid, grid_inputs

import rectiformer.ops.attention as attention_module
from rectiformer import attention
from rectiformer.ops import gpu, plain
from rectiformer.ops.call import UNBOUNDED
from rectiformer.ops.decode import decode_attention
from rectiformer.ops.gpu import SIMPLEX_POWERS
from rectiformer.ops.simplex import entmax15, sparsemax

pytestmark = pytest.mark.usefixtures("interpreter")
DEFINITIONS = {"sparsemax": sparsemax, "entmax15": entmax15}
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "lengths": {"key_lengths": [17, 0]},
    "dropout": {"dropout_p": 0.25, "seed": 2**40 + 7},
    "bias": {"attn_bias": grid(1, 4, 13, 17)},
    "mask": {"attn_mask": torch.arange(17) % 3 != 1},
    "nothing seen": {"attn_mask": torch.arange(13)[:, None] % 2 * torch.ones(17) > 0},
    "everything": {"causal": True, "window_size": (4, 0), "key_lengths": [9, 17], "dropout_p": 0.25, "seed": 11},
    "negative scale": {"scale": -0.5},
}
variants = pytest.mark.parametrize("variant", SIMPLEX_POWERS)


def weigh_all(variant, scores):
    """Every query sees every key."""
    return gpu.simplex.simplex(scores, None, 1.0, SIMPLEX_POWERS[variant], 0, UNBOUNDED, UNBOUNDED)


@variants
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_match_the_reference(variant, features, dtype, monkeypatch):
    monkeypatch.setattr(plain, "plain_weights", lambda *_: pytest.fail("no kernel was taken"))
    assert_matches_reference(grid_inputs(2, 4, 2, 13, 17, 8, 5), dtype, "products", variant, **FEATURES[features])


@variants
def test_more_queries_than_keys_under_a_mask(variant):
    arguments = {"attn_mask": torch.arange(200).view(40, 5) % 3 != 1, "key_lengths": [5, 2]}
    assert_matches_reference(grid_inputs(2, 2, 2, 40, 5, 8, 5), torch.float32, "products", variant, **arguments)


@variants
@pytest.mark.parametrize("keys", [1, 2, 16, 17, 300, 2049])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_rows_of_any_length_and_size_sum_to_one_with_the_support_of_the_definition(variant, keys, size):
    scores = size * torch.randn(1, 1, 3, keys, generator=torch.Generator().manual_seed(keys))
    found = weigh_all(variant, scores)
    exact = DEFINITIONS[variant](scores.double(), None)
    # Scores of 1,000 hold no more than four digits of what is below the largest.
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=4e-7 * max(1.0, size))
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 1, 3), rtol=0, atol=1e-5)
    assert ((found > 0) == (exact > 0)).double().mean() > 0.99


@variants
def test_one_length_for_all_rows_of_a_cache(variant, monkeypatch):
    """As beam search gives it: expanded, every row at the same address."""
    products = [each for each in attention_module.BACKENDS if each.name == "products"]
    monkeypatch.setattr(attention_module, "candidates", lambda *_: products)
    q, keys, values, _ = (tensor.float() for tensor in grid_inputs(6, 2, 2, 1, 16, 8, 8))
    found = decode_attention(q, keys, values, variant, key_lengths=torch.tensor([5]))
    expected = attention(q, keys[:, :, :5], values[:, :, :5], variant, backend="reference")
    torch.testing.assert_close(found, expected)


@variants
def test_equal_scores_share_and_a_far_one_takes_all(variant):
    rows = torch.stack([torch.zeros(8), torch.tensor([9.0] + [0.0] * 7)])[None, None]
    found = weigh_all(variant, rows)[0, 0]
    torch.testing.assert_close(found[0], torch.full((8,), 0.125))
    assert found[1].tolist() == [1.0] + [0.0] * 7


@variants
def test_a_score_that_is_not_a_number_is_not_hidden(variant):
    rows = torch.tensor([[float("nan"), 1.0, 2.0]])[None, None]
    assert weigh_all(variant, rows).isnan().any()


@variants
def test_first_and_second_derivatives(variant):
    upstream, scores = (torch.randn(1, 2, 3, 5, dtype=torch.float64) for _ in range(2))

    def derivatives(weigh, *leaves):
        upstream, scores = leaves = [leaf.requires_grad_() for leaf in leaves]
        first = torch.autograd.grad(weigh(scores), scores, upstream, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        return [first, *second]

    exact = derivatives(lambda scores: DEFINITIONS[variant](scores, None), upstream, scores)
    ours = derivatives(partial(weigh_all, variant), upstream.detach().float(), scores.detach().float())
    for fast, true in zip(ours, exact, strict=True):
        # Roots and quotients of five numbers below 10 in float32, differentiated twice.
        torch.testing.assert_close(fast.double(), true, rtol=1e-5, atol=1e-5)


def test_what_the_kernels_do_not_do_goes_through_plain_operations(monkeypatch):
    q, k, v, _ = (tensor.float() for tensor in grid_inputs(1, 1, 1, 3, 4, 4, 4))
    taken, weigh = [], gpu.simplex.simplex_weights
    monkeypatch.setattr(gpu.simplex, "simplex_weights", lambda *a: taken.append(1) or weigh(*a))

    def takes_kernel(variant, *tensors):
        taken.clear()
        attention(*(tensors or (q, k, v)), variant, backend="products")
        return bool(taken)

    assert takes_kernel("sparsemax")
    assert not takes_kernel("entmax")
    assert not takes_kernel("sparsemax", q.double(), k.double(), v.double())
    torch.func.jvp(lambda x: attention(x, k, v, "entmax15", backend="products"), (q,), (q,))
    assert not taken
    monkeypatch.setattr(gpu, "MAX_ROW", 3)
    assert not takes_kernel("sparsemax")
    monkeypatch.setattr(gpu, "MAX_ROW", 4)
    monkeypatch.setattr(gpu, "TRITON", False)
    assert not takes_kernel("sparsemax")
