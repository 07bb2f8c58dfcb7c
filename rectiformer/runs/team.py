"""The processes that train one run together: what one of them decides or meets, all know.

They speak JSON over a gloo group of their own, beside whatever carries gradients. Its time limit is long, since the
others wait there while rank 0 prepares data or validates; a rank that dies ends the waiting of the others at once, and
one that is stopped in training is found out by runs/pulse.py.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from rectiformer.errors import HEARD, TOLD, ArgumentError, RectiformerError, is_shared

T = TypeVar("T")
WAIT = timedelta(days=1)
MEETING = timedelta(minutes=5)
MEETING_POLL = 0.01  # seconds


class LostRankError(RectiformerError):
    """Another rank died or cannot be reached any more."""

    exit_code = 7


@dataclass(frozen=True)
class Team:
    """`size` processes at one run, seen from the one that is `rank`. Alone, every method is a plain call."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank writes, locks, prepares and speaks for all."""
        return self.rank == 0

    def gather(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank, which JSON must hold; where it fails on one, all raise that rank's error."""
        if self.size == 1:
            return [work()]
        failure: Exception | None = None
        try:
            message = json.dumps({"value": work()})
        except Exception as error:  # whatever it is, the others must hear of it
            failure, message = error, json.dumps({"kind": type(error).__name__, "text": str(error)})
        messages = self._exchange(message)
        if failure is not None:
            failure.add_note(TOLD)
            raise failure
        for rank, said in enumerate(messages):
            if "value" not in said:
                raise heard(rank, said["kind"], said["text"])
        return [said["value"] for said in messages]

    def lead(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, which alone does it; its error, where it fails, on every rank."""
        return self.gather(work if self.leads else nothing)[0]

    def any(self, flag: bool) -> bool:
        """Whether some rank says so."""
        if self.size == 1:
            return flag
        said = torch.tensor([int(flag)])
        with self.watching():
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group)
        return bool(said)

    def add(self, tensor: Tensor) -> None:
        """Have every rank's `tensor` be their sum, by the group that carries gradients."""
        with self.watching():
            dist.all_reduce(tensor)

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Have every rank's `tensors` be those of rank 0, by the group that carries gradients."""
        if self.size > 1:
            with self.watching():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What collectives raise in here where a rank is gone, as LostRankError."""
        try:
            yield
        except RuntimeError as error:
            words = ("gloo", "NCCL", "Connection", "Broken pipe")
            if self.size == 1 or not (isinstance(error, dist.DistError) or any(word in str(error) for word in words)):
                raise
            why = re.sub(r"\[[^]]*\.cc:[0-9]+\] *", "", " ".join(str(error).split()))[:100]
            raise LostRankError(
                f"rank {self.rank}: another rank is gone ({why}); what was saved is kept; run the same command "
                "again, a training with --resume, or have torchrun do it by --max-restarts"
            ) from error

    def twin(self) -> Team:
        """The same ranks over connections of their own, for another thread; all ranks must ask for it together."""
        if self.size == 1:
            return self
        return Team(self.rank, self.size, dist.new_group(backend="gloo", timeout=WAIT))

    def _exchange(self, message: str) -> list[dict[str, Any]]:
        text = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.long)
        with self.watching():
            dist.all_gather(list(sizes.split(1)), torch.tensor([len(text)]), group=self.group)
            row = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            row[: len(text)] = text
            rows = [torch.empty_like(row) for _ in range(self.size)]
            dist.all_gather(rows, row, group=self.group)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]


ALONE = Team()


def nothing() -> Any:
    return None


@contextmanager
def join_team(device: Callable[[int], torch.device]) -> Iterator[tuple[Team, torch.device]]:
    """The ranks that torchrun started, or this process alone, and the device of this rank, by its number on the host.

    Gradients go over NCCL between GPUs and over gloo between CPUs.
    """
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE, device(0)
        return
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    with Team(rank, size).watching():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store_of_start(rank, size), rank=rank, world_size=size)
        team = Team(rank, size).twin()
    own = torch.device(team.gather(lambda: str(device(local)))[team.rank])
    if own.type == "cuda":
        torch.cuda.set_device(own)
    try:
        yield team, own
    except Exception as error:
        if is_shared(error):  # else a rank might wait here for one that is gone, and has to leave as it is
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def torchrun_store() -> dist.Store | None:
    """What torchrun keeps for its ranks, over restarts too; None without torchrun."""
    if not dist.is_torchelastic_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, MEETING)


def store_of_start(rank: int, size: int) -> dist.Store | None:
    """Where ranks find each other: apart from where those before a restart did, whose addresses are still there.

    See pytorch issue 135712.
    """
    store = torchrun_store()
    return store and dist.PrefixStore(f"rectiformer start {name_start(store, rank, size)}", store)


def name_start(store: dist.Store, rank: int, size: int) -> str:
    """A name for this start, the same on all ranks, which no start before it had.

    Hosts do not count restarts alike, so rank 0 draws the name. The others ask with a word of their own, which none
    before a restart had, and rank 0 answers whatever it finds asked, new or old, until all have heard.
    """
    own = uuid4().hex
    if rank:
        store.set(f"rectiformer asks {rank}", own)
        name = store.get(f"rectiformer answers {own}").decode()
        store.set(f"rectiformer heard {name} {rank}", "yes")
        return name
    missing, end = list(range(1, size)), time.monotonic() + MEETING.total_seconds()
    while missing:
        for asks in (f"rectiformer asks {other}" for other in missing):
            if store.check([asks]):
                store.set(f"rectiformer answers {store.get(asks).decode()}", own)
        missing = [other for other in missing if not store.check([f"rectiformer heard {own} {other}"])]
        if missing and time.monotonic() > end:
            raise dist.DistStoreError(f"rank {missing[0]} has not come within {MEETING}")
        time.sleep(MEETING_POLL)
    return own


class Restarts:
    """Whether torchrun is starting ranks again that had begun with a folder, told by what it keeps meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.key = f"rectiformer begins {folder.absolute()}"
        self.store = torchrun_store()

    def begun(self) -> bool:
        """Whether this is not the first start, and an earlier one got as far as `begin`."""
        return self.store is not None and self.store.check([self.key])

    def begin(self) -> None:
        """From now on the folder is that of these ranks."""
        if self.store is not None:
            self.store.set(self.key, "yes")


def device_of_rank(device: torch.device, local: int) -> torch.device:
    """The GPU of the process that is number `local` on its host, or the CPU."""
    if device.type != "cuda":
        return device
    if local >= torch.cuda.device_count():
        raise ArgumentError(
            f"process {local} of this host has no GPU of its own, as there are {torch.cuda.device_count()}; start as "
            "many by torchrun --nproc-per-node, or choose the device cpu"
        )
    return torch.device("cuda", local)


def heard(rank: int, kind: str, text: str) -> Exception:
    """The error that another rank raised: of the same kind where it is one of ours."""
    kinds: list[type[Exception]] = [InterruptedError, *subclasses(RectiformerError)]
    known = {each.__name__: each for each in kinds}
    error = known[kind](text) if kind in known else RectiformerError(f"rank {rank} failed: {kind}: {text}")
    error.add_note(HEARD)
    return error


def speaks() -> bool:
    """Whether this process is alone, or the one that speaks for the ranks of torchrun."""
    return not dist.is_torchelastic_launched() or os.environ["RANK"] == "0"


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for child in kind.__subclasses__():
        yield from subclasses(child)
