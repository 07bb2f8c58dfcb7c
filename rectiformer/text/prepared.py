"""Text as subword ids on disk, read through memory maps: `prepare` writes a folder, `Prepared.open` reads it.

    manifest.json            hashes, sizes and counts of all that follows; written last
    source.model, target.model
    train-0/, train-1/, ...  a copy of the training pairs each: {source,target}.{ids,starts}, documents.starts
    valid/                   the same, and the text itself: source.txt, target.txt

Pair i of a side is ids[starts[i] : starts[i + 1]], without special symbols; where pairs are segments of documents, each
sentence has a separator after it. With word links, a copy has links.{cells,starts} too, as text/links.py describes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np

from rectiformer.config import Config, DataConfig
from rectiformer.errors import ConfigError, DataError, NoSpaceError
from rectiformer.files import NO_SPACE, WRITE_LOCK, hash_file, new_folder
from rectiformer.text import corpus
from rectiformer.text.batches import BLOCK, Pairs, Part
from rectiformer.text.corpus import Counts, TextPair, files_of, has_documents, has_split, input_files
from rectiformer.text.documents import build_segments, halvings
from rectiformer.text.encoding import SIDES, Ids, cut_ids, encode_pairs, fit_lengths, link_pairs
from rectiformer.text.lines import display_name, local_path
from rectiformer.text.links import CELL_TYPE, LINK_ARRAYS, CellLinks, Cells
from rectiformer.text.vocabulary import TRAINING_CHARACTERS, Vocabulary, choose_vocabularies

FORMAT, LINKED_FORMAT = 1, 2  # of a folder without word links, and with them
ARRAYS = ("source.ids", "source.starts", "target.ids", "target.starts", "documents.starts")
TEXTS = ("source.txt", "target.txt")

Progress = Callable[[str, int], None]  # the stage, and how many pairs are done


class Prepared:
    """A folder written by `prepare`: vocabularies, copies of the training pairs, and validation pairs if any."""

    def __init__(self, folder: Path, manifest: dict[str, Any], verify: bool) -> None:
        self.folder, self.manifest = folder, manifest
        self.hash: str = manifest["hash"]
        hashes = manifest["vocabularies"]
        self.source = Vocabulary.load(folder / "source.model", hashes["source"])
        shared = hashes["source"] == hashes["target"]
        self.target = self.source if shared else Vocabulary.load(folder / "target.model", hashes["target"])
        self.segment_length: int = manifest.get("segment", 0)
        linked = copies_of(manifest) if is_linked(manifest) else []
        splits = {
            name: Encoded(folder / name, self.source, self.target, self.segment_length > 0, verify, name in linked)
            for name in manifest["splits"]
        }
        self.valid = splits.pop("valid", None)
        self.train = list(splits.values())

    @classmethod
    def open(cls, folder: Path, verify: bool = True) -> Prepared:
        """Open a prepared folder; a DataError if anything is missing, changed or outside of it.

        To `verify` is to compare the hash of every file too, which reads all of them once.
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
    def valid_segments(self) -> list[tuple[list[str], list[str]]]:
        """Source and target sentences of each validation pair."""
        if self.valid is None:
            return []
        texts, found = iter(self.valid_text), []
        for index in range(self.valid.pairs):
            borders = np.count_nonzero(self.valid.source(index) == self.source.separator) if self.segment_length else 0
            pairs = list(islice(texts, int(borders) + 1))
            found.append(([source for source, _ in pairs], [target for _, target in pairs]))
        return found

    @property
    def valid_text(self) -> list[tuple[str, str]]:
        """Source and target text of the validation sentences; empty without validation data."""
        if self.valid is None:
            return []
        sides = [(self.folder / "valid" / name).read_bytes().decode("utf-8").split("\n")[:-1] for name in TEXTS]
        return list(zip(*sides, strict=True))

    def set_weights(self, weights: Sequence[float]) -> None:
        """Draw pairs from each file by its weight, as text/batches.py describes; without weights, each pair once."""
        for name, encoded in zip(copies_of(self.manifest), self.train, strict=True):
            sizes = [corpus["pairs"] for corpus in self.manifest["splits"][name].get("corpora", [])]
            if weights and len(sizes) != len(weights):
                raise ConfigError(
                    f"data.weights has {len(weights)} numbers, but {self.folder} was made from {len(sizes)} files that "
                    "can be told apart; give one for each, or prepare it again"
                )
            if weights and (min(sizes) < 0 or sum(sizes) != encoded.pairs):
                raise damaged(
                    self.folder / "manifest.json", f"files of {sizes} pairs, but {name} has {encoded.pairs:,}"
                )
            firsts = accumulate(sizes, initial=0)
            encoded.parts = [Part(*part) for part in zip(firsts, sizes, weights, strict=False)]

    def is_from(self, config: Config) -> bool:
        """Whether `prepare` with this configuration would read the same files, unchanged since, in the same way.

        False for standard input and for text that is not on this machine, since nobody can tell.
        """
        known = all(os.path.exists(local_path(name)) for name in input_files(config.data))
        return known and self.manifest["made_from"] == describe_origin(config)


def require_text(config: Config) -> None:
    """Raise a ConfigError if a stream leaves no text to train subwords on."""
    named = config.vocabulary.source_model and (config.vocabulary.shared or config.vocabulary.target_model)
    if config.data.stream and not (named or config.data.valid_source):
        raise ConfigError(
            "data.stream leaves no text to train subwords on; name vocabulary.source_model (and target_model unless "
            "they are shared), or data.valid_source, or a prepared folder with --data"
        )


def prepare(
    config: Config, folder: Path, progress: Progress | None = None, note: Callable[[str], None] = lambda text: None
) -> Prepared:
    """Train or load the vocabularies, encode the configured text into the new `folder`, and open it.

    The text is streamed, twice if subwords are trained. `folder` appears complete or not at all.
    """
    if os.path.lexists(folder):
        raise DataError(f"{folder} exists; open it as it is, name another folder, or remove it")
    try:
        with new_folder(folder, note) as unfinished:
            write_folder(config, unfinished, progress or (lambda stage, done: None))
    except OSError as error:
        if error.errno in NO_SPACE:
            raise NoSpaceError(
                f"no space left for {folder}; nothing was kept; free some space and prepare again"
            ) from error
        raise DataError(f"cannot write {folder}: {error.strerror}; nothing was kept") from error
    return Prepared.open(folder, verify=False)


def write_folder(config: Config, folder: Path, progress: Progress) -> None:
    origin = describe_origin(config)
    with corpus.spool_inputs(config.data, folder, lambda: progress("spool", 0)) as data:
        progress("vocabulary", 0)
        require_text(config)
        sample = partial(corpus.sample_lines, data, config.vocabulary.sentences, TRAINING_CHARACTERS)
        vocabularies = choose_vocabularies(config.vocabulary, sample, has_documents(data), data.segment_length > 0)
        for side, vocabulary in zip(SIDES, vocabularies, strict=True):
            vocabulary.save(folder / f"{side}.model")
        alpha = config.vocabulary.sampling
        copies = [f"train-{copy}" for copy in range(config.vocabulary.copies if alpha else 1)]
        if data.stream:
            copies = []
        splits = {copy: write_split(data, folder / copy, vocabularies, alpha, progress) for copy in copies}
        if has_split(data, "valid"):
            splits["valid"] = write_split(data, folder / "valid", vocabularies, 0.0, progress)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != WRITE_LOCK)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": hash_file(path)} for path in paths
    }
    hashes = {side: vocabulary.sha256 for side, vocabulary in zip(SIDES, vocabularies, strict=True)}
    version = LINKED_FORMAT if data.links else FORMAT
    manifest = {"format": version, "made_from": origin, "vocabularies": hashes, "splits": splits, "files": files}
    manifest["segment"] = data.segment_length
    manifest |= {"stream": True} if data.stream else {}
    manifest["hash"] = hash_data(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def write_split(
    data: DataConfig, folder: Path, vocabularies: tuple[Vocabulary, Vocabulary], alpha: float, progress: Progress
) -> dict[str, Any]:
    """Encode one split or copy into the new `folder`, sampling subwords if alpha > 0; return its summary."""
    split, max_length = "train", data.segment_length - 1 if data.segment_length else data.max_length  # the separator
    if folder.name == "valid":
        split, max_length = "valid", sys.maxsize
    corpora = len(files_of(data, split)[0]) or 1
    counts, read, number = Counts(), Counts(), 1
    linked = split == "train" and bool(data.links)
    with SplitWriter(folder, vocabularies, data.segment_length > 0, corpora, linked) as writer:
        for pairs in corpus.read_ahead(corpus.in_batches(corpus.read_pairs(data, split, read))):
            texts = [[pair.source for pair in pairs], [pair.target for pair in pairs]]
            seed = f"{data.seed}/{folder.name}/{number - 1}"
            sides, lengths = encode_pairs(vocabularies, texts, alpha, seed)
            cells = link_pairs(vocabularies, pairs, texts, alpha, seed, data.link_words) if linked else None
            numbers = range(number, number + len(pairs))
            fitting = fit_lengths(lengths, max_length, data, counts, "pair {:,}", numbers)
            writer.add(pairs, sides, fitting, cells)
            number += len(pairs)
            progress(folder.name, number - 1)
    counts.pairs, counts.documents = int(writer.pairs.sum()), writer.documents
    counts.empty, counts.bad_utf8 = counts.empty + read.empty, read.bad_utf8
    if not counts.pairs:
        raise DataError(f"no sentence pairs left in {folder.name}: {counts.describe()}")
    if linked and not writer.cells:
        raise DataError(f"no word is linked in {', '.join(map(display_name, data.links))}; leave data.links out")
    borders = np.append(0, np.cumsum(writer.pairs))
    if data.segment_length:
        borders = cut_segments(folder, data.segment_length, borders, data.mixed and split == "train")
        counts.segments = int(borders[-1])
    tokens = {f"{side}_tokens": count for side, count in zip(SIDES, writer.tokens, strict=True)}
    columns = {"pairs": np.diff(borders), **tokens}
    return {
        "pairs": int(borders[-1]),
        "documents": writer.documents,
        **{name: int(count.sum()) for name, count in tokens.items()},
        "counts": dataclasses.asdict(counts),
        "corpora": [{name: int(column[index]) for name, column in columns.items()} for index in range(corpora)],
    }


def describe_origin(config: Config) -> dict[str, Any]:
    """What a folder is made from: the configuration, and size and time of every file that it names."""
    models = [name for name in (config.vocabulary.source_model, config.vocabulary.target_model) if name]
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in ("data", "vocabulary")}
    del sections["data"]["weights"]  # they change nothing here
    if not config.data.stream:
        del sections["data"]["stream"]  # a key that older folders lack
    if not config.data.mixed:
        del sections["data"]["mixed"]  # likewise
    if not config.data.links:
        del sections["data"]["links"], sections["data"]["link_words"]
    paths = {name: local_path(name) for name in input_files(config.data)} | {name: name for name in models}
    found = {name: os.stat(path) for name, path in paths.items() if os.path.exists(path)}
    inputs = {name: [state.st_size, state.st_mtime_ns] for name, state in found.items()}
    return json.loads(json.dumps({**sections, "inputs": inputs}))  # as read back: lists, no tuples


def read_manifest(folder: Path) -> dict[str, Any]:
    text = regular_file(folder, "manifest.json").read_bytes()
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(folder / "manifest.json", f"not JSON ({error})") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found not in (FORMAT, LINKED_FORMAT):
        raise damaged(
            folder / "manifest.json", f"format {found!r}, but this version reads {FORMAT} and {LINKED_FORMAT}"
        )
    return manifest


def is_linked(manifest: dict[str, Any]) -> bool:
    """Whether the training pairs have word links."""
    return bool(manifest["format"] == LINKED_FORMAT)


def arrays_of(manifest: dict[str, Any], split: str) -> tuple[str, ...]:
    """The names of the arrays that a split or copy has."""
    return ARRAYS + LINK_ARRAYS if is_linked(manifest) and split != "valid" else ARRAYS


def check_manifest(folder: Path, manifest: dict[str, Any], verify: bool) -> None:
    """Raise a DataError unless its files exist, are regular, inside `folder`, and of the stated size and hash."""
    for name, entry in manifest["files"].items():
        path = regular_file(folder, name)
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise damaged(path, f"{size:,} bytes, but the manifest says {entry['bytes']:,}")
        if verify and (found := hash_file(path)) != entry["sha256"]:
            raise damaged(path, f"hash {found}, but the manifest says {entry['sha256']}")
    needed = {"source.model", "target.model"}
    for split in {*manifest["splits"], *(() if manifest.get("stream") else ("train-0",))}:
        needed |= {f"{split}/{name}" for name in (*arrays_of(manifest, split), *(TEXTS if split == "valid" else ()))}
    if missing := sorted(needed - set(manifest["files"])):
        raise damaged(folder / "manifest.json", f"does not name {missing[0]}")
    if (expected := hash_data(manifest)) != manifest["hash"]:
        raise damaged(folder / "manifest.json", f"data hash {manifest['hash']}, but its files make {expected}")


def regular_file(folder: Path, name: str) -> Path:
    """The path of a file named in a manifest; a DataError if it leads out of `folder` or is not a regular file."""
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
    """The hash of what training reads: vocabularies, and the ids, offsets, documents and links of every copy."""
    parts = [manifest["vocabularies"][side] for side in SIDES]
    names = [f"{copy}/{name}" for copy in copies_of(manifest) for name in arrays_of(manifest, copy)]
    parts += [manifest["files"][name]["sha256"] for name in names]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def copies_of(manifest: dict[str, Any]) -> list[str]:
    """The folders of the copies of the training text."""
    return [split for split in manifest["splits"] if split != "valid"]


def damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}; remove the folder and run `rectiformer data prepare` again")


class Encoded(Pairs):
    """The pairs of one split or copy in a folder, as views of its files, with no special symbols but separators.

    Args:
        segmented: whether pairs are segments, with a separator after each sentence; the last one is left out here.
        verify: read all ids once and check that they are in the vocabulary, and links that they are of these pairs.
        linked: whether there are word links.
    """

    def __init__(
        self,
        folder: Path,
        source: Vocabulary,
        target: Vocabulary,
        segmented: bool = False,
        verify: bool = True,
        linked: bool = False,
    ) -> None:
        ids = [map_ids(folder / f"{side}.ids", of, verify) for side, of in zip(SIDES, (source, target), strict=True)]
        paths = [folder / f"{side}.starts" for side in SIDES]
        lengths = [read_lengths(path, len(each), segmented) for path, each in zip(paths, ids, strict=True)]
        super().__init__(ids, lengths, [map_array(path, "<i8") for path in paths])
        self.document_starts = map_array(folder / "documents.starts", "<i8")
        if len(self.target_lengths) != self.pairs:
            raise damaged(folder, f"{self.pairs:,} sources but {len(self.target_lengths):,} targets")
        if self.document_starts[0] != 0 or np.diff(self.document_starts, append=self.pairs).min() < 1:
            raise damaged(folder / "documents.starts", f"its documents do not lie in {self.pairs:,} pairs")
        if linked:
            cells, starts = (
                map_array(folder / name, kind) for name, kind in zip(LINK_ARRAYS, (CELL_TYPE, "<i8"), strict=True)
            )
            self.links = CellLinks(cells, starts)
            if verify and not self.links.fit(self.source_lengths, self.target_lengths, BLOCK):
                raise damaged(folder / LINK_ARRAYS[0], f"its links are not those of {self.pairs:,} pairs")


def map_ids(path: Path, vocabulary: Vocabulary, verify: bool) -> np.ndarray:
    """The ids of a side; with `verify`, a DataError unless all of them are in the vocabulary."""
    if verify:
        highest = max(int(block.max()) for block in read_blocks(path, vocabulary.id_type))
        if highest >= vocabulary.size:
            raise damaged(path, f"id {highest} in a vocabulary of {vocabulary.size}")
    return map_array(path, vocabulary.id_type)


def read_lengths(path: Path, ids: int, segmented: bool) -> np.ndarray:
    """The lengths of all pairs; a DataError unless their offsets cut this many ids into pairs."""
    lengths = np.empty(max(0, path.stat().st_size // 8 - 1), dtype=np.int32)
    fits, done, before = True, 0, np.zeros(0, dtype=np.int64)
    for block in read_blocks(path, "<i8"):
        if not done:
            fits = block[0] == 0
        found = np.diff(block, prepend=before) - segmented
        fits = fits and (found.min(initial=1) >= 1)
        lengths[done : done + len(found)] = found
        done, before = done + len(found), block[-1:]
    if not (fits and len(lengths) and before[0] == ids):
        raise damaged(path, f"its offsets do not cut {ids:,} ids into pairs")
    return lengths


def read_blocks(path: Path, dtype: str) -> Iterator[np.ndarray]:
    """An array, block by block. A map that is read to its end counts as memory of the process; this does not."""
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype, BLOCK)):
            yield block


def map_array(path: Path, dtype: str) -> np.ndarray:
    mapped = np.memmap(path, dtype=dtype, mode="r")
    return mapped.view(np.ndarray)  # slicing a plain array takes a tenth of the time


class SplitWriter(ExitStack):
    """Appends pairs to the files of a new folder; a folder named "valid" gets their text too.

    Args:
        separated: write a separator after every sentence, for `cut_segments`.
        corpora: how many corpora the pairs come from.
        linked: whether the pairs have word links.
    """

    def __init__(
        self,
        folder: Path,
        vocabularies: tuple[Vocabulary, Vocabulary],
        separated: bool,
        corpora: int = 1,
        linked: bool = False,
    ) -> None:
        super().__init__()
        folder.mkdir()
        self._ends = [vocabulary.separator if separated else None for vocabulary in vocabularies]
        self.documents, self.tokens = 0, np.zeros((len(SIDES), corpora), dtype=np.int64)
        self.pairs = np.zeros(corpora, dtype=np.int64)
        self._types = [vocabulary.id_type for vocabulary in vocabularies]
        self._begun, self._document = 0, 0  # documents that began before the next pair, and before the last one kept
        self._texts = TEXTS if folder.name == "valid" else ()
        names = ARRAYS + self._texts + (LINK_ARRAYS if linked else ())
        self._files = {name: self.enter_context((folder / name).open("wb")) for name in names}
        self.cells = 0
        for name in names:
            if name.endswith(".starts") and name != "documents.starts":
                self._files[name].write(bytes(8))

    def add(
        self, pairs: Sequence[TextPair], sides: Sequence[Ids], lengths: np.ndarray, links: Cells | None = None
    ) -> None:
        """Write pairs, cut to `lengths` [sides, pairs]; those of length 0 are left out."""
        kept = lengths[0] > 0
        self._add_documents(np.array([pair.document_start for pair in pairs]), kept)
        corpora = np.array([pair.corpus for pair in pairs])[kept]
        for index, (side, ids) in enumerate(zip(SIDES, sides, strict=True)):
            written, sizes = cut_ids(ids, lengths[index], self._ends[index])
            starts = self.tokens[index].sum() + np.cumsum(sizes[kept])
            self._files[f"{side}.ids"].write(written.astype(self._types[index]).tobytes())
            self._files[f"{side}.starts"].write(starts.astype("<i8").tobytes())
            np.add.at(self.tokens[index], corpora, sizes[kept])
        if links is not None:
            cells, counts = links.cut(lengths)
            self._files["links.cells"].write(cells.astype(CELL_TYPE).tobytes())
            self._files["links.starts"].write((self.cells + np.cumsum(counts[kept])).astype("<i8").tobytes())
            self.cells += len(cells)
        for name, side in zip(self._texts, SIDES, strict=False):
            lines = [getattr(pair, side) + "\n" for pair, is_kept in zip(pairs, kept, strict=True) if is_kept]
            self._files[name].write("".join(lines).encode())
        self.pairs += np.bincount(corpora, minlength=len(self.pairs))

    def _add_documents(self, starts: np.ndarray, kept: np.ndarray) -> None:
        """Note where documents start: one whose first pair is dropped starts with the next pair that is kept."""
        begun = self._begun + np.cumsum(starts)
        first = np.flatnonzero(np.diff(begun[kept], prepend=self._document))
        self._files["documents.starts"].write((self.pairs.sum() + first).astype("<i8").tobytes())
        self.documents += len(first)
        self._begun = int(begun[-1])
        self._document = int(begun[kept][-1]) if kept.any() else self._document


def cut_segments(folder: Path, limit: int, borders: np.ndarray, mixed: bool = False) -> np.ndarray:
    """Join the sentences in `folder` into segments of up to `limit` subwords; the ids stay as they are.

    Args:
        borders: the first sentences of some documents.
        mixed: cut successive documents at `limit`, half of it, and so on down to single sentences.

    Returns:
        The segments that start at `borders`.
    """
    starts = {side: np.fromfile(folder / f"{side}.starts", "<i8") for side in SIDES}
    documents = np.fromfile(folder / "documents.starts", "<i8")
    lengths = np.stack([np.diff(starts[side]) - 1 for side in SIDES], 1)
    segments = build_segments(lengths, documents, halvings(limit) if mixed else [limit])
    firsts = np.array([first for first, _ in segments])
    for side in SIDES:
        np.append(starts[side][firsts], starts[side][-1]).tofile(folder / f"{side}.starts")
    np.searchsorted(firsts, documents).astype("<i8").tofile(folder / "documents.starts")
    return np.searchsorted(firsts, borders)
