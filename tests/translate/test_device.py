"""Weights held in fewer bits: the same numbers as cast ones, and nothing left to multiply at each step."""

import copy

import pytest
import torch

from rectiformer.errors import ArgumentError
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.transformer import Transformer
from rectiformer.studies.recipes import OPEN, THRESHOLD, attention_settings
from rectiformer.toml import load_config
from rectiformer.translate.translator import cast_weights, find_device

WORDS, START = 23, 2
SMALL = (
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.ffn_size=16",
    "model.encoder_layers=1",
    "model.decoder_layers=2",
)


def build(variant):
    torch.manual_seed(1)
    model = Transformer(load_config(None, [*SMALL, *attention_settings(variant)]).model, WORDS, WORDS, START).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("variant", ["rela-g", "reluformer", OPEN, THRESHOLD])
def test_held_weights_are_cast_ones(variant):
    cast = build(variant)
    held = copy.deepcopy(cast)
    for parameter in cast.parameters():
        parameter.data = parameter.data.bfloat16()
    cast_weights(held, torch.bfloat16)
    source, target, lengths = torch.randint(4, WORDS, (2, 9)), torch.randint(4, WORDS, (2, 7)), torch.tensor([9, 4])
    with torch.inference_mode():
        assert torch.equal(held(source, lengths, target), cast(source, lengths, target))
        states = [model.begin_static(model.encode(source, lengths), 1, 16) for model in (held, cast)]
        for index in range(7):
            ours, theirs = (
                model.step(target[:, index], state) for model, state in zip((held, cast), states, strict=True)
            )
            assert torch.equal(ours, theirs)
    assert held.output.dtype == torch.bfloat16


@pytest.mark.parametrize("variant", ["reluformer", OPEN])
def test_a_step_multiplies_no_weights_any_more(variant, monkeypatch):
    made, project = [], RectifiedAttention._fold
    monkeypatch.setattr(RectifiedAttention, "_fold", lambda *a: made.append(1) or project(*a))
    inputs = torch.randint(4, WORDS, (2, 9)), torch.tensor([9, 4]), torch.randint(4, WORDS, (2, 7))
    model = build(variant)
    with torch.inference_mode():
        model(*inputs)
        assert made
        cast_weights(model, torch.bfloat16)
        made.clear()
        model(*inputs)
    assert not made


@pytest.mark.parametrize("device", ["mps", "meta", "xla:0"])
def test_devices_that_nobody_has_tried_are_refused(device):
    with pytest.raises(ArgumentError, match=f"^device '{device}' is not supported; use auto, cpu or cuda$"):
        find_device(device)
