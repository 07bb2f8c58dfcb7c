"""A column of a Hugging Face dataset as lines: saved on disk, in local files, or on the hub, a part at a time.

    hf:NAME?column=COLUMN&split=train&config=CONFIG

NAME is a folder written by `save_to_disk`, a parquet, JSON or CSV file, or a name on the hub. COLUMN may lead into
a cell, as `translation.de` does; `split` is "train" unless it is given, `config` the dataset's own default.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any
from urllib.parse import parse_qsl

from rectiformer.errors import ConfigError, DataError, unknown_name
from rectiformer.text.foreign import one_line

KEYS = ("column", "split", "config")
KINDS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
ROWS = 1_000  # held at once


def read_column(address: str) -> Iterator[str]:
    """The cells of a column, one line each: a LF inside is a space, and a missing cell is empty."""
    name, options = parse_address(address)
    top, *inside = options["column"].split(".")
    number = 0
    for cells in read_cells(name, top, options):
        for cell in cells:
            number += 1
            try:
                text = reduce(lambda value, key: value[key], inside, cell)
            except (KeyError, TypeError):
                raise DataError(f"hf:{name}, row {number:,}: no {options['column']!r} in {cell!r:.80}") from None
            if not isinstance(text, str | None):
                raise DataError(f"hf:{name}, row {number:,}: {options['column']} is {text!r:.80}, not text")
            yield (text or "").replace("\n", " ")


def parse_address(address: str) -> tuple[str, dict[str, str]]:
    """NAME and the options of it; a ConfigError where they do not say which column."""
    name, _, query = address.partition("?")
    options = dict(parse_qsl(query))
    for key in options:
        if key not in KEYS:
            raise ConfigError(unknown_name("option", key, KEYS, section=f"hf:{name}?"))
    if "column" not in options:
        raise ConfigError(f"hf:{address} names no column; write hf:{name}?column=NAME, such as translation.de")
    return name, options


def read_cells(name: str, column: str, options: Mapping[str, str]) -> Iterator[list[Any]]:
    """A column some rows at a time; whatever a dataset cannot do is a DataError on one line."""
    try:
        table = open_table(name, options.get("split", "train"), options.get("config"))
        names = table.column_names
        if names is not None and column not in names:
            raise DataError(f"hf:{name} has no column {column!r}; it has {', '.join(names)}")
        parts: Iterable[Mapping[str, list[Any]]] = table.select_columns([column]).iter(batch_size=ROWS)
        for part in parts:
            yield part[column]
    except (ConfigError, DataError):
        raise
    except Exception as error:  # of the many packages behind it
        raise DataError(f"cannot read hf:{name}: {type(error).__name__}: {one_line(str(error))[:300]}") from error


def open_table(name: str, split: str, config: str | None) -> Any:
    """A split of a dataset, of which nothing is in memory yet."""
    try:
        from datasets import DatasetDict, load_dataset, load_from_disk
    except ImportError as error:
        raise ConfigError(f"hf:{name} needs the package datasets; install it, or rectiformer[datasets]") from error
    if not os.path.exists(name):
        return load_dataset(name, config, split=split, streaming=True)
    if os.path.isfile(name):
        kind = KINDS.get(os.path.splitext(name)[1])
        if kind is None:
            raise ConfigError(f"hf:{name} is a file, but of none of these kinds: {', '.join(KINDS)}")
        return load_dataset(kind, data_files={split: name}, split=split, streaming=True)
    found = load_from_disk(name)
    if not isinstance(found, DatasetDict):
        return found
    if split not in found:
        raise DataError(f"hf:{name} has no split {split!r}; it has {', '.join(map(str, found))}")
    return found[split]
