"""NaN stays NaN: a query or key that is broken never reads as one that attends to nothing."""

import pytest
import torch

from rectiformer import VARIANTS, attention
from rectiformer.ops.decode import decode_attention

RECTIFIED = [name for name, variant in VARIANTS.items() if variant.rectified]
NAN, INF = float("nan"), float("inf")


def inputs(B=1, H=1, M=4, N=6, D=8, dtype=torch.float32):
    return [torch.randn(B, H, length, D).to(dtype) for length in (M, N, N)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 3)], ids=["one matrix", "several"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_query_has_a_broken_row(variant, sizes, dtype):
    q, k, v = inputs(*sizes, dtype=dtype)
    q[0, 0, 2, 3] = NAN
    out = attention(q, k, v, variant)
    assert out[0, 0, 2].isnan().all()
    out[0, 0, 2] = 0
    assert out.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_key_breaks_the_rows_that_see_it(variant):
    q, k, v = inputs(M=6)
    k[0, 0, 3] = NAN
    out = attention(q, k, v, variant, causal=True)
    assert out[0, 0, :3].isfinite().all()
    assert out[0, 0, 3:].isnan().all()


@pytest.mark.parametrize("variant", RECTIFIED)
@pytest.mark.parametrize("broken", [NAN, INF, -INF, 1e38], ids=str)
def test_the_fast_path_is_broken_where_the_reference_is(variant, broken):
    for sizes, arguments in (((1, 1), {}), ((2, 2), {"key_lengths": [6, 0]}), ((2, 2), {"key_lengths": [4, 3]})):
        q, k, v = inputs(*sizes)
        q[-1, 0, 2, 3], k[0, 0, 1, 0] = broken, broken
        found = attention(q, k, v, variant, **arguments)
        expected = attention(q, k, v, variant, backend="reference", **arguments)
        assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if "blocked" in row.implementations])
@pytest.mark.parametrize("broken", [NAN, INF], ids=str)
@pytest.mark.parametrize("arguments", [{"causal": True}, {"key_lengths": [4, 6]}], ids=str)
def test_gradients_are_finite_where_those_of_the_reference_are(variant, broken, arguments):
    """Closed and hidden cells pass no gradient back, not even 0 times NaN."""
    for bias in (None, 0.1 * torch.randn(2, 6, 6)):
        tensors = [each.requires_grad_() for each in (*inputs(2, 2, 6), *([] if bias is None else [bias]))]
        d_out = torch.randn(2, 2, 6, 8)
        d_out[0, 0, 2, 1] = d_out[1, 1, 4, 0] = broken
        found, expected = (
            torch.autograd.grad(
                attention(*tensors[:3], variant, attn_bias=bias, backend=name, **arguments), tensors, d_out
            )
            for name in ("blocked", "reference")
        )
        for ours, right in zip(found, expected, strict=True):
            assert torch.equal(ours.isfinite(), right.isfinite())


@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, for NaN
@pytest.mark.parametrize(
    ("variant", "arguments"),
    [
        ("rela", {}),
        ("relu2", {}),
        ("softmax", {}),
        ("rela", {"attn_bias": torch.zeros(4, 6)}),
        ("relu2", {"window_size": 2}),
    ],
    ids=["rela", "relu2", "softmax", "rela with a bias", "relu2 in a window"],
)
def test_kernels_keep_nan(variant, arguments):
    tensors = [tensor.requires_grad_() for tensor in inputs()]
    with torch.no_grad():
        tensors[0][0, 0, 2, 3] = NAN
    outcomes = []
    for backend in ("fused", "reference"):
        out = attention(*tensors, variant, backend=backend, **arguments)
        outcomes.append([out, *torch.autograd.grad(out.sum(), tensors)])
    for found, expected in zip(*outcomes, strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
    assert outcomes[0][0][0, 0, 2].isnan().all()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("variant", ["rela", "relu2", "softmax", "sparsemax", "sigmoid"])
@pytest.mark.parametrize("skip", [False, True])
def test_decoding_keeps_nan(variant, skip):
    q, keys, values = inputs(B=2, H=2, M=1)
    q[1, 0, 0, 3] = NAN
    out = decode_attention(q, keys, values, variant, key_lengths=torch.tensor([6, 5]), skip=skip)
    assert out[1, 0].isnan().all()
    assert out[0].isfinite().all()
    assert out[1, 1].isfinite().all()
