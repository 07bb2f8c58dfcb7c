"""Dataclasses out of the JSON values that `dataclasses.asdict` made of them, with every type checked."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rectiformer.analyze.wire import shorten
from rectiformer.errors import DataError


def restore(kind: Any, value: Any, where: str) -> Any:
    """A JSON value as the annotation `kind` has it; DataError where it is something else.

    Further keys are ignored; one that is missing has its default, if there is one.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        fitting = [each for each in inner if fits(each, value)]
        return restore(fitting[0] if fitting else inner[0], value, where)
    if not fits(kind, value):
        raise DataError(f"{where} is {shorten(value)}, but it needs {getattr(kind, '__name__', kind)}")
    if origin is list:
        return [restore(inner[0], each, f"{where}[{index}]") for index, each in enumerate(value)]
    if origin is dict:
        return {key: restore(inner[1], each, f"{where}.{key}") for key, each in value.items()}
    if not is_dataclass(kind):
        return float(value) if kind is float else value
    hints = get_type_hints(kind)
    optional = {field.name for field in fields(kind) if field.default is not MISSING}
    for name in hints:
        if name not in value and name not in optional:
            raise DataError(f"{where} has no {name!r}; it was cut or written by something else")
    values = {name: restore(hint, value[name], f"{where}.{name}") for name, hint in hints.items() if name in value}
    return kind(**values)  # type: ignore[operator]


def fits(kind: Any, value: Any) -> bool:
    """Whether a JSON value is of the outer type that `kind` has in JSON."""
    wanted = dict if is_dataclass(kind) else get_origin(kind) or kind
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, int | float) if wanted is float else isinstance(value, wanted)
