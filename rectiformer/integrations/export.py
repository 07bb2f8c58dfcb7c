"""Exports: which models other engines can run, and folders that are written completely or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

import rectiformer
from rectiformer import files
from rectiformer.config import SITES, ModelConfig
from rectiformer.errors import ArgumentError, CheckpointError
from rectiformer.model.embedding import Embedding
from rectiformer.model.layers import centers_keys, find_score_bias
from rectiformer.ops.variants import VARIANTS
from rectiformer.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from rectiformer.translate.translator import Translator

FORMATS = ("onnx", "ctranslate2", "transformers")
ENGINES = {"onnx": "ONNX", "ctranslate2": "CTranslate2", "transformers": "MarianMT"}
NO_GRAPH = ("topk",)
"""Variants that torch cannot turn into an ONNX graph."""
CAN_RUN = {
    "onnx": tuple(name for name in VARIANTS if name not in NO_GRAPH),
    "ctranslate2": ("softmax",),
    "transformers": ("softmax", "rela", "rela-i", "reluformer", "relu-seqlen"),
}
"""The variants that each engine has; Marian has those that `integrations.transformers.register` gives it."""
NORMS = {"onnx": ("post", "pre"), "ctranslate2": ("post",), "transformers": ("post",)}
"""The placements of LayerNorm that each engine has."""

RECORD = "export.json"
RECORD_VERSION = 1
MAX_RECORD = 2**20  # bytes; ours have a few thousand

Report = Callable[[str], None]
"""Told what is being done, one line at a time."""


def require_exportable(config: ModelConfig, format: str) -> None:
    """Raise an ArgumentError if an engine cannot run such a model; it says why, and which engines can."""
    if reason := obstacle(config, format):
        others = [other for other in FORMATS if not obstacle(config, other)]
        advice = f"export it with --to {' or '.join(others)}" if others else "only rectiformer itself can run it"
        if centered(config) and not obstacle(config, format, center=False):
            advice += ', or train with model.center_keys = "no"'
        raise ArgumentError(f"{reason}; {advice}")


def obstacle(config: ModelConfig, format: str, center: bool = True) -> str:
    """Why an engine cannot run such a model; empty if it can. Without `center`, centered keys are no obstacle."""
    engine, variants = ENGINES[format], {site: config.variant_at(site) for site in SITES}
    if config.positions != "sequence":
        return f"{engine} counts positions through the sequence, but model.positions = {config.positions!r}"
    if config.norm not in NORMS[format]:
        return f"{engine} has no layers with model.norm = {config.norm!r}, only with {NORMS[format][0]!r}"
    if format != "onnx":
        for key in ("memory", "output_norm", "norm_epsilon", "output_gate", "qk_norm"):
            if (value := getattr(config, key)) != (needed := getattr(ModelConfig(), key)):
                return f"{engine} has no layers with model.{key} = {value!r}, only with {needed!r}"
    for site, variant in variants.items():
        if variant not in CAN_RUN[format]:
            known = f"all but {', '.join(NO_GRAPH)}" if format == "onnx" else ", ".join(CAN_RUN[format])
            return f"{engine} cannot compute the {site} attention of this model, {variant!r}, only {known}"
    if format == "transformers":
        if len(set(variants.values())) > 1:
            return f"{engine} has one attention for all sites, this model {variants}"
        if center and centered(config):
            key = f"model.center_keys = {config.center_keys!r}"
            return f"{engine} cannot center keys, as {key} does for {variants['cross']!r}"
        if find_score_bias(config, variants["cross"]) is not None:
            return f"{engine} cannot add model.score_bias = {config.score_bias!r} to its scores"
    return ""


def centered(config: ModelConfig) -> bool:
    """Whether the model centers keys anywhere."""
    return any(centers_keys(config, site) for site in SITES)


def table() -> Iterator[tuple[str, ...]]:
    """One row per variant: its name, and for each format the placements of LayerNorm that can be exported."""
    for variant in VARIANTS:
        yield variant, *(placements(variant, format) for format in FORMATS)


def placements(variant: str, format: str) -> str:
    """The values of model.norm that can be exported, and of model.center_keys unless the default will do; or "no"."""
    configs = {norm: ModelConfig(variant=variant, norm=norm) for norm in ("post", "pre")}
    if fit := [norm for norm, config in configs.items() if not obstacle(config, format)]:
        return ", ".join(fit)
    if fit := [norm for norm, config in configs.items() if not obstacle(config, format, center=False)]:
        return f'{", ".join(fit)}, with `center_keys = "no"`'
    return "no"


def require_packages(format: str, extra: str, *names: str) -> None:
    """Raise an ArgumentError if a package that writes or reads `format` is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ArgumentError(f"{format} needs {', '.join(missing)}; install it with: pip install 'rectiformer[{extra}]'")


def require_new(out: Path) -> None:
    """Raise a CheckpointError if `out` exists."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists and is untouched; remove it, or name another --out")


@contextmanager
def export_folder(translator: Translator, out: Path, format: str, **others: Any) -> Iterator[Path]:
    """A folder to fill that becomes `out` at the end, with a record; if anything fails, nothing remains.

    The record says what the translator is, and `others`.
    """
    require_new(out)
    require_exportable(translator.model.config, format)
    with files.writing(out), files.new_folder(out) as folder:
        yield folder
        write_record(folder, format, translator, **others)


def fold_bias(embedding: Embedding) -> Tensor:
    """The embedding table with its bias added to every row, for engines that scale the table and have no bias."""
    return (embedding.table + embedding.bias / embedding.table.shape[1] ** 0.5).detach()


def name_tokens(vocabulary: Vocabulary) -> list[str]:
    """The subwords by id, as sentencepiece spells them; special ones have the names that other engines expect."""
    from rectiformer.translate.translator import piece_text

    named = {vocabulary.pad: "<pad>", vocabulary.unk: "<unk>", vocabulary.bos: "<s>", vocabulary.eos: "</s>"}
    names = [named.get(id) or piece_text(vocabulary, id) for id in range(vocabulary.size)]
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ArgumentError(
            f"two subwords of a vocabulary are named {twice!r}, which only sentencepiece can tell apart"
        )
    return names


def write_record(folder: Path, engine: str, translator: Translator, **others: Any) -> None:
    """Describe an export in its last file: version, sizes, symbols, hashes of the other files."""
    record = {
        "format": RECORD_VERSION,
        "kind": engine,
        "rectiformer": rectiformer.__version__,
        "model": dataclasses.asdict(translator.model.config),
        "source": describe_vocabulary(translator.source),
        "target": describe_vocabulary(translator.target),
        "max_length": translator.max_length,
        "segment_length": translator.segment_length,
        **others,
        "fingerprint": translator.fingerprint(),
        "files": {
            path.name: files.hash_file(path) for path in sorted(folder.iterdir()) if path.name != files.WRITE_LOCK
        },
    }
    files.write_file(folder / RECORD, json.dumps(record, indent=1).encode())


def describe_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    """Its size, its symbols by id, and the hash of its model."""
    symbols = {name: getattr(vocabulary, name) for name in ("pad", "unk", "bos", "eos", "separator")}
    return {"size": vocabulary.size, "symbols": symbols, "sha256": vocabulary.sha256}


def read_record(folder: Path, engine: str) -> Mapping[str, Any]:
    """The record of an exported folder; CheckpointError unless its files are as they were written."""
    path = folder / RECORD
    if not path.is_file():
        raise CheckpointError(f"{folder} is not an exported folder: it has no {RECORD}; `rectiformer export` makes one")
    record = files.parse_object(path, files.read_regular(path, MAX_RECORD))
    if (record.get("format"), record.get("kind")) != (RECORD_VERSION, engine):
        found = f"format {record.get('format')!r} of {record.get('kind')!r}"
        raise CheckpointError(
            f"{path} says {found}, but format {RECORD_VERSION} of {engine!r} is needed; export the run again with "
            f"--to {engine}"
        )
    listed = record.get("files")
    if not isinstance(listed, dict) or not listed:
        raise files.damaged(path, "it lists no files")
    for name, sha256 in listed.items():
        if Path(name).name != name or (folder / name).is_symlink() or not (folder / name).is_file():
            raise files.damaged(folder / Path(name).name, "it is missing, or not a file")
        if files.hash_file(folder / name) != sha256:
            raise files.damaged(folder / name, "its hash is not the one it was written with")
    return record
