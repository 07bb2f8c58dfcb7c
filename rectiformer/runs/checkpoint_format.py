"""The files of a checkpoint: tensors as safetensors, and a manifest with size and hash of each.

A manifest is trusted only as far as it fits the files and itself. Where several ranks hold shards of the tensors, each
of them writes a file: that of rank r of n is `model.r-of-n.safetensors`. A tensor is its shards concatenated, so any
number of ranks can read what any other number wrote; a scalar is the same in every shard.

torch.distributed.checkpoint is not used. Its own format has a pickled index. Its safetensors can be resharded too, but
it opens files by name after they were checked, where ours are parsed from the very bytes whose hash was right.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError, DivergedError
from rectiformer.files import damaged, parse_object, read_regular

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 2**24  # bytes; one of ours has about a thousand, and 500 more for each rank that saved a shard
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of a file in the folder itself, never a way out of it
SHARD = re.compile(r"(.+)\.([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")
RowRange = Callable[[str], tuple[int, int]]
"""The first row wanted of a tensor, by its name, and the first one no longer wanted."""


def file_entry(data: bytes) -> dict[str, Any]:
    """What a manifest says of a file with this content."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def seal(manifest: Mapping[str, Any]) -> bytes:
    """A manifest or record as bytes that hold their own hash, so that damage to it shows too."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1, sort_keys=True).encode()


def read_sealed(path: Path, limit: int, version: int) -> dict[str, Any]:
    """What was sealed into a file of at most `limit` bytes; CheckpointError where it is damaged or foreign."""
    data = read_regular(path, limit)
    sealed = parse_object(path, data)
    if sealed.get("format") != version:
        raise damaged(path, f"its format is {sealed.get('format')!r}, this version of rectiformer reads {version}")
    sealed.pop("sha256", None)
    try:
        intact = seal(sealed) == data
    except RecursionError:
        intact = False
    if not intact:
        raise damaged(path, "it does not match its own hash")
    return sealed


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, without its own hash; CheckpointError where it is damaged or foreign."""
    manifest = read_sealed(folder / MANIFEST, MANIFEST_LIMIT, FORMAT)
    if not is_well_formed(manifest):
        raise damaged(folder / MANIFEST, "it is no list of files inside the folder, each with size and hash")
    return manifest


def is_well_formed(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is what `save_checkpoint` writes; its own hash does not say so, as anybody can compute it."""
    types = {"format": int, "step": int, "files": dict, "identity": dict, "rectiformer": str, "torch": str}
    return (
        types_of(manifest) == types
        and all(type(value) is str for value in manifest["identity"].values())
        and all(PLAIN_NAME.fullmatch(name) for name in manifest["files"])
        and all(
            type(entry) is dict and types_of(entry) == {"sha256": str, "size": int}
            for entry in manifest["files"].values()
        )
    )


def types_of(mapping: Mapping[str, Any]) -> dict[str, type]:
    return {key: type(value) for key, value in mapping.items()}


def pack(step: int, name: str, group: Mapping[str, Tensor]) -> bytes:
    """Tensors in safetensors format; DivergedError where one is not finite, ArgumentError where two share storage."""
    owners: dict[tuple[torch.device, int], str] = {}
    for key, tensor in group.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DivergedError(
                f"step {step}: {name} {key!r} holds numbers that are not finite; "
                "no checkpoint was written, earlier ones are kept"
            )
        if tensor.numel() and (owner := owners.setdefault((tensor.device, tensor.data_ptr()), key)) != key:
            raise ArgumentError(f"{name} {owner!r} and {key!r} share storage; save one of them")
    from safetensors.torch import save

    return save({key: tensor.detach().cpu().contiguous() for key, tensor in group.items()})


def shard_name(name: str, rank: int, world_size: int) -> str:
    """The file of one rank's shards."""
    return f"{name}.{rank}-of-{world_size}.safetensors"


def files_of(name: str, files: Collection[str], where: Path) -> list[str]:
    """The files that hold `name`, shards by rank; none where nothing holds it."""
    if f"{name}.safetensors" in files:
        return [f"{name}.safetensors"]
    found = [match for file in files if (match := SHARD.fullmatch(file)) and match[1] == name]
    counts = {int(match[3]) for match in found}
    wanted = [shard_name(name, rank, count) for count in counts for rank in range(count)]
    if len(counts) > 1 or sorted(wanted) != sorted(match[0] for match in found):
        raise damaged(where, f"of the shards of {name} it lists {', '.join(sorted(match[0] for match in found))}")
    return wanted


def join_shards(shards: Iterable[dict[str, Tensor]], row_range: RowRange | None) -> dict[str, Tensor]:
    """Whole tensors out of their shards, or some rows of each; besides what is wanted, one shard at most is held."""
    found: dict[str, list[Tensor]] = {}
    passed: Counter[str] = Counter()
    for shard in shards:
        for key, tensor in shard.items():
            if tensor.dim() == 0:
                found[key] = [tensor]
                continue
            first, stop = row_range(key) if row_range is not None else (0, passed[key] + len(tensor))
            wanted = tensor[max(0, first - passed[key]) : max(0, stop - passed[key])]
            found.setdefault(key, []).append(wanted if row_range is None else wanted.clone())
            passed[key] += len(tensor)
    return {key: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for key, pieces in found.items()}
