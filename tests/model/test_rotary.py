"""Queries and keys rotated by the index of their sentence."""

import math

import pytest
import torch

from rectiformer.config import ModelConfig
from rectiformer.model.rotary import apply_rotary, rotation_of
from rectiformer.model.transformer import Transformer
from rectiformer.ops.variants import VARIANTS, dot_scores

START, SEPARATOR, WORDS = 2, 4, 23
SIZES = {"hidden_size": 16, "num_heads": 2, "ffn_size": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}


def build(**config):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SIZES, **config), WORDS, WORDS, START, (SEPARATOR, SEPARATOR)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and the like, so that nothing is left out of a score
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("head", [1, 2, 7, 64])
def test_products_depend_on_how_far_apart_sentences_are_and_within_one_are_as_they_were(head):
    q, k = torch.randn(2, 1, 1, 1, head, dtype=torch.double)

    def product(mine, other):
        one, two = (
            apply_rotary(x, rotation_of(torch.tensor([[number]]), head)) for x, number in ((q, mine), (k, other))
        )
        return (one * two).sum()

    torch.testing.assert_close(product(11, 11), (q * k).sum(), rtol=0, atol=1e-5)
    torch.testing.assert_close(product(3, 8), product(40, 45), rtol=0, atol=1e-4)  # angles are single precision


def test_each_pair_of_dimensions_rotates_by_the_angle_it_says():
    x = torch.zeros(1, 1, 1, 8)
    x[..., 2] = 1
    found = apply_rotary(x, rotation_of(torch.tensor([[3]]), 8)).flatten()
    angle = 3 * math.pi * 0.5**1.5
    expected = torch.zeros(8)
    expected[[2, 6]] = torch.tensor([math.cos(angle), math.sin(angle)])
    torch.testing.assert_close(found, expected)


def test_the_first_pair_and_an_odd_dimension_stand_still():
    x = torch.randn(1, 3, 4, 9)
    found = apply_rotary(x, rotation_of(torch.tensor([[0, 1, 2, 77]]), 9))
    torch.testing.assert_close(found[..., [0, 4, 8]], x[..., [0, 4, 8]])
    assert not torch.allclose(found, x)


def test_no_two_of_two_thousand_sentences_look_alike():
    """The mean of the cosines is what is left of a product between them that fitted in all dimensions."""
    alike = rotation_of(torch.arange(1, 2000)[None], 64).cos.mean(-1)
    assert alike.max() < 0.5


@pytest.mark.parametrize("head_dim", [8, 6])
def test_each_view_of_a_variant_rotates_by_itself(head_dim):
    """By the rotation of a head of its size, so that its scores too depend on how far apart sentences are."""
    x, half = torch.randn(1, 2, 5, head_dim), head_dim // 2
    ids = torch.tensor([[0, 1, 2, 3, 9]])
    rotated = apply_rotary(x, rotation_of(ids, head_dim), views=2)
    for view in (slice(half), slice(half, None)):
        pairs = apply_rotary(x[..., view], rotation_of(ids, half))
        torch.testing.assert_close(rotated[..., view], pairs)


PRODUCTS = [name for name, row in VARIANTS.items() if row.score is dot_scores]
CASES = [(name, "none") for name in PRODUCTS] + [(name, "open") for name in PRODUCTS if VARIANTS[name].power]


@pytest.mark.parametrize(("variant", "score_bias"), CASES)
def test_a_segment_that_says_the_same_later_is_read_the_same(variant, score_bias):
    """Only how far apart sentences are counts, where scores are products: forty sentences later two are read alike."""
    model = build(variant=variant, score_bias=score_bias, positions="sentence", center_keys="no")
    x = torch.randn(1, 5, 16, dtype=torch.double)
    sentence_ids = torch.tensor([[0, 0, 0, 1, 1]])
    with torch.no_grad():
        first, later = (model.encoder[0](x, None, model.rotation(sentence_ids + more)) for more in (0, 40))
        still = model.encoder[0](x, None)
    torch.testing.assert_close(first, later, rtol=0, atol=1e-4)
    assert not torch.allclose(first, still, atol=1e-3)
