"""Tensors saved in shards: whole again for one rank, and sharded anew for any number of them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rectiformer.errors import CheckpointError
from rectiformer.runs.checkpoint import (
    FORMAT,
    MANIFEST,
    files_of,
    join_shards,
    open_checkpoint,
    read_manifest,
    save_checkpoint,
    seal,
    shard_name,
)


def chunk(tensor, ranks):
    """Shards as FSDP2 makes them: of equal length, as long as there are rows."""
    each = -(-len(tensor) // ranks)
    return [tensor[rank * each : (rank + 1) * each] for rank in range(ranks)]


@given(rows=st.integers(0, 13), before=st.integers(1, 6), after=st.integers(1, 6))
def test_any_number_of_ranks_reads_what_any_other_wrote(rows, before, after):
    tensors = {"w": torch.arange(3 * rows).view(rows, 3), "w/step": torch.tensor(7.0)}
    shards = [{"w": shard, "w/step": tensors["w/step"]} for shard in chunk(tensors["w"], before)]
    assert all(torch.equal(found, tensors[name]) for name, found in join_shards(shards, None).items())
    each = -(-rows // after)
    for rank, expected in enumerate(chunk(tensors["w"], after)):
        wanted = min(rows, rank * each), min(rows, (rank + 1) * each)
        found = join_shards(shards, lambda key, wanted=wanted: wanted)
        assert torch.equal(found["w"], expected)
        assert found["w/step"] == 7


def test_shards_are_found_by_rank():
    files = [shard_name("model", rank, 12) for rank in range(12)]
    assert files_of("model", {*files, "optimizer.safetensors", "state.json"}, Path()) == files
    assert files_of("optimizer", {*files, "optimizer.safetensors"}, Path()) == ["optimizer.safetensors"]
    assert files_of("ema", files, Path()) == []


@pytest.mark.parametrize(
    "files",
    [
        ["model.1-of-2.safetensors"],
        ["model.0-of-1.safetensors", "model.0-of-2.safetensors", "model.1-of-2.safetensors"],
        ["model.00-of-1.safetensors"],
    ],
)
def test_incomplete_shards_are_refused(files):
    with pytest.raises(CheckpointError, match="of the shards of model it lists"):
        files_of("model", files, Path("manifest.json"))


def test_the_shard_of_a_single_rank_is_the_whole(tmp_path):
    weights = {"w": torch.arange(6.0).view(3, 2)}
    saved = save_checkpoint(tmp_path, 3, {"averaged": weights}, {}, {}, shards={"model": weights})
    found = open_checkpoint(saved.path)
    assert set(saved.manifest["files"]) == {"averaged.safetensors", "model.0-of-1.safetensors", "state.json"}
    assert (found.holds("model"), found.holds("averaged"), found.holds("ema")) == (True, True, False)
    assert torch.equal(found.tensors("model")["w"], weights["w"])


def test_a_manifest_of_four_thousand_ranks_is_read(tmp_path):
    names = [shard_name(name, rank, 4_000) for name in ("model", "optimizer", "ema") for rank in range(4_000)]
    files = {name: {"sha256": "0" * 64, "size": 10**9} for name in names}
    manifest = {"format": FORMAT, "step": 1, "files": files, "identity": {}, "rectiformer": "", "torch": ""}
    (tmp_path / MANIFEST).write_bytes(seal(manifest))
    assert files_of("ema", read_manifest(tmp_path)["files"], tmp_path) == names[-4_000:]
