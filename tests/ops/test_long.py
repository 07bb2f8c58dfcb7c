"""The fused kernels for long sequences, run by Triton's interpreter, against the reference."""

import pytest
import torch
from closeness import (
    OPTIONS,
    assert_beta_gets_its_gradients,
    assert_matches_reference,
    assert_no_worse,
    grid,
    grid_inputs,
    kernel_arguments,
    outputs_and_gradients,
)

from rectiformer import VARIANTS, attention, attention_varlen
from rectiformer.ops import gpu
from rectiformer.ops.activations import FUNCTIONS
from rectiformer.ops.attention import check_call
from rectiformer.ops.gpu import kernel_obstacle, long_obstacle
from rectiformer.ops.reference import reference_attention

pytestmark = pytest.mark.usefixtures("interpreter", "_no_short_kernels")
# One of each kind: the ReLA variants are one computation.
KINDS = [name for name, row in VARIANTS.items() if row.pointwise is not None and name not in ("rela-i", "rela-g")]
# Tiles of float32 have 16 to 64 rows, so these shapes have full tiles, edges and tails.
M, N = 70, 75
ALONE = {
    "causal": {"causal": True},
    "window": {"window_size": (9, 5)},
    "causal window": {"causal": True, "window_size": (20, 0)},
    "lengths": {"key_lengths": [75, 37]},
    "dropout": {"dropout_p": 0.25, "seed": 2**40 + 7},
    "negative scale": {"scale": -0.5},
}
TOGETHER = {
    "full": {},
    "everything": {
        "causal": True, "window_size": (50, 0), "key_lengths": [40, 0], "dropout_p": 0.25, "seed": 11, "scale": -0.5
    },
    "mask": {"attn_mask": grid(2, 1, M, N, seed=4) > 0},
}  # fmt: skip
# Interpreting is slow: every kind meets all features together, and each feature alone meets one kind.
CASES = [(kind, 2, name, features) for kind in KINDS for name, features in TOGETHER.items()]
CASES += [(KINDS[number % len(KINDS)], 1, name, features) for number, (name, features) in enumerate(ALONE.items())]
BIASES = [(1, 1, 1, 1), (1, 2, 40, 45), (2, 1, 40, 45), (2, 2, 1, 45), (2, 2, 40, 1)]
"""Any two axes are whole and broadcast in all four ways."""


@pytest.fixture
def _no_short_kernels(monkeypatch):
    """The interpreter wants small shapes, and those would go to the kernels for short sequences."""
    monkeypatch.setattr(gpu, "short_obstacle", lambda *_: "not wanted here")


@pytest.mark.parametrize(
    ("variant", "heads", "features"), [pytest.param(*case[:2], case[3], id=f"{case[0]}-{case[2]}") for case in CASES]
)
def test_kernels_match_the_reference(variant, heads, features):
    inputs = grid_inputs(2, heads, heads, M, N, 16, 8)
    assert_matches_reference(inputs, torch.float32, "fused", variant, **features)


@pytest.mark.parametrize("variant", ["rela", "reluformer"])
@pytest.mark.parametrize(
    "sizes", [(1, 4, 2, 33, 40, 16, 16), (1, 2, 1, 40, 33, 5, 7), (1, 1, 1, 1, 64, 8, 8), (2, 1, 1, 96, 1, 130, 4)]
)
def test_shapes_match_the_reference(variant, sizes):
    assert_matches_reference(grid_inputs(*sizes), torch.float32, "fused", variant, causal=True)


@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_a_bias_gets_its_gradient_in_its_own_shape(shape):
    inputs = grid_inputs(2, 2, 2, 40, 45, 16, 8)
    assert_matches_reference(inputs, torch.float32, "fused", "rela", attn_bias=grid(*shape, seed=9))


@pytest.mark.parametrize("variant", ["reluformer", "sigmoid", "threshold"])
def test_a_bias_goes_with_everything_else(variant):
    more = {
        "causal": True,
        "dropout_p": 0.25,
        "seed": 3,
        "key_lengths": [60, 75],
        "attn_bias": grid(2, 2, M, N, seed=3),
    }
    assert_matches_reference(grid_inputs(2, 2, 2, M, N, 16, 8), torch.float32, "fused", variant, **more)


def learned_gamma(dtype, how, heads, key_heads):
    """The gradient of gamma, and the sum of the absolute terms that it is the sum of."""
    q, k, v, upstream = (tensor.to(dtype) for tensor in grid_inputs(2, heads, key_heads, M, N, 8, 8))
    v.requires_grad_()
    gamma = torch.linspace(0.5, 2, heads, dtype=dtype).requires_grad_()
    call = check_call(q, k, v, "reluformer", causal=True, options={"gamma": gamma})
    out = (
        gpu.long.long_attention(q, k, v, call)
        if how == "fused"
        else reference_attention(q, k, v, call, precision=dtype)
    )
    d_gamma, d_v = torch.autograd.grad(out, [gamma, v], upstream)
    return d_gamma, (d_v * v).abs().sum() / gamma.min()


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2)])
def test_a_learned_gamma_gets_its_gradient(heads, key_heads):
    exact, terms = learned_gamma(torch.float64, "reference", heads, key_heads)
    ours, _ = learned_gamma(torch.float32, "fused", heads, key_heads)
    assert (ours.double() - exact).abs().max() <= torch.finfo(torch.float32).eps * terms


@pytest.mark.parametrize(
    ("key_heads", "features"),
    [
        (2, {}),
        (1, {"causal": True, "key_lengths": [30, 20]}),
        (2, {"attn_mask": grid(2, 1, 30, 40, seed=4) > 0, "dropout_p": 0.25, "seed": 5}),
    ],
    ids=str,
)
def test_a_learned_beta_gets_its_gradient(key_heads, features):
    assert_beta_gets_its_gradients(grid_inputs(2, 2, key_heads, 30, 40, 8, 8), **features)


BOUNDS = torch.tensor([0, 5, 5, 45, 80, 80]), torch.tensor([0, 40, 43, 43, 76, 80])


def packed_results(dtype, backend, variant, **arguments):
    q, k, v, upstream = (tensor[0].transpose(0, 1).to(dtype) for tensor in grid_inputs(1, 2, 2, 80, 80, 16, 8))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = attention_varlen(*leaves, *BOUNDS, variant, backend=backend, **OPTIONS.get(variant, {}), **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


MOST = {"max_seqlen_q": 40, "max_seqlen_k": 40}
WINDOW = {"window_size": (7, 3), "dropout_p": 0.25, "seed": 5}


@pytest.mark.parametrize(
    ("variant", "features", "most"),
    [
        ("rela", {}, {}),
        ("rela", {"causal": True}, MOST),
        ("rela", WINDOW, {}),
        ("reluformer", {}, MOST),
        ("reluformer", {"causal": True}, {}),
        ("reluformer", WINDOW, MOST),
        ("sigmoid", {"causal": True}, {}),
        ("threshold", WINDOW, MOST),
    ],
    ids=str,
)
def test_packed_sequences_match_the_reference(variant, features, most):
    ours = packed_results(torch.float32, "fused", variant, **features, **most)
    eager = packed_results(torch.float32, "reference", variant, **features)
    exact = packed_results(torch.float64, "reference", variant, **features)
    for name, *results in zip(["out", "d_q", "d_k", "d_v"], ours, eager, exact, strict=True):
        assert_no_worse(name, *results)


@pytest.mark.parametrize("arguments", [{"key_lengths": [30, 0]}, {"causal": True, "key_lengths": [64, 33]}], ids=str)
@pytest.mark.parametrize("variant", ["rela", "sigmoid", "threshold"])
def test_padding_may_hold_anything(variant, arguments):
    clean = grid_inputs(2, 2, 2, 40, 64, 16, 8)
    dirty = [tensor.clone() for tensor in clean]
    for sequence, length in enumerate(arguments["key_lengths"]):
        dirty[1][sequence, :, length:] = torch.nan
        dirty[2][sequence, :, length:] = torch.inf
    expected, ours = (
        outputs_and_gradients(inputs, torch.float32, "fused", variant, **arguments) for inputs in (clean, dirty)
    )
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def test_neighbors_in_a_pack_may_hold_anything():
    q, k, v = (tensor[0].transpose(0, 1).float() for tensor in grid_inputs(1, 2, 2, 60, 60, 16, 8)[:3])
    bounds = torch.tensor([0, 20, 60])
    expected = attention_varlen(q, k, v, bounds, bounds, backend="fused")
    for tensor in (q, k, v):
        tensor[20:] = torch.nan
    assert torch.equal(attention_varlen(q, k, v, bounds, bounds, backend="fused")[:20], expected[:20])


def test_layouts_do_not_matter():
    q, k, v, _ = (tensor.float() for tensor in grid_inputs(2, 2, 2, 40, 50, 16, 8))
    expected = attention(q, k, v, causal=True, backend="fused")
    strided = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]
    assert torch.equal(attention(*strided, causal=True, backend="fused"), expected)
    spread = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in (q, k, v)]  # columns two apart
    assert torch.equal(attention(*spread, causal=True, backend="fused"), expected)
    assert expected.transpose(1, 2).is_contiguous()


def arguments_of(*, packed=False, bias=False, factors=False, function="relu", shift=""):
    q, k, v, _ = (tensor.float().requires_grad_() for tensor in grid_inputs(1, 2, 2, 40, 40, 8, 8))
    given = {"row_exponent": 0.5, "window_right": 0, "function": function, "shift": shift, "shift_factor": 0.5}
    if packed:
        given |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 10, 40]))
    if bias:
        given["attn_bias"] = grid(1, 2, 40, 1).float().requires_grad_()
    if factors:
        given["head_factors"] = torch.tensor([0.5, 2.0], requires_grad=True)
        given["head_shifts"] = torch.tensor([0.25, 0.5], requires_grad=True) if shift else None
    return kernel_arguments(q, k, v, **given)


WAYS = [{}, {"packed": True}, {"bias": True}, {"factors": True}, {"function": "gelu"}]
WAYS += [{"function": "sigmoid", "shift": "log n", "factors": True, "packed": True}]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_operators_are_what_they_say_to_torch(how):
    arguments = arguments_of(**how)
    torch.library.opcheck(
        gpu.long.long, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(gpu.long.long_backward, [torch.ones_like(arguments[0]), *arguments], test_utils=checks)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_second_derivatives_are_the_reference_s(how):
    def penalty_gradients(dtype, run):
        arguments = [
            value.detach().to(dtype).requires_grad_()
            if isinstance(value, torch.Tensor) and value.requires_grad
            else value
            for value in arguments_of(**how)
        ]
        leaves = [value for value in arguments if isinstance(value, torch.Tensor) and value.requires_grad]
        first = torch.autograd.grad(run(*arguments).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)

    def plain(*arguments):
        call = gpu.common.KernelCall(*arguments)
        scores = call.scale * call.q @ call.k.mT + (0 if call.attn_bias is None else call.attn_bias)
        rows, columns = torch.arange(40)[:, None], torch.arange(40)
        seen = columns <= rows
        if call.packed:
            seen = seen & ((rows < 10) == (columns < 10))
        count = seen.sum(-1, keepdim=True).to(scores.dtype)
        if call.shift:
            scores = scores - call.shift_factor * call.head_shifts[:, None, None] * count.log()
        weights = FUNCTIONS[call.function](scores).where(seen, 0) * count**-call.row_exponent
        return (weights if call.head_factors is None else weights * call.head_factors[:, None, None]) @ call.v

    exact = penalty_gradients(torch.float64, plain)
    eager = penalty_gradients(torch.float32, plain)
    ours = penalty_gradients(torch.float32, gpu.long.long)
    for index, results in enumerate(zip(ours, eager, exact, strict=True)):
        assert_no_worse(f"leaf {index}", *results)


def test_reruns_are_bitwise_equal():
    inputs = grid_inputs(1, 2, 1, M, N, 16, 8)
    first, again = (outputs_and_gradients(inputs, torch.float32, "fused", "reluformer", causal=True) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(again[name], value), name


def test_every_kernel_has_a_tiling_of_every_head_size():
    for kernel in ("forward", "rows", "keys", "queries", "bias"):
        for size in (1, 16, 64, 65, 128, 129, 256):
            q = torch.empty(1, 1, 1, size, dtype=torch.bfloat16)
            of_size = 64 if size <= 64 else 128 if size <= 128 else 256
            found = {name: gpu.long.find_tiling(kernel, q, q, name, edges=True) for name in ("relu", "sigmoid")}
            assert found["relu"] == gpu.long.TILINGS[kernel, of_size][1]
            assert found["sigmoid"] == (gpu.long.TILINGS | gpu.long.SMOOTH_TILINGS)[kernel, of_size][1]


@pytest.mark.parametrize(
    ("variant", "size", "dtype", "reason"),
    [
        ("softmax", 8, torch.float32, "no fused kernel for long sequences"),
        ("rela", 257, torch.float32, "head sizes up to 256"),
        ("rela", 8, torch.float64, "one of float32, bfloat16 and float16"),
    ],
)
def test_what_the_kernels_cannot_do_is_said(variant, size, dtype, reason):
    q = torch.zeros(1, 1, 4, size, dtype=dtype)
    call = check_call(q, q, q, variant)
    assert reason in (kernel_obstacle(q, q, q, call) or long_obstacle(q, q, call))


@pytest.mark.parametrize("variant", ["rela", "relu2", "reluformer", "leaky-relu", "threshold"])
def test_a_low_bias_hides_keys_however_high_their_scores_are(variant):
    tensors = [tensor.float().requires_grad_() for tensor in grid_inputs(1, 2, 2, 40, 40, 8, 8)]
    *qkv, upstream = tensors
    shown = torch.ones(40, 40, dtype=torch.bool).tril()
    bias = torch.where(shown, 0.25, -1e4).requires_grad_()
    outcomes = []
    for arguments in ({"attn_bias": bias}, {"attn_bias": torch.full((40, 40), 0.25), "attn_mask": shown}):
        out = attention(*qkv, variant, backend="fused", scale=1e5, **arguments)
        outcomes.append([out, *torch.autograd.grad(out, qkv, upstream)])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
