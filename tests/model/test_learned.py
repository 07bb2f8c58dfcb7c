"""Gamma, beta and alpha as parameters: of a head, of a layer, of a whole model."""

import pytest
import torch
from model.built_attention import HEADS, WIDTH, assert_same, build, tokens

from rectiformer import VARIANTS, ConfigError, LearnedOption, RectifiedAttention

LEARNED = {"reluformer": ("gamma", 1.0), "entmax": ("alpha", 1.5), "threshold": ("beta", 1.0)}


@pytest.mark.parametrize(("learn", "shape"), [("head", (HEADS,)), ("layer", (1,)), ("fixed", None)], ids=str)
@pytest.mark.parametrize("variant", LEARNED)
def test_learned_numbers_start_at_the_default(variant, learn, shape):
    module, x = RectifiedAttention(WIDTH, HEADS, variant, option_sharing=learn), tokens(2, 5, dtype=torch.float32)
    name, start = LEARNED[variant]
    fixed = RectifiedAttention(WIDTH, HEADS, variant, options={name: start})
    fixed.load_state_dict(module.state_dict(), strict=False)
    assert_same(module(x), fixed(x))
    assert fixed.learned is None
    assert (module.learned and module.learned().shape) == shape
    assert shape is None or module.learned().tolist() == pytest.approx([start] * shape[0], rel=1e-6)  # a few roundings


@pytest.mark.parametrize("learn", ["head", "layer"])
@pytest.mark.parametrize("variant", LEARNED)
def test_gradients_of_learned_numbers(variant, learn):
    module, x = build(variant, option_sharing=learn), tokens(1, 6)

    def call(raw):
        return torch.func.functional_call(module, {"learned.raw": raw}, x)

    assert torch.autograd.gradcheck(call, (module.learned.raw,))
    module(x).square().sum().backward()
    assert (module.learned.raw.grad != 0).all()


def test_a_variant_may_learn_two_numbers():
    """Of threshold-diff, both are shared alike, and each can be fixed by itself."""
    module, x = build("threshold-diff", option_sharing="layer"), tokens(2, 5)
    assert {name: number.shape for name, number in module.learned.values().items()} == {"beta": (1,), "lam": (1,)}
    module(x).square().sum().backward()
    assert module.learned.raw.grad != 0
    assert module.learned.other.raw.grad != 0
    module.learned.reset_parameters()
    assert {name: number.item() for name, number in module.learned.values().items()} == {
        "beta": pytest.approx(0.25),
        "lam": pytest.approx(0.5),
    }
    for name, other in (("beta", "lam"), ("lam", "beta")):
        fixed = RectifiedAttention(WIDTH, HEADS, "threshold-diff", options={name: 0.125})
        assert fixed.current_options().keys() == {"beta", "lam"}
        assert list(fixed.learned.values()) == [other]
        with pytest.raises(ConfigError, match=f"{name} is given both fixed, as 0.125, and shared"):
            RectifiedAttention(
                WIDTH, HEADS, "threshold-diff", options={name: 0.125}, option_sharing=build("threshold-diff").learned
            )


def test_one_number_for_a_whole_model():
    shared = LearnedOption(VARIANTS["reluformer"], "gamma")
    layers = torch.nn.ModuleList(
        RectifiedAttention(WIDTH, HEADS, "reluformer", option_sharing=shared) for _ in range(3)
    )
    assert [name for name, _ in layers.named_parameters() if "learned" in name] == ["0.learned.raw"]
    x = tokens(2, 5, dtype=torch.float32)
    losses = [layer(x).square().sum() for layer in layers]
    grads = [torch.autograd.grad(loss, shared.raw, retain_graph=True)[0] for loss in losses]
    sum(losses).backward()
    assert_same(shared.raw.grad, sum(grads))
    assert all(grad != 0 for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [-30.0, 30.0], ids=["far-down", "far-up"])
@pytest.mark.parametrize("variant", LEARNED)
def test_learned_numbers_stay_in_range_after_large_updates(variant, step, dtype):
    module, x = RectifiedAttention(WIDTH, HEADS, variant).to(dtype), tokens(2, 5, dtype=dtype)
    with torch.no_grad():
        module.learned.raw.add_(step)
    value = module.learned().detach()
    low, high = (1, 2) if variant == "entmax" else (0, torch.finfo(dtype).max)
    assert ((low < value) & (value <= high)).all(), f"{value.tolist()} is outside"
    module(x).sum().backward()
    assert all(part.grad.isfinite().all() for part in module.parameters())


def test_a_learned_number_starts_where_it_is_told_to():
    assert build("reluformer", option_init=0.25).learned().shape == (HEADS,)
    module = RectifiedAttention(WIDTH, HEADS, "reluformer", option_init=0.25)
    assert_same(module.learned(), torch.full((HEADS,), 0.25))
    assert RectifiedAttention(WIDTH, HEADS, "reluformer", option_sharing="fixed", option_init=0.25).options == {
        "gamma": 0.25
    }


@pytest.mark.parametrize(
    ("variant", "start", "reach"),
    [
        ("entmax", 3.0, "1.001 and 2"),
        ("entmax", 2.0, "1.001 and 2"),
        ("entmax", 1.0, "1.001 and 2"),
        ("reluformer", 0.0, "0 and inf"),
        ("reluformer", -1.0, "0 and inf"),
        ("threshold", 0.0, "0 and inf"),
    ],
)
def test_a_start_out_of_reach_is_refused(variant, start, reach):
    name = LEARNED[variant][0]
    with pytest.raises(ConfigError, match=f"{name} is learned between {reach} and cannot start at {start:g}"):
        RectifiedAttention(WIDTH, HEADS, variant, option_init=start)


def test_a_bias_that_hides_keys_hides_them_whatever_gamma_is():
    """Gamma may divide the projections, and then divides the bias as well."""
    module, x = RectifiedAttention(WIDTH, HEADS, "reluformer", option_sharing="head"), tokens(2, 5, dtype=torch.float32)
    with torch.no_grad():
        module.learned.raw.fill_(4.0)
    low = torch.full((5, 5), -1e4).triu(1)
    found = module(x, attn_bias=low)
    assert_same(found, module(x, causal=True))
    (slope,) = torch.autograd.grad(
        module(x, attn_bias=torch.full((5, 5), -torch.inf).triu(1)).sum(), module.learned.raw
    )
    assert slope.isfinite().all()


def test_a_bias_that_hides_no_key_hides_none_whatever_gamma_is():
    """A low bias that is divided by a small gamma would otherwise change how many keys are counted."""
    x, low = tokens(2, 5), torch.full((5, 5), -3e3).double().triu(1)
    module = build("reluformer", option_init=0.5)
    fixed = build("reluformer", option_sharing="fixed", option_init=0.5)
    fixed.load_state_dict(module.state_dict(), strict=False)
    fixed.options["gamma"] = module.learned()
    assert_same(module(x, attn_bias=low), fixed(x, attn_bias=low))
