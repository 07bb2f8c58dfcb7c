"""Attention over a sequence sharded across ranks, on real gloo processes, equals that of one rank."""

from functools import cache

import pytest
import torch
from closeness import assert_matches_reference, assert_no_worse, grid, grid_inputs, outputs_and_gradients
from gloo import run_ranks
from sharded import CASES, FEWER_CASES, RANKS, RECTIFIED, SETTINGS, SHAPES, find

from rectiformer import attention, context_parallel_attention, shard_sequence
from rectiformer.errors import ArgumentError
from rectiformer.ops import gpu
from rectiformer.ops.call import UNBOUNDED, Visibility
from rectiformer.ops.distributed import CALL_FACTS, ContextGroup, local_parts


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What each of four ranks found; processes are started once for all tests."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if hasattr(request.config, "workerinput") else folder
    return run_ranks(find, RANKS, folder / "attention-ranks")


@cache
def one_rank(case, dtype, how):
    return outputs_and_gradients(case.inputs, dtype, how, case.variant, **case.arguments)


def whole(shards, dim=2):
    """Rank r holds chunks r and 2W - 1 - r."""
    halves = [shard.chunk(2, dim) for shard in shards]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


def assert_equals_one_rank(case, by_rank):
    exact, eager = one_rank(case, torch.float64, "reference"), one_rank(case, getattr(torch, case.dtype), "eager")
    for name in exact:
        assert_no_worse(f"{case} {name}", whole([result[name] for result in by_rank]), eager[name], exact[name])


def test_each_setting_meets_two_variants():
    met = [(case.dtype, case.shape, case.causal, case.lengths) for case in CASES]
    assert all(met.count(setting) >= 2 for setting in SETTINGS)


@pytest.mark.parametrize("variant", RECTIFIED)
def test_outputs_and_gradients_equal_one_ranks(found, variant):
    """Full and causal, self and cross, key lengths, grouped heads, float32 and bfloat16."""
    cases = [case for case in CASES if case.variant == variant]
    assert len(cases) >= 10
    for case in cases:
        assert_equals_one_rank(case, [results[str(case)] for results in found])


def test_checkpointing_changes_nothing(found):
    assert_equals_one_rank(CASES[0], [results["checkpoint"] for results in found])


def test_groups_of_two_ranks_equal_one_rank_too(found):
    assert {case.variant for case in FEWER_CASES} == set(RECTIFIED)
    for group in (found[:2], found[2:]):
        for case in FEWER_CASES:
            assert_equals_one_rank(case, [results["halves"][str(case)] for results in group])


def test_an_option_receives_the_sum_of_its_gradients(found):
    q, k, v, upstream = grid_inputs(*SHAPES["self"])
    gamma = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64, requires_grad=True)
    out = attention(q, k, v, "reluformer", causal=True, gamma=gamma)
    (expected,) = torch.autograd.grad(out, gamma, upstream)
    torch.testing.assert_close(sum(results["gamma"] for results in found), expected)


def test_queries_need_no_gradient(found):
    q, k, v, upstream = grid_inputs(*SHAPES["self"])
    (expected,) = torch.autograd.grad(attention(q, k, v.requires_grad_(), causal=True), v, upstream)
    torch.testing.assert_close(whole([results["frozen"] for results in found]), expected)


def test_sharding_and_joining_undo_each_other(found):
    x, d_x = grid(3, 16), grid(3, 16, seed=1)
    assert torch.equal(whole([results["round"]["shard"] for results in found], -1), x)
    for results in found:
        assert torch.equal(results["round"]["whole"], x)
        assert torch.equal(results["round"]["ids"], torch.arange(16))
    ranks = len(found)
    d_whole = whole([results["round"]["d_shard"] for results in found], -1)
    assert torch.equal(d_whole, d_x * (ranks * (ranks + 1) / 2))  # rank r weighed it with r + 1


def test_ranks_send_the_bytes_that_are_documented(found):
    W, shapes = len(found), 8 * (1 + len(CALL_FACTS))
    assert shapes == 8 * 13
    B, H, _, M, _, D, Dv = SHAPES["more keys"]
    expected = [shapes * W, B * H * M * 2 * D, B * H * M * 4 * Dv, B * H * M * 2 * Dv, B * H * M * 4 * D]
    B, H, _, M, _, D, Dv = SHAPES["grouped"]
    expected += [shapes * W, B * H * M * 4 * D, B * H * M * 4 * Dv, B * H * M * 4 * Dv, B * H * M * 4 * D]
    for results in found:
        assert results["bytes"] == [size * (W - 1) // W for size in expected]


REFUSALS = {
    "softmax": ["variant 'softmax' is not rectified"] * 2,
    "unknown option": ["has no argument 'dropout_p'; only attention() has"] * 2,
    "odd shard": ["ShapeError: q has "] * 2,
    "empty shard": ["ShapeError: q has 0 rows"] * 2,
    "long lengths": ["beyond the 16 keys"] * 2,
    "one odd shard": ["refused its arguments", "ShapeError: q has"],
    "one of three axes": ["refused its arguments", "q has 3 axes but needs 4"],
    "one is no tensor": ["refused its arguments", "NoneType"],
    "one longer": ["has N = "] * 2,
    "one wider": ["has Dv = 5 but rank 0 has 6"] * 2,
    "one of another dtype": ["has dtype = "] * 2,
    "one causal": ["has causal = 1 but rank 0 has 0"] * 2,
    "one another variant": ["has variant = "] * 2,
    "one with gradients": ["has gradients = 1 but rank 0 has 0"] * 2,
    "indivisible": ["axis 2 is 15 long"] * 2,
    "no such axis": ["dim = 1, but the tensor is [16]"] * 2,
    "one odd to join": ["refused its arguments", "two equal chunks"],
    "one longer to join": ["has axis 2 = "] * 2,
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_calls_are_refused_on_every_rank(found, name):
    """Only the last rank calls wrongly where the name says "one": it says why, and the others do not wait for it."""
    others, last = REFUSALS[name]
    *first, end = [results["refusals"][name] for results in found]
    assert all(others in message for message in first), first
    assert last in end
    assert not any("\n" in message for message in (*first, end))


def test_every_refusal_is_looked_at(found):
    assert all(set(results["refusals"]) == set(REFUSALS) for results in found)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (16, 64), (64, 16)])
def test_causal_work_is_divided(size, queries, keys):
    """Each visible cell is one rank's, and of self-attention all ranks have as many; no part holds a hidden row."""
    seen = Visibility(queries, keys, UNBOUNDED, 0, first=keys - queries)
    by_rank = [
        [part.visibility.counts(torch.device("cpu")) for part in local_parts(seen, ContextGroup(None, rank, size))]
        for rank in range(size)
    ]
    cells = [sum(int(counts.sum()) for counts in parts) for parts in by_rank]
    assert sum(cells) == seen.counts(torch.device("cpu")).sum()
    assert all(counts.min() > 0 for parts in by_rank for counts in parts)
    assert queries != keys or len(set(cells)) == 1


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kernels", ["short", "long"])
def test_fused_kernels_take_every_part(monkeypatch, kernels):
    """As they do on a GPU: more queries than keys, a window to the right only, lengths that end in a chunk."""
    if kernels == "long":
        monkeypatch.setattr(gpu, "short_obstacle", lambda *_: "not wanted here")
    seen = Visibility(64, 64, UNBOUNDED, 0, torch.tensor([41]))
    for rank in range(2):
        for part in local_parts(seen, ContextGroup(None, rank, 2)):
            view = part.visibility
            inputs = grid_inputs(1, 1, 1, view.queries, view.keys, 8, 8)
            masks = {"window_size": (view.left, view.right), "key_lengths": view.key_lengths}
            assert_matches_reference(inputs, torch.float32, "fused", "rela", **masks)


@pytest.mark.parametrize("call", [lambda x: context_parallel_attention(x, x, x), shard_sequence])
def test_without_a_process_group_the_way_out_is_named(call):
    with pytest.raises(ArgumentError, match="init_process_group"):
        call(torch.zeros(1, 1, 4, 2))
