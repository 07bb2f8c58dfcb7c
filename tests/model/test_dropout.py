"""Dropout of activations: plain, and by a hash in compiled code."""

import pytest
import torch

from rectiformer.model.dropout import Dropout, draw_factors, keep_numbers

BITS = 2**32 - 1


def mix_word(word):
    """The finalizer of MurmurHash3 in Python's own integers."""
    word = ((word ^ word >> 16) * 0x85EBCA6B) & BITS
    word = ((word ^ word >> 13) * 0xC2B2AE35) & BITS
    return word ^ word >> 16


def survives(seed, probability, row, column):
    word = (seed ^ seed >> 32) & BITS
    word = mix_word((mix_word((word + row * 0x9E3779B9) & BITS) + column * 0x9E3779B9) & BITS)
    signed = word - 2**32 if word >= 2**31 else word
    return signed >= round(probability * 2**32) - 2**31


def kept(seed, probability, rows=512, columns=256):
    return keep_numbers(torch.tensor([seed]), probability, rows, columns)


@pytest.fixture(params=["eager", "compiled"])
def drop(request):
    """Dropout of one half, as it runs with and without torch.compile."""
    torch.compiler.reset()
    module = Dropout(0.5)
    return module if request.param == "eager" else torch.compile(module, backend="aot_eager")


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_the_probability_along_both_axes(probability):
    cells = kept(7, probability).double()
    deviation = (probability * (1 - probability)) ** 0.5
    for axis in (0, 1):
        limit = 5 * deviation / cells.shape[1 - axis] ** 0.5  # five standard errors
        assert (cells.mean(1 - axis) - (1 - probability)).abs().max() <= limit
    assert abs(cells.mean() - (1 - probability)) <= 5 * deviation / cells.numel() ** 0.5


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**62 - 1])
def test_the_hash_is_the_one_that_is_written_down(seed):
    cells = kept(seed, 0.3, rows=9, columns=11)
    assert cells.tolist() == [[survives(seed, 0.3, row, column) for column in range(11)] for row in range(9)]


def test_cells_are_independent_of_neighbors_and_of_other_seeds():
    cells = kept(7, 0.5).double() - 0.5
    limit = 5 * 0.25 / cells.numel() ** 0.5
    others = [kept(seed, 0.5).double() - 0.5 for seed in (8, 7 + 2**32, 2**62 - 1)]
    for other in (cells.roll(1, 0), cells.roll(1, 1), cells.roll((1, 1), (0, 1)), *others):
        assert (cells * other).mean().abs() <= limit


def test_more_rows_leave_the_first_ones_as_they_are():
    assert torch.equal(kept(7, 0.3)[:100, :20], kept(7, 0.3, rows=100, columns=20))


@pytest.mark.parametrize("probability", [1e-3, 0.1, 0.9, 1 - 1e-7])
def test_on_a_cpu_the_probability_is_right_to_a_65536th(probability):
    torch.manual_seed(5)
    factors = draw_factors(torch.empty(333, 1001), probability).double()
    dropped = (factors == 0).double().mean().item()
    kept = min(max(1 - probability, 2**-16), 1 - 2**-16)
    assert abs(1 - dropped - kept) <= 2**-17 + 5 * (kept * (1 - kept) / factors.numel()) ** 0.5
    assert factors.max().item() == pytest.approx(1 / kept, rel=1e-2)  # the 65,536th
    for shift in (1, 2, 3, 4, 1001):  # numbers of one word, and of neighboring rows, know nothing of each other
        pairs = (factors.flatten()[shift:] > 0) & (factors.flatten()[:-shift] > 0)
        assert abs(pairs.double().mean().item() - kept**2) <= 2**-15 + 5 * kept / factors.numel() ** 0.5


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5,), (3, 7, 2)], ids=str)
def test_on_a_cpu_any_shape_and_any_strides_do(shape):
    drop = Dropout(0.5)
    assert drop(torch.ones(shape)).shape == shape
    assert drop(torch.ones(shape).transpose(0, -1) if shape else torch.ones(shape)).shape == tuple(reversed(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_survivors_grow_so_that_the_mean_is_kept(drop, dtype):
    x = torch.full((8, 40, 64), 0.75, dtype=dtype)
    out = drop(x)
    assert out.dtype == dtype
    assert out.shape == x.shape
    assert set(out.unique().tolist()) == {0.0, 1.5}
    share = (out != 0).double().mean()
    assert abs(share - 0.5) <= 5 * 0.5 / x.numel() ** 0.5


def test_gradients_are_dropped_where_the_numbers_were(drop):
    x = torch.randn(6, 50, requires_grad=True)
    out = drop(x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.where(out != 0, 2.0, 0.0))
    assert torch.equal(out, x.detach() * x.grad)


def test_torchs_generator_decides(drop):
    x = torch.ones(20, 30)
    torch.manual_seed(3)
    first, second = drop(x), drop(x)
    torch.manual_seed(3)
    assert torch.equal(drop(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("probability", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_touched_without_probability_or_training(probability, training):
    x = torch.randn(3, 4)
    assert Dropout(probability).train(training)(x) is x
