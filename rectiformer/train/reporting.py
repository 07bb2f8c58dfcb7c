"""What training tells while it runs; the command line turns it into a progress bar or plain lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rectiformer.runs.metrics import MetricsLog


class Reporter(Protocol):
    """Somebody who watches."""

    def note(self, text: str) -> None:
        """One line worth reading."""

    def preparing(self, stage: str, count: int) -> None:
        """So many lines of a stage of data preparation are done."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts, with `step` updates of `steps` already done."""

    def advance(self, step: int) -> None:
        """One more update is done."""

    def logged(self, record: Mapping[str, Any]) -> None:
        """Numbers of the latest updates, as in metrics.jsonl."""

    def validated(self, record: Mapping[str, Any]) -> None:
        """Numbers of a validation, as in metrics.jsonl."""

    def end(self) -> None:
        """Training is over, for whatever reason."""


class Silent:
    """Nobody watches."""

    def note(self, text: str) -> None: ...
    def preparing(self, stage: str, count: int) -> None: ...
    def begin(self, step: int, steps: int) -> None: ...
    def advance(self, step: int) -> None: ...
    def logged(self, record: Mapping[str, Any]) -> None: ...
    def validated(self, record: Mapping[str, Any]) -> None: ...
    def end(self) -> None: ...


class Board:
    """TensorBoard events of the records, where they are wanted."""

    def __init__(self, folder: Path | None) -> None:
        self.writer = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import

            self.writer = SummaryWriter(str(folder))

    def write(self, prefix: str, record: Mapping[str, Any]) -> None:
        if self.writer is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self.writer.add_scalar(f"{prefix}/{name}", value, record["step"])
            self.writer.flush()


class Journal:
    """The numbers of a run as they come: in metrics.jsonl, in TensorBoard, and told to whoever watches."""

    def __init__(self, run: Path, tensorboard: bool, reporter: Reporter) -> None:
        self.metrics = MetricsLog(run / "metrics.jsonl")
        self.board = Board(run / "tensorboard" if tensorboard else None)
        self.reporter = reporter

    def logged(self, record: dict[str, Any]) -> None:
        """Numbers of the latest updates."""
        self.metrics.write(record)
        self.board.write("train", record)
        self.reporter.logged(record)

    def validated(self, record: dict[str, Any]) -> None:
        """Numbers of a validation."""
        self.metrics.write(record)
        self.board.write("valid", record)
        self.reporter.validated(record)
