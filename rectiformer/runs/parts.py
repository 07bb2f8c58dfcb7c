"""Tensors that several ranks saved together: each rank a file with its rows of every one of them.

Part r of n of `model` is the file `model.r-of-n.safetensors`. A tensor is its parts on top of each other, so that any
number of ranks can read what any other number wrote; one without axes is the same in every part.

torch.distributed.checkpoint is not used here. Its own format has a pickled index. Its safetensors can be resharded too,
but it opens files by name after they were checked, where ours are parsed from the very bytes whose hash was right.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor

from rectiformer.files import damaged

PART = re.compile(r"(.+)\.([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")
Rows = Callable[[str], tuple[int, int]]
"""The first row wanted of a tensor, and the first not wanted any more."""


def part_name(name: str, rank: int, size: int) -> str:
    """The file of one rank's rows."""
    return f"{name}.{rank}-of-{size}.safetensors"


def files_of(name: str, files: Collection[str], where: Path) -> list[str]:
    """The files that hold `name`, its parts in their order; none where nothing holds it."""
    if f"{name}.safetensors" in files:
        return [f"{name}.safetensors"]
    found = [match for file in files if (match := PART.fullmatch(file)) and match[1] == name]
    counts = {int(match[3]) for match in found}
    wanted = [part_name(name, rank, count) for count in counts for rank in range(count)]
    if len(counts) > 1 or sorted(wanted) != sorted(match[0] for match in found):
        raise damaged(where, f"of the parts of {name} it lists {', '.join(sorted(match[0] for match in found))}")
    return wanted


def join_parts(parts: Iterable[dict[str, Tensor]], rows: Rows | None) -> dict[str, Tensor]:
    """Whole tensors out of their parts, or some rows of each; no more than one part is held beside what is wanted."""
    found: dict[str, list[Tensor]] = {}
    passed: Counter[str] = Counter()
    for part in parts:
        for key, tensor in part.items():
            if tensor.dim() == 0:
                found[key] = [tensor]
                continue
            first, stop = rows(key) if rows is not None else (0, passed[key] + len(tensor))
            wanted = tensor[max(0, first - passed[key]) : max(0, stop - passed[key])]
            found.setdefault(key, []).append(wanted if rows is None else wanted.clone())
            passed[key] += len(tensor)
    return {key: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for key, pieces in found.items()}
