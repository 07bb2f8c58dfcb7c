"""On a GPU every variant gives what it gives on the CPU: values, gradients, dropout, compiled or not."""

import pytest
import torch
from closeness import assert_no_worse, grid_inputs, outputs_and_gradients

from rectiformer import VARIANTS, attention, attention_stats, attention_varlen, attention_weights

pytestmark = [
    pytest.mark.gpu,
    # torch's own warnings
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
FEATURES = {
    "full": {},
    "causal": {"causal": True, "window": (9, 0)},
    "lengths": {"key_lengths": [29, 0]},
    "dropout": {"dropout": 0.3, "seed": 3},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_match_float64_on_the_cpu(variant, features, dtype):
    inputs = grid_inputs(2, 4, 2, 23, 29, 16, 5)
    moved = [tensor.cuda() for tensor in inputs]
    exact = outputs_and_gradients(inputs, torch.float64, "reference", variant, **FEATURES[features])
    eager = outputs_and_gradients(moved, dtype, "eager", variant, **FEATURES[features])
    ours = outputs_and_gradients(moved, dtype, "auto", variant, **FEATURES[features])
    for name in exact:
        assert_no_worse(f"{variant} {name}", ours[name].cpu(), eager[name].cpu(), exact[name])


@pytest.mark.parametrize("variant", ["rela", "reluformer", "entmax", "softmax"])
def test_compiled_for_the_gpu(variant):
    q, k, v = (torch.randn(2, 4, 33, 16, device="cuda", requires_grad=True) for _ in range(3))

    def call(q, k, v):
        return attention(q, k, v, variant, causal=True)

    out = torch.compile(call, fullgraph=True)(q, k, v)
    expected = call(q, k, v)
    assert torch.allclose(out, expected, atol=1e-4)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(expected.square().sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-3, rtol=1e-3)


def test_weights_statistics_and_packed_sequences():
    q, k = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    stats, moved = attention_stats(q, k, causal=True), attention_stats(q.cuda(), k.cuda(), causal=True)
    assert torch.equal(stats.nonzero, moved.nonzero.cpu())
    sparse = attention_weights(q.cuda(), k.cuda(), sparse=True)
    assert torch.allclose(sparse.to_dense().cpu().view(2, 2, 9, 9), attention_weights(q, k), atol=1e-5)
    packed = [torch.randn(7, 2, 8) for _ in range(3)]
    bounds = torch.tensor([0, 3, 3, 7])
    out = attention_varlen(
        *(tensor.cuda() for tensor in packed), bounds.cuda(), bounds.cuda(), "reluformer", causal=True
    )
    assert torch.allclose(out.cpu(), attention_varlen(*packed, bounds, bounds, "reluformer", causal=True), atol=1e-5)
