"""What `MultiheadAttention` refuses, vs. torch.nn.MultiheadAttention: the same calls, with the same exception types."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rectiformer.errors import RectiformerError
from rectiformer.model.multihead import MultiheadAttention

WIDTH, HEADS, B, M, N = 8, 4, 3, 5, 9


def hidden(*shape):
    return torch.zeros(*shape, dtype=torch.bool)


GOOD = {"query": torch.zeros(M, B, WIDTH), "key": torch.zeros(N, B, WIDTH), "value": torch.zeros(N, B, WIDTH)}
UNBATCHED = {"query": torch.zeros(M, WIDTH), "key": torch.zeros(N, WIDTH), "value": torch.zeros(N, WIDTH)}
REFUSED = {
    "1D-query": {"query": torch.zeros(WIDTH)},
    "4D": {name: torch.zeros(1, N, B, WIDTH) for name in ("query", "key", "value")},
    "2D-key": {"key": torch.zeros(N, WIDTH)},
    "narrow-query": {"query": torch.zeros(M, B, WIDTH - 1)},
    "narrow-key": {"key": torch.zeros(N, B, WIDTH - 1)},
    "narrow-key-and-value": {name: torch.zeros(N, B, WIDTH - 1) for name in ("key", "value")},
    "longer-value": {"value": torch.zeros(N + 1, B, WIDTH)},
    "other-batch-of-keys": {name: torch.zeros(N, B - 1, WIDTH) for name in ("key", "value")},
    "1D-padding": {"key_padding_mask": hidden(N)},
    "3D-padding": {"key_padding_mask": hidden(B, 1, N)},
    "padding-for-one-sequence": {"key_padding_mask": hidden(1, N)},
    "short-padding": {"key_padding_mask": hidden(B, N - 1)},
    "whole-number-padding": {"key_padding_mask": hidden(B, N).long()},
    "unbatched-2D-padding": UNBATCHED | {"key_padding_mask": hidden(1, N)},
    "unbatched-short-padding": UNBATCHED | {"key_padding_mask": hidden(N - 1)},
    "1D-mask": {"attn_mask": hidden(N)},
    "4D-mask": {"attn_mask": hidden(B, HEADS, M, N)},
    "mask-of-one-query": {"attn_mask": hidden(1, N)},
    "mask-a-sequence": {"attn_mask": hidden(B, M, N)},
    "whole-number-mask": {"attn_mask": hidden(M, N).int()},
    "unbatched-1D-mask": UNBATCHED | {"attn_mask": hidden(N)},
    "unbatched-transposed-mask": UNBATCHED | {"attn_mask": hidden(N, M)},
    "unbatched-mask-a-sequence": UNBATCHED | {"attn_mask": hidden(B, M, N)},
    "causal-without-mask": {"is_causal": True},
    "another-dtype": {"query": torch.zeros(M, B, WIDTH, dtype=torch.float64)},
}
"""Calls of length-first modules that torch refuses."""


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_have_the_exception_types_of_torch(case):
    call = GOOD | REFUSED[case]
    nn.MultiheadAttention(WIDTH, HEADS)(**GOOD)
    with pytest.raises((AssertionError, RuntimeError)) as theirs:
        nn.MultiheadAttention(WIDTH, HEADS)(**call)
    with pytest.raises(theirs.type):
        MultiheadAttention(WIDTH, HEADS)(**call)


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_a_wrong_width_of_separate_projections_is_refused_as_torch_does(which):
    widths = {"kdim": WIDTH + 1, "vdim": WIDTH + 2}
    tensors = {"query": torch.zeros(M, B, WIDTH), "key": torch.zeros(N, B, WIDTH + 1)}
    tensors |= {"value": torch.zeros(N, B, WIDTH + 2)}
    tensors[which] = tensors[which][..., :-1]
    with pytest.raises(AssertionError):
        nn.MultiheadAttention(WIDTH, HEADS, **widths)(**tensors)
    with pytest.raises(AssertionError, match=f"{which} is .*, but its last axis needs"):
        MultiheadAttention(WIDTH, HEADS, **widths)(**tensors)


@pytest.mark.parametrize("sizes", [(8, 3), (0, 4), (8, 0), (-8, 2)], ids=str)
def test_a_constructor_refuses_what_torch_refuses(sizes):
    with pytest.raises((AssertionError, ValueError)) as theirs:
        nn.MultiheadAttention(*sizes)
    with pytest.raises(theirs.type, match=f"num_heads = {sizes[1]}") as refusal:
        MultiheadAttention(*sizes)
    assert isinstance(refusal.value, RectiformerError)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_with_a_way_out(layout):
    ours = MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    nested = torch.nested.nested_tensor([torch.zeros(2, WIDTH), torch.zeros(3, WIDTH)], layout=layout)
    with torch.no_grad(), pytest.raises(AssertionError, match="nested tensors are not supported: pad them") as refusal:
        ours(nested, nested, nested)
    assert isinstance(refusal.value, RectiformerError)


def test_scripting_is_refused_also_inside_a_model():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS)
    layer.self_attn = MultiheadAttention(WIDTH, HEADS)
    for module in (layer.self_attn, layer):
        with pytest.raises(RuntimeError, match=r"cannot be scripted; use torch\.compile or torch\.export") as refusal:
            torch.jit.script(module)
        assert isinstance(refusal.value, RectiformerError)
