"""Norms begun in the epilogue, run by Triton's interpreter, against the formula: values, derivatives, null rows."""

import pytest
import torch
from closeness import assert_no_worse, grid, grid_inputs

from rectiformer.ops.dispatch import check_call
from rectiformer.ops.gated import gated_attention, gated_obstacle
from rectiformer.ops.reference import reference_attention

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    # numpy warns where exp(-x) of a closed gate is infinite; the sigmoid is 0 then, as it should be
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "lengths": {"key_lengths": [17, 0]},
    "everything": {"causal": True, "window": (4, 0), "key_lengths": [9, 17], "dropout": 0.25, "seed": 11},
}
NAMES = ["x", "squares", "d_q", "d_k", "d_v", "d_gain", "d_gate"]


gated_or_not = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


def tensors(gated, B, H, K, M, N, D, Dv):
    """q, k, v, gain, gate and upstream gradients of x and squares in float64, on the grid."""
    q, k, v, d_x = grid_inputs(B, H, K, M, N, D, Dv)
    gain, gate, d_squares = grid(H * Dv, seed=4), grid(H * Dv, seed=5), grid(B, H, M, seed=6)
    return [q, k, v, gain, gate if gated else None, d_x, d_squares]


def plain_gated(q, k, v, gain, gate, call):
    """The formula."""
    z = reference_attention(q, k, v, call)
    gain, gate = (None if vector is None else vector.view(q.shape[1], 1, -1) for vector in (gain, gate))
    return gain * z * (1 if gate is None else torch.sigmoid(gate * z)), z.square().sum(-1)


def call_of(q, k, v, variant="rela", *, causal=False, key_lengths=None, window=None, dropout=0.0, seed=None, **options):
    return check_call(q, k, v, variant, causal, key_lengths, None, None, window, None, dropout, seed, options)


def results(how, inputs, dtype, variant="rela", **arguments):
    """x, squares and the gradients of q, k, v, gain and gate, and the leaves they belong to."""
    leaves = [None if tensor is None else tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    *given, d_x, d_squares = leaves
    out = how(*given, call_of(*given[:3], variant, **arguments))
    held = [leaf for leaf in given if leaf is not None]
    return [*out, *torch.autograd.grad(out, held, (d_x, d_squares), create_graph=True)], leaves


def assert_matches_formula(inputs, variant="rela", **arguments):
    ways = [(gated_attention, torch.float32), (plain_gated, torch.float32), (plain_gated, torch.float64)]
    found = [results(how, inputs, dtype, variant, **arguments)[0] for how, dtype in ways]
    for name, ours, eager, exact in zip(NAMES, *found, strict=False):
        assert_no_worse(f"{variant} {name}", ours, eager, exact)


@gated_or_not
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("variant", ["rela", "reluformer", "relu2", "softmax"])
def test_kernels_match_the_formula(variant, features, gated):
    assert_matches_formula(tensors(gated, 2, 2, 2, 13, 17, 8, 5), variant, **FEATURES[features])


@pytest.mark.parametrize("key_heads", [1, 2])
def test_heads_may_share_keys(key_heads):
    assert_matches_formula(tensors(True, 2, 4, key_heads, 6, 17, 8, 5), **FEATURES["everything"])


@gated_or_not
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (20, 3, 17, 20), (33, 40, 8, 8)], ids=str)
def test_any_size_fits_its_block(gated, sizes):
    assert_matches_formula(tensors(gated, 1, 2, 2, *sizes), causal=True)


@gated_or_not
def test_rows_that_attend_to_nothing_are_zero_with_finite_gradients(gated):
    inputs = tensors(gated, 1, 2, 2, 4, 5, 8, 6)
    inputs[0][:, :, 1:3], inputs[1] = -1, inputs[1].abs() + 0.25  # so that rows 1 and 2 score below 0
    (x, squares, d_q, *rest), _ = results(gated_attention, inputs, torch.float32)
    assert (x[:, :, 1:3] == 0).all()
    assert (squares[:, :, 1:3] == 0).all()
    assert (d_q[:, :, 1:3] == 0).all()
    assert (squares[:, :, [0, 3]] > 0).any()
    assert all(grad.isfinite().all() for grad in rest)
    assert_matches_formula(inputs)


@gated_or_not
@pytest.mark.parametrize("size", [2.0**-40, 2.0**-13, 2.0**13])  # powers of 2 keep scores exact
def test_values_of_any_size_match_the_formula(gated, size):
    inputs = tensors(gated, 2, 2, 2, 4, 5, 8, 6)
    inputs[2] = inputs[2] * size
    assert_matches_formula(inputs)


@pytest.mark.parametrize("gamma", [torch.tensor([0.5, 2.0]), torch.tensor(2.0)], ids=str)
def test_a_learned_factor_receives_its_gradient(gamma):
    inputs, found = tensors(True, 2, 2, 1, 5, 7, 8, 3), []
    for how, dtype in ((gated_attention, torch.float32), (plain_gated, torch.float64)):
        leaf = gamma.to(dtype).requires_grad_()
        (x, squares, *_), _ = results(how, inputs, dtype, "reluformer", gamma=leaf, causal=True)
        found.append(torch.autograd.grad(x.sum() + squares.sum(), leaf)[0].double())
    # A hundred float32 roundings: sums of up to 2 * 5 * 7 products, a root, a quotient.
    assert (found[0] - found[1]).abs().max() <= 100 * torch.finfo(torch.float32).eps * found[1].abs().max()


@gated_or_not
def test_second_derivatives_match_the_formula(gated):
    inputs, found = tensors(gated, 1, 2, 1, 3, 4, 4, 4), []
    for how, dtype in ((gated_attention, torch.float32), (plain_gated, torch.float64)):
        (_, _, *first), leaves = results(how, inputs, dtype)
        held = [leaf for leaf in leaves if leaf is not None]
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), held))
    for ours, exact in zip(*found, strict=True):
        # A hundred float32 roundings of the largest entry.
        assert (ours.double() - exact).abs().max() <= 100 * torch.finfo(torch.float32).eps * exact.abs().max()


def test_padding_may_hold_nan():
    clean = tensors(True, 2, 2, 2, 4, 6, 4, 4)
    dirty = [tensor.clone() for tensor in clean]
    for tensor in dirty[1:3]:
        tensor[1, :, 2:] = torch.nan
    expected, ours = (
        results(gated_attention, x, torch.float32, key_lengths=[6, 2], causal=True)[0] for x in (clean, dirty)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_reruns_are_bitwise_equal():
    inputs = tensors(True, 3, 4, 2, 6, 7, 4, 4)
    first, again = (results(gated_attention, inputs, torch.float32)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_operators_are_well_formed():
    found = [tensor.float().requires_grad_() for tensor in tensors(True, 1, 2, 1, 3, 4, 4, 2)]
    q, k, v, gain, gate, d_x, d_squares = found
    factors = torch.tensor([0.5, 2.0], requires_grad=True)
    numbers, sizes = [0.5, 0.0, 0.5, 1.0], [1, 3, 0, 3, 4]
    given = (gain, gate, q, k, v, factors, torch.tensor([3]), None, None, None, numbers, sizes)
    torch.library.opcheck(torch.ops.rectiformer.short_gated.default, given)
    upstream = d_x.detach(), d_squares.detach()
    torch.library.opcheck(torch.ops.rectiformer.short_gated_backward.default, (*upstream, *given))


def test_what_the_kernels_cannot_do_has_a_reason():
    q, k, v, gain, gate, *_ = (tensor.float() for tensor in tensors(True, 1, 2, 2, 3, 3, 4, 4))
    call = call_of(q, k, v)
    assert gated_obstacle(q, k, v, gain, gate, call) == ""
    assert "one is [7] of torch.float32" in gated_obstacle(q, k, v, gain, gate[:7], call)
    assert "one is [8] of torch.float64" in gated_obstacle(q, k, v, gain.double(), None, call)
    assert "it takes one of float32" in gated_obstacle(q.double(), k, v, gain, gate, call)
