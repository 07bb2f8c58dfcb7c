"""The manifest of a prepared folder: what must be there, and that nothing else is read."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

from rectiformer.errors import DataError
from rectiformer.files import hash_file
from rectiformer.text.encoded import ARRAYS, SIDES, TEXTS, damaged

FORMAT = 1


def read_manifest(folder: Path) -> dict[str, Any]:
    text = regular_file(folder, "manifest.json").read_bytes()
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(folder / "manifest.json", f"not JSON ({error})") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise damaged(folder / "manifest.json", f"format {found!r}, but this version reads {FORMAT}")
    return manifest


def check_manifest(folder: Path, manifest: dict[str, Any], verify: bool) -> None:
    """Raise a DataError unless the files it names are there, regular, inside `folder` and as large as it says."""
    for name, entry in manifest["files"].items():
        path = regular_file(folder, name)
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise damaged(path, f"{size:,} bytes, but the manifest says {entry['bytes']:,}")
        if verify and (found := hash_file(path)) != entry["sha256"]:
            raise damaged(path, f"hash {found}, but the manifest says {entry['sha256']}")
    needed = {"source.model", "target.model"}
    for split in {*manifest["splits"], *(() if manifest.get("stream") else ("train-0",))}:
        needed |= {f"{split}/{name}" for name in (*ARRAYS, *(TEXTS if split == "valid" else ()))}
    if missing := sorted(needed - set(manifest["files"])):
        raise damaged(folder / "manifest.json", f"does not name {missing[0]}")
    if (expected := hash_data(manifest)) != manifest["hash"]:
        raise damaged(folder / "manifest.json", f"data hash {manifest['hash']}, but its files make {expected}")


def regular_file(folder: Path, name: str) -> Path:
    """The path of a file named in a manifest; a DataError if it leads out of `folder` or is anything but a file."""
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{folder}: file name {name!r} leads out of the folder; nothing was read")
        mode = path.lstat().st_mode
    except (OSError, RuntimeError) as error:  # Python 3.12 calls a loop of links a RuntimeError
        raise damaged(path, f"{getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: not a regular file; nothing was read")
    return path


def hash_data(manifest: dict[str, Any]) -> str:
    """What training reads, in one hash: vocabularies, and the ids, offsets and documents of every copy."""
    parts = [manifest["vocabularies"][side] for side in SIDES]
    parts += [manifest["files"][f"{copy}/{name}"]["sha256"] for copy in copies_of(manifest) for name in ARRAYS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def copies_of(manifest: dict[str, Any]) -> list[str]:
    """The folders of the copies of the training text."""
    return [split for split in manifest["splits"] if split != "valid"]
