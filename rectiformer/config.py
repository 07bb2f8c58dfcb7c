"""Configuration: TOML into frozen dataclasses, strictly. An unknown key is an error that names the nearest one."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from rectiformer.errors import ConfigError, unknown_name


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How every attention layer of one model behaves."""

    width: int = 64
    """Size of the residual stream; the heads share it equally."""
    heads: int = 1
    """Number of query heads. Must divide `width`."""
    variant: str = "rela-g"
    """A name from the variant table; `rectiformer variants` lists them all."""
    dropout: float = 0.0
    """Probability of dropping an attention weight in training."""

    def __post_init__(self) -> None:
        if self.width < 1 or self.heads < 1:
            raise ConfigError(f"width = {self.width}, heads = {self.heads}; each must be at least 1")
        if self.width % self.heads:
            raise ConfigError(f"heads = {self.heads} does not divide width = {self.width}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout = {self.dropout}, but it is a probability below 1")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The small retrieval task of `rectiformer demo`."""

    steps: int = 400
    """Updates of each model."""
    batch: int = 64
    """Sentences in one update."""
    sentence: int = 14
    """Words in one sentence, a third of them repeated; there are 20 words to draw from."""
    learning_rate: float = 1e-2
    """Step size of Adam."""
    seed: int = 1
    """Decides sentences and initial weights."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "sentence"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}, but it must be at least 1")
        if self.sentence > 30:
            raise ConfigError(f"sentence = {self.sentence}, but 20 words make sentences of at most 30")
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate = {self.learning_rate}, but it must be above 0")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    demo: DemoConfig = field(default_factory=DemoConfig)


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Defaults, overlaid by a TOML file, overlaid by `section.key=value` strings."""
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(tables, override)
    return build(Config, tables, "")


def apply_override(tables: dict[str, Any], override: str) -> None:
    """Set `section.key=value`; the value is TOML, or a bare word taken as a string."""
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and key and text.strip()):
        raise ConfigError(f"{override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section!r} is a value, not a section")
    table[key] = value


def build(kind: type, table: Any, where: str) -> Any:
    """An instance of the dataclass `kind` from a TOML table; `where` is the path to it, for messages."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where.rstrip('.')!r} must be a section, not {table!r}")
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise ConfigError(unknown_name("key", key, hints, section=where))
    values = {}
    for key, value in table.items():
        expected = hints[key]
        if isinstance(expected, type) and dataclasses.is_dataclass(expected):
            values[key] = build(expected, value, f"{where}{key}.")
        else:
            values[key] = check_type(where + key, value, expected)
    return kind(**values)


def check_type(name: str, value: Any, expected: type) -> Any:
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise ConfigError(f"{name} = {value!r}, but it must be {article(expected.__name__)}")
    return value


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def to_toml(config: Config) -> str:
    """The whole configuration as TOML that `load_config` reads back."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        lines += [f"[{section.name}]"]
        values = getattr(config, section.name)
        for item in dataclasses.fields(values):
            value = getattr(values, item.name)
            text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
            lines.append(f"{item.name} = {text}" if not isinstance(value, str) else f'{item.name} = "{value}"')
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"
