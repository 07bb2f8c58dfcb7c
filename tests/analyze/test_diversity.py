"""How heads differ: closed forms on hand-made weights, and the definition spelled out on random ones."""

import itertools
import math

import pytest
import torch
from closeness import peak_allocation

from rectiformer import RectifiedAttention
from rectiformer.analyze.meters import BLOCK_CELLS, DiversityMeter
from rectiformer.ops.weights import weight_blocks


def measure(*blocks, visible=None):
    meter = DiversityMeter()
    for block in blocks:
        meter.update(block, torch.full(block.shape[:3], block.shape[-1]) if visible is None else visible)
    return meter.result()


def heads(*rows):
    """One query: weights [1, H, 1, N] from one row per head."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None]


def test_identical_heads_do_not_differ():
    found = measure(heads(*[[0.2, 0.0, 0.8]] * 4))
    assert found.js == pytest.approx(0, abs=1e-15)
    assert found.js_zero == pytest.approx(0, abs=1e-15)
    assert (found.dropped, found.support_overlap) == (0.0, 1.0)


def test_heads_that_differ_in_mass_alone_do_not_differ():
    assert measure(heads([1, 0, 3], [10, 0, 30])).js == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("H", [2, 3, 8])
def test_disjoint_one_hot_heads_differ_by_the_logarithm_of_their_number(H):
    found = measure(torch.eye(H)[None, :, None])
    assert found.js == pytest.approx(math.log(H))
    assert found.js_zero == pytest.approx(math.log(H))
    assert (found.dropped, found.support_overlap) == (0.0, 0.0)


def test_one_hot_heads_and_a_uniform_one():
    """H(5/8, 1/8, 1/8, 1/8) - (0 + log 4) / 2, and supports that share 1 of 4 keys."""
    found = measure(heads([1, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]))
    mixture = -(5 / 8 * math.log(5 / 8) + 3 / 8 * math.log(1 / 8))
    assert found.js == pytest.approx(mixture - math.log(4) / 2)
    assert found.support_overlap == 0.25


def test_null_heads_are_dropped_and_counted():
    """Two disjoint one-hot heads of four: log 2 among themselves; as zeros, 2 shares of 1/4 in the mixture."""
    found = measure(heads([1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0]))
    assert found.js == pytest.approx(math.log(2))
    assert found.js_zero == pytest.approx(2 * -0.25 * math.log(0.25))
    assert (found.dropped, found.support_overlap) == (0.5, 0.0)


def test_a_query_without_active_heads_has_no_divergence_but_a_zero_one():
    """The query of nothing counts in js_zero and `dropped` only."""
    weights = torch.cat([heads([1, 0], [0, 1]), heads([0, 0], [0, 0])], dim=2)
    found = measure(weights)
    assert found.js == pytest.approx(math.log(2))
    assert found.js_zero == pytest.approx(math.log(2) / 2)
    assert found.dropped == 0.5


def test_one_active_head_agrees_with_itself_and_makes_no_pair():
    weights = torch.cat([heads([1, 1], [0, 0]), heads([1, 1], [1, 0])], dim=2)
    found = measure(weights)
    assert found.support_overlap == 0.5
    assert found.js == pytest.approx(measure(heads([1, 1], [1, 0])).js / 2)


def test_dead_attention_gives_zeros():
    found = measure(torch.zeros(2, 3, 4, 5))
    assert (found.js, found.js_zero, found.dropped, found.support_overlap) == (0.0, 0.0, 1.0, 0.0)


def test_signs_of_weights_are_ignored():
    weights = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    assert measure(weights) == measure(weights.abs())


def test_rows_that_see_nothing_count_nowhere():
    weights = heads([1, 0], [0, 1])
    padded = torch.cat([weights, torch.full_like(weights, math.nan)], dim=2)
    assert measure(padded, visible=torch.tensor([[[2, 0], [2, 0]]])) == measure(weights)


def entropy(row):
    return -sum(p * math.log(p) for p in row if p)


def by_definition(weights):
    """All measures of weights [B, H, M, N], in plain Python."""
    js, js_zero, overlaps, null = [], [], [], 0
    B, H, M, N = weights.shape
    for b, m in itertools.product(range(B), range(M)):
        rows = [[abs(w) for w in row] for row in weights[b, :, m].tolist()]
        shares = [[w / sum(row) for w in row] if any(row) else [0.0] * N for row in rows]
        active = [share for share in shares if any(share)]
        null += H - len(active)
        for found, used in ((js, active), (js_zero, shares)):
            if used:
                mixture = [sum(column) / len(used) for column in zip(*used, strict=True)]
                found.append(entropy(mixture) - sum(map(entropy, used)) / len(used))
        supports = [{n for n in range(N) if share[n]} for share in active]
        pairs = [len(one & other) / len(one | other) for one, other in itertools.combinations(supports, 2)]
        if pairs:
            overlaps.append(sum(pairs) / len(pairs))
    means = [sum(found) / len(found) for found in (js, js_zero)]
    return [*means, null / (B * H * M), sum(overlaps) / len(overlaps)]


@pytest.mark.parametrize("threshold", [-10.0, 0.0, 0.8, 1.4])
def test_random_weights_follow_the_definition(threshold):
    weights = torch.randn(3, 4, 6, 5, dtype=torch.float64)
    weights = torch.where(weights > threshold, weights, 0)
    found = measure(weights[:1], weights[1:])
    assert list(vars(found).values()) == pytest.approx(by_definition(weights), abs=1e-12)


def test_meters_merge():
    first, second = torch.rand(2, 1, 3, 4, 5).sub(0.5).relu()
    one, other = DiversityMeter(), DiversityMeter()
    for meter, weights in ((one, first), (other, second)):
        meter.update(weights, torch.full(weights.shape[:3], 5))
    one.merge(other.state())
    assert vars(one.result()) == pytest.approx(vars(measure(first, second)), abs=1e-15)


def observe(attention, *inputs, **call):
    seen = []
    attention.observer = seen.append
    with torch.inference_mode():
        attention(*inputs, **call)
    return seen[0]


@pytest.mark.parametrize("cells", [1, 50, 1 << 20])
@pytest.mark.parametrize("variant", ["rela-g", "softmax", "reluformer", "cog"])
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"causal": True},
        {"key_lengths": torch.tensor([3, 7])},
        {"window_size": (2, 1)},
        {"attn_mask": torch.ones(7, 7, dtype=torch.bool).tril(1)},
        {"attn_bias": torch.linspace(-1, 1, 49).view(7, 7)},
    ],
    ids=lambda call: "".join(call),
)
def test_blocks_are_the_rows_of_the_weights(call, variant, cells):
    seen = observe(RectifiedAttention(8, 2, variant), torch.randn(2, 7, 8), **call)
    blocks = list(weight_blocks(seen.q, seen.k, seen.variant, cells=cells, **seen.call))
    assert [rows.start for rows, _ in blocks] == [0, *(rows.stop for rows, _ in blocks[:-1])]
    torch.testing.assert_close(torch.cat([block for _, block in blocks], 2), seen.weights(), rtol=0, atol=1e-6)


def test_memory_does_not_grow_with_the_square_of_the_length():
    def peak(length):
        seen = observe(RectifiedAttention(32, 8, "rela"), torch.randn(1, length, 32), causal=True)
        visible = seen.visible().expand(1, 8, length)

        def work():
            meter = DiversityMeter()
            for rows, weights in weight_blocks(seen.q, seen.k, seen.variant, cells=BLOCK_CELLS, **seen.call):
                meter.update(weights, visible[:, :, rows])

        return peak_allocation(work)

    short, long = peak(256), peak(1024)
    assert long < 8 * 1024 * 1024 * 4 / 2  # half of all weights
    assert long < 2 * short
