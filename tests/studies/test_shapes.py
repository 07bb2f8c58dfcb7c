"""Zeros by shape against the operator's own count, and every way to leave them out against the plain one."""

import pytest
import torch

from rectiformer.model.observation import Observation
from rectiformer.ops.occupancy import sparsity_by_shape
from rectiformer.studies.shapes import SHAPES, ShapeMeter
from rectiformer.studies.skipping_speed import SPEEDS, milliseconds, ways
from rectiformer.studies.speed import Load, measure_speed
from rectiformer.toml import load_config


def observe(M, N, shift, lengths=None, causal=False, B=2):
    """A call whose scores are the more often 0 the larger `shift` is."""
    torch.manual_seed(M + N)
    q, k = torch.randn(B, 2, M, 32) + shift, torch.randn(B, 2, N, 32) - shift
    call = {"causal": causal, **({} if lengths is None else {"key_lengths": torch.tensor(lengths)})}
    return Observation("rela", q, k, q, call)


@pytest.mark.parametrize("causal", [False, True])
def test_shares_are_those_of_the_operator(causal):
    seen = observe(150, 150, 0.8, causal=causal)
    meter = ShapeMeter()
    meter.update(seen, torch.ones(2, 150, dtype=torch.bool))
    expected = sparsity_by_shape(seen.q, seen.k, "rela", causal=causal)
    assert 0 < expected["tiles of 16"] < expected["pages of 16"] < expected["cells"] < 1
    assert meter.shares() == pytest.approx({shape: expected[shape] for shape in SHAPES}, abs=1e-5)


def test_padding_counts_nowhere():
    """A batch with padding has the counts of its sentences one by one."""
    seen, lengths, queries = observe(80, 70, 0.8, lengths=[70, 23]), [70, 23], [80, 31]
    together, apart = ShapeMeter(), ShapeMeter()
    together.update(seen, torch.arange(80) < torch.tensor(queries)[:, None])
    for row, (N, M) in enumerate(zip(lengths, queries, strict=True)):
        q, k = seen.q[row : row + 1, :, :M], seen.k[row : row + 1, :, :N]
        apart.update(Observation("rela", q, k, q, {}), torch.ones(1, M, dtype=torch.bool))
    assert (together.visible, together.zeros) == (apart.visible, apart.zeros)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("variant", ["rela", "reluformer"])
def test_leaving_out_zeros_changes_nothing(variant):
    """A call as a model hands it to an observer."""
    seen = observe(70, 130, 0.5, lengths=[130, 117])
    asked = dict.fromkeys(("attn_mask", "bias", "window")) | dict(seen.call)
    gamma = {"gamma": torch.tensor([0.5, 4.0])} if variant == "reluformer" else {}
    call = Observation(variant, seen.q, seen.k, seen.q, {**asked, **gamma})
    found = {name: work() for name, work in ways(call).items()}
    assert list(found) == list(SPEEDS)
    prefill, by_tiles, *decoded = found.values()
    torch.testing.assert_close(by_tiles, prefill)
    assert prefill.abs().max() > 0.1
    for each in decoded:
        torch.testing.assert_close(each, prefill[:, :, -1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_is_timed_on_a_gpu(dtype):
    seen = observe(256, 256, 0.5, lengths=[256, 200])
    call = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in seen.call.items()}
    on_gpu = Observation("rela", seen.q.cuda().to(dtype), seen.k.cuda().to(dtype), seen.q, call)
    with torch.inference_mode():
        found = {name: milliseconds(work) for name, work in ways(on_gpu).items()}
    assert list(found) == list(SPEEDS)
    assert all(0 < each < 10 for each in found.values())


@pytest.mark.gpu
def test_speed_is_measured_with_and_without_kernels():
    config = load_config(None, ["training.precision=bf16", "model.hidden_size=64"])
    load = Load(vocabulary=100, length=8, sentences=16, searched=4, repeats=2, turns=2)
    found = measure_speed(config, ("softmax", "rela-g", "sparsemax"), load, torch.device("cuda"))
    assert list(found) == [f"{name} {how}" for name in ("softmax", "rela-g", "sparsemax") for how in ("fused", "plain")]
    assert all(0 < each < 1e4 for row in found.values() for each in row.values())
