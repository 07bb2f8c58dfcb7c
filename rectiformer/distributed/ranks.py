"""The ranks of one job, in torch.distributed's words: what one of them decides or meets, all know.

Objects travel as JSON over a gloo group of its own, separate from the one that carries gradients. Its timeout is long,
since the other ranks wait there while rank 0 prepares data or validates; a rank that dies ends the waiting of the
others at once, and one that is stopped in training is found by distributed/pulse.py.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from rectiformer.errors import FROM_OTHER_RANK, SENT_TO_ALL_RANKS, ArgumentError, RectiformerError, is_on_all_ranks

T = TypeVar("T")
TIMEOUT = timedelta(days=1)
START_TIMEOUT = timedelta(minutes=5)
START_POLL = 0.01  # seconds


class LostRankError(RectiformerError):
    """Another rank died or cannot be reached any more."""

    exit_code = 7


@dataclass(frozen=True)
class Ranks:
    """The `world_size` processes of one job, seen from process `rank`.

    A method that communicates must be called by all ranks; in a single process it is a plain call.
    """

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_rank0(self) -> bool:
        """Whether this rank writes, locks, prepares and prints for all."""
        return self.rank == 0

    def own_share(self, items: Sequence[T]) -> Sequence[T]:
        """Every `world_size`-th of the items that all ranks have: this rank's."""
        return items[self.rank :: self.world_size]

    def all_gather_object(self, make: Callable[[], T]) -> list[T]:
        """What `make` returns on each rank, which JSON must hold; if it fails on one, all raise that rank's error."""
        if self.world_size == 1:
            return [make()]
        failure: Exception | None = None
        try:
            message = json.dumps({"value": make()})
        except Exception as error:  # whatever it is, the others must learn of it
            failure, message = error, json.dumps({"error": type(error).__name__, "text": str(error)})
        messages = self._all_gather_text(message)
        if failure is not None:
            failure.add_note(SENT_TO_ALL_RANKS)
            raise failure
        for rank, each in enumerate(messages):
            if "value" not in each:
                raise error_of_rank(rank, each["error"], each["text"])
        return [each["value"] for each in messages]

    def on_rank0(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, which alone calls it; if it fails there, its error on every rank."""
        return self.all_gather_object(work if self.is_rank0 else nothing)[0]

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on some rank."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        with self.error_guard():
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return bool(flags)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace every rank's `tensor` by their sum, over the group that carries gradients."""
        with self.error_guard():
            dist.all_reduce(tensor)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replace every rank's `tensors` by those of rank 0, over the group that carries gradients."""
        if self.world_size > 1:
            with self.error_guard():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    @contextmanager
    def error_guard(self) -> Iterator[None]:
        """Turn what collectives raise in here where a rank is gone into LostRankError."""
        try:
            yield
        except RuntimeError as error:
            words = ("gloo", "NCCL", "Connection", "Broken pipe")
            lost = isinstance(error, dist.DistError) or any(word in str(error) for word in words)
            if self.world_size == 1 or not lost:
                raise
            why = re.sub(r"\[[^]]*\.cc:[0-9]+\] *", "", " ".join(str(error).split()))[:100]
            raise LostRankError(
                f"rank {self.rank}: another rank is gone ({why}); what was saved is kept; run the same command "
                "again, a training with --resume, or have torchrun do it by --max-restarts"
            ) from error

    def new_group(self) -> Ranks:
        """The same ranks over connections of their own, for another thread."""
        if self.world_size == 1:
            return self
        return Ranks(self.rank, self.world_size, dist.new_group(backend="gloo", timeout=TIMEOUT))

    def _all_gather_text(self, message: str) -> list[dict[str, Any]]:
        text = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.world_size, dtype=torch.long)
        with self.error_guard():
            dist.all_gather(list(lengths.split(1)), torch.tensor([len(text)]), group=self.group)
            padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
            padded[: len(text)] = text
            texts = [torch.empty_like(padded) for _ in range(self.world_size)]
            dist.all_gather(texts, padded, group=self.group)
        return [
            json.loads(each[:length].numpy().tobytes()) for each, length in zip(texts, lengths.tolist(), strict=True)
        ]


SINGLE_PROCESS = Ranks()


def nothing() -> Any:
    return None


@contextmanager
def init_ranks(find_device: Callable[[], torch.device]) -> Iterator[tuple[Ranks, torch.device]]:
    """The ranks that torchrun started, or this process alone, and this rank's device of the type that was found.

    Gradients go over NCCL between GPUs and over gloo between CPUs.
    """
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield SINGLE_PROCESS, device_of_rank(find_device(), 0)
        return
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    with Ranks(rank, size).error_guard():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = torchrun_store()
        if store is not None:  # ranks before a restart met there too, and left addresses: pytorch issue 135712
            store = dist.PrefixStore(f"rectiformer start {name_start(store, rank, size)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        ranks = Ranks(rank, size).new_group()
    own = torch.device(ranks.all_gather_object(lambda: str(device_of_rank(find_device(), local)))[ranks.rank])
    if own.type == "cuda":
        torch.cuda.set_device(own)
    try:
        yield ranks, own
    except Exception as error:
        if is_on_all_ranks(error):  # else a rank might wait here for one that is gone, and has to leave as it is
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def torchrun_store() -> dist.Store | None:
    """The store that torchrun keeps for its ranks, also across restarts; None without torchrun."""
    if not dist.is_torchelastic_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, START_TIMEOUT)


def name_start(store: dist.Store, rank: int, size: int) -> str:
    """A name for this start, the same on all ranks, which no earlier start had.

    Hosts do not count restarts alike, so rank 0 draws the name. The others ask for it with a token of their own, which
    is new after a restart, and rank 0 answers every token it finds, old or new, until all have the name.
    """
    own = uuid4().hex
    if rank:
        store.set(f"rectiformer asks {rank}", own)
        name = store.get(f"rectiformer answers {own}").decode()
        store.set(f"rectiformer learned {name} {rank}", "yes")
        return name
    missing, end = list(range(1, size)), time.monotonic() + START_TIMEOUT.total_seconds()
    while missing:
        for asks in (f"rectiformer asks {other}" for other in missing):
            if store.check([asks]):
                store.set(f"rectiformer answers {store.get(asks).decode()}", own)
        missing = [other for other in missing if not store.check([f"rectiformer learned {own} {other}"])]
        if missing and time.monotonic() > end:
            raise dist.DistStoreError(f"rank {missing[0]} has not come within {START_TIMEOUT}")
        time.sleep(START_POLL)
    return own


def device_of_rank(device: torch.device, local: int) -> torch.device:
    """The GPU of the process whose rank on its host is `local`, or the CPU."""
    if device.type != "cuda":
        return device
    if local >= torch.cuda.device_count():
        raise ArgumentError(
            f"process {local} of this host has no GPU of its own, as there are {torch.cuda.device_count()}; start as "
            "many by torchrun --nproc-per-node, or choose the device cpu"
        )
    return torch.device("cuda", local)


def error_of_rank(rank: int, name: str, text: str) -> Exception:
    """The error that another rank raised: of the same class where it is one of ours."""
    classes: list[type[Exception]] = [InterruptedError, *subclasses(RectiformerError)]
    known = {each.__name__: each for each in classes}
    error = known[name](text) if name in known else RectiformerError(f"rank {rank} failed: {name}: {text}")
    error.add_note(FROM_OTHER_RANK)
    return error


def is_rank0() -> bool:
    """Whether this process is alone, or rank 0 of those that torchrun started."""
    return not dist.is_torchelastic_launched() or os.environ["RANK"] == "0"


def subclasses(parent: type[Exception]) -> Iterator[type[Exception]]:
    yield parent
    for child in parent.__subclasses__():
        yield from subclasses(child)
