"""Whether the other ranks still run.

A rank that is killed breaks its connections, but one that is stopped, or whose machine is gone, breaks none: whoever
waits for it in a collective would wait for the whole timeout. So each rank has a thread that counts up a counter in
torchrun's store and checks whether those of the others move.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from threading import Event, Thread

import torch.distributed as dist

from rectiformer.distributed.ranks import LostRankError, Ranks

BEAT = 5.0
"""Seconds from one look to the next."""
SILENCE = 120
"""Looks at a counter that does not move, after which its rank counts as lost: 10 minutes. They are this process's own
looks, so no rank is lost where all were stopped together and go on together."""


class Pulse:
    """While open, ends this process with LostRankError's exit code and line where another rank has stopped.

    The thread that waits for that rank cannot be woken, so nothing is left but to end the process: what is on disk
    survives a kill at any moment. Without a store, as where torchrun keeps none, it does nothing.
    """

    def __init__(self, ranks: Ranks, store: dist.Store | None, beat: float = BEAT, silence: int = SILENCE) -> None:
        self.ranks, self.store, self.beat, self.silence = ranks, store, beat, silence
        self.ended = Event()
        self.thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Pulse:
        if self.store is not None and self.ranks.world_size > 1:
            self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join(self.beat)  # at most one look is left; a store that hangs is not waited for

    def _run(self) -> None:
        counters: dict[int, bytes] = {}
        still: Counter[int] = Counter()
        looks = 0
        while not self.ended.wait(self.beat):
            looks += 1
            try:
                found = self._look(looks)
            except RuntimeError:
                return  # torchrun is gone, and its store with it
            for rank, counter in found.items():
                still[rank] = still[rank] + 1 if counter == counters.get(rank, b"") else 0
                if still[rank] >= self.silence and not self.ended.is_set():
                    self._leave(rank)
            counters = found

    def _look(self, looks: int) -> dict[int, bytes]:
        """The counter of each other rank, empty where there is none yet; this rank's own is set first."""
        assert self.store is not None
        self.store.set(name(self.ranks.rank), str(looks))
        others = [rank for rank in range(self.ranks.world_size) if rank != self.ranks.rank]
        return {rank: self.store.get(name(rank)) if self.store.check([name(rank)]) else b"" for rank in others}

    def _leave(self, rank: int) -> None:
        sys.stderr.write(
            f"rectiformer: rank {self.ranks.rank}: rank {rank} has given no sign for {self.beat * self.silence:.0f} "
            "seconds: it is stopped, or cannot be reached; what was saved is kept; run the same command again, a "
            "training with --resume, or have torchrun do it by --max-restarts\n"
        )
        sys.stderr.flush()
        os._exit(LostRankError.exit_code)


def name(rank: int) -> str:
    return f"rectiformer pulse {rank}"
