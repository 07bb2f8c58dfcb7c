"""Exported folders: written completely or not at all, with a record of what is in them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

import rectiformer
from rectiformer.errors import ArgumentError, CheckpointError
from rectiformer.files import (
    WRITE_LOCK,
    damaged,
    hash_file,
    new_folder,
    parse_object,
    read_regular,
    write_file,
    writing,
)
from rectiformer.model.embedding import Embedding
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.translator import Translator, piece_text

FORMAT = 1
RECORD = "export.json"
RECORD_LIMIT = 2**20  # bytes; ours have a few thousand

Report = Callable[[str], None]
"""Told, in a line each, what is being done."""


def require_packages(format: str, extra: str, *names: str) -> None:
    """ArgumentError where a package that writes or reads `format` is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ArgumentError(f"{format} needs {', '.join(missing)}; install it with: pip install 'rectiformer[{extra}]'")


def require_new(out: Path) -> None:
    """CheckpointError where something is at `out` already."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists and is untouched; remove it, or name another --out")


@contextmanager
def export_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that becomes `out` at the end; if anything fails, nothing stays."""
    require_new(out)
    with writing(out), new_folder(out) as folder:
        yield folder


def fold_bias(embedding: Embedding) -> Tensor:
    """The table of an embedding with its bias in every row, for engines that scale a table and have no bias."""
    return (embedding.table + embedding.bias / embedding.table.shape[1] ** 0.5).detach()


def name_tokens(vocabulary: Vocabulary) -> list[str]:
    """The subwords by id, as sentencepiece writes them, special ones under the names that other engines expect."""
    named = {vocabulary.pad: "<pad>", vocabulary.unk: "<unk>", vocabulary.bos: "<s>", vocabulary.eos: "</s>"}
    names = [named.get(id) or piece_text(vocabulary, id) for id in range(vocabulary.size)]
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ArgumentError(
            f"two subwords of a vocabulary are named {twice!r}, which only sentencepiece can tell apart"
        )
    return names


def write_record(folder: Path, kind: str, translator: Translator, **others: Any) -> None:
    """Say, in the last file of an export, what the others are: version, sizes, symbols, hashes."""
    record = {
        "format": FORMAT,
        "kind": kind,
        "rectiformer": rectiformer.__version__,
        "model": dataclasses.asdict(translator.model.config),
        "source": describe_vocabulary(translator.source),
        "target": describe_vocabulary(translator.target),
        "longest": translator.longest,
        "segment": translator.segment,
        **others,
        "fingerprint": translator.fingerprint(),
        "files": {path.name: hash_file(path) for path in sorted(folder.iterdir()) if path.name != WRITE_LOCK},
    }
    write_file(folder / RECORD, json.dumps(record, indent=1).encode())


def describe_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    """Its size, its symbols by id, and the hash of its model."""
    symbols = {name: getattr(vocabulary, name) for name in ("pad", "unk", "bos", "eos", "separator")}
    return {"size": vocabulary.size, "symbols": symbols, "sha256": vocabulary.sha256}


def read_record(folder: Path, kind: str) -> Mapping[str, Any]:
    """The record of an exported folder whose files are as they were written; CheckpointError where they are not."""
    path = folder / RECORD
    if not path.is_file():
        raise CheckpointError(f"{folder} is no exported folder: it has no {RECORD}; `rectiformer export` makes one")
    record = parse_object(path, read_regular(path, RECORD_LIMIT))
    if (record.get("format"), record.get("kind")) != (FORMAT, kind):
        found = f"format {record.get('format')!r} of {record.get('kind')!r}"
        raise CheckpointError(
            f"{path} says {found}, but format {FORMAT} of {kind!r} is needed; export the run again with --to {kind}"
        )
    files = record.get("files")
    if not isinstance(files, dict) or not files:
        raise damaged(path, "it lists no files")
    for name, sha256 in files.items():
        if Path(name).name != name or (folder / name).is_symlink() or not (folder / name).is_file():
            raise damaged(folder / Path(name).name, "it is missing, or not a file")
        if hash_file(folder / name) != sha256:
            raise damaged(folder / name, "its hash is not the one it was written with")
    return record
