"""The norm kernels, run by Triton's interpreter, against the formula: values, derivatives, null rows, any width."""

import pytest
import torch

from rectiformer.ops import gpu
from rectiformer.ops.gpu import rms_norm_suits
from rectiformer.ops.norm import plain_rms_norm

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    # numpy warns where exp(-x) of a closed gate is infinite; the sigmoid is 0 then, as it should be
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
EPSILON = 1e-8


gated_or_not = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


def tensors(gated, *shape, dtype=torch.float64):
    """z, gain, gate and an upstream gradient, as leaves; float64 holds numbers that float32 holds exactly."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(size, generator=generator).to(dtype) for size in (shape, shape[-1:], shape[-1:], shape)]
    z, gain, gate, upstream = (tensor.requires_grad_() for tensor in made)
    return z, gain, gate if gated else None, upstream


def results(norm, z, gain, gate, upstream):
    """Output, and gradients for z, gain and gate."""
    out = norm(z, gain, gate, EPSILON)
    leaves = [leaf for leaf in (z, gain, gate) if leaf is not None]
    return [out, *torch.autograd.grad(out, leaves, upstream, create_graph=True)]


def narrow(inputs):
    return [None if tensor is None else tensor.detach().float().requires_grad_() for tensor in inputs]


def assert_as_good_as_eager(inputs):
    """At most twice the error of the formula in float32, plus one rounding of the largest entry."""
    exact = results(plain_rms_norm, *inputs)
    eager = results(plain_rms_norm, *narrow(inputs))
    ours = results(gpu.norm.fused_rms_norm, *narrow(inputs))
    for fast, plain, true in zip(ours, eager, exact, strict=True):
        assert fast.dtype == plain.dtype
        assert fast.shape == true.shape
        allowed = 2 * (plain - true).abs().max() + torch.finfo(torch.float32).eps * true.abs().max()
        assert (fast - true).abs().max() <= allowed


@gated_or_not
@pytest.mark.parametrize("shape", [(1,), (3, 1), (7, 24), (2, 3, 33), (5, 512), (1, 3000)], ids=str)
def test_kernels_match_the_formula(gated, shape):
    assert_as_good_as_eager(tensors(gated, *shape))


@gated_or_not
def test_few_programs_walk_over_many_rows(gated, monkeypatch):
    monkeypatch.setattr(gpu.norm, "BACKWARD_PROGRAMS", 2)
    assert_as_good_as_eager(tensors(gated, 11, 700))


def test_sums_of_many_programs():
    """More programs than `column_sums` reads at once."""
    assert_as_good_as_eager(tensors(True, 130, 1025))


@gated_or_not
def test_null_rows_stay_zero_with_finite_gradients(gated):
    z, gain, gate, upstream = tensors(gated, 3, 24, dtype=torch.float32)
    z = z.detach().clone()
    z[1] = 0
    out, d_z, *d_vectors = results(gpu.norm.fused_rms_norm, z.requires_grad_(), gain, gate, upstream)
    assert (out[1] == 0).all()
    assert (out[[0, 2]] != 0).all()
    expected = upstream[1] * gain * 1e4 * (0.5 if gated else 1)  # 1 / sqrt(1e-8), and an open half
    torch.testing.assert_close(d_z[1], expected)
    assert all(grad.isfinite().all() for grad in d_vectors)


@gated_or_not
@pytest.mark.parametrize("size", [1e-12, 1e-4, 1e4])
def test_rows_of_any_size_match_the_formula(gated, size):
    z, *rest = tensors(gated, 4, 24)
    assert_as_good_as_eager([(z.detach() * size).float().double().requires_grad_(), *rest])


@gated_or_not
def test_no_rows_give_no_output_and_zero_gradients(gated):
    out, d_z, *d_vectors = results(gpu.norm.fused_rms_norm, *tensors(gated, 0, 24, dtype=torch.float32))
    assert out.shape == d_z.shape == (0, 24)
    assert all((grad == 0).all() and grad.shape == (24,) for grad in d_vectors)


@gated_or_not
def test_rows_may_lie_in_any_order(gated):
    z, gain, gate, upstream = tensors(gated, 5, 24, dtype=torch.float32)
    inputs = z.mT.contiguous().mT, torch.stack([gain, gain], 1)[:, 0], gate, upstream.mT.contiguous().mT
    torch.testing.assert_close(results(gpu.norm.fused_rms_norm, *inputs), results(plain_rms_norm, *inputs))


@gated_or_not
def test_second_derivatives_match_the_formula(gated):
    def penalty_gradients(norm, inputs):
        _, *first = results(norm, *inputs)
        return torch.autograd.grad(
            sum(grad.square().sum() for grad in first), [leaf for leaf in inputs if leaf is not None]
        )

    inputs = tensors(gated, 4, 12)
    exact, ours = penalty_gradients(plain_rms_norm, inputs), penalty_gradients(gpu.norm.fused_rms_norm, narrow(inputs))
    for fast, true in zip(ours, exact, strict=True):
        # A hundred float32 roundings of the largest entry.
        assert (fast - true).abs().max() <= 100 * torch.finfo(torch.float32).eps * true.abs().max()


@gated_or_not
def test_operators_are_well_formed(gated):
    z, gain, gate, upstream = tensors(gated, 2, 3, 24, dtype=torch.float32)
    torch.library.opcheck(torch.ops.rectiformer.rms_norm.default, (z, gain, gate, EPSILON))
    torch.library.opcheck(torch.ops.rectiformer.rms_norm_backward.default, (upstream.detach(), z, gain, gate, EPSILON))


def test_reruns_are_bitwise_equal():
    inputs = tensors(True, 40, 130, dtype=torch.float32)
    first, again = (results(gpu.norm.fused_rms_norm, *inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_cpu_keeps_the_formula():
    z, gain, gate, _ = tensors(True, 3, 24, dtype=torch.float32)
    assert not rms_norm_suits(z, gain, gate)
