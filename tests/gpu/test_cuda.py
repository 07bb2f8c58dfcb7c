"""On a GPU every variant gives what it gives on the CPU: values, gradients, dropout, compiled or not."""

import pytest
import torch
from closeness import assert_no_worse, grid_inputs, outputs_and_gradients

from rectiformer import VARIANTS, attention, attention_stats, attention_varlen, attention_weights
from rectiformer.ops.gpu import rms_norm_suits
from rectiformer.ops.norm import plain_rms_norm, rms_norm

pytestmark = [
    pytest.mark.gpu,
    # torch's own warnings
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
FEATURES = {
    "full": {},
    "causal": {"causal": True, "window_size": (9, 0)},
    "lengths": {"key_lengths": [29, 0]},
    "dropout": {"dropout_p": 0.3, "seed": 3},
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


@pytest.mark.parametrize("variant", ["rela", "reluformer", "entmax", "sparsemax", "softmax"])
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


@pytest.mark.parametrize(
    ("variant", "dtype", "sizes"),
    [
        ("rela", torch.float32, (23, 29, 16, 5)),
        ("relu-seqlen", torch.float16, (23, 29, 16, 5)),
        ("relu2", torch.bfloat16, (23, 29, 16, 5)),
        ("reluformer", torch.bfloat16, (97, 128, 64, 64)),  # long enough for the instructions of whole warp groups
        ("softmax", torch.bfloat16, (128, 97, 64, 64)),
    ],
)
def test_fused_kernels_match_float64_on_the_cpu(variant, dtype, sizes):
    arguments = {"causal": True, "key_lengths": [sizes[1], 5], "dropout_p": 0.25, "seed": 3, "scale": 0.125}
    inputs = grid_inputs(2, 2, 2, *sizes)
    moved = [tensor.cuda() for tensor in inputs]
    exact = outputs_and_gradients(inputs, torch.float64, "reference", variant, **arguments)
    eager = outputs_and_gradients(moved, dtype, "eager", variant, **arguments)
    ours = outputs_and_gradients(moved, dtype, "fused", variant, **arguments)
    for name in exact:
        assert_no_worse(f"{variant} {name}", ours[name].cpu(), eager[name].cpu(), exact[name])


def test_a_learned_factor_of_the_fused_kernels_receives_its_gradient():
    inputs = grid_inputs(3, 2, 2, 23, 29, 16, 5)

    def gradient(device, dtype, backend):
        q, k, v, upstream = (tensor.to(device, dtype) for tensor in inputs)
        gamma = torch.tensor([0.5, 2.0], device=device, dtype=dtype, requires_grad=True)
        out = attention(q, k, v, "reluformer", gamma=gamma, causal=True, backend=backend)
        return torch.autograd.grad(out, gamma, upstream)[0].double().cpu()

    exact, ours = gradient("cpu", torch.float64, "reference"), gradient("cuda", torch.float32, "fused")
    # A hundred float32 roundings of a sum whose terms cancel in part.
    assert (ours - exact).abs().max() <= 100 * torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize(("gated", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_norm_kernels_match_the_formula(gated, dtype):
    """Enough rows for every program of the backward pass to walk over several."""
    shapes = [(5000, 512), (512,), (512,), (5000, 512)] if gated else [(5000, 500), (500,), (5000, 500)]
    leaves = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]

    def results(norm, dtype):
        z, gain, *gate, upstream = (leaf.to(dtype).requires_grad_() for leaf in leaves)
        out = norm(z, gain, gate[0] if gate else None, 1e-8)
        return [out, *torch.autograd.grad(out, (z, gain, *gate), upstream)]

    exact, eager = results(plain_rms_norm, torch.float64), results(plain_rms_norm, dtype)
    ours, again = results(rms_norm, dtype), results(rms_norm, dtype)
    for name, fast, repeated, plain, true in zip(
        ["out", "d_z", "d_gain", "d_gate"], ours, again, eager, exact, strict=False
    ):
        assert_no_worse(name, fast, plain, true)
        assert torch.equal(fast, repeated)


def test_norms_use_the_kernels():
    z, gain = torch.randn(3, 24, device="cuda"), torch.ones(24, device="cuda")
    assert rms_norm_suits(z, gain, None)
    assert not rms_norm_suits(z.double(), gain, None)
    assert not rms_norm_suits(z, torch.ones(23, device="cuda"), None)
