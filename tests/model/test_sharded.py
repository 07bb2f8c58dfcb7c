"""A model over sources that real gloo ranks share gives what it gives on one."""

from functools import cache

import pytest
import torch
from closeness import assert_no_worse
from gloo import run_ranks
from sharded_model import CASES, REFUSED, Case, build, encode, find, losses, translate

from rectiformer.errors import ArgumentError
from rectiformer.model.transformer import sharded_source


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"])
def found(tmp_path_factory, request):
    """What each rank found; processes are started once for all tests."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if hasattr(request.config, "workerinput") else folder
    return run_ranks(find, request.param, folder / f"model-ranks-{request.param}")


def whole(shards, length):
    """Rank r holds chunks r and 2W - 1 - r; what padded the sequence is cut off."""
    halves = [shard.chunk(2, 1) for shard in shards]
    joined = torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], 1)
    return joined[:, :length]


@cache
def one_rank(case, dtype):
    model = build(case).to(dtype)
    return encode(model, case).states, losses(model, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_encoded_sources_equal_one_ranks(found, case):
    exact, eager = one_rank(case, torch.float64)[0], one_rank(case, torch.float32)[0]
    for row, length in enumerate(case.lengths):
        shared = whole([results[str(case)]["encoded"][row : row + 1] for results in found], length)
        assert_no_worse(f"{case} row {row}", shared, eager[row : row + 1, :length], exact[row : row + 1, :length])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_equal_one_ranks(found, case):
    """The mean over ranks of the gradients, as DistributedDataParallel takes it; of all parameters as one vector."""
    (loss, exact), (eager_loss, eager) = one_rank(case, torch.float64)[1], one_rank(case, torch.float32)[1]
    for results in found:
        assert_no_worse(f"{case} loss", results[str(case)]["loss"], eager_loss, loss)
    mean = sum(results[str(case)]["gradients"] for results in found) / len(found)
    assert_no_worse(f"{case} gradients", mean, eager, exact)
    assert exact.count_nonzero() > exact.numel() / 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_translations_are_one_ranks(found, case):
    expected = translate(build(case), case)
    assert len({tuple(ids) for ids, _ in expected}) == len(case.lengths)
    for results in found:
        told = results[str(case)]["translations"]
        assert [ids for ids, _ in told] == [ids for ids, _ in expected]
        for (_, score), (_, own) in zip(told, expected, strict=True):
            assert score == pytest.approx(own, rel=1e-5)


def test_ranks_hold_their_part_only(found):
    case = CASES[0]
    ranks = len(found)
    own = 2 * -(-max(case.lengths) // (2 * ranks))
    assert own < max(case.lengths)
    assert all(results[str(case)]["encoded"].shape[1] == own for results in found)
    assert all(results[str(case)]["cached"] == own for results in found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_add_up_is_refused(found, name):
    for results in found:
        assert REFUSED[name][1] in results["refused"][name]
        assert "\n" not in results["refused"][name]


def test_afterwards_the_model_is_its_own_again(found):
    assert all(results["restored"] for results in found)


def test_without_a_process_group_the_way_out_is_named():
    with pytest.raises(ArgumentError, match="init_process_group"), sharded_source(build(Case("rela-g"))):
        pass
