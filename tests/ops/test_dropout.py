"""Dropout as a pure function of seed and cell."""

import pytest
import torch
from closeness import OPTIONS

from rectiformer import VARIANTS, attention
from rectiformer.ops.dropout import drop_seed, keep_cells

CPU = torch.device("cpu")


def cells(seed, probability, batch=4, heads=8, queries=128, keys=128):
    rectangle = [slice(0, size) for size in (batch, heads, queries, keys)]
    return keep_cells(drop_seed(seed, CPU), probability, rectangle, all_heads=heads)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_the_probability_along_every_axis(probability):
    kept = cells(3, probability).double()
    deviation = (probability * (1 - probability)) ** 0.5
    for axis in range(4):
        others = tuple(other for other in range(4) if other != axis)
        means = kept.mean(others)
        limit = 5 * deviation / (kept.numel() / kept.shape[axis]) ** 0.5  # five standard errors
        assert (means - (1 - probability)).abs().max() <= limit


def test_cells_are_independent_of_their_neighbors_and_of_other_seeds():
    kept = cells(3, 0.5).double() - 0.5
    limit = 5 * 0.25 / kept.numel() ** 0.5
    for shifted in (kept.roll(1, 3), kept.roll(1, 2), kept.roll(1, 1), kept.roll(1, 0), cells(4, 0.5).double() - 0.5):
        assert (kept * shifted).mean().abs() <= limit


def test_rows_and_columns_are_no_factors_of_a_cell():
    """Cells are products of a row's and a column's number. Independent ones have no common structure: four at the
    corners of a rectangle have no common mean, any two rows or columns of a head agree as often as chance has it, and
    their sums vary as much as chance has it, neither more nor less."""
    kept = cells(3, 0.5, batch=1, heads=4, queries=512, keys=512)[0].double() * 2 - 1
    for rows, columns in ((1, 1), (1, 64), (3, 8), (128, 1), (100, 100)):
        corners = kept * kept.roll(rows, 1) * kept.roll(columns, 2) * kept.roll((rows, columns), (1, 2))
        assert corners.mean().abs() <= 5 / kept.numel() ** 0.5
    for lines in (kept, kept.mT):
        products = (lines @ lines.mT / 512**0.5)[:, *torch.triu_indices(512, 512, 1)]  # standard normal numbers
        assert products.abs().max() <= 6.5
        assert ((products**2).mean() - 1).abs() <= 5 * (2 / products.numel()) ** 0.5
        assert ((products**4).mean() - 3).abs() <= 5 * (96 / products.numel()) ** 0.5 + 2 / 512  # of 512 coins each
        sums = lines.sum(-1) / 512**0.5
        assert ((sums**2).mean() - 1).abs() <= 5 * (2 / sums.numel()) ** 0.5


def test_any_rectangle_is_a_part_of_the_whole():
    rectangle = slice(1, 3), slice(2, 5), slice(20, 40), slice(64, 128)
    part = keep_cells(drop_seed(3, CPU), 0.3, rectangle, all_heads=8)
    assert torch.equal(part, cells(3, 0.3)[1:3, 2:5, 20:40, 64:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_seed_gives_one_result_and_the_mean_is_kept(variant):
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 4)

    def run(**dropout):
        return attention(q, k, v, variant, **OPTIONS.get(variant, {}), **dropout)

    first = run(dropout_p=0.4, seed=1)
    assert torch.equal(first, run(dropout_p=0.4, seed=1))
    assert not torch.equal(first, run(dropout_p=0.4, seed=2))
    samples = torch.stack([run(dropout_p=0.4, seed=seed) for seed in range(400)]).double()
    off = (samples.mean(0) - run()).abs()
    assert (off <= 5 * samples.std(0) / 20 + 1e-6).all()


def test_without_a_seed_torchs_generator_decides():
    q, k, v = (torch.randn(1, 1, 8, 8) for _ in range(3))
    torch.manual_seed(5)
    first, second = attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(first, attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)


def test_a_seed_may_be_a_tensor():
    q, k, v = (torch.randn(1, 1, 8, 8) for _ in range(3))
    assert torch.equal(
        attention(q, k, v, dropout_p=0.5, seed=torch.tensor(9)), attention(q, k, v, dropout_p=0.5, seed=9)
    )


def test_any_seed_of_64_bits_will_do():
    for seed in (1 << 63, (1 << 64) - 1):
        assert torch.equal(drop_seed(seed, CPU), drop_seed(seed - (1 << 64), CPU))
