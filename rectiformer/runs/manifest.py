"""The list of a checkpoint's files with size and hash of each, trusted only as far as it fits them and itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rectiformer.files import damaged, parse_object, read_regular

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 2**24  # bytes; one of ours has about a thousand, and 500 more for each rank that saved a part
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of a file in the folder itself, never a way out of it


def describe(data: bytes) -> dict[str, Any]:
    """What a manifest says of a file with this content."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def seal(manifest: Mapping[str, Any]) -> bytes:
    """A manifest or record as bytes that hold their own hash, so that damage to it shows too."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1, sort_keys=True).encode()


def read_sealed(path: Path, limit: int, version: int) -> dict[str, Any]:
    """What was sealed into a file of so many bytes at most; CheckpointError where it is damaged or foreign."""
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
    """Whether a manifest is what `save_checkpoint` makes; its own hash does not say so, as anybody can compute that."""
    kinds = {"format": int, "step": int, "files": dict, "identity": dict, "rectiformer": str, "torch": str}
    return (
        {key: type(value) for key, value in manifest.items()} == kinds
        and all(type(value) is str for value in manifest["identity"].values())
        and all(PLAIN_NAME.fullmatch(name) for name in manifest["files"])
        and all(type(entry) is dict for entry in manifest["files"].values())
        and all(
            {key: type(value) for key, value in entry.items()} == {"sha256": str, "size": int}
            for entry in manifest["files"].values()
        )
    )
