"""Measures of memories: closed forms on hand-made tokens, and what hooks see against the layers' own arithmetic."""

import math

import pytest
import torch

from rectiformer.analyze.meters import MemoryMeter, VarianceMeter, anisotropy
from rectiformer.analyze.survey import observing_memory
from rectiformer.config import ModelConfig
from rectiformer.model.layers import EncoderLayer
from rectiformer.model.memory import MEMORIES


def measure(weights, output=None, residual=None, values=None):
    meter = MemoryMeter(torch.eye(weights.shape[1]) if values is None else values)
    meter.update(
        weights,
        torch.ones(len(weights), 2) if output is None else output,
        torch.ones(len(weights), 2) if residual is None else residual,
    )
    return meter.result()


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 3.0])
def test_an_output_that_is_a_multiple_of_the_stream_has_its_square_as_variance_ratio(factor):
    residual = torch.randn(7, 5, dtype=torch.float64)
    found = measure(torch.ones(7, 4), output=factor * residual + 2, residual=residual)
    assert found.variance_ratio == pytest.approx(factor**2)


def test_a_stream_without_variance_gives_no_ratio():
    assert measure(torch.ones(3, 4)).variance_ratio == 0.0


def test_variance_keeps_its_digits_far_from_zero_and_over_batches():
    x = torch.randn(1000, dtype=torch.float64)
    whole, merged = VarianceMeter(), VarianceMeter()
    for part in (x + 1e9).split(37):
        whole.update(part)
    for part in (x + 1e9).chunk(2):
        half = VarianceMeter()
        half.update(part)
        merged.merge(*half.state())
    whole.update(torch.empty(0))
    exact = x.var(correction=0).item()
    assert whole.result() == pytest.approx(exact, rel=1e-6)
    assert merged.result() == pytest.approx(exact, rel=1e-6)


def test_even_weights_give_the_largest_their_share_of_slots():
    found = measure(torch.full((3, 1000), 0.7))
    assert found.top_score_ratio == pytest.approx({"0.002": 0.002, "0.01": 0.01, "0.1": 0.1})
    assert found.usage_entropy == pytest.approx(math.log(1000))
    assert found.used_slots == 1.0


def test_one_hot_weights_are_all_in_the_largest():
    weights = torch.zeros(4, 1000)
    weights[[0, 1, 2, 3], [5, 5, 9, 9]] = 2
    found = measure(weights)
    assert found.top_score_ratio == {"0.002": 1.0, "0.01": 1.0, "0.1": 1.0}
    assert found.used_slots == 2 / 1000
    assert found.usage_entropy == pytest.approx(math.log(2))


def test_few_slots_have_one_largest_at_least():
    """Weights 1 to 10: the largest is 10 of 55."""
    found = measure(torch.arange(1.0, 11.0)[torch.randperm(10)][None])
    assert found.top_score_ratio == pytest.approx({"0.002": 10 / 55, "0.01": 10 / 55, "0.1": 10 / 55})


def test_tokens_without_weights_have_no_ratio_and_use_no_slots():
    weights = torch.zeros(5, 100)
    assert measure(weights).top_score_ratio == {"0.002": 0.0, "0.01": 0.0, "0.1": 0.0}
    assert (measure(weights).used_slots, measure(weights).usage_entropy) == (0.0, 0.0)
    weights[2] = 1
    assert measure(weights).top_score_ratio == pytest.approx({"0.002": 0.01, "0.01": 0.01, "0.1": 0.1})


def test_batches_and_merged_meters_equal_one_batch():
    weights, output, residual = torch.randn(20, 64).relu(), torch.randn(20, 8), torch.randn(20, 8)
    values = torch.randn(64, 8)
    meters = [MemoryMeter(values) for _ in range(2)]
    for index, part in enumerate(torch.arange(20).split(3)):
        meters[index % 2].update(weights[part], output[part], residual[part])
    meters[0].merge(meters[1].state())
    found, whole = (vars(each) for each in (meters[0].result(), measure(weights, output, residual, values)))
    assert found.pop("top_score_ratio") == pytest.approx(whole.pop("top_score_ratio"), abs=1e-12)
    assert found == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.eye(4), 0.0),
        (torch.tensor([[1.0, 2.0]]).repeat(5, 1), 1.0),
        (torch.tensor([[1.0, 1.0], [3.0, 3.0]]), 1.0),
        (torch.tensor([[2.0, 0.0], [-5.0, 0.0]]), -1.0),
        (torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), math.sqrt(0.5)),
        (torch.tensor([[1.0, 0.0]]), 0.0),
    ],
    ids=["orthogonal", "the same", "of one direction", "opposite", "with a row of zeros", "one"],
)
def test_anisotropy_of_known_values(values, expected):
    assert anisotropy(values) == pytest.approx(expected, abs=1e-12)


def test_anisotropy_is_the_mean_cosine_of_all_pairs():
    values = torch.randn(30, 6, dtype=torch.float64) + 0.5
    cosines = torch.nn.functional.cosine_similarity(values[:, None], values[None], dim=-1)
    assert anisotropy(values) == pytest.approx((cosines.sum().item() - 30) / (30 * 29), abs=1e-12)


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_what_is_observed_is_the_stream_and_what_is_added_to_it(memory, order):
    layer = EncoderLayer(ModelConfig(hidden_size=8, num_heads=2, ffn_size=16, memory=memory, norm=order), {}).eval()
    layer.memory.observer = before = lambda seen: None
    seen = []
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        with observing_memory(layer, lambda observation, residual: seen.append((observation, residual))):
            layer(x, None)
        entering = layer.around_attention(x, lambda x: layer.attention(x))
        added = layer.memory(layer.around_memory.norm(entering) if order == "pre" else entering)
        layer(x, None)  # seen by nobody
    [(observation, residual)] = seen
    torch.testing.assert_close(residual, entering, rtol=0, atol=0)
    torch.testing.assert_close(observation.output, added, rtol=0, atol=0)
    assert layer.memory.observer is before


def test_observing_ends_with_an_error_too():
    layer = EncoderLayer(ModelConfig(hidden_size=8, num_heads=2, ffn_size=16), {})
    with pytest.raises(ZeroDivisionError), observing_memory(layer, lambda *_: 1 / 0):
        layer(torch.randn(1, 2, 8), None)
    assert layer.memory.observer is None
    assert not layer.around_memory._forward_pre_hooks
