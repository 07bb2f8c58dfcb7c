"""Checkpoints of a run in training: written while it waits or, with `checkpoint.async_save`, while it goes on."""

import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from rectiformer.distributed.ranks import Ranks
from rectiformer.runs.checkpoint import newest_checkpoints, save_checkpoint, step_name
from rectiformer.runs.folder import Run

Tensors = Mapping[str, Mapping[str, Tensor]]


@dataclass
class State:
    """What the loop remembers besides tensors: `state.json` of a checkpoint."""

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


class Saver:
    """Saves what the ranks of one run hold, one checkpoint at a time.

    With `checkpoint.async_save` the tensors are copied to main memory and a thread writes them, over connections of
    its own; the next save, `finish` and the end of training wait for it, and raise its error.
    """

    def __init__(self, run: Run, ranks: Ranks, sharded: bool) -> None:
        self.run, self.config, self.sharded = run, run.config.checkpoint, sharded
        self.ranks = ranks.new_group() if self.config.async_save else ranks
        self.writer = ThreadPoolExecutor(1)
        self.pending: Future[object] | None = None

    def save(self, state: State, tensors: Tensors, extra: Tensors, *, best: bool) -> Path:
        """Save `state`, `tensors`, of which each rank holds all or its shards, and `extra`, which rank 0 holds."""
        self.finish()
        if self.config.async_save:
            written = tensors if self.sharded or self.ranks.is_rank0 else {}
            tensors = {  # copied on a CPU too, where training would go on with the very same tensors
                name: {key: tensor.to("cpu", copy=True) for key, tensor in group.items()}
                for name, group in written.items()
            }
        write = partial(
            save_checkpoint,
            self.run.path,
            state.step,
            extra if self.sharded else {**tensors, **extra},
            asdict(state),
            self.run.identity,
            best=best,
            keep=self.config.keep,
            keep_also=tuple(state.planned),
            ranks=self.ranks,
            shards=tensors if self.sharded else None,
        )
        if self.config.async_save:
            self.pending = self.writer.submit(write)
        else:
            write()
        return self.run.path / "checkpoints" / step_name(state.step)

    def finish(self) -> None:
        """Wait for what is being written; every rank raises what failed on any of them."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for what is being written, at an end that has its own reason."""
        self.writer.shutdown()


def average_checkpoints(folder: Path, steps: Collection[int], warn: Callable[[str], None]) -> dict[str, Tensor]:
    """The mean of the weights of several checkpoints."""
    found = newest_checkpoints(folder, sys.maxsize, warn)
    checkpoints = [checkpoint for checkpoint in found if checkpoint.step in steps]
    total: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        for name, tensor in checkpoint.tensors("model").items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(checkpoints)).float() for name, tensor in total.items()}
