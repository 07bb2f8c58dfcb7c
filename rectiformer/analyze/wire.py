"""What a record is made of on its way to a file: values checked against a JSON schema, arrays as text."""

from __future__ import annotations

import base64
import gzip
import json
import math
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rectiformer.errors import DataError

SCHEMA = Path(__file__).with_name("record.schema.json")
TYPES: dict[str, type] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def pack(array: np.ndarray, dtype: str) -> dict[str, Any]:
    """An array [n] as JSON: base64 of gzip of little-endian bytes; equal arrays give equal text."""
    data = gzip.compress(array.astype(f"<{dtype}", copy=False).tobytes(), 6, mtime=0)
    return {"dtype": dtype, "shape": [len(array)], "data": base64.b64encode(data).decode("ascii")}


def unpack(packed: dict[str, Any], where: str) -> np.ndarray:
    """The array of `pack`; DataError where its data does not hold as many numbers as its shape says."""
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
    """DataError, beginning with `where`, unless `value` is as `schema` says: of its keywords, those ours uses."""
    if "$ref" in schema:
        check_schema(value, load_schema()["$defs"][schema["$ref"].removeprefix("#/$defs/")], where)
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and value not in allowed:
        raise DataError(f"{where} is {shorten(value)}, but it must be {' or '.join(map(repr, allowed))}")
    if "type" in schema and not has_type(value, schema["type"]):
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        raise DataError(f"{where} is {shorten(value)}, but it must be of type {' or '.join(kinds)}")
    if "minimum" in schema and not schema["minimum"] <= value <= schema["maximum"]:
        raise DataError(f"{where} is {shorten(value)}, but it must be from {schema['minimum']} to {schema['maximum']}")
    if isinstance(value, dict):
        check_object(value, schema, where)
    elif isinstance(value, list):
        check_array(value, schema, where)


def check_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> None:
    for name in schema.get("required", ()):
        if name not in value:
            raise DataError(f"{where} lacks {name!r}; it needs {', '.join(schema['required'])}")
    for name, inner in schema.get("properties", {}).items():
        if name in value:
            check_schema(value[name], inner, f"{where}.{name}")


def check_array(value: list[Any], schema: dict[str, Any], where: str) -> None:
    if "minItems" in schema and not schema["minItems"] <= len(value) <= schema["maxItems"]:
        raise DataError(f"{where} has {len(value)} items, but it must have {schema['minItems']}")
    inner = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
    for index, (item, wanted) in enumerate(zip(value, inner, strict=False)):
        check_schema(item, wanted, f"{where}[{index}]")


def has_type(value: Any, wanted: str | list[str]) -> bool:
    kinds = wanted if isinstance(wanted, list) else [wanted]
    return any(type(value) is TYPES[kind] for kind in kinds)


def shorten(value: Any) -> str:
    """The beginning of a value, in one line."""
    return ascii(value[:40] if isinstance(value, str) else value)[:60]


def find_nonfinite(value: Any, where: str = "") -> str | None:
    """The place of the first NaN or infinity in a JSON value, and which it is; None if all numbers are finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where.lstrip('.')} = {value}"
    parts: list[tuple[Any, str]] = []
    if isinstance(value, dict):
        parts = [(part, f"{where}.{name}") for name, part in value.items()]
    elif isinstance(value, list):
        parts = [(part, f"{where}[{index}]") for index, part in enumerate(value)]
    return next((found for part, place in parts if (found := find_nonfinite(part, place)) is not None), None)
