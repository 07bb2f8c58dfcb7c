"""What hardware does with NaN and with masks of low numbers: a GPU's plain maximum would make 0 of NaN."""

import pytest
import torch
from closeness import assert_matches_reference, grid_inputs

from rectiformer import VARIANTS, attention
from rectiformer.ops.decode import decode_attention

pytestmark = pytest.mark.gpu
NAN = float("nan")
SHAPES = {"short": (2, 2, 40, 48, 64), "long": (1, 2, 300, 700, 64), "long, D 128": (1, 2, 1024, 1024, 128)}


def inputs(B, H, M, N, D, dtype):
    return [torch.randn(B, H, length, D, device="cuda").to(dtype) for length in (M, N, N)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_query_has_a_broken_row_and_broken_gradients(variant, shape, dtype):
    q, k, v = inputs(*SHAPES[shape], dtype)
    q[0, 0, 2, 3] = NAN
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = attention(*leaves, variant)
    assert out[0, 0, 2].isnan().all()
    assert out.isnan().sum() == out.shape[-1]
    d_q, d_k, d_v = torch.autograd.grad(out.sum(), leaves)
    if variant != "inhibitor":  # whose distances have, in torch too, no slope where they are NaN
        assert d_q[0, 0, 2].isnan().any() or d_k[0, 0].isnan().any() or d_v[0, 0].isnan().any()
    assert d_k[0, 1].isfinite().all()


@pytest.mark.parametrize("variant", ["rela", "relu2", "softmax", "sparsemax", "entmax15", "sigmoid"])
def test_decoding_keeps_nan(variant):
    q, keys, values = inputs(2, 2, 1, 700, 64, torch.bfloat16)
    q[1, 0, 0, 3] = NAN
    out = decode_attention(q, keys, values, variant, key_lengths=torch.tensor([700, 500], device="cuda"))
    assert out[1, 0].isnan().all()
    assert out[0].isfinite().all()
    assert out[1, 1].isfinite().all()


@pytest.mark.parametrize("low", [-1e9, -65504.0, -5_000.0], ids=str)
@pytest.mark.parametrize("variant", ["rela", "reluformer", "relu-seqlen", "relu2"])
def test_a_low_bias_hides_its_keys(variant, low):
    """The kernels against the reference, whose rule is tested on a CPU."""
    seen = torch.ones(300, 300, dtype=torch.bool).tril()
    bias = torch.zeros(300, 300).masked_fill(~seen, low).cuda()
    moved = [tensor.cuda() for tensor in grid_inputs(1, 2, 2, 300, 300, 64, 64)]
    assert_matches_reference(moved, torch.bfloat16, "fused", variant, attn_bias=bias)
