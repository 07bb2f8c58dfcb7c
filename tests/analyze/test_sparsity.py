"""Zeros and rows of nothing: hand-made weights with known answers, in one batch or in many."""

import itertools
import math

import pytest
import torch

from rectiformer import attention_stats
from rectiformer.analyze.meters import HeadMeter, LengthMeter, length_edges


def stats_of(weights, **visibility):
    """Statistics of a call whose weights [B, H, M, N] are these: unit keys, and the weights as queries."""
    B, _, _, N = weights.shape
    keys = torch.eye(N, dtype=weights.dtype).expand(B, 1, N, N)
    return attention_stats(weights, keys, "rela", scale=1.0, **visibility)


def all_real(stats):
    return torch.ones(stats.visible.shape[0], stats.visible.shape[2], dtype=torch.bool)


def measure(weights, **visibility):
    stats = stats_of(weights, **visibility)
    meter = HeadMeter(weights.shape[1])
    meter.update(stats, all_real(stats))
    return meter.result()


def one_row(*weights):
    return torch.tensor(weights, dtype=torch.float64)[None, None, None]


ROWS = {
    "uniform": (one_row(0.25, 0.25, 0.25, 0.25), 0.0, 0.0, 1.0, math.log(4), 4.0),
    "uniform and heavy": (one_row(3.0, 3.0, 3.0, 3.0), 0.0, 0.0, 12.0, math.log(4), 4.0),
    "one-hot": (one_row(0.0, 2.0, 0.0, 0.0), 0.75, 0.0, 2.0, 0.0, 1.0),
    "null": (one_row(0.0, 0.0, 0.0, 0.0), 1.0, 1.0, 0.0, 0.0, 0.0),
    "half": (one_row(0.5, 0.0, 0.5, 0.0), 0.5, 0.0, 1.0, math.log(2), 2.0),
}


@pytest.mark.parametrize(("weights", "sparsity", "null", "mass", "entropy", "keys"), ROWS.values(), ids=ROWS)
def test_a_row_has_its_known_measures(weights, sparsity, null, mass, entropy, keys):
    found = measure(weights)
    assert (found.sparsity, found.null_rate, found.mass) == ([sparsity], [null], [mass])
    assert found.entropy == [pytest.approx(entropy, abs=1e-7)]
    assert (found.nonzero_keys, found.active_queries) == ([keys], [1 - null])


def test_heads_are_measured_apart_and_null_rows_have_no_entropy():
    weights = torch.zeros(1, 2, 2, 4, dtype=torch.float64)
    weights[0, 0, 0] = 1  # head 0: a uniform row and a null row; head 1: null rows only
    found = measure(weights)
    assert found.sparsity == [0.5, 1.0]
    assert found.null_rate == [0.5, 1.0]
    assert found.mass == [2.0, 0.0]
    assert found.entropy == [pytest.approx(math.log(4)), 0.0]
    assert found.nonzero_keys == [2.0, 0.0]


def test_hidden_cells_are_no_zeros():
    ones = torch.ones(2, 3, 5, 5)
    assert measure(ones, causal=True).sparsity == [0.0] * 3
    assert measure(ones, key_lengths=[2, 4]).sparsity == [0.0] * 3
    assert measure(ones, causal=True).nonzero_keys == [3.0] * 3


def test_queries_that_see_no_key_count_nowhere():
    found = measure(torch.ones(2, 1, 3, 4), key_lengths=[0, 4])
    assert (found.null_rate, found.mass, found.active_queries) == ([0.0], [4.0], [1.0])


def test_padding_counts_nowhere_even_if_it_is_not_a_number():
    stats = stats_of(torch.ones(2, 1, 3, 4))
    stats.mass[1, :, 2] = math.nan
    stats.nonzero[1, :, 2] = 0
    meter = HeadMeter(1)
    meter.update(stats, torch.tensor([[True, True, True], [True, True, False]]))
    assert meter.rows == 5
    assert meter.result().mass == [4.0]
    assert meter.result().sparsity == [0.0]


def test_a_meter_that_saw_nothing_says_zero():
    found = HeadMeter(2).result()
    assert found.sparsity == found.null_rate == found.mass == found.entropy == [0.0, 0.0]


def random_weights(seed, B=3, H=2, M=4, N=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, H, M, N, generator=generator, dtype=torch.float64).relu()


def test_batches_and_merged_meters_equal_one_dense_count():
    first, second = random_weights(1), random_weights(2)
    one, other = HeadMeter(2), HeadMeter(2)
    one.update(stats_of(first), all_real(stats_of(first)))
    other.update(stats_of(second), all_real(stats_of(second)))
    one.merge(other.state())
    dense = torch.cat([first, second])
    found = one.result()
    assert found.sparsity == pytest.approx((dense == 0).double().mean((0, 2, 3)).tolist(), abs=1e-12)
    assert found.null_rate == pytest.approx((dense == 0).all(-1).double().mean((0, 2)).tolist(), abs=1e-12)
    assert found.mass == pytest.approx(dense.sum(-1).mean((0, 2)).tolist(), abs=1e-6)
    assert one.pooled().result().sparsity == pytest.approx([(dense == 0).double().mean().item()], abs=1e-12)


def test_lengths_are_measured_in_their_bins():
    weights = torch.zeros(4, 2, 3, 4)
    weights[0] = 1  # length 2: dense; lengths 3 and 4: null; length 9: half of the keys
    weights[3, :, :, :2] = 1
    stats = stats_of(weights)
    meter = LengthMeter([2, 3, 5, 7, 10], 2)
    meter.update(stats, all_real(stats), torch.tensor([2, 3, 4, 9]))
    found = meter.result()
    assert found.lengths == [2, 3, 5, 7, 10]
    assert found.sparsity == [0.0, 1.0, 0.0, 0.5]
    assert found.null_rate == [0.0, 1.0, 0.0, 0.0]
    assert found.rows == [6, 12, 0, 6]
    meter.merge(meter.state())
    assert meter.result().rows == [12, 24, 0, 12]
    assert meter.result().sparsity == found.sparsity


@pytest.mark.parametrize(
    ("lengths", "edges"),
    [
        ([5], [5, 6]),
        ([5, 5, 5], [5, 6]),
        (range(1, 17), [1, 2, 4, 6, 8, 10, 12, 14, 17]),
        ([3, 3, 3, 3, 3, 3, 3, 900], [3, 901]),
    ],
)
def test_edges_hold_every_length_and_no_empty_bin(lengths, edges):
    assert length_edges(lengths) == edges
    for start, stop in itertools.pairwise(edges):
        assert any(start <= length < stop for length in lengths)
