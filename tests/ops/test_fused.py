"""The fused kernels, run by Triton's interpreter, and the two plain products against the reference."""

import pytest
import torch
from closeness import (
    assert_beta_gets_its_gradients,
    assert_matches_reference,
    grid,
    grid_inputs,
    kernel_arguments,
    outputs_and_gradients,
)

from rectiformer import VARIANTS, attention
from rectiformer.errors import ArgumentError
from rectiformer.ops.attention import check_call, choose
from rectiformer.ops.gpu import kernel_obstacle, short_obstacle

FUSED = [name for name, variant in VARIANTS.items() if "fused" in variant.implementations]
# One of each kind: the ReLA variants are one computation, and rows with a normalizer have tests of their own.
KINDS = [name for name in FUSED if name not in ("rela-i", "rela-g") and not VARIANTS[name].rowwise]
PRODUCTS = [name for name, variant in VARIANTS.items() if "products" in variant.implementations]
TOGETHER = {
    "full": {},
    "everything": {
        "causal": True, "window_size": (4, 0), "key_lengths": [9, 17], "dropout_p": 0.25, "seed": 11, "scale": -0.5
    },
    "zero scale": {"scale": 0.0},
}  # fmt: skip
ALONE = {
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "lengths": {"key_lengths": [17, 0]},
    "dropout": {"dropout_p": 0.25, "seed": 2**40 + 7},
    "negative scale": {"scale": -0.5},
}
FEATURES = TOGETHER | ALONE
# Interpreting is slow: every kind meets all features together, and each feature alone meets one kind.
CASES = [pytest.param(kind, features, id=f"{kind}-{name}") for kind in KINDS for name, features in TOGETHER.items()]
CASES += [
    pytest.param(kind, features, id=f"{kind}-{name}")
    for kind, (name, features) in zip(KINDS, ALONE.items(), strict=False)
]


kernels_run = pytest.mark.usefixtures("interpreter")


def call_of(q, k, v, variant="rela", **arguments):
    options = {name: arguments.pop(name) for name in VARIANTS[variant].options if name in arguments}
    return check_call(q, k, v, variant, options=options, **arguments)


@kernels_run
@pytest.mark.parametrize(("variant", "features"), CASES)
def test_kernels_match_the_reference(variant, features):
    assert_matches_reference(grid_inputs(2, 2, 2, 13, 17, 8, 5), torch.float32, "fused", variant, **features)


@kernels_run
@pytest.mark.parametrize("variant", KINDS)
def test_lengths_may_lie_apart_in_memory(variant):
    inputs = grid_inputs(3, 2, 2, 5, 17, 8, 5)
    for lengths in (torch.tensor([9]).expand(3), torch.tensor([9, 1, 17, 1, 4, 1])[::2]):
        assert_matches_reference(inputs, torch.float32, "fused", variant, key_lengths=lengths)


@kernels_run
@pytest.mark.parametrize(("features", "key_heads"), [("full", 1), ("everything", 2)])
@pytest.mark.parametrize("variant", KINDS)
def test_heads_may_share_keys(variant, features, key_heads):
    inputs = grid_inputs(2, 4, key_heads, 6, 17, 8, 5)
    assert_matches_reference(inputs, torch.float32, "fused", variant, **TOGETHER[features])


@kernels_run
@pytest.mark.parametrize("variant", FUSED)
def test_every_fused_variant_runs(variant):
    assert_matches_reference(grid_inputs(1, 2, 2, 3, 4, 4, 4), torch.float32, "fused", variant, causal=True)


@kernels_run
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 18, 3, 2), (20, 3, 17, 20), (33, 40, 8, 8)], ids=str)
@pytest.mark.parametrize("variant", ["reluformer", "relu2", "softmax"])
def test_any_size_fits_its_block(variant, sizes):
    """More queries than keys too: then the first causal rows see nothing."""
    assert_matches_reference(grid_inputs(1, 2, 2, *sizes), torch.float32, "fused", variant, causal=True)


@kernels_run
@pytest.mark.parametrize("exponent", [0.0, 0.5, 0.75, 2.0])
@pytest.mark.parametrize("variant", ["relu-seqlen", "relu2"])
def test_any_exponent_scales_the_rows(variant, exponent):
    inputs = grid_inputs(2, 1, 1, 5, 17, 4, 4)
    arguments = {"exponent": exponent, "window_size": (6, 6), "key_lengths": [17, 3]}
    assert_matches_reference(inputs, torch.float32, "fused", variant, **arguments)


def gamma_gradients(inputs, gamma, how, dtype):
    q, k, v, upstream = (tensor.to(dtype).requires_grad_() for tensor in inputs)
    gamma = gamma.to(dtype).requires_grad_()
    arguments = {"causal": True, "key_lengths": [7, 4], "dropout_p": 0.25, "seed": 5}
    out = attention(q, k, v, "reluformer", gamma=gamma, backend=how, **arguments)
    return out, *torch.autograd.grad(out, (gamma, q), upstream, create_graph=True), gamma, q, upstream


@kernels_run
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("gamma", [torch.tensor([0.5, 2.0]), torch.tensor([0.5]), torch.tensor(2.0)], ids=str)
def test_a_learned_factor_receives_first_and_second_derivatives(gamma, key_heads):
    inputs = grid_inputs(2, 2, key_heads, 5, 7, 8, 3)
    results = []
    for how, dtype in (("fused", torch.float32), ("reference", torch.float64)):
        out, d_gamma, d_q, *leaves = gamma_gradients(inputs, gamma, how, dtype)
        second = torch.autograd.grad(d_gamma.square().sum() + d_q.square().sum(), leaves)
        results.append([out, d_gamma, d_q, *second])
    for ours, exact in zip(*results, strict=True):
        # A hundred float32 roundings: sums of up to 2 * 5 * 7 products, a root, a quotient.
        assert (ours.double() - exact).abs().max() <= 100 * torch.finfo(torch.float32).eps * exact.abs().max()


@kernels_run
@pytest.mark.parametrize("features", [{}, {"causal": True, "key_lengths": [7, 4], "dropout_p": 0.25, "seed": 5}])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_a_learned_shift_receives_first_and_second_derivatives(key_heads, features):
    assert_beta_gets_its_gradients(grid_inputs(2, 2, key_heads, 5, 7, 8, 3), **features)


@kernels_run
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("threshold", {"power": 1}),
        ("threshold", {"power": 3}),
        ("polynomial", {"degree": 4}),
        ("relu-exp", {"power": 16}),
    ],
)
def test_any_whole_power(variant, options):
    inputs = grid_inputs(2, 2, 2, 11, 16, 8, 5)
    assert_matches_reference(inputs, torch.float32, "fused", variant, causal=True, key_lengths=[16, 9], **options)


@kernels_run
@pytest.mark.parametrize("variant", KINDS)
def test_inputs_may_lie_in_any_order(variant):
    """Heads split from one projection, and features that are not neighbors in memory."""
    joint = grid(2, 6, 3, 2, 4, dtype=torch.float32)  # [B, M, qkv, H, D]
    q, k, v = joint.permute(2, 0, 3, 1, 4).unbind()
    k = k.mT.contiguous().mT
    expected = attention(q, k, v, variant, backend="reference")
    out = attention(q, k, v, variant, backend="fused")
    torch.testing.assert_close(out, expected)
    assert out.transpose(1, 2).is_contiguous()  # so that joining the heads moves nothing


@kernels_run
def test_key_lengths_may_lie_in_any_order():
    q, k, v, _ = (tensor.float() for tensor in grid_inputs(3, 1, 1, 4, 5, 4, 4))
    lengths = torch.tensor([5, 0, 2, 0, 0, 0])
    out = attention(q, k, v, key_lengths=lengths[::2], backend="fused")
    assert torch.equal(out, attention(q, k, v, key_lengths=[5, 2, 0], backend="fused"))


@kernels_run
@pytest.mark.parametrize("variant", KINDS)
def test_padding_may_hold_nan(variant):
    clean = grid_inputs(2, 2, 2, 4, 6, 4, 4)
    dirty = [tensor.clone() for tensor in clean]
    for tensor in dirty[1:3]:
        tensor[1, :, 2:] = torch.nan
    arguments = {"key_lengths": [6, 2], "causal": True}
    expected = outputs_and_gradients(clean, torch.float32, "fused", variant, **arguments)
    ours = outputs_and_gradients(dirty, torch.float32, "fused", variant, **arguments)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@kernels_run
@pytest.mark.parametrize("variant", KINDS)
def test_second_derivatives_match_the_reference(variant):
    def penalty_gradients(dtype, how):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in grid_inputs(1, 2, 1, 3, 4, 4, 4)]
        *qkv, upstream = leaves
        out = attention(*qkv, variant, causal=True, backend=how)
        first = torch.autograd.grad(out, qkv, upstream, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)

    for ours, exact in zip(
        penalty_gradients(torch.float32, "fused"), penalty_gradients(torch.float64, "reference"), strict=True
    ):
        # A hundred float32 roundings of the largest entry.
        assert (ours.double() - exact).abs().max() <= 100 * torch.finfo(torch.float32).eps * exact.abs().max()


@kernels_run
@pytest.mark.parametrize("bounds", [None, torch.tensor([0, 1, 1, 3])], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("power", "exponent", "factors", "shift"), [(0, 0.0, None, ""), (1, 0.5, [0.5, 2.0], "sqrt(2 log n)")]
)
def test_operators_are_well_formed(power, exponent, factors, shift, bounds):
    q, k, v, upstream = (tensor.float().requires_grad_() for tensor in grid_inputs(1, 2, 1, 3, 3, 4, 2))
    factors = None if factors is None else torch.tensor(factors, requires_grad=True)
    given = {"power": power, "row_exponent": exponent, "head_factors": factors, "window_left": 3, "window_right": 0}
    given |= {"shift": shift, "shift_factor": 0.5, "head_shifts": factors.detach().requires_grad_()} if shift else {}
    if bounds is None:
        given["key_lengths"] = torch.tensor([2])
    else:
        given |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_queries": 32, "max_keys": 32}
    arguments = kernel_arguments(q, k, v, **given)
    torch.library.opcheck(torch.ops.rectiformer.short.default, arguments)
    if bounds is not None:  # its lengths would be read in a trace
        arguments = [value.detach() if isinstance(value, torch.Tensor) else value for value in arguments]
    torch.library.opcheck(torch.ops.rectiformer.short_backward.default, [upstream.detach(), *arguments])


@kernels_run
def test_reruns_are_bitwise_equal():
    inputs = grid_inputs(2, 2, 2, 6, 7, 4, 4)
    first, again = (outputs_and_gradients(inputs, torch.float32, "fused", "reluformer") for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@kernels_run
def test_auto_never_interprets():
    q, k, v, _ = (tensor.float() for tensor in grid_inputs(1, 1, 1, 3, 3, 4, 4))
    assert choose(q, k, v, call_of(q, k, v), "auto")[0].name == "blocked"


def test_lengths_of_one_block_share_a_compiled_kernel():
    """What Triton compiles for is the same, for padded sequences of 33 to 64 rows."""
    pytest.importorskip("triton")
    from rectiformer.ops.gpu.common import KernelCall
    from rectiformer.ops.gpu.short import launch_configs, short_flags

    found = []
    for length in (33, 40, 64):
        q, k, v, _ = (tensor.float() for tensor in grid_inputs(1, 1, 1, length, length, 4, 4))
        call = KernelCall(*kernel_arguments(q, k, v, window_right=0))
        found.append((short_flags(call), *(list(launch_configs(call, backward)) for backward in (False, True))))
    assert found[0] == found[1] == found[2]


REFUSED = [
    ("sparsemax", (1, 2, 2, 3, 3, 4, 4), {}, torch.float32, "variant 'sparsemax' has no fused kernel"),
    ("rela", (1, 2, 2, 3, 3, 4, 4), {}, torch.float64, "it takes one of float32, bfloat16 and float16"),
    ("rela", (1, 2, 2, 129, 3, 4, 4), {}, torch.bfloat16, "in torch.bfloat16 it takes up to 128 queries and keys"),
    ("rela", (1, 2, 2, 3, 65, 4, 4), {}, torch.float32, "in torch.float32 it takes up to 64 queries and keys"),
    ("rela", (1, 2, 2, 3, 3, 65, 4), {}, torch.float32, "and head sizes up to that"),
    ("rela", (1, 2, 2, 3, 3, 4, 129), {}, torch.float16, "and head sizes up to that"),
    ("rela", (1, 2, 2, 3, 3, 4, 4), {"attn_bias": torch.zeros(3, 3)}, torch.float32, "it has no bias or mask"),
    ("rela", (1, 2, 2, 3, 3, 4, 4), {"attn_mask": torch.ones(3, 3) > 0}, torch.float32, "it has no bias or mask"),
    ("rela", (0, 2, 2, 3, 3, 4, 4), {}, torch.float32, "nothing is to be computed"),
]


@kernels_run
@pytest.mark.parametrize(("variant", "sizes", "arguments", "dtype", "reason"), REFUSED)
def test_what_short_kernels_cannot_do_has_a_reason(variant, sizes, arguments, dtype, reason):
    q, k, v, _ = (tensor.to(dtype) for tensor in grid_inputs(*sizes))
    call = call_of(q, k, v, variant, **arguments)
    obstacle = kernel_obstacle(q, k, v, call) or short_obstacle(q, v, call)
    assert reason in obstacle
    assert "\n" not in obstacle


@kernels_run
def test_a_forced_backend_that_cannot_run_is_refused_with_the_reason():
    q, k, v, _ = grid_inputs(1, 2, 2, 3, 3, 4, 4)
    with pytest.raises(ArgumentError, match="backend 'fused' cannot run this call: it takes one of float32, bfloat16"):
        attention(q, k, v, backend="fused")


def test_without_a_device_the_kernels_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v, _ = (tensor.float() for tensor in grid_inputs(1, 1, 1, 3, 3, 4, 4))
    with pytest.raises(ArgumentError, match="it runs on CUDA devices, and q is on cpu"):
        attention(q, k, v, backend="fused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("variant", PRODUCTS)
def test_products_match_the_reference(variant, features, dtype):
    assert_matches_reference(grid_inputs(2, 4, 2, 13, 17, 8, 5), dtype, "products", variant, **FEATURES[features])


@pytest.mark.parametrize("variant", PRODUCTS)
def test_products_take_bias_and_mask(variant):
    arguments = {"attn_bias": grid(1, 4, 5, 7), "attn_mask": torch.arange(35).view(5, 7) % 3 > 0, "scale": 0.5}
    assert_matches_reference(grid_inputs(2, 4, 2, 5, 7, 8, 5), torch.float32, "products", variant, **arguments)


def test_variants_of_other_sums_have_no_products():
    q, k, v, _ = (tensor.float() for tensor in grid_inputs(1, 1, 1, 3, 3, 4, 4))
    with pytest.raises(ArgumentError, match="variant 'inhibitor' is not made of two matrix products"):
        attention(q, k, v, "inhibitor", backend="products")
