"""The norm begun in the epilogue of the kernels equals one of its own."""

import copy

import pytest
import torch
from closeness import assert_no_worse, grid
from model.built_attention import HEADS, WIDTH, assert_same, fix_scores

from rectiformer import VARIANTS, RectifiedAttention
from rectiformer.ops.dispatch import check_call

NORMED = [name for name, row in VARIANTS.items() if row.rectified and row.output_norm != "none"]
kernels_run = pytest.mark.usefixtures("interpreter")


def on_grid(variant, size=1.0, **arguments):
    """A float32 module whose scores are exact in every dtype, so that none changes sign by rounding."""
    module = RectifiedAttention(WIDTH, HEADS, variant, **arguments)
    with torch.no_grad():
        for seed, part in enumerate(module.parameters()):
            part.copy_(grid(*part.shape, seed=seed))
        for part in (module.input_weight, module.input_bias):
            if part is not None:
                part[WIDTH + module.sizes[1] :] *= size  # those of the values
    return module


def attend_normed(module, x):
    q, k, v = module.project(x, None, None)
    call = check_call(q, k, v, module.variant, True, torch.tensor([5, 3]), None, None, None, None, 0.0, None, {})
    return module.attend_normed(q, k, v, call)


def attend_plainly(module, x):
    return module(x, causal=True, key_lengths=torch.tensor([5, 3]))


def output_and_gradients(how, module, dtype):
    module, x = copy.deepcopy(module).to(dtype), grid(2, 5, WIDTH, seed=99, dtype=dtype).requires_grad_()
    out = how(module, x)
    probe = grid(2, 5, WIDTH, seed=100, dtype=dtype)
    parts = {"out": out, "d_x": x, **dict(module.named_parameters())}
    return dict(zip(parts, [out, *torch.autograd.grad(out, list(parts.values())[1:], probe)], strict=True))


@kernels_run
@pytest.mark.parametrize("size", [1.0, 2.0**-13, 2.0**-40], ids=["ordinary", "small", "nearly-null"])
@pytest.mark.parametrize("arguments", [{}, {"num_kv_heads": 2, "bias": False}], ids=["", "grouped"])
@pytest.mark.parametrize("variant", NORMED)
def test_a_norm_in_the_epilogue_equals_one_of_its_own(variant, arguments, size):
    module = on_grid(variant, size, **arguments)
    ways = [(attend_normed, torch.float32), (attend_plainly, torch.float32), (attend_plainly, torch.float64)]
    ours, eager, exact = (output_and_gradients(how, module, dtype) for how, dtype in ways)
    for name in exact:
        assert_no_worse(name, ours[name], eager[name], exact[name])


@kernels_run
@pytest.mark.parametrize("variant", NORMED)
def test_a_norm_in_the_epilogue_leaves_null_rows_to_the_output_bias(variant):
    module = on_grid(variant)
    fix_scores(module, [-1.0] * HEADS)
    found = output_and_gradients(attend_normed, module, torch.float32)
    assert torch.equal(found["out"], module.output.bias.expand(2, 5, WIDTH))
    assert all(grad.isfinite().all() for grad in found.values())


# Seconds, for it compiles.
@kernels_run
def test_a_norm_in_the_epilogue_compiles_as_one_graph():
    torch._dynamo.reset()
    module = on_grid("rela-g")
    compiled = torch.compile(attend_normed, fullgraph=True, backend="aot_eager")
    ours, eager = (output_and_gradients(how, module, torch.float32) for how in (compiled, attend_normed))
    for name in eager:
        assert_same(ours[name], eager[name])


def test_without_kernels_the_norm_has_a_pass_of_its_own():
    module, x = on_grid("rela-g"), grid(2, 5, WIDTH, dtype=torch.float32)
    q, k, v = module.project(x, None, None)
    call = check_call(q, k, v, "rela-g", False, None, None, None, None, None, 0.0, None, {})
    assert not module.norms_in_epilogue(q, k, v, call)
