"""What training reports while it runs; the command line turns it into a progress bar or plain lines."""

from collections.abc import Mapping
from typing import Any


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
