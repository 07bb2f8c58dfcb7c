"""Rectified attention that begins open: its scores raised by its power, through one dimension of each head."""

import math

import pytest
import torch

from rectiformer import ConfigError, attention
from rectiformer.config import ModelConfig
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.projection import center_keys
from rectiformer.model.transformer import Transformer

WIDTH, HEADS = 24, 3
LENGTHS = torch.tensor([9, 4])


def build(variant, seed=0, **settings):
    torch.manual_seed(seed)
    return RectifiedAttention(WIDTH, HEADS, variant, **settings).double().eval()


def split(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("center", [True, False], ids=["centered", "as they are"])
@pytest.mark.parametrize(("variant", "init"), [("rela", 1.0), ("relu2", 2.0), ("relu-seqlen", 0.3), ("rela", 0.0)])
def test_it_adds_a_number_to_every_score_of_the_other_dimensions(variant, init, center, bias):
    module = build(variant, score_bias=init, center_keys=center, bias=bias, output_norm="none")
    x = torch.randn(2, 9, WIDTH, dtype=torch.double)
    q, k, v = torch.nn.functional.linear(x, module.input_weight, module.input_bias).split(WIDTH, -1)
    first = torch.arange(WIDTH) % (WIDTH // HEADS) == 0
    q, k = q.masked_fill(first, 0), k.masked_fill(first, 0)
    k = center_keys(k, LENGTHS) if center else k
    by_hand = attention(
        split(q), split(k), split(v), variant, key_lengths=LENGTHS, attn_bias=torch.full((1, 1, 1, 1), init).double()
    )
    expected = module.output(by_hand.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, key_lengths=LENGTHS), expected)


def test_gamma_divides_what_is_raised():
    module = build("reluformer", score_bias=1.0, option_init=4.0)
    bare = build("reluformer", score_bias=1.0, option_init=1.0)
    bare.load_state_dict({**module.state_dict(), **{k: v for k, v in bare.state_dict().items() if "learned" in k}})
    with torch.no_grad():
        bare.output.weight.div_(4)
    x = torch.randn(2, 9, WIDTH, dtype=torch.double)
    torch.testing.assert_close(module(x), bare(x))


@pytest.mark.parametrize(("variant", "power"), [("relu-seqlen", 1), ("relu2", 2)])
def test_it_begins_as_a_softmax_does(variant, power):
    """What is left of their difference falls with the square of the scores."""
    rectified = build(variant, score_bias=power, center_keys=True, output_norm="none")
    softmax = build("softmax", output_norm="none")
    x, first = torch.randn(2, 9, WIDTH, dtype=torch.double), torch.arange(WIDTH) % (WIDTH // HEADS) == 0
    with torch.no_grad():
        softmax.input_weight[:WIDTH][first] = 0  # the dimension that the other one does without
        softmax.output.weight.mul_(power**power)

    def differ(scale):
        for module in (rectified, softmax):
            module.load_state_dict({**module.state_dict(), "input_weight": weights[module] * scales(scale)})
        with torch.no_grad():
            return (rectified(x) - softmax(x)).norm()

    def scales(scale):
        return torch.cat([torch.full((2 * WIDTH, 1), scale), torch.ones(WIDTH, 1)]).double()

    weights = {module: module.input_weight.detach().clone() for module in (rectified, softmax)}
    large, small = differ(0.1), differ(0.05)  # scores of a hundredth, and a quarter of that
    assert 0 < small < large / 14


def test_a_key_is_cut_once_its_score_has_fallen_by_the_power():
    module = build("rela", score_bias=1.0, center_keys=True)
    seen = []
    module.observer = seen.append
    x = torch.randn(1, 9, WIDTH, dtype=torch.double)
    module(x)
    weights = seen[0].weights()
    assert 0 < (weights == 0).double().mean() < 0.4  # of scores with a deviation near 1, where [x]+ cuts half


def test_queries_learn_how_far_to_open_and_keys_do_not():
    module = build("rela", score_bias=1.0, output_norm="none")
    module(torch.randn(2, 5, WIDTH, dtype=torch.double)).sum().backward()
    idle = (module.input_weight.grad == 0).all(1)
    taken = [row % (WIDTH // HEADS) == 0 for row in range(3 * WIDTH)]
    assert idle.tolist() == [WIDTH <= row < 2 * WIDTH and first for row, first in enumerate(taken)]


def test_a_head_of_centered_keys_can_close():
    module = build("rela", score_bias=1.0, center_keys=True)
    seen = []
    module.observer = seen.append
    with torch.no_grad():
        module.input_bias[0] = -100  # of the first head's queries
    module(torch.randn(1, 9, WIDTH, dtype=torch.double))
    nothing = (seen[0].weights() == 0).all(-1)
    assert nothing[:, 0].all()
    assert not nothing[:, 1:].any()


def test_only_rectified_attention_of_a_model_has_a_score_bias():
    config = ModelConfig(
        hidden_size=16, num_heads=2, ffn_size=8, variant="softmax", cross_variant="relu2", score_bias="open"
    )
    sites = {site.kind: site.attention.score_bias for site in Transformer(config, 9, 9).sites()}
    assert sites["encoder"] is None
    assert sites["decoder"] is None
    assert sites["cross"].init == 2


def test_a_threshold_begins_at_0_and_is_learned():
    config = {"hidden_size": 16, "num_heads": 2, "ffn_size": 8, "variant": "reluformer"}
    site = next(Transformer(ModelConfig(**config, score_bias="zero"), 9, 9).sites())
    assert site.attention.score_bias.init == 0
    site.attention(torch.randn(2, 5, 16)).square().sum().backward()
    assert site.attention.input_bias.grad[:16:8].abs().min() > 0


def test_heads_of_one_dimension_are_refused():
    with pytest.raises(ConfigError, match="heads of 1 dimension have none left for scores"):
        RectifiedAttention(4, 4, "rela", score_bias=1.0)


def unit(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def test_normed_queries_and_keys_give_cosines_times_a_number_per_head():
    module, x = RectifiedAttention(16, 4, "softmax", qk_norm=True).double(), torch.randn(2, 5, 16).double()
    with torch.no_grad():
        module.qk_norm.gain.copy_(torch.tensor([0.0, 1.0, 2.0, 5.0]))
    q, k, _ = module.project(x, None, None)
    plain_q, plain_k = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in module._linear(x, 0, 2).chunk(2, -1))
    torch.testing.assert_close(k, unit(plain_k), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q, unit(plain_q) * module.qk_norm.gain[:, None, None], rtol=1e-4, atol=1e-4)
    weights = watch_weights(module, x)
    torch.testing.assert_close(weights[:, 0], torch.full((2, 5, 5), 0.2).double())  # a factor of 0
    module(x).sum().backward()
    assert module.qk_norm.gain.grad.abs().min() > 0


def watch_weights(module, x):
    seen = []
    module.observer = seen.append
    module(x)
    module.observer = None
    return seen[0].weights()


def test_the_score_bias_is_not_normed():
    """With all other dimensions at 0, the scores are the bias alone."""
    module = RectifiedAttention(16, 2, "rela", qk_norm=True, score_bias=1.0)
    with torch.no_grad():
        module.qk_norm.gain.zero_()
    torch.testing.assert_close(watch_weights(module, torch.randn(2, 5, 16)), torch.ones(2, 2, 5, 5))


def test_gamma_scales_normed_scores_too():
    module, x = RectifiedAttention(16, 2, "reluformer", qk_norm=True, option_init=1.0), torch.randn(2, 5, 16)
    before = watch_weights(module, x)
    with torch.no_grad():
        module.learned.raw.fill_(math.log(4))
    torch.testing.assert_close(watch_weights(module, x), before / 4)


def test_cosines_are_not_normed_again():
    with pytest.raises(ConfigError, match="scores of variant 'threshold' are no products"):
        RectifiedAttention(16, 2, "threshold", qk_norm=True)
    config = ModelConfig(hidden_size=16, num_heads=2, variant="softmax", cross_variant="threshold", qk_norm=True)
    model = Transformer(config, 20, 20)
    assert [site.attention.qk_norm is None for site in model.sites()] == [False, False, False, True, False, True]


@pytest.mark.parametrize("output_norm", ["none", "rms"])
def test_the_gate_of_the_input_multiplies_each_head(output_norm):
    module = RectifiedAttention(16, 2, "rela", output_norm=output_norm, output_gate=True).double()
    x, context = torch.randn(2, 5, 16).double(), torch.randn(2, 7, 16).double()
    with torch.no_grad():
        module.gate.weight.zero_()
        module.gate.bias.copy_(torch.tensor([0.0, 50.0]))
        found = module(x, context)
        module.gate.bias.fill_(50.0)
        whole = module(x, context)
        module.output.weight[:, :8] = 0
        second = module(x, context)
    torch.testing.assert_close(found, second + (whole - second) / 2)  # of the first head, a half
