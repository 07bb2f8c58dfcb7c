"""The kernel of a residual sum and its LayerNorm, run by Triton's interpreter, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_no_worse

from rectiformer.config import ModelConfig
from rectiformer.model.layers import Residual
from rectiformer.ops import gpu
from rectiformer.ops.gpu import add_norm_suits
from rectiformer.ops.norm import add_norm

pytestmark = pytest.mark.usefixtures("interpreter")
EPSILON = 1e-8


def draw(*shape):
    """x, what is added, weight and bias; float64 holds numbers that float32 holds exactly."""
    width = shape[-1:]
    return [torch.randn(size).double() for size in (shape, shape, width, width)]


def plain(x, added, weight, bias):
    return F.layer_norm(x + added, weight.shape, weight, bias, EPSILON)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 64), (9, 500), (0, 4)], ids=str)
def test_the_kernel_matches_torch(shape):
    inputs = draw(*shape)
    narrow = [tensor.float() for tensor in inputs]
    assert_no_worse("add_norm", gpu.norm.fused_add_norm(*narrow, EPSILON), plain(*narrow), plain(*inputs))


def test_a_large_common_offset_costs_no_digits():
    """The sum is centered before it is squared."""
    inputs = draw(4, 64)
    inputs[0] += 1000
    narrow = [tensor.float() for tensor in inputs]
    assert_no_worse(
        "add_norm", gpu.norm.fused_add_norm(*narrow, EPSILON), plain(*narrow), plain(*(t.double() for t in narrow))
    )


@pytest.mark.parametrize("order", ["post", "pre"])
def test_a_residual_is_the_same_with_and_without_gradients(order):
    residual = Residual(ModelConfig(hidden_size=24, num_heads=2, norm=order)).eval()
    x = torch.randn(3, 2, 24)
    with torch.no_grad():
        inferred = residual(x, torch.tanh)
    torch.testing.assert_close(inferred, residual(x, torch.tanh).detach())


def test_the_kernel_is_for_inference_of_what_it_knows():
    x, added, weight, bias = (tensor.float() for tensor in draw(3, 8))
    assert not add_norm_suits(x, added, weight, bias)
    weight.requires_grad_()
    assert add_norm(x, added, weight, bias, EPSILON).requires_grad
    with torch.no_grad():
        assert add_norm_suits(x, added, weight, bias)
        assert not add_norm_suits(x.double(), added, weight, bias)
        assert not add_norm_suits(x[:1], added, weight, bias)


def test_the_operator_is_well_formed():
    torch.library.opcheck(torch.ops.rectiformer.add_norm.default, (*(tensor.float() for tensor in draw(3, 8)), EPSILON))
