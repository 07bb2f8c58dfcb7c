"""Text as subword ids on disk, read through memory maps: `prepare` writes a folder, `Prepared.open` reads it.

    manifest.json            hashes, sizes and counts of all that follows; written last
    source.model, target.model
    train-0/, train-1/, ...  a copy of the training pairs each: {source,target}.{ids,starts}, documents.starts
    valid/                   the same, and the text itself: source.txt, target.txt

Ids have no special symbols; pair i of a side is ids[starts[i] : starts[i + 1]].
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rectiformer.config import Config, DataConfig
from rectiformer.errors import DataError, NoSpaceError
from rectiformer.text import corpus
from rectiformer.text.corpus import Counts, TextPair
from rectiformer.text.vocabulary import TRAINING_CHARACTERS, Vocabulary, choose_vocabularies, sync

FORMAT = 1
SIDES = ("source", "target")
ARRAYS = ("source.ids", "source.starts", "target.ids", "target.starts", "documents.starts")
TEXTS = ("source.txt", "target.txt")

Progress = Callable[[str, int], None]  # what is being done, and how many pairs it is done for


class Encoded:
    """The pairs of one split or copy, as ids without special symbols. `verify` reads all of them once."""

    def __init__(self, folder: Path, source: Vocabulary, target: Vocabulary, verify: bool = True) -> None:
        self._source = map_sentences(folder, "source", source, verify)
        self._target = map_sentences(folder, "target", target, verify)
        self.source_lengths = np.diff(self._source[1]).astype(np.int32)
        self.target_lengths = np.diff(self._target[1]).astype(np.int32)
        self.pairs = len(self.source_lengths)
        self.document_starts = map_array(folder / "documents.starts", "<i8")
        if len(self.target_lengths) != self.pairs:
            raise damaged(folder, f"{self.pairs:,} sources but {len(self.target_lengths):,} targets")
        if self.document_starts[0] != 0 or np.diff(self.document_starts, append=self.pairs).min() < 1:
            raise damaged(folder / "documents.starts", f"its documents do not lie in {self.pairs:,} pairs")

    def source(self, index: int) -> np.ndarray:
        """Source ids of pair `index`: a view of the file."""
        ids, starts = self._source
        return ids[starts[index] : starts[index + 1]]

    def target(self, index: int) -> np.ndarray:
        """Target ids of pair `index`: a view of the file."""
        ids, starts = self._target
        return ids[starts[index] : starts[index + 1]]


def map_sentences(folder: Path, side: str, vocabulary: Vocabulary, verify: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids and starts of a side; a DataError where they do not fit each other or, with `verify`, the vocabulary."""
    ids = map_array(folder / f"{side}.ids", vocabulary.id_type)
    starts = map_array(folder / f"{side}.starts", "<i8")
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(ids) or np.diff(starts).min() < 1:
        raise damaged(folder / f"{side}.starts", f"its offsets do not cut {len(ids):,} ids into sentences")
    if verify and ids.max() >= vocabulary.size:
        raise damaged(folder / f"{side}.ids", f"id {ids.max()} in a vocabulary of {vocabulary.size}")
    return ids, starts


def map_array(path: Path, kind: str) -> np.ndarray:
    return np.memmap(path, dtype=kind, mode="r").view(
        np.ndarray
    )  # a slice of a plain array costs a tenth of a memmap's


class Prepared:
    """A folder written by `prepare`: vocabularies, copies of the training pairs, validation pairs if there are any."""

    def __init__(self, folder: Path, manifest: dict[str, Any], verify: bool) -> None:
        self.folder, self.manifest = folder, manifest
        self.hash: str = manifest["hash"]
        hashes = manifest["vocabularies"]
        self.source = Vocabulary.load(folder / "source.model", hashes["source"])
        shared = hashes["source"] == hashes["target"]
        self.target = self.source if shared else Vocabulary.load(folder / "target.model", hashes["target"])
        splits = {name: Encoded(folder / name, self.source, self.target, verify) for name in manifest["splits"]}
        self.valid = splits.pop("valid", None)
        self.train = list(splits.values())

    @classmethod
    def open(cls, folder: Path, verify: bool = True) -> Prepared:
        """Read a prepared folder; a DataError where anything is missing, changed or outside of it.

        Args:
            verify: also compare the hash of every file, which reads all of them once.
        """
        manifest = read_manifest(folder)
        try:
            check_manifest(folder, manifest, verify)
            return cls(folder, manifest, verify)
        except DataError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise damaged(folder / "manifest.json", f"not a manifest ({type(error).__name__}: {error})") from error

    @property
    def valid_text(self) -> list[tuple[str, str]]:
        """Source and target of the validation pairs as they were read; empty without validation data."""
        if self.valid is None:
            return []
        sides = [(self.folder / "valid" / name).read_bytes().decode("utf-8").split("\n")[:-1] for name in TEXTS]
        return list(zip(*sides, strict=True))

    def is_from(self, config: Config) -> bool:
        """Whether `prepare` with this configuration would read the same files, unchanged since, in the same way.

        Never true of standard input, of which nobody can tell.
        """
        return "-" not in corpus.input_files(config.data) and self.manifest["made_from"] == describe_origin(config)


def damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}; remove the folder and run `rectiformer data prepare` again")


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
    for split in {"train-0", *manifest["splits"]}:
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


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_data(manifest: dict[str, Any]) -> str:
    """What training reads, in one hash: vocabularies, and the ids, offsets and documents of every copy."""
    parts = [manifest["vocabularies"][side] for side in SIDES]
    copies = [split for split in manifest["splits"] if split != "valid"]
    parts += [manifest["files"][f"{copy}/{name}"]["sha256"] for copy in copies for name in ARRAYS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def prepare(config: Config, folder: Path, progress: Progress | None = None) -> Prepared:
    """Choose or load the vocabularies, encode the configured text into the new `folder`, and open it.

    The text is streamed, twice where subwords have to be chosen. `folder` appears at once and complete, or not at all.
    """
    if os.path.lexists(folder):
        raise DataError(f"{folder} exists; open it as it is, name another folder, or remove it")
    unfinished = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a killed process whose number we have now
    try:
        unfinished.mkdir(parents=True)
        write_folder(config, unfinished, progress or (lambda stage, done: None))
        os.rename(unfinished, folder)
        sync(folder.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"no space left for {folder}; nothing was kept; make room and prepare again") from error
        raise DataError(f"cannot write {folder}: {error.strerror}; nothing was kept") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Prepared.open(folder, verify=False)


def write_folder(config: Config, folder: Path, progress: Progress) -> None:
    origin = describe_origin(config)
    with corpus.spool_inputs(config.data, folder) as data:
        progress("vocabulary", 0)
        sample = partial(corpus.sample_lines, data, config.vocabulary.sentences, TRAINING_CHARACTERS)
        vocabularies = choose_vocabularies(config.vocabulary, sample)
        for side, vocabulary in zip(SIDES, vocabularies, strict=True):
            vocabulary.save(folder / f"{side}.model")
        alpha = config.vocabulary.sampling
        copies = [f"train-{copy}" for copy in range(config.vocabulary.copies if alpha else 1)]
        splits = {copy: write_split(data, folder / copy, vocabularies, alpha, progress) for copy in copies}
        if corpus.has_split(data, "valid"):
            splits["valid"] = write_split(data, folder / "valid", vocabularies, 0.0, progress)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": hash_file(path)} for path in paths
    }
    hashes = {side: vocabulary.sha256 for side, vocabulary in zip(SIDES, vocabularies, strict=True)}
    manifest = {"format": FORMAT, "made_from": origin, "vocabularies": hashes, "splits": splits, "files": files}
    manifest["hash"] = hash_data(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in (*paths, folder / "manifest.json", *(folder / split for split in splits), folder):
        sync(path)


def write_split(
    data: DataConfig, folder: Path, vocabularies: tuple[Vocabulary, Vocabulary], alpha: float, progress: Progress
) -> dict[str, Any]:
    """Encode the pairs of one split or copy into the new `folder`, drawing subwords where alpha > 0; its summary."""
    split, longest = ("valid", sys.maxsize) if folder.name == "valid" else ("train", data.longest)
    counts, number, document_start = Counts(), 0, False
    with SplitWriter(folder, vocabularies) as writer:
        for pairs in corpus.in_batches(corpus.read_pairs(data, split, counts)):
            key = f"{data.seed}/{folder.name}/{number}"
            sources = vocabularies[0].encode_all([pair.source for pair in pairs], alpha, f"{key}/source")
            targets = vocabularies[1].encode_all([pair.target for pair in pairs], alpha, f"{key}/target")
            for pair, *sides in zip(pairs, sources, targets, strict=True):
                number += 1
                document_start |= pair.document_start  # kept for the next pair where this one is dropped
                if fitting := corpus.fit_lengths(sides, longest, data.too_long, counts, number):
                    writer.add(pair, fitting, document_start)
                    document_start = False
            progress(folder.name, number)
    counts.pairs, counts.documents = writer.pairs, writer.documents
    if not writer.pairs:
        raise DataError(f"no sentence pairs left in {folder.name}: {counts.describe()}")
    tokens = {f"{side}_tokens": count for side, count in zip(SIDES, writer.tokens, strict=True)}
    return {"pairs": writer.pairs, "documents": writer.documents, **tokens, "counts": dataclasses.asdict(counts)}


class SplitWriter(ExitStack):
    """Appends pairs to the files of a new folder; those of the folder "valid" with their text."""

    def __init__(self, folder: Path, vocabularies: tuple[Vocabulary, Vocabulary]) -> None:
        super().__init__()
        folder.mkdir()
        self.pairs, self.documents, self.tokens = 0, 0, [0, 0]
        self._types = [vocabulary.id_type for vocabulary in vocabularies]
        self._texts = TEXTS if folder.name == "valid" else ()
        self._files = {name: self.enter_context((folder / name).open("wb")) for name in ARRAYS + self._texts}
        for side in SIDES:
            self._files[f"{side}.starts"].write(bytes(8))

    def add(self, pair: TextPair, sides: list[list[int]], document_start: bool) -> None:
        if document_start:
            self._files["documents.starts"].write(self.pairs.to_bytes(8, "little"))
        for place, (side, ids) in enumerate(zip(SIDES, sides, strict=True)):
            self.tokens[place] += len(ids)
            self._files[f"{side}.ids"].write(np.array(ids, dtype=self._types[place]).tobytes())
            self._files[f"{side}.starts"].write(self.tokens[place].to_bytes(8, "little"))
        for name, text in zip(self._texts, (pair.source, pair.target), strict=False):
            self._files[name].write(text.encode("utf-8") + b"\n")
        self.pairs += 1
        self.documents += document_start


def describe_origin(config: Config) -> dict[str, Any]:
    """What a folder is made from: the configuration, and size and time of every file it names."""
    models = [name for name in (config.vocabulary.source_model, config.vocabulary.target_model) if name]
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in ("data", "vocabulary")}
    found = {name: os.stat(name) for name in [*corpus.input_files(config.data), *models] if os.path.exists(name)}
    inputs = {name: [state.st_size, state.st_mtime_ns] for name, state in found.items()}
    return json.loads(json.dumps({**sections, "inputs": inputs}))  # as it is read back: lists, no tuples
