"""Checkpoints of a run in training: written while it waits or, where asked to, while it goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from torch import Tensor

from rectiformer.config import CheckpointConfig
from rectiformer.distributed.ranks import Ranks
from rectiformer.runs.checkpoint import newest_checkpoints, save_checkpoint, step_name
from rectiformer.runs.folder import Run

Tensors = Mapping[str, Mapping[str, Tensor]]


class Saver:
    """Saves what the ranks of one run hold, one checkpoint at a time.

    With `checkpoint.async_save = true` a copy of the tensors is made in main memory and a thread writes it, over
    connections of its own; the next save, `finish` and the end of training wait for it, and raise what it met.
    """

    def __init__(self, run: Run, config: CheckpointConfig, ranks: Ranks, sharded: bool) -> None:
        self.run, self.config, self.sharded = run, config, sharded
        self.ranks = ranks.new_group() if config.async_save else ranks
        self.thread: Thread | None = None
        self.failure: Exception | None = None

    def save(
        self, step: int, tensors: Tensors, extra: Tensors, state: dict[str, Any], *, best: bool, also: Collection[int]
    ) -> Path:
        """Save `tensors`, of which each rank holds all or some rows, and `extra`, all of which rank 0 holds."""
        self.finish()
        if not self.config.async_save:
            self._write(step, tensors, extra, state, best, also)
        else:
            held = tensors if self.sharded or self.ranks.is_rank0 else {}  # tensors on a CPU would be trained on, too
            copy = {
                name: {key: each.to("cpu", copy=True) for key, each in group.items()} for name, group in held.items()
            }
            self.thread = Thread(target=self._try, args=(step, copy, extra, state, best, tuple(also)), daemon=True)
            self.thread.start()
        return self.run.path / "checkpoints" / step_name(step)

    def finish(self) -> None:
        """Wait for what is being written; every rank raises what any of them met."""
        self.close()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def close(self) -> None:
        """Wait for what is being written, at an end that has its own reason."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _try(self, *what: Any) -> None:
        try:
            self._write(*what)
        except Exception as error:  # raised where somebody listens
            self.failure = error

    def _write(
        self, step: int, tensors: Tensors, extra: Tensors, state: dict[str, Any], best: bool, also: Collection[int]
    ) -> None:
        save_checkpoint(
            self.run.path,
            step,
            extra if self.sharded else {**tensors, **extra},
            state,
            self.run.identity,
            best=best,
            keep=self.config.keep,
            keep_also=also,
            ranks=self.ranks,
            shards=tensors if self.sharded else None,
        )


def average_checkpoints(folder: Path, steps: Collection[int], warn: Callable[[str], None]) -> dict[str, Tensor]:
    """The mean of the weights of several checkpoints."""
    found = newest_checkpoints(folder, sys.maxsize, warn)
    checkpoints = [checkpoint for checkpoint in found if checkpoint.step in steps]
    total: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        for name, tensor in checkpoint.tensors("model").items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(checkpoints)).float() for name, tensor in total.items()}
