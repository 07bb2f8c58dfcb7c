"""A step being written: tensors packed, room made, files on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from rectiformer.errors import ArgumentError, DivergedError
from rectiformer.files import remove, require_space, sync, write_file, writing
from rectiformer.runs.manifest import describe


def pack(step: int, name: str, group: Mapping[str, Tensor]) -> bytes:
    """Tensors in safetensors format; DivergedError where one is not finite, ArgumentError where two share memory."""
    owners: dict[tuple[torch.device, int], str] = {}
    for key, tensor in group.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DivergedError(
                f"step {step}: {name} {key!r} holds numbers that are not finite; "
                "no checkpoint was written, earlier ones are kept"
            )
        if tensor.numel() and (owner := owners.setdefault((tensor.device, tensor.data_ptr()), key)) != key:
            raise ArgumentError(f"{name} {owner!r} and {key!r} share memory; save one of them")
    return save({key: tensor.detach().cpu().contiguous() for key, tensor in group.items()})


def begin_step(path: Path, temporary: Path, size: int) -> None:
    """An empty folder `temporary` for the step `path` of `size` bytes."""
    root = path.parent
    with writing(path):
        if not root.is_dir():
            root.mkdir(parents=True)
            sync(root.parent)
        require_space(path, size)
        remove(temporary)
        temporary.mkdir()


def write_contents(path: Path, temporary: Path, contents: Mapping[str, bytes]) -> dict[str, Any]:
    """Files of the step `path`, on disk when this returns, and what its manifest has to say of them."""
    with writing(path):
        for name, data in contents.items():
            write_file(temporary / name, data, halfway="mid-tensor")
    return {name: describe(data) for name, data in contents.items()}
