"""The attention record: what the heads of one model did with some sentences, in one file in an open format.

record.schema.json is the format. Only weights other than 0 are stored, as compressed sparse rows, so that a head that
attends to nothing costs nothing, and a row that weighs none of the keys it sees is marked as such. Offsets into texts
count Unicode characters.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import rectiformer
from rectiformer.errors import ArgumentError, DataError
from rectiformer.files import replacing
from rectiformer.measure.alignment import Links, check_links

FORMAT, VERSION = "rectiformer-attention", 1
SITES = ("cross", "encoder", "decoder")
"""Where a model attends: cross-attention, and the self-attention of encoder and decoder."""
DTYPES = {"row_starts": "u4", "columns": "u4", "weights": "f4", "mass": "f4", "null": "u1", "visible": "u4"}
"""The arrays of a site, and the dtype each is stored in."""
LARGEST_ARRAYS = 2**30  # bytes of all arrays of a record together
LARGEST_TEXT = 2**31  # bytes of JSON, in which they take four thirds of that at most
SCHEMA = Path(__file__).with_name("record.schema.json")
TYPES: dict[str, type] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


class PieceSpan(NamedTuple):
    """A subword and the characters of the text it covers: text[start:stop]; the end of a sentence covers none."""

    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Side:
    """A sentence, its pieces (the last one its end), and which of them make up each word."""

    text: str
    pieces: list[PieceSpan]
    words: list[tuple[int, int, int, int]]
    """First piece, piece after the last, first character, character after the last."""
    sentences: list[tuple[int, int]] = field(default_factory=list)
    """Where the text is a document: first piece and piece after the last, without what separates sentences."""


@dataclass(frozen=True, eq=False)
class SiteRecord:
    """One attention over one example: H heads, M queries, N keys; row r of the arrays is head r // M, query r % M."""

    kind: str
    """cross, encoder or decoder. A decoder's own key 0 is the start symbol, key j the target piece j - 1."""
    layer: int
    heads: int
    queries: int
    keys: int
    row_starts: np.ndarray
    """[H * M + 1]: row r has the columns and weights from row_starts[r] up to row_starts[r + 1]."""
    columns: np.ndarray
    weights: np.ndarray
    mass: np.ndarray
    """[H * M], the sum of each row."""
    null: np.ndarray
    """[H * M], 1 where a query sees keys and weighs none of them."""
    visible: np.ndarray
    """[H * M], how many keys each query sees."""

    @classmethod
    def from_dense(cls, kind: str, layer: int, weights: np.ndarray, visible: np.ndarray) -> SiteRecord:
        """The record of weights [H, M, N], where each query sees `visible` [H, M] keys."""
        heads, queries, keys = weights.shape
        flat = weights.astype(np.float32, copy=False).reshape(heads * queries, keys)
        row, column = flat.nonzero()
        return cls.from_entries(kind, layer, weights.shape, row, column, flat[row, column], visible)

    @classmethod
    def from_entries(
        cls,
        kind: str,
        layer: int,
        shape: tuple[int, ...],
        rows: np.ndarray,
        columns: np.ndarray,
        weights: np.ndarray,
        visible: np.ndarray,
    ) -> SiteRecord:
        """The record of the weights other than 0 of a shape [H, M, N], where the columns of each row are in order."""
        heads, queries, keys = shape
        order = np.argsort(rows, kind="stable")
        nonzero, mass = (np.bincount(rows, each, heads * queries) for each in (None, weights))
        return cls(
            kind,
            layer,
            heads,
            queries,
            keys,
            row_starts=np.concatenate([[0], nonzero.cumsum()]).astype(np.uint32),
            columns=columns[order].astype(np.uint32),
            weights=weights[order],
            mass=mass.astype(np.float32),
            null=((nonzero == 0) & (visible.reshape(-1) > 0)).astype(np.uint8),
            visible=visible.reshape(-1).astype(np.uint32),
        )

    def dense(self) -> np.ndarray:
        """The weights [H, M, N] in float32, zeros included."""
        weights = np.zeros((self.heads * self.queries, self.keys), dtype=np.float32)
        weights[np.repeat(np.arange(len(weights)), np.diff(self.row_starts)), self.columns] = self.weights
        return weights.reshape(self.heads, self.queries, self.keys)


@dataclass(frozen=True)
class Example:
    """One sentence pair, or one sentence for a model without a decoder, and what the heads did with it."""

    source: Side
    target: Side | None
    forced: bool
    """Whether the target was given; otherwise it is the model's own translation."""
    translation: str | None
    """The model's own translation, if it is known."""
    gold: Links | None
    sites: list[SiteRecord]

    def site(self, kind: str, layer: int) -> SiteRecord:
        """The attention of this kind in this layer, from 0."""
        for site in self.sites:
            if (site.kind, site.layer) == (kind, layer):
                return site
        known = ", ".join(f"{site.kind} {site.layer}" for site in self.sites) or "none"
        raise ArgumentError(f"the example has no {kind} attention of layer {layer}; it has {known}, counted from 0")


@dataclass(frozen=True)
class ModelCard:
    """The model of a record."""

    name: str
    id: str
    """SHA-256 of configuration and weights, or empty if they are not known."""
    variants: dict[str, str]
    """The variant at encoder, decoder and cross."""
    layers: dict[str, int]
    """How many layers encoder and decoder have."""
    heads: int

    def to_json(self) -> dict[str, Any]:
        """The card as a record or findings carry it."""
        return {**asdict(self), "written_by": f"rectiformer {rectiformer.__version__}"}


@dataclass(frozen=True)
class AttentionRecord:
    """One model and some examples."""

    model: ModelCard
    examples: list[Example]


def write_record(record: AttentionRecord, path: str | Path) -> None:
    """Write a record, compressed if the name ends in .gz; an old file stays until the new one is complete."""
    path = Path(path)
    content = to_json(record)
    # Level 1: the arrays are compressed already, and what base64 added goes at any level.
    packed = path.suffix == ".gz"
    with replacing(path) as raw, gzip.GzipFile("", "wb", 1, raw, 0) if packed else nullcontext(raw) as file:
        for part in json.JSONEncoder(separators=(",", ":"), allow_nan=False).iterencode(content):
            file.write(part.encode("ascii"))


def read_record(path: str | Path) -> AttentionRecord:
    """Read a record; DataError, in one line, for anything that is not one."""
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read(LARGEST_TEXT + 1)  # a small file can hold far more than there is memory
        if len(data) > LARGEST_TEXT:
            raise DataError(f"{path} holds more than {LARGEST_TEXT:,} bytes, which no attention record has")
        content = json.loads(data)
    except DataError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is truncated or not gzip ({error}); write it again, or name it without .gz") from error
    except OSError as error:
        raise DataError(f"cannot read attention record {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON, or not all of it; an attention record is one JSON object") from error
    return from_json(content, str(path))


def to_json(record: AttentionRecord) -> dict[str, Any]:
    """The record as plain JSON values; DataError where it is inconsistent, so that whatever is written can be read."""
    for index, example in enumerate(record.examples):
        check_example(example, f"examples[{index}]")
    examples = [example_to_json(example) for example in record.examples]
    check_size(examples, "the record")
    return {"format": FORMAT, "version": VERSION, "model": record.model.to_json(), "examples": examples}


def example_to_json(example: Example) -> dict[str, Any]:
    gold = example.gold
    links = gold and {"sure": [*map(list, sorted(gold.sure))], "possible": [*map(list, sorted(gold.possible))]}
    return {
        "source": side_to_json(example.source),
        "target": None if example.target is None else side_to_json(example.target),
        "forced": example.forced,
        "translation": example.translation,
        "gold": links,
        "sites": [site_to_json(site) for site in example.sites],
    }


def side_to_json(side: Side) -> dict[str, Any]:
    content = {"text": side.text, "pieces": [*map(list, side.pieces)], "words": [*map(list, side.words)]}
    return {**content, "sentences": [*map(list, side.sentences)]} if side.sentences else content


def site_to_json(site: SiteRecord) -> dict[str, Any]:
    values = {each.name: getattr(site, each.name) for each in fields(site)}
    return {name: pack(value, DTYPES[name]) if name in DTYPES else value for name, value in values.items()}


def from_json(content: Any, where: str) -> AttentionRecord:
    """The record of `to_json`; DataError, beginning with `where`, for anything else."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise DataError(f"{where} is not an attention record: its format is {shorten(found)}, not {FORMAT!r}")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise DataError(f"{where} is version {version}; this rectiformer reads {VERSION}; upgrade rectiformer")
    check_schema(content, load_schema(), f"{where}: record")
    check_size(content["examples"], where)
    model = {key: content["model"][key] for key in ("name", "id", "variants", "layers", "heads")}
    examples = []
    for index, each in enumerate(content["examples"]):
        location = f"{where}: examples[{index}]"
        examples.append(example_from_json(each, location))
        check_example(examples[-1], location)
    return AttentionRecord(ModelCard(**model), examples)


def check_size(examples: list[dict[str, Any]], where: str) -> None:
    """DataError, beginning with `where`, if the arrays would be larger than a record may be."""
    sites = (site for example in examples for site in example["sites"])
    size = sum(site[name]["shape"][0] * np.dtype(dtype).itemsize for site in sites for name, dtype in DTYPES.items())
    if size > LARGEST_ARRAYS:
        raise DataError(
            f"{where}: its arrays have {size:,} bytes, but at most {LARGEST_ARRAYS:,} are read; record fewer examples"
        )


def example_from_json(content: dict[str, Any], where: str) -> Example:
    gold, target = content["gold"], content["target"]
    links = gold and Links(frozenset(map(tuple, gold["sure"])), frozenset(map(tuple, gold["possible"])))
    sites = [site_from_json(site, f"{where}.sites[{index}]") for index, site in enumerate(content["sites"])]
    return Example(
        side_from_json(content["source"]),
        None if target is None else side_from_json(target),
        content["forced"],
        content["translation"],
        links,
        sites,
    )


def side_from_json(content: dict[str, Any]) -> Side:
    return Side(
        content["text"],
        [PieceSpan(*piece) for piece in content["pieces"]],
        [(first, last, start, stop) for first, last, start, stop in content["words"]],
        [(first, last) for first, last in content.get("sentences", ())],
    )


def site_from_json(content: dict[str, Any], where: str) -> SiteRecord:
    values = {each.name: content[each.name] for each in fields(SiteRecord)}
    arrays = {name: unpack(values[name], f"{where}.{name}") for name in DTYPES}
    return SiteRecord(**{**values, **arrays})


def pack(array: np.ndarray, dtype: str) -> dict[str, Any]:
    """An array [n] as JSON: base64 of gzip of little-endian bytes; equal arrays give equal text."""
    data = gzip.compress(array.astype(f"<{dtype}", copy=False).tobytes(), 6, mtime=0)
    return {"dtype": dtype, "shape": [len(array)], "data": base64.b64encode(data).decode("ascii")}


def unpack(packed: dict[str, Any], where: str) -> np.ndarray:
    """The array of `pack`; DataError if its data does not match its shape."""
    dtype = np.dtype(f"<{packed['dtype']}")
    size = packed["shape"][0] * dtype.itemsize
    stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        # One byte more than there should be: data that grows without end is seen and not unpacked.
        data = stream.decompress(base64.b64decode(packed["data"], validate=True), size + 1)
    except (ValueError, zlib.error) as error:
        raise DataError(f"{where} is corrupt: {error}; write the record again") from error
    if len(data) != size or not stream.eof:
        more = "more than " * (len(data) > size)
        raise DataError(
            f"{where} is truncated or corrupt: {more}{min(len(data), size)} bytes of {size}; write it again"
        )
    return np.frombuffer(data, dtype)


@cache
def load_schema() -> dict[str, Any]:
    """The schema of an attention record."""
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


def check_schema(value: Any, schema: dict[str, Any], where: str) -> None:
    """DataError, beginning with `where`, unless `value` matches `schema`, by the keywords of record.schema.json."""
    if "$ref" in schema:
        check_schema(value, load_schema()["$defs"][schema["$ref"].removeprefix("#/$defs/")], where)
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and value not in allowed:
        raise DataError(f"{where} is {shorten(value)}, but it must be {' or '.join(map(repr, allowed))}")
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if type(value) not in [TYPES[name] for name in types]:
            raise DataError(f"{where} is {shorten(value)}, but it must be of type {' or '.join(types)}")
    if "minimum" in schema and not schema["minimum"] <= value <= schema["maximum"]:
        raise DataError(f"{where} is {shorten(value)}, but it must be from {schema['minimum']} to {schema['maximum']}")
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                raise DataError(f"{where} lacks {name!r}; it needs {', '.join(schema['required'])}")
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                check_schema(value[name], inner, f"{where}.{name}")
    elif isinstance(value, list):
        if "minItems" in schema and not schema["minItems"] <= len(value) <= schema["maxItems"]:
            raise DataError(f"{where} has {len(value)} items, but it must have {schema['minItems']}")
        items = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        for index, (item, inner) in enumerate(zip(value, items, strict=False)):
            check_schema(item, inner, f"{where}[{index}]")


def shorten(value: Any) -> str:
    """The beginning of a value, in one line."""
    return ascii(value[:40] if isinstance(value, str) else value)[:60]


def check_example(example: Example, where: str) -> None:
    """DataError, beginning with `where`, if something in `example` is out of range or inconsistent."""
    source, target = example.source, example.target
    check_side(source, f"{where}.source")
    if target is not None:
        check_side(target, f"{where}.target")
    if example.gold is not None:
        check_links(example.gold, len(source.words), 0 if target is None else len(target.words), f"{where}.gold")
    pieces = {"source": len(source.pieces), "target": None if target is None else len(target.pieces)}
    for index, site in enumerate(example.sites):
        location = f"{where}.sites[{index}]"
        own = pieces["source" if site.kind == "encoder" else "target"]
        axes = (own, pieces["source"] if site.kind == "cross" else own)
        if (site.queries, site.keys) != axes:
            raise DataError(
                f"{location}: {site.kind} layer {site.layer} has {site.queries} queries and {site.keys} keys, but the "
                f"example has {pieces['source']} source and {pieces['target'] or 'no'} target pieces"
            )
        check_rows(site, location)


def check_side(side: Side, where: str) -> None:
    for index, piece in enumerate(side.pieces):
        if not 0 <= piece.start <= piece.stop <= len(side.text):
            raise DataError(
                f"{where}.pieces[{index}] covers characters {piece.start} to {piece.stop} of a text of {len(side.text)}"
            )
    for index, (first, last, start, stop) in enumerate(side.words):
        if not (0 <= first <= last <= len(side.pieces) and 0 <= start <= stop <= len(side.text)):
            raise DataError(
                f"{where}.words[{index}] has pieces {first} to {last} of {len(side.pieces)} and characters {start} to "
                f"{stop} of {len(side.text)}"
            )
    for index, (first, last) in enumerate(side.sentences):
        before = side.sentences[index - 1][1] if index else 0
        if not before <= first <= last <= len(side.pieces):
            raise DataError(
                f"{where}.sentences[{index}] has pieces {first} to {last}, but they must rise from {before} to at most "
                f"{len(side.pieces)}"
            )


def check_rows(site: SiteRecord, where: str) -> None:
    """DataError unless the arrays of a site are consistent compressed sparse rows."""
    rows, nonzeros = site.heads * site.queries, len(site.columns)
    sizes = {"row_starts": rows + 1, "weights": nonzeros, "mass": rows, "null": rows, "visible": rows}
    for name, size in sizes.items():
        if len(getattr(site, name)) != size:
            raise DataError(f"{where}.{name} has {len(getattr(site, name))} numbers, but it needs {size}")
    starts = site.row_starts.astype(np.int64)
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != nonzeros or (counts < 0).any():
        raise DataError(f"{where}.row_starts does not rise from 0 to {nonzeros}, the number of columns")
    if nonzeros and site.columns.max() >= site.keys:
        raise DataError(f"{where}.columns has {site.columns.max()}, but there are {site.keys} keys, counted from 0")
    within = np.ones(max(0, nonzeros - 1), dtype=bool)
    within[starts[(starts > 0) & (starts < nonzeros)] - 1] = False  # from the last of a row to the first of the next
    if (within & (site.columns[1:] <= site.columns[:-1])).any():
        raise DataError(f"{where}.columns does not rise within a row")
    if not np.isfinite(site.weights).all() or (site.weights == 0).any():
        raise DataError(f"{where}.weights has a 0, NaN or infinity; only finite weights other than 0 are stored")
    if (counts > site.visible).any() or (site.visible > site.keys).any():
        raise DataError(f"{where}.visible does not lie between a row's weights and the {site.keys} keys")
    if (site.null != ((counts == 0) & (site.visible > 0))).any():
        raise DataError(f"{where}.null does not mark exactly the rows that see keys and weigh none")
