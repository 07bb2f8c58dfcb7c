"""What training reports while it runs; the command line turns it into a progress bar or plain lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rectiformer.runs.metrics import MetricsLog


class Reporter:
    """Receives the progress of a training, and shows nothing of it; subclasses show what they want to."""

    def note(self, text: str) -> None:
        """One line worth reading."""

    def preparing(self, stage: str, count: int) -> None:
        """So many lines of a stage of data preparation are done."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts, with `step` updates of `steps` already done."""

    def advance(self, step: int) -> None:
        """One more update is done."""

    def logged(self, record: Mapping[str, Any]) -> None:
        """Metrics of the latest updates, as in metrics.jsonl."""

    def validated(self, record: Mapping[str, Any]) -> None:
        """Metrics of a validation, as in metrics.jsonl."""

    def end(self) -> None:
        """Training is over, for whatever reason."""


class Journal:
    """The metrics of a run as they come: in metrics.jsonl, in TensorBoard where wanted, and to the reporter."""

    def __init__(self, run: Path, tensorboard: bool, reporter: Reporter) -> None:
        self.metrics = MetricsLog(run / "metrics.jsonl")
        self.reporter = reporter
        self.writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import

            self.writer = SummaryWriter(str(run / "tensorboard"))

    def logged(self, record: dict[str, Any]) -> None:
        """Record the metrics of the latest updates."""
        self._write("train", record)
        self.reporter.logged(record)

    def validated(self, record: dict[str, Any]) -> None:
        """Record the metrics of a validation."""
        self._write("valid", record)
        self.reporter.validated(record)

    def _write(self, prefix: str, record: dict[str, Any]) -> None:
        self.metrics.write(record)
        if self.writer is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self.writer.add_scalar(f"{prefix}/{name}", value, record["step"])
            self.writer.flush()
