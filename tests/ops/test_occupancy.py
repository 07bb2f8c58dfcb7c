"""Maps of empty tiles are exact, and attention that leaves them out computes the same sums."""

import pytest
import torch
from closeness import grid_inputs

from rectiformer import attention, attention_weights
from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops.occupancy import TileMap, attention_by_tiles, sparsity_by_shape, tile_map


def clustered(B=1, H=2, M=150, N=200, D=16):
    """Queries and keys of two kinds that do not see each other, so that whole tiles are empty."""
    q, k, v, upstream = (tensor.float() for tensor in grid_inputs(B, H, H, M, N, D, 8))
    q[..., 0], k[..., 0] = 0, 0
    q[:, :, :70, 0], q[:, :, 70:, 0] = 8, -8
    k[:, :, :130, 0], k[:, :, 130:, 0] = 8, -8
    return q, k, v, upstream


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window_size": (30, 10)}, {"key_lengths": [90]}], ids=str)
def test_the_map_is_that_of_the_weights(arguments):
    q, k, _, _ = clustered()
    found = tile_map(q, k, **arguments)
    used = attention_weights(q, k, **arguments) != 0
    for m in range(3):
        for n in range(4):
            cells = used[:, :, 64 * m : 64 * m + 64, 64 * n : 64 * n + 64]
            assert torch.equal(found.active[:, :, m, n], cells.flatten(2).any(-1))
    assert not (found.active & ~found.visible).any()
    if "window_size" not in arguments:  # which hides what would be empty
        assert 0 < found.sparsity < 1


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window_size": (30, 10)}, {"key_lengths": [90]}], ids=str)
@pytest.mark.parametrize("variant", ["rela", "reluformer"])
def test_leaving_empty_tiles_out_changes_nothing(variant, arguments):
    q, k, v, upstream = clustered()
    tiles = tile_map(q, k, variant, **arguments)

    def results(call):
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    full = TileMap(torch.ones_like(tiles.active), tiles.visible)
    every = results(lambda *leaves: attention_by_tiles(*leaves, full, variant, **arguments))
    some = results(lambda *leaves: attention_by_tiles(*leaves, tiles, variant, **arguments))
    for one, other in zip(every, some, strict=True):
        assert torch.equal(one, other)  # what is left out are zeros, and the order of the rest is the same
    plain = results(lambda *leaves: attention(*leaves, variant, **arguments))
    for one, other in zip(some, plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


@pytest.mark.usefixtures("interpreter")
def test_tiles_that_are_not_listed_are_not_visited():
    q, k, v, _ = clustered()
    tiles = tile_map(q, k)
    k[:, :, 130:], v[:, :, 130:] = torch.nan, torch.nan
    out = attention_by_tiles(q[:, :, :64], k, v, TileMap(tiles.active[:, :, :1], tiles.visible[:, :, :1]))
    assert not tiles.active[:, :, 0, 3].any()
    assert out.isnan().any() == bool(tiles.active[:, :, 0, 2].any())


def test_sparsity_is_counted_by_shape():
    q, k, _, _ = clustered(M=128, N=128)
    weights = attention_weights(q, k, causal=True)
    seen = torch.ones(128, 128, dtype=torch.bool).tril()
    found = sparsity_by_shape(q, k, causal=True)
    assert found["cells"] == pytest.approx((weights[:, :, seen] == 0).double().mean().item())
    assert found["rows"] == pytest.approx((weights == 0).all(-1).double().mean().item())
    assert found["tiles of 64"] == pytest.approx(tile_map(q, k, causal=True).sparsity)
    assert found["cells"] >= found["pages of 16"] >= found["pages of 64"] >= found["tiles of 64"]
    assert found["tiles of 16"] >= found["tiles of 64"]


def test_what_cannot_be_is_refused():
    q, k, v, _ = clustered()
    with pytest.raises(ArgumentError, match="has no exact zeros"):
        tile_map(q, k, "softmax")
    with pytest.raises(ArgumentError, match="cannot run this call: it runs on CUDA devices"):
        attention_by_tiles(q, k, v, tile_map(q, k))


@pytest.mark.usefixtures("interpreter")
def test_a_map_of_another_call_is_refused():
    q, k, v, _ = clustered()
    with pytest.raises(ShapeError, match=r"\[1, 2, 2, 4\] tiles, but this call has \[1, 2, 3, 4\]"):
        attention_by_tiles(q, k, v, tile_map(q[:, :, :100], k))
