"""Kernels of rows with a threshold or a normalizer, run by Triton's interpreter, against the reference."""

import pytest
import torch
from closeness import assert_matches_reference, assert_no_worse, grid_inputs, outputs_and_gradients

import rectiformer.ops.attention as attention_module
from rectiformer import VARIANTS, attention, explain
from rectiformer.errors import ArgumentError
from rectiformer.ops.attention import candidates, check_call
from rectiformer.ops.call import UNBOUNDED
from rectiformer.ops.gpu import SIMPLEX_POWERS, rowwise
from rectiformer.ops.gpu.row_functions import ROW_FUNCTIONS
from rectiformer.ops.simplex import entmax15, sparsemax

pytestmark = pytest.mark.usefixtures("interpreter")
DEFINITIONS = {"sparsemax": sparsemax, "entmax15": entmax15}
# Tiles of float32 have 16 to 64 rows, so these shapes have full tiles, edges and tails.
M, N = 70, 75
FEATURES = {
    "sparsemax": {
        "full": {},
        "window": {"window_size": (9, 5)},
        "everything": {"causal": True, "window_size": (50, 0), "key_lengths": [40, 0], "scale": -0.5},
        "zero scale": {"scale": 0.0, "causal": True, "window_size": 3},
    },
    "entmax15": {
        "full": {},
        "causal": {"causal": True},
        "lengths": {"key_lengths": [75, 37]},
        "everything": {"causal": True, "window_size": (50, 3), "key_lengths": [0, 40], "scale": -0.5},
    },
    "softmax1": {
        "full": {},
        "everything": {"causal": True, "window_size": (50, 0), "key_lengths": [40, 0], "scale": -0.5},
    },
    "self-adjust": {
        "causal": {"causal": True},
        "everything": {"window_size": (50, 3), "key_lengths": [0, 40], "scale": -0.5},
    },
    "softpick": {
        "full": {},
        "window": {"window_size": (9, 5)},
        "everything": {"causal": True, "window_size": (50, 0), "key_lengths": [40, 0], "scale": -0.5},
        "zero scale": {"scale": 0.0, "causal": True, "window_size": 3},
    },
}
CASES = [
    pytest.param(variant, features, id=f"{variant}-{name}")
    for variant, cases in FEATURES.items()
    for name, features in cases.items()
]
variants = pytest.mark.parametrize("variant", FEATURES)
on_the_simplex = pytest.mark.parametrize("variant", SIMPLEX_POWERS)
normalized = pytest.mark.parametrize("variant", [name for name in FEATURES if name not in SIMPLEX_POWERS])


def test_every_row_of_the_table_is_here():
    assert [name for name, row in VARIANTS.items() if row.rowwise] == list(FEATURES)
    assert {VARIANTS[name].rowwise for name in FEATURES} == ROW_FUNCTIONS.keys()
    assert {name: row.power for name, row in ROW_FUNCTIONS.items() if row.power} == SIMPLEX_POWERS


@pytest.mark.parametrize(("variant", "features"), CASES)
def test_kernels_match_the_reference(variant, features):
    assert_matches_reference(grid_inputs(2, 1, 1, M, N, 16, 8), torch.float32, "fused", variant, **features)


@variants
@pytest.mark.parametrize("sizes", [(1, 3, 1, 40, 33, 5, 7), (1, 1, 1, 1, 64, 8, 8), (2, 1, 1, 20, 1, 130, 4)], ids=str)
def test_shapes_match_the_reference(variant, sizes):
    assert_matches_reference(grid_inputs(*sizes), torch.float32, "fused", variant, causal=True)


@variants
def test_16_bits_match_the_reference(variant):
    assert_matches_reference(grid_inputs(1, 2, 1, 20, 75, 8, 8), torch.float16, "fused", variant, causal=True)


def ladder(keys):
    """Rows that are hard to find a threshold for: equal, one far above, steps of all sizes, many small ones below one
    large, and random ones of every size."""
    generator = torch.Generator().manual_seed(keys)
    steps = torch.arange(keys, dtype=torch.float32)
    rows = [torch.zeros(keys), torch.where(steps == keys // 2, 9.0, 0.0), -(2.0**-steps), -(1.5 ** (steps - 20))]
    rows += [torch.where(steps == 0, 0.9, 0.0), -steps / keys]
    rows += [size * torch.randn(keys, generator=generator) for size in (1e-3, 0.1, 1.0, 10.0, 1e3)]
    return torch.stack(rows)


@on_the_simplex
@pytest.mark.parametrize("keys", [2, 64])
def test_rows_of_every_kind_have_the_weights_of_the_definition(variant, keys):
    scores = ladder(keys)
    rows = len(scores)
    q, k, v = torch.ones(rows, 1, 1, 1), scores[:, None, :, None], torch.eye(keys).expand(rows, 1, keys, keys)
    found = attention(q, k, v, variant, backend="fused")[:, 0, 0]
    exact = DEFINITIONS[variant](scores.double(), None)
    # Scores of 1,000 hold no more than four digits of what is below the largest.
    allowed = 4e-7 * scores.abs().amax(1).clamp_min(1)
    assert ((found - exact).abs().amax(1) <= allowed).all()
    torch.testing.assert_close(found.sum(1), torch.ones(rows), rtol=0, atol=1e-6)
    assert ((found > 0) == (exact > 0)).double().mean() > 0.99


@on_the_simplex
def test_thresholds_are_found_in_few_passes(variant, monkeypatch):
    """Every pass over the keys is a product of queries and keys."""
    parts, add_mass = [], rowwise.add_mass
    monkeypatch.setattr(rowwise, "add_mass", lambda *given: parts.append(1) or add_mass(*given))
    q, k = torch.randn(1, 1, 16, 16), torch.randn(1, 1, 1024, 16)
    attention(q, k, k, variant, backend="fused")
    passes = 1 + len(parts) // 2  # one for the maximum; then two ranges of keys in each
    assert 3 <= passes <= 8


def inputs_with(scores):
    """q, k, v, whose scores at scale 1 are these, [B, M, N] with one dimension per query, and an upstream gradient."""
    B, M, N = scores.shape
    q = torch.eye(M).expand(B, 1, M, M)
    v = torch.linspace(-1, 1, N * 3).view(1, 1, N, 3).expand(B, 1, N, 3)  # tells all keys apart
    return [q, scores.mT[:, None], v, torch.linspace(1, 2, 3).expand(B, 1, M, 3)]


@normalized
def test_rows_of_extreme_scores(variant):
    """A tile after the other with higher scores, then with lower; rows far above 0, far below, and close to it."""
    near = torch.randn(16, 75, generator=torch.Generator().manual_seed(1)).double()  # of one row, eager may err by luck
    steps = torch.linspace(-80, 80, 75) + near
    kinds = {"far": [steps, -steps, near + 80, near - 80], "close": [1e-3 * near], "closest": [1e-6 * near]}
    for kind, scores in kinds.items():  # each by its own size
        inputs = inputs_with(torch.stack(scores))
        exact = outputs_and_gradients(inputs, torch.float64, "reference", variant, scale=1.0)
        eager, ours = (
            outputs_and_gradients(inputs, torch.float32, by, variant, scale=1.0) for by in ("eager", "fused")
        )
        for name in exact:
            assert_no_worse(f"{name} of scores {kind}", ours[name], eager[name], exact[name])


def test_softpick_attends_to_nothing_where_no_score_is_positive():
    scores = torch.tensor([[0.0] * 5, [-1.0, 0.0, -3.0, 0.0, -80.0], [-100.0] * 5, [-1.0, 2.0, 0.0, 0.0, 0.0]])
    found = outputs_and_gradients(inputs_with(scores[:, None]), torch.float32, "fused", "softpick", scale=1.0)
    for result in found.values():
        assert not result[:3].any()
    value, others = torch.expm1(torch.tensor(2.0)), 1 - torch.exp(torch.tensor(-1.0))
    expected = value / (value + others) * inputs_with(scores[:, None])[2][3, 0, 1]
    torch.testing.assert_close(found["out"][3, 0, 0], expected)


def test_softpick_has_no_gradient_where_one_key_takes_all():
    """Slopes are up to 1,000 there, which would make a gradient of what 16 bits round off."""
    q, k, v, upstream = (tensor.half() for tensor in inputs_with(torch.logspace(-3, -1, 20)[:, None, None]))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = attention(*leaves, "softpick", scale=1.0, backend="fused")
    d_q, d_k, _ = torch.autograd.grad(out, leaves, upstream)
    assert max(d_q.abs().max(), d_k.abs().max()) <= 1e-2


def test_softmax1_leaves_out_what_nobody_asks_for():
    """Weights of a row sum to less than 1, and far below 0 to nothing; one score of 0 gets 1 / 2."""
    scores = torch.tensor([[-120.0, -120.0], [0.0, -120.0]])
    q, k, _, _ = inputs_with(scores[:, None])
    out = attention(q, k, torch.ones(2, 1, 2, 1), "softmax1", scale=1.0, backend="fused")
    assert out.flatten().tolist() == [0.0, 0.5]


def poison(tensors, lengths):
    dirty = [tensor.clone() for tensor in tensors]
    for sequence, length in enumerate(lengths):
        dirty[1][sequence, :, length:] = torch.nan
        dirty[2][sequence, :, length:] = torch.inf
    return dirty


@variants
def test_padding_may_hold_anything(variant):
    clean, arguments = grid_inputs(2, 1, 1, 20, 40, 8, 8), {"causal": True, "key_lengths": [37, 0]}
    expected, ours = (
        outputs_and_gradients(inputs, torch.float32, "fused", variant, **arguments)
        for inputs in (clean, poison(clean, arguments["key_lengths"]))
    )
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
    assert not expected["out"][1].any()
    assert not any(expected[name][1].any() for name in ("d_q", "d_k", "d_v"))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, for NaN
@variants
@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_is_kept_as_the_reference_keeps_it(variant, where):
    tensors = [tensor.float() for tensor in grid_inputs(1, 1, 1, 20, 40, 8, 8)[:3]]
    tensors[["query", "key"].index(where)][0, 0, 12, 3] = torch.nan
    leaves = [tensor.requires_grad_() for tensor in tensors]
    outcomes = []
    for backend in ("fused", "reference"):
        out = attention(*leaves, variant, backend=backend, window_size=9)
        outcomes.append([out, *torch.autograd.grad(out.sum(), leaves)])
    ours, expected = ([result.isnan() for result in results] for results in outcomes)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[3], expected[3])
    assert ours[0].any()
    assert all((found >= wanted).all() for found, wanted in zip(ours, expected, strict=True))  # no NaN is lost


@variants
def test_reruns_are_bitwise_equal_and_no_row_depends_on_others(variant):
    inputs = [torch.randn(2, 1, length, 8) for length in (20, 40, 40, 20)]
    first, again = (outputs_and_gradients(inputs, torch.float32, "fused", variant) for _ in range(2))
    alone = outputs_and_gradients([tensor[1:] for tensor in inputs], torch.float32, "fused", variant)
    inputs[0][:, :, :7] *= 9  # the neighbors in a tile take other numbers of passes
    inputs[0][:, :, 8:] *= 0.1
    changed = outputs_and_gradients(inputs, torch.float32, "fused", variant)
    for name, value in first.items():
        assert torch.equal(again[name], value), name
        assert torch.equal(alone[name], value[1:]), name
    for name in ("out", "d_q"):
        assert torch.equal(changed[name][:, :, 7], first[name][:, :, 7]), name


def test_layouts_do_not_matter():
    q, k, v, _ = (tensor.float() for tensor in grid_inputs(1, 2, 2, 20, 30, 8, 8))
    expected = attention(q, k, v, "entmax15", causal=True, backend="fused")
    for spread in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: torch.stack([x, x], -1)[..., 0]):
        laid = [spread(tensor) for tensor in (q, k, v)]
        assert torch.equal(attention(*laid, "entmax15", causal=True, backend="fused"), expected)
    assert expected.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("function", ["entmax15", "softpick"])
def test_operators_are_what_they_say_to_torch(function):
    leaves = [tensor.float().requires_grad_() for tensor in grid_inputs(1, 2, 1, 5, 7, 4, 4)[:3]]
    arguments = [*leaves, torch.tensor([6]), 0.5, function, UNBOUNDED, 0]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(rowwise.rowwise, arguments, test_utils=checks)
    out, rows = rowwise.rowwise(*arguments)
    assert not rows.requires_grad
    backward = [torch.ones_like(out), out.detach(), rows, *arguments]
    torch.library.opcheck(rowwise.rowwise_backward, backward, test_utils=("test_schema", "test_faketensor"))


@variants
def test_second_derivatives_are_the_reference_s(variant):
    def penalty_gradients(dtype, backend):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in grid_inputs(1, 2, 1, 5, 7, 4, 4)[:3]]
        out = attention(*leaves, variant, causal=True, key_lengths=[6], backend=backend)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)

    ours, exact = penalty_gradients(torch.float32, "fused"), penalty_gradients(torch.float64, "reference")
    for found, true in zip(ours, exact, strict=True):
        # Roots and quotients of numbers below 10 in float32, differentiated twice.
        torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"attn_bias": torch.zeros(4, 4)}, "no fused kernel for bias or mask"),
        ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, "no fused kernel for bias or mask"),
        ({"dropout_p": 0.5}, "no fused kernel for dropout"),
    ],
    ids=["bias", "mask", "dropout"],
)
def test_what_the_kernels_cannot_do_is_said(arguments, reason):
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ArgumentError, match=reason):
        attention(q, q, q, "sparsemax", backend="fused", **arguments)
    wide = torch.zeros(1, 1, 4, 257)
    with pytest.raises(ArgumentError, match="head sizes up to 256"):
        attention(wide, wide, wide, "sparsemax", backend="fused")


@variants
def test_a_gpu_takes_them_for_long_rows(variant, monkeypatch):
    monkeypatch.setattr(attention_module, "LEAST_ROWWISE", {VARIANTS[variant].rowwise: 1024})
    for queries, keys, names in (
        (1023, 4096, ["products", "reference"]),
        (4096, 1023, ["products", "reference"]),
        (1024, 1024, ["fused", "sdpa", "products", "reference"]),
    ):
        q, k = (torch.empty(1, 1, length, 8, device="meta", dtype=torch.bfloat16) for length in (queries, keys))
        assert [each.name for each in candidates(q, check_call(q, k, k, variant), "auto")] == names


@pytest.mark.parametrize(
    ("variant", "more"), [("entmax15", {"threshold", "means"}), ("softpick", {"means"}), ("softmax1", set())]
)
def test_they_are_explained(variant, more):
    q = torch.zeros(1, 1, 4, 8)
    found = explain(q, q, q, variant, backend="fused")
    assert (found.backend, found.kernel) == ("fused", "long")
    assert set(found.tilings) == {"forward", "keys", "queries"} | more
    assert "no fused kernel for short sequences" in str(found)


def test_every_kernel_has_a_tiling_of_every_head_size():
    for kernel in rowwise.EXACT:
        for size in (1, 64, 65, 128, 129, 256):
            q = torch.empty(1, 1, 1, size, dtype=torch.bfloat16)
            largest = 64 if size <= 64 else 128 if size <= 128 else 256
            assert rowwise.find_tiling(kernel, q, q) == rowwise.TILINGS[kernel, largest]
