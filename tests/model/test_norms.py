"""The output norms against their formulas in float64; null rows, 16-bit rows and fresh modules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rectiformer.config import ModelConfig
from rectiformer.errors import ConfigError
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.norms import OUTPUT_NORMS, RMSNorm, build_output_norm
from rectiformer.model.transformer import Transformer
from rectiformer.ops.variants import VARIANTS
from rectiformer.toml import load_config

WIDTH = 24
NORMS = ["rms", "rms-small", "gated-rms"]
"""ReLA's own, over all heads together; the others are for ablations."""
SIXTEEN_BITS = [torch.bfloat16, torch.float16]
every_norm = pytest.mark.parametrize("name", NORMS)


def build(name, width=WIDTH, dtype=torch.float64):
    """A norm whose gain and gate have left their initial values, so that a test sees them."""
    norm = build_output_norm(name, width)
    with torch.no_grad():
        for part in norm.parameters():
            part.add_(torch.randn_like(part))
    return norm.to(dtype)


def rows(*shape, width=WIDTH, size=1.0, dtype=torch.float64):
    return (size * torch.randn(*shape, width, dtype=torch.float64)).to(dtype)


def plain(norm, z):
    """The formula of section 1.2 in float64, from whatever numbers the norm and z hold."""
    z = z.double()
    out = norm.gain.double() * z / (z.pow(2).sum(-1, keepdim=True) / z.shape[-1] + 1e-8).sqrt()
    if norm.gate is not None:
        out = out * torch.sigmoid(norm.gate.double() * z)
    return out


def roundings(dtype, count=16):
    """Relative error of `count` roundings: squares summed pairwise, a root, at most six operations more."""
    return count * torch.finfo(dtype).eps


def half_least(dtype):
    """Half the smallest number above 0: what rounding may add where numbers lose digits."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2


def assert_within(actual, exact, bound):
    assert actual.isfinite().all()
    excess = (actual.double() - exact).abs() - bound
    assert (excess <= 0).all(), f"up to {excess.max():.3g} beyond the bound"


def gradient(norm, z, upstream):
    z = z.detach().clone().requires_grad_()
    norm(z).backward(upstream)
    return z.grad


@every_norm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (0,)], ids=str)
def test_output_follows_the_formula(name, dtype, shape):
    norm, z = build(name, dtype=dtype), rows(*shape, dtype=dtype)
    out, exact = norm(z), plain(norm, z)
    assert (out.shape, out.dtype) == (z.shape, dtype)
    assert_within(out, exact, roundings(dtype) * exact.abs())


@every_norm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("given", [{}, {"epsilon": 0.01}], ids=["default", "given"])
def test_epsilon_is_added_inside_the_root(name, dtype, given):
    norm = build_output_norm(name, WIDTH, **given).to(dtype)
    nn.init.ones_(norm.gain)
    z = torch.full((WIDTH,), given.get("epsilon", 1e-8) ** 0.5, dtype=dtype)  # its mean square is epsilon as well
    expected = torch.full_like(z, math.sqrt(0.5))
    if name == "gated-rms":
        expected = expected * torch.sigmoid(norm.gate * z)
    torch.testing.assert_close(norm(z), expected, rtol=roundings(dtype), atol=0)


@every_norm
@pytest.mark.parametrize("parameters", ["same", "float32"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])  # 300 squared is beyond float16
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_sixteen_bit_rows_round_once(name, dtype, size, parameters):
    # Beyond exp(88) a sigmoid in float32 is flushed to 0, hence the smallest normal number in the bound.
    norm = build(name, 512, dtype if parameters == "same" else torch.float32)
    z, upstream = rows(20, width=512, size=size, dtype=dtype), rows(20, width=512, dtype=dtype)
    half_step, least = torch.finfo(dtype).eps / 2, half_least(dtype) + torch.finfo(torch.float32).smallest_normal
    out, exact = norm(z), plain(norm, z)
    inside = roundings(torch.float32)
    if name == "gated-rms":  # a rounded argument moves a small sigmoid by as much as the argument is large
        inside = inside * (1 + (norm.gate * z).abs())
    assert out.dtype == dtype
    assert_within(out, exact, (half_step + inside) * exact.abs() + least)
    d_z = gradient(norm, z, upstream)
    (exact,) = torch.autograd.grad(plain(norm, wide := z.double().requires_grad_()), wide, upstream.double())
    # Terms of the gradient cancel, so float32 errs by the size of the largest one.
    assert_within(d_z, exact, half_step * exact.abs() + roundings(torch.float32, 64) * exact.abs().max() + least)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *SIXTEEN_BITS], ids=str)
def test_a_null_row_stays_exactly_zero(name, dtype):
    norm, z = build(name, dtype=dtype), rows(3, dtype=dtype)
    z[1] = 0
    out = norm(z)
    assert (out[1] == 0).all()
    assert (out[[0, 2]] != 0).all()
    d_z = gradient(norm, z, torch.ones_like(z))
    assert all(part.grad.isfinite().all() for part in norm.parameters())
    expected = norm.gain.double() * 1e4 * (0.5 if name == "gated-rms" else 1)  # 1 / sqrt(1e-8), and an open half
    rounding = roundings(torch.promote_types(dtype, torch.float32)) + torch.finfo(dtype).eps / 2
    assert_within(d_z[1], expected, rounding * expected.abs())


@every_norm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1e-12])
def test_nearly_null_rows_are_finite(name, dtype, size):
    norm, z = build(name, dtype=dtype), rows(5, size=size, dtype=dtype)
    out, exact = norm(z), plain(norm, z)
    wide = torch.promote_types(dtype, torch.float32)
    assert_within(out, exact, (roundings(wide) + torch.finfo(dtype).eps / 2) * exact.abs() + half_least(dtype))
    assert gradient(norm, z, torch.ones_like(z)).isfinite().all()
    assert all(part.grad.isfinite().all() for part in norm.parameters())


@pytest.mark.parametrize("name", ["rms", "gated-rms"])
def test_gain_starts_at_one(name):
    assert torch.equal(build_output_norm(name, 512).gain, torch.ones(512))


@pytest.mark.parametrize(("name", "part"), [("rms-small", "gain"), ("gated-rms", "gate")])
@pytest.mark.parametrize("width", [512, 2048])
def test_small_vectors_start_uniform_up_to_the_limit(name, part, width):
    vector = getattr(build_output_norm(name, width), part)
    limit = math.sqrt(3 / width)
    assert vector.abs().max() <= limit
    assert vector.max() > 0.95 * limit  # 0.975 ** 512 is 2e-6
    assert vector.min() < -0.95 * limit
    deviation = limit / math.sqrt(3)
    assert abs(vector.mean().item()) < 5 * deviation / math.sqrt(width)  # five standard errors
    spread = math.sqrt((1.8 - 1) / (4 * width))  # of a sample deviation; 1.8 is the kurtosis of a uniform
    assert vector.std().item() == pytest.approx(deviation, rel=5 * spread)


def test_a_model_has_its_epsilon_everywhere():
    for name in ("gated-rms", "head-rms"):
        model = Transformer(ModelConfig(output_norm=name, norm_epsilon=0.25), 20, 20)
        assert {site.attention.norm.epsilon for site in model.sites()} == {0.25}


@pytest.mark.parametrize("epsilon", [0.0, -1e-8, math.nan])
def test_an_epsilon_that_divides_null_rows_by_zero_is_refused(epsilon):
    with pytest.raises(ConfigError, match="make it above 0"):
        RectifiedAttention(16, 2, norm_epsilon=epsilon)


def test_the_limit_at_width_512():
    gate = build_output_norm("gated-rms", 512).gate
    assert 0.95 * 0.0765 < gate.abs().max() < 0.0766


def test_the_gate_starts_half_open():
    gated, ungated, z = RMSNorm(512, gated=True).double(), RMSNorm(512).double(), rows(50, width=512)
    half = ungated(z) / 2
    # A sigmoid moves by at most a quarter of its argument, and no gate is beyond the limit.
    assert_within(gated(z), half, 2 * half.abs() * math.sqrt(3 / 512) * z.abs() / 4)


def test_heads_may_be_normed_one_by_one():
    """Scaling one head changes nothing, where a norm over all heads would change every head."""
    norm, z = build_output_norm("head-rms", WIDTH, 3).double(), rows(5)
    scaled = z.clone()
    scaled[:, :8] *= 3
    torch.testing.assert_close(norm(scaled), norm(z), rtol=1e-7, atol=1e-7)  # but for epsilon
    one = build_output_norm("rms", 8).double()
    torch.testing.assert_close(norm(z)[:, 8:16], one(z[:, 8:16]), rtol=1e-12, atol=1e-12)
    assert norm(torch.zeros(2, WIDTH).double()).eq(0).all()


def test_a_layer_norm_subtracts_the_mean():
    z = rows(5)
    expected = (z - z.mean(-1, keepdim=True)) / (z.var(-1, keepdim=True, unbiased=False) + 1e-8).sqrt()
    torch.testing.assert_close(build_output_norm("layer", WIDTH).double()(z), expected, rtol=1e-12, atol=1e-12)


def test_every_norm_of_the_table_can_be_named_in_a_configuration():
    for name in OUTPUT_NORMS:
        config = load_config(
            None, [f"model.output_norm={name}", "model.hidden_size=16", "model.ffn_size=8", "model.num_heads=2"]
        )
        model = Transformer(config.model, 10, 10)
        assert all(type(site.attention.norm) is type(build_output_norm(name, 16, 2)) for site in model.sites())


@every_norm
def test_reset_parameters_starts_over(name):
    torch.manual_seed(3)
    fresh = build_output_norm(name, WIDTH)
    norm = build(name, dtype=torch.float32)
    torch.manual_seed(3)
    norm.reset_parameters()
    for part, expected in zip(norm.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("factor", [0.25, 3.0, 1e3])
@pytest.mark.parametrize("name", ["rms", "rms-small"])
def test_plain_norm_forgets_the_scale(name, factor):
    norm, z = build(name), rows(30)
    least = z.square().mean(-1).min().item() * min(1, factor) ** 2
    # 1 / sqrt(s + epsilon) is 1 / sqrt(s) up to epsilon / (2 s), once for each side.
    torch.testing.assert_close(norm(factor * z), norm(z), rtol=1e-8 / least + roundings(torch.float64), atol=0)


@pytest.mark.parametrize("factor", [0.25, 3.0, 1e3])
def test_the_gate_sees_the_scale(factor):
    norm, z = build("gated-rms"), rows(30)
    opened = torch.sigmoid(norm.gate * factor * z) / torch.sigmoid(norm.gate * z)
    expected, least = norm(z) * opened, z.square().mean(-1).min().item() * min(1, factor) ** 2
    torch.testing.assert_close(norm(factor * z), expected, rtol=1e-8 / least + roundings(torch.float64), atol=0)
    assert (opened.log().abs() > 0.1).double().mean() > 0.5  # so the change is no rounding


@every_norm
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradients(name, check):
    norm = build(name, 5)
    names, parts = zip(*norm.named_parameters(), strict=True)

    def call(z, *parts):
        return torch.func.functional_call(norm, dict(zip(names, parts, strict=True)), z)

    assert check(call, (rows(3, width=5).requires_grad_(), *parts))


def test_none_is_the_identity():
    z = rows(3)
    assert build_output_norm("none", WIDTH)(z) is z


def test_every_variant_names_a_norm():
    assert {row.output_norm for row in VARIANTS.values()} <= OUTPUT_NORMS.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gated-rsm", "unknown output norm 'gated-rsm'; did you mean 'gated-rms'?"),
        ("rms-smalll", "unknown output norm 'rms-smalll'; did you mean 'rms-small'?"),
        ("batch", "unknown output norm 'batch'; known are none, rms, rms-small, gated-rms, head-rms, layer"),
    ],
)
def test_unknown_norm_names_the_nearest(name, message):
    with pytest.raises(ConfigError) as refusal:
        build_output_norm(name, WIDTH)
    assert str(refusal.value) == message
