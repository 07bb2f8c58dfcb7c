"""The log of a run's metrics: one JSON object per line, appended, and truncated where a run resumes."""

import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rectiformer.errors import DataError
from rectiformer.files import replace_file, writing


class MetricsLog:
    """Records written one per line, each handed to the system before `write` returns, and to TensorBoard where wanted.

    A log that a killed process may have left with half a line must be rewound before it is written to.
    """

    def __init__(self, path: Path, tensorboard: bool = False) -> None:
        self.path, self.tensorboard = path, tensorboard
        self.writer: Any = None
        if tensorboard:
            import torch.utils.tensorboard  # noqa: F401  seconds to import; where it is missing, nothing has begun yet

    def write(self, record: dict[str, Any], prefix: str = "train") -> None:
        """Append `record`; floats that are not finite, which JSON lacks, become "nan", "inf" or "-inf".

        TensorBoard has its numbers under `prefix`.
        """
        line = json.dumps(spell_non_finite(record), allow_nan=False).encode() + b"\n"
        with writing(self.path), open(self.path, "ab") as file:
            file.write(line)
        if self.tensorboard:
            self.writer = self.writer or open_writer(self.path)
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self.writer.add_scalar(f"{prefix}/{name}", value, record["step"])
            self.writer.flush()

    def rewind(self, step: int, undone: Collection[str] = ()) -> None:
        """Drop all records of steps after `step`, and half a line at the end; the rest stays byte for byte.

        Args:
            undone: keys of records that will be written anew for `step` itself; those with one of them are dropped.
        """
        if self.tensorboard:
            self.writer = open_writer(self.path, purge_step=step + 1)  # what it has of later steps is shown no more
        if not os.path.lexists(self.path):
            return
        kept = [line for line, record in parse_lines(self.path) if not after(record, step, undone)]
        with writing(self.path):
            replace_file(self.path, b"".join(line + b"\n" for line in kept))


def open_writer(path: Path, purge_step: int | None = None) -> Any:
    """A writer of TensorBoard events in a folder next to the log."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path.with_name("tensorboard")), purge_step=purge_step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a log, none where there is no log; half a line at the end, left by a kill, is passed over."""
    return [record for _, record in parse_lines(path)]


def parse_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each line with its record; DataError where one before the last is no record, or the log no file of its own."""
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):  # a FIFO would wait
        raise DataError(f"cannot read {path}: it is not a regular file; move it away")
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            parsed.append((line, record))
        elif number < len(lines):
            raise DataError(
                f"{path}:{number}: {line[:40]!r} is not a JSON object; delete that line, or move the file away"
            )
    return parsed


def after(record: dict[str, Any], step: int, undone: Collection[str]) -> bool:
    at = record.get("step")
    return isinstance(at, int) and (at > step or (at == step and not record.keys().isdisjoint(undone)))


def spell_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: spell_non_finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [spell_non_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value
