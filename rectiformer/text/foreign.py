"""Sentencepiece models from elsewhere: a crafted one can crash sentencepiece itself, so each is tried apart first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rectiformer.errors import DataError

LONGEST_PIECE = 2_048  # bytes: 512 characters, the most sentencepiece would choose
PIECE, TRAINER, NORMALIZER = 1, 2, 3  # fields of sentencepiece's ModelProto, in the order they are written

PROBE = """
import sys, sentencepiece
model = sentencepiece.SentencePieceProcessor(model_proto=sys.stdin.buffer.read())
model.decode(model.encode("A probe: \\u00e9, e\\u0301, \\u65e5\\u672c, \\U0001f600 " + "x" * 1000))
model.decode(list(range(len(model))))
print("OK")
"""


def reject_unsafe_model(model: bytes, path: Path) -> None:
    """Raise a DataError unless `model` is whole, has no piece too long to be one, and loads and works in a child."""
    fields = list(read_fields(model))
    if not {PIECE, TRAINER, NORMALIZER} <= {number for number, _ in fields}:
        raise DataError(f"tokenizer rejected: {path} ({len(model):,} bytes) is cut short or no sentencepiece model")
    longest = max(length for number, length in fields if number == PIECE)
    if longest > LONGEST_PIECE + 16:  # its score and kind take some bytes
        raise DataError(
            f"tokenizer rejected: {path} has a piece of {longest:,} bytes; at most {LONGEST_PIECE:,} make sense"
        )
    try:
        child = subprocess.run([sys.executable, "-P", "-c", PROBE], input=model, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"tokenizer rejected: {path} took over 60 s to load") from error
    if child.returncode != 0 or child.stdout.strip() != b"OK":
        reason = child.stderr.decode("utf-8", errors="replace").strip().split("\n")[-1]
        raise DataError(f"tokenizer rejected: {path} fails to load (exit {child.returncode}): {one_line(reason)}")


def read_fields(model: bytes) -> Iterator[tuple[int, int]]:
    """Number and length of each field of a serialized message, as far as it is one: all are length-delimited."""
    place = 0
    while place < len(model):
        tag, place = read_varint(model, place)
        length, place = read_varint(model, place)
        place += length
        if tag & 7 != 2 or place > len(model):
            return
        yield tag >> 3, length


def read_varint(model: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, lowest first, and the place after it; past the end of `model` where it is cut."""
    value = 0
    for shift in range(0, 64, 7):
        if place >= len(model):
            break
        byte = model[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    return value, len(model) + 1


def one_line(text: str) -> str:
    return " ".join(text.split())
