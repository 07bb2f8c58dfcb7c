"""Row sums next to the output: every path against sums over the reference's dense weights, value and gradients."""

import math

import pytest
import torch
from closeness import assert_no_worse, grid, grid_inputs, kernel_arguments
from torch.utils._python_dispatch import TorchDispatchMode

import rectiformer.ops.weights as weights_module
from rectiformer import VARIANTS
from rectiformer.errors import ArgumentError
from rectiformer.ops.attention import check_call
from rectiformer.ops.gpu import row_sums_obstacle
from rectiformer.ops.reference import reference_attention, reference_weights
from rectiformer.ops.weights import attention_with_rows

M, N = 70, 75  # tiles of float32 have 16 to 64 rows: full ones, edges and tails
RECTIFIED = [name for name, variant in VARIANTS.items() if variant.rectified]
OTHERS = [name for name, variant in VARIANTS.items() if variant.has_weights and not variant.rectified]
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 5)},
    "lengths": {"key_lengths": [75, 37]},
    "everything": {"causal": True, "window_size": (50, 0), "key_lengths": [40, 0], "dropout_p": 0.25, "seed": 14},
    "negative scale": {"scale": -0.5},
    "mask": {"attn_mask": grid(2, 1, M, N, seed=4) > 0},
}
KERNELS = [("reluformer", name) for name in FEATURES]
KERNELS += [
    ("rela", "lengths"),
    ("rela", "causal"),
    ("relu2", "full"),
    ("relu2", "everything"),
    ("relu-seqlen", "causal"),
]


def plan(q, k, v, variant, arguments, options=None):
    return check_call(q, k, v, variant, options=options, **arguments)


def dense(q, k, v, call):
    """Output, mass and entropy from all weights at once, in plain torch."""
    size = reference_weights(q, k, call, precision=q.dtype).abs()
    mass = size.sum(-1)
    share = size / torch.where(mass > 0, mass, 1)[..., None]
    entropy = -(share * torch.where(share > 0, share, 1).log()).sum(-1)
    return reference_attention(q, k, v, call, precision=q.dtype), mass, entropy


def summed(q, k, v, call):
    out, rows = attention_with_rows(q, k, v, call)
    return out, rows.mass, rows.entropy


def results(inputs, dtype, how, variant, **arguments):
    """Output and sums, the gradients of all three together for q, k, v, and that of gamma where there is one."""
    q, k, v, upstream = (tensor.to(dtype, copy=True) for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    options = {}
    if "gamma" in VARIANTS[variant].options:
        options["gamma"] = torch.linspace(0.5, 2, q.shape[1], dtype=dtype).requires_grad_()
    found = how(q, k, v, plan(q, k, v, variant, arguments, options))
    rows = [grid(*q.shape[:3], seed=seed).to(found[1].dtype) for seed in (21, 22)]
    gradients = torch.autograd.grad(found, [*leaves, *options.values()], [upstream, *rows])
    out, mass, entropy = (part.detach() for part in found)
    named = dict(zip(["d_q", "d_k", "d_v", *options], gradients, strict=True))
    terms = [upstream * out, rows[0] * mass]  # those that gamma's gradient is the sum of; entropy knows no gamma
    return {"out": out, "mass": mass, "entropy": entropy, **named}, sum(term.abs().sum().item() for term in terms)


def assert_rows_match(inputs, variant, ours=summed, plain=dense, **arguments):
    fast, _ = results(inputs, torch.float32, ours, variant, **arguments)
    eager, _ = results(inputs, torch.float32, plain, variant, **arguments)
    exact, terms = results(inputs, torch.float64, plain, variant, **arguments)
    if "gamma" in exact:
        error = (fast.pop("gamma").double() - exact.pop("gamma")).abs().max()
        assert error <= torch.finfo(torch.float32).eps * terms / 0.5, "gamma"
    for name in exact:
        assert_no_worse(f"{variant} {name}", fast[name], eager[name], exact[name])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("variant", "features"), KERNELS)
def test_kernels_sum_up_rows_as_the_reference_does(variant, features):
    assert_rows_match(grid_inputs(2, 1, 1, M, N, 16, 8), variant, **FEATURES[features])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("variant", ["reluformer", "relu2"])
@pytest.mark.parametrize("sizes", [(1, 4, 2, 33, 40, 16, 16), (1, 2, 1, 40, 33, 5, 7), (1, 2, 2, 1, 64, 8, 8)], ids=str)
def test_kernels_sum_up_rows_of_every_shape(sizes, variant):
    assert_rows_match(grid_inputs(*sizes), variant, causal=True)


@pytest.mark.parametrize("block", [1 << 20, 5000], ids=["whole", "by rows"])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("variant", RECTIFIED)
def test_the_cpu_sums_up_rows_as_the_reference_does(variant, features, block, monkeypatch):
    monkeypatch.setattr(weights_module, "BLOCK_CELLS", block)
    assert_rows_match(grid_inputs(2, 2, 1, M, N, 16, 8), variant, **FEATURES[features])


@pytest.mark.parametrize("variant", OTHERS)
def test_rows_of_every_other_variant_are_summed_up_too(variant, monkeypatch):
    monkeypatch.setattr(weights_module, "BLOCK_CELLS", 5000)
    assert_rows_match(grid_inputs(2, 2, 1, M, N, 16, 8), variant, **FEATURES["everything"])


def test_a_bias_gets_the_gradient_of_the_sums():
    q, k, v, _ = grid_inputs(1, 2, 2, M, N, 8, 8)
    bias = grid(1, 2, 1, N, seed=9).requires_grad_()
    call = plan(q, k, v, "reluformer", {"attn_bias": bias})
    ours, expected = (torch.autograd.grad(how(q, k, v, call)[2].square().sum(), bias)[0] for how in (summed, dense))
    assert expected.abs().max() > 0
    torch.testing.assert_close(ours, expected)
    assert "bias" in row_sums_obstacle(q, k, v, call)


@pytest.mark.parametrize("fused", [False, True])
def test_null_rows_weigh_nothing_and_pass_no_gradient(fused, request):
    if fused:
        request.getfixturevalue("interpreter")
    q, k, v, _ = (tensor.float() for tensor in grid_inputs(1, 2, 2, 20, 24, 8, 8))
    k[..., 0] = 1.0
    q[:, :, 3] = torch.tensor([-1.0] + [0.0] * 7)
    q.requires_grad_()
    _, rows = attention_with_rows(q, k, v, plan(q, k, v, "reluformer", {"causal": True}))
    assert [part[0, :, 3].eq(0).all().item() for part in (rows.mass, rows.entropy, rows.raw_entropy)] == [True] * 3
    (rows.mass.sum() + rows.entropy.sum() + rows.raw_entropy.sum()).backward()
    assert q.grad.isfinite().all()
    assert q.grad[:, :, 3].eq(0).all()
    assert q.grad[:, :, 5].any()


def test_the_raw_entropy_is_that_of_the_weights_as_they_are():
    q, k, v, _ = grid_inputs(1, 2, 2, 20, 24, 8, 8)
    call = plan(q, k, v, "reluformer", {"causal": True})
    weights = reference_weights(q, k, call)
    expected = -torch.special.xlogy(weights, weights).sum(-1)
    torch.testing.assert_close(attention_with_rows(q, k, v, call)[1].raw_entropy, expected)


def rows_arguments(packed=False, factors=False):
    q, k, v, _ = (tensor.float().requires_grad_() for tensor in grid_inputs(1, 2, 2, 40, 40, 8, 8))
    given = {"row_exponent": 0.5, "window_right": 0}
    if packed:
        given |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 10, 40]))
    if factors:
        given["head_factors"] = torch.tensor([0.5, 2.0], requires_grad=True)
    return kernel_arguments(q, k, v, **given)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("how", [{}, {"packed": True}, {"factors": True}], ids=str)
def test_operators_are_what_they_say_to_torch(how):
    arguments = rows_arguments(**how)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.rectiformer.long_rows.default, arguments, test_utils=checks)
    upstream = [torch.ones_like(arguments[0]), torch.ones(1, 2, 40, 2)]
    backward = torch.ops.rectiformer.long_rows_backward.default
    torch.library.opcheck(backward, [*upstream, *arguments], test_utils=("test_schema", "test_faketensor"))


def test_what_has_no_weights_is_refused():
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ArgumentError, match="'inhibitor' subtracts"):
        attention_with_rows(q, q, q, plan(q, q, q, "inhibitor", {}))


@pytest.mark.parametrize("n", [8, 32, 128, 512])
def test_rows_start_as_the_closed_form_says(n):
    """Unit-normal scores x: mass sqrt(n / pi) and, for long rows, entropy ln n - 0.9769.

    w = [x]+ / sqrt(n / 2), E[x]+ = 1 / sqrt(2 pi), Var[x]+ = 1/2 - 1 / (2 pi). ln n - entropy tends to
    E[x+ ln x+] / E[x+] - ln E[x+] = (ln 4 pi - Euler's constant) / 2 = 0.9769; the next term is 0.107 / n.
    """
    size, draws = 64, 512
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(draws, 1, 16, size, generator=generator)
    q = q / q.norm(dim=-1, keepdim=True) * size**0.5  # so that scores of a row are exactly unit-normal, whatever q is
    k = torch.randn(draws, 1, n, size, generator=generator)
    _, rows = attention_with_rows(q, k, k, plan(q, k, k, "reluformer", {}))
    # Rows that share their keys are nearly independent; a mean over 16 of them is one draw.
    masses = rows.mass.mean(2).flatten().double()
    error = masses.std() / draws**0.5
    assert (masses.mean() - math.sqrt(n / math.pi)).abs() <= 4 * error
    assert error < 0.01 * math.sqrt(n / math.pi)
    entropies = rows.entropy.mean(2).flatten().double()
    error = entropies.std() / draws**0.5
    expected = math.log(n) - (math.log(4 * math.pi) - 0.5772156649) / 2 - 0.107 / n
    assert (entropies.mean() - expected).abs() <= 4 * error + n**-2  # and what comes after that
    assert error < 0.01


PATHS = ["causal", "cross", "cache", "padded"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fused", [False, True])
def test_n_counts_visible_keys_in_every_path(path, fused, request):
    """With scores of 1, a row's mass is n / sqrt(n / 2): it tells n."""
    if fused:
        request.getfixturevalue("interpreter")
    N = 12
    M = {"cross": 5, "cache": 3}.get(path, N)
    q, k = torch.ones(2, 1, M, 4), torch.ones(2, 1, N, 4)
    arguments = {"scale": 0.25, "causal": path in ("causal", "cache")}
    position = torch.arange(N - M, N).expand(2, 1, M)
    expected = position + 1 if arguments["causal"] else torch.full((2, 1, M), N)
    if path == "padded":
        arguments["key_lengths"] = [12, 7]
        expected = torch.tensor([12, 7])[:, None, None].expand(2, 1, M)
    _, rows = attention_with_rows(q, k, k, plan(q, k, k, "reluformer", arguments))
    assert torch.equal(rows.visible.expand(expected.shape), expected)
    torch.testing.assert_close(rows.mass, (2 * expected).float().sqrt())


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation returns."""

    cells = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.cells = max(self.cells, tensor.untyped_storage().nbytes() // tensor.element_size())
        return found


@pytest.mark.parametrize("variant", ["reluformer", "softmax"])
def test_memory_grows_no_faster_than_the_length(variant):
    def largest(length):
        leaves = [torch.randn(1, 4, length, 8, requires_grad=True) for _ in range(3)]
        with Largest() as seen:
            out, rows = attention_with_rows(*leaves, plan(*leaves, variant, {"causal": True}))
            (out.sum() + rows.mass.log().sum() + rows.entropy.sum()).backward()
        return seen.cells

    assert weights_module.BLOCK_CELLS >= 4 * 512**2  # a short one is held whole
    for length in (512, 1024):
        assert largest(length) <= weights_module.BLOCK_CELLS < 4 * 1024**2
