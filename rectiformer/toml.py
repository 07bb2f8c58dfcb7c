"""TOML into the dataclasses of config.py and back, strictly: an unknown key is an error that names the nearest one."""

import ast
import dataclasses
import inspect
import math
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from rectiformer import config as sections
from rectiformer.config import Config, Files, Numbers
from rectiformer.errors import ConfigError, unknown_name

CONTROL = (*range(32), 127)  # characters that TOML takes in no other way; a file name may have any but NUL
SURROGATE = re.compile("[\ud800-\udfff]")  # what Python has for bytes of a file name that are not UTF-8
ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', **{code: f"\\u{code:04X}" for code in CONTROL}}
LONGEST_SHOWN = 80  # characters of a value in a message


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Defaults, overlaid by a TOML file, overlaid by `section.key=value` strings."""
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = parse(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return overlay(tables, overrides)


def override_config(config: Config, overrides: Iterable[str]) -> Config:
    """A configuration overlaid by `section.key=value` strings."""
    return overlay(dataclasses.asdict(config), overrides)


def overlay(tables: dict[str, Any], overrides: Iterable[str]) -> Config:
    for override in overrides:
        apply_override(tables, override)
    return build(Config, tables, "")


def parse(text: str) -> dict[str, Any]:
    """The tables of a TOML text; ValueError for anything else."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def apply_override(tables: dict[str, Any], override: str) -> None:
    """Set `section.key=value`; the value is TOML, or a bare word taken as a string."""
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and key and text.strip()):
        raise ConfigError(f"{override!r} is not of the form section.key=value")
    try:
        value = parse(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section!r} is a value, not a section")
    table[key] = value


def build(kind: type, table: Any, where: str) -> Any:
    """An instance of the dataclass `kind` from a TOML table; `where` is the path to it, for messages."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where.rstrip('.')!r} must be a section, not {show(table)}")
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise ConfigError(unknown_name("key", key, hints, section=where))
    values = {}
    for item in dataclasses.fields(kind):
        if item.name not in table:
            continue
        expected, value = hints[item.name], table[item.name]
        if isinstance(expected, type) and dataclasses.is_dataclass(expected):
            values[item.name] = build(expected, value, f"{where}{item.name}.")
        else:
            values[item.name] = check_range(where + item.name, check_type(where + item.name, value, expected), item)
    return kind(**values)


def check_type(name: str, value: Any, expected: Any) -> Any:
    if expected == Files:
        files = (value,) if isinstance(value, str) else value
        if not isinstance(files, list | tuple) or not all(isinstance(path, str) for path in files):
            raise ConfigError(f"{name} = {show(value)}, but it must be a file name or a list of them")
        return tuple(check_text(name, path) for path in files)
    if expected == Numbers:
        if not isinstance(value, list | tuple) or not all(type(number) in (int, float) for number in value):
            raise ConfigError(f"{name} = {show(value)}, but it must be a list of numbers")
        return tuple(to_float(number) for number in value)
    if expected is float and type(value) is int:
        return to_float(value)
    if type(value) is not expected:
        noun = expected.__name__
        raise ConfigError(f"{name} = {show(value)}, but it must be {'an' if noun == 'int' else 'a'} {noun}")
    return check_text(name, value) if expected is str else value


def check_text(name: str, value: str) -> str:
    """A word or file name; ConfigError where it cannot be one, or where TOML cannot hold it."""
    if "\0" in value:
        raise ConfigError(f"{name} = {show(value)}, but no name can have a NUL character in it")
    if SURROGATE.search(value):
        raise ConfigError(f"{name} = {show(value)}, but its bytes are not UTF-8; rename the file")
    return value


def to_float(value: int | float) -> float:
    """A float, infinite where the number is too large to be one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_range(name: str, value: Any, item: dataclasses.Field[Any]) -> Any:
    known = item.metadata.get("choices")
    if known and value not in known:
        raise ConfigError(unknown_name(f"value of {name}", value, known))
    if "least" in item.metadata:
        least, below = item.metadata["least"], item.metadata["below"]
        if not least <= value < below:
            upper = below if isinstance(below, int) else f"{below:g}"
            raise ConfigError(f"{name} = {show(value)}, but it must be at least {least:g} and below {upper}")
    return value


def show(value: Any) -> str:
    """A value for a message, shortened where nobody would read all of it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to write out integers of thousands of digits
        return "a value too long to show"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def to_toml(config: Config, comments: bool = False) -> str:
    """The whole configuration as TOML that `load_config` reads back.

    Args:
        comments: above each section and key, say what it is about and which words it takes.
    """
    about = docstrings() if comments else {}
    lines: list[str] = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        kind = type(values).__name__
        lines += [*comment(about.get(kind, "")), f"[{section.name}]"]
        for item in dataclasses.fields(values):
            text = about.get(f"{kind}.{item.name}", "")
            if comments and "choices" in item.metadata:
                text += f" One of {', '.join(map(toml_value, item.metadata['choices']))}."
            lines += [*comment(text), f"{item.name} = {toml_value(getattr(values, item.name))}"]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def docstrings() -> dict[str, str]:
    """What config.py says of every section, by the name of its class, and of every key, as `Class.key`."""
    found: dict[str, str] = {}
    for section in ast.parse(inspect.getsource(sections)).body:
        if isinstance(section, ast.ClassDef):
            found[section.name] = ast.get_docstring(section) or ""
            for key, after in pairwise(section.body):  # Python keeps no docstrings of fields; in the source they follow
                if isinstance(key, ast.AnnAssign) and isinstance(after, ast.Expr):
                    found[f"{section.name}.{ast.unparse(key.target)}"] = str(ast.literal_eval(after.value))
    return found


def comment(text: str) -> list[str]:
    """Lines of a TOML comment."""
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), 110, break_on_hyphens=False)]


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value.translate(ESCAPES)}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(part) for part in value) + "]"
    return repr(value)
