"""The errors a user can cause. Each message is one line: what clashed, both values, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches

EXTRAS = {
    "translate": ("matplotlib", "rich", "sacrebleu", "safetensors", "sentencepiece", "typer"),
    "serve": ("fastapi", "httptools", "prometheus_client", "pydantic", "uvicorn"),
    "hf": ("transformers",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "ctranslate2": ("ctranslate2",),
    "datasets": ("datasets",),
    "tensorboard": ("tensorboard",),
}
"""Packages that each extra of pyproject.toml installs."""
FROM_OTHER_RANK = "from another rank"
"""The note on an error that another rank has raised."""
SENT_TO_ALL_RANKS = "sent to all ranks"
"""The note on an error that this rank has raised and sent to all others."""


class RectiformerError(Exception):
    """Base of all errors raised on purpose; the command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class ShapeError(RectiformerError, ValueError):
    """Tensors whose shapes do not fit together."""


class ArgumentError(RectiformerError, ValueError):
    """An argument whose value makes no sense, alone or together with the others."""


class ConfigError(RectiformerError, ValueError):
    """A configuration that cannot be read or does not hold together."""


class DataError(RectiformerError, ValueError):
    """Text or prepared data that cannot be used as it is."""

    exit_code = 3


class CheckpointError(RectiformerError):
    """A checkpoint or run folder that is damaged, foreign, in use, or does not fit what is asked of it."""

    exit_code = 4


class DivergedError(RectiformerError):
    """Training met a loss or gradient that is not a finite number; nothing was updated with it."""

    exit_code = 5


class NoSpaceError(RectiformerError):
    """The disk cannot hold what has to be written."""

    exit_code = 6


class DeviceMemoryError(RectiformerError):
    """The device has run out of memory; with fewer other processes on it there may be enough."""

    exit_code = 8


def is_from_other_rank(error: BaseException) -> bool:
    """Whether another rank has raised `error`, and prints it."""
    return FROM_OTHER_RANK in getattr(error, "__notes__", ())


def is_on_all_ranks(error: BaseException) -> bool:
    """Whether every rank ends with `error`."""
    return is_from_other_rank(error) or SENT_TO_ALL_RANKS in getattr(error, "__notes__", ())


def unknown_name(kind: str, name: str, known: Iterable[str], section: str = "") -> str:
    """Say that `name` (of a `section`) is no `kind`, and which known names are nearest to it."""
    known = list(known)
    longer = [each for each in known if len(name) > 2 and each.startswith(name)]
    close = longer or get_close_matches(name, known, n=3) or [each for each in known if name in each.split("_")]
    if close:
        return f"unknown {kind} {section + name!r}; did you mean {' or '.join(map(repr, close))}?"
    return f"unknown {kind} {section + name!r}; known are {', '.join(known)}"


def missing_package(error: ModuleNotFoundError) -> str:
    """What to install for an import that failed, in one line; empty where it is no package of an extra."""
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return f"{package} is not installed; pip install 'rectiformer[{extra}]'"
    return ""
