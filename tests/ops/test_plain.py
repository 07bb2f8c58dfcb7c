"""What runs where no kernel of ours does: torch's own softmax, and plain implementations a few rows at a time."""

import pytest
import torch
from closeness import assert_matches_reference, grid_inputs

from rectiformer import VARIANTS, attention, attention_weights
from rectiformer.errors import ArgumentError
from rectiformer.ops import plain
from rectiformer.ops.attention import BACKENDS
from rectiformer.ops.call import AttentionCall, Visibility

SEEN = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "lengths": {"key_lengths": [17, 0]},
    "mask": {"attn_mask": torch.arange(17) % 3 != 1},
    "everything": {"causal": True, "window_size": (4, 0), "key_lengths": [9, 17]},
    "scaled": {"scale": -0.5},
}


@pytest.mark.parametrize("queries", [13, 17])
@pytest.mark.parametrize("features", SEEN)
def test_the_softmax_of_torch_matches_the_reference(features, queries):
    inputs = grid_inputs(2, 4, 2, queries, 17, 8, 8)
    assert_matches_reference(inputs, torch.bfloat16, "sdpa", "softmax", **SEEN[features])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"dropout_p": 0.5}, "drops other cells"), ({"attn_bias": torch.zeros(1)}, "gradient for a bias")],
    ids=["dropout", "bias"],
)
def test_what_torch_does_otherwise_is_refused(arguments, reason):
    q = torch.zeros(1, 1, 3, 4, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=reason):
        attention(q, q, q, "softmax", backend="sdpa", **arguments)
    with pytest.raises(ArgumentError, match="'rela' is not a softmax"):
        attention(q, q, q, backend="sdpa")
    with pytest.raises(ArgumentError, match="16-bit"):
        attention(*[q.float()] * 3, "softmax", backend="sdpa")


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_one_after_the_other_are_the_same_call(variant, monkeypatch):
    """Dropout, masks and biases are cut with the rows; gradients reach keys and values from all of them."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, length, 4, dtype=torch.float64, requires_grad=True) for length in (7, 9, 9))
    bias = torch.randn(1, 2, 7, 9, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(7, 9) < 0.8
    arguments = {
        "attn_bias": bias,
        "attn_mask": mask,
        "key_lengths": [9, 4],
        "dropout_p": 0.3,
        "seed": 5,
        "window_size": (6, 3),
    }
    for backend in {each.name for each in BACKENDS if each.plain} & set(VARIANTS[variant].implementations):
        found = []
        for most in (1 << 40, 9 * 8 * 4 * 4):
            monkeypatch.setattr(plain, "MOST_HELD", most)
            out = attention(q, k, v, variant, backend=backend, **arguments)
            found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))])
        for whole, parts in zip(*found, strict=True):
            torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_a_call_that_would_hold_too_much_goes_by_rows():
    """32 heads with 4,096 x 4,096 differences in each of 64 columns are 128 GiB, four times over."""
    q = torch.empty(4, 8, 4096, 64, device="meta")
    seen = Visibility(4096, 4096)
    assert plain.rows_at_once(q, q, AttentionCall(VARIANTS["inhibitor"], seen, {}, 1.0)) == 4096 // 128
    assert plain.rows_at_once(q, q, AttentionCall(VARIANTS["softmax"], seen, {}, 1.0)) == 4096 // 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_meta_device_gives_shapes(variant):
    q, k = torch.empty(2, 4, 5, 8, device="meta", requires_grad=True), torch.empty(2, 2, 7, 8, device="meta")
    out = attention(q, k, k, variant, causal=True)
    out.sum().backward()
    assert out.shape == q.grad.shape == q.shape
    if VARIANTS[variant].has_weights:
        assert attention_weights(q, k, variant).shape == (2, 4, 5, 7)
