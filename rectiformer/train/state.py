"""What a run in training remembers beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class State:
    """What the loop remembers beside the tensors."""

    step: int = 0
    validated: int = 0
    """The latest step that was validated."""
    best: float | None = None
    best_step: int = 0
    bad_validations: int = 0
    stopped_early: bool = False
    finished: bool = False
    batches: str = ""
    """A digest of the pairs of every batch so far, chained: equal digests mean the same batches in the same order."""
    sums: tuple[float, ...] = (0.0, 0.0, 0.0)
    tokens: int = 0
    updates: int = 0
    planned: list[int] = field(default_factory=list)
    """The newest checkpoints that were due, as many as are averaged; those saved at a stop or an end are not."""
    consumed: tuple[int, ...] = (0, 0)
    """Lines of a stream, and batches made of them, that need not be read again to go on."""
