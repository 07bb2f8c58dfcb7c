"""How long a piece of work takes, and what it holds besides its results."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from closeness import peak_allocation

Work = Callable[[], object]
Attend = Callable[..., Tensor]  # of q, k, v, and what else is learned
CACHE_BYTES = 256 << 20  # more than any GPU's second-level cache
BATCH = 10  # calls between two waits for the device, where the host's time is measured
ROUNDS = 4  # calls in one captured graph, so that its launch weighs little


def time_calls(work: Work, device: str, milliseconds: float, flush: bool = True) -> float:
    """Median milliseconds of one call as launched from Python. `flush`: every call finds the GPU's cache cold."""
    work()
    if device == "cpu":
        return statistics.median(cpu_times(work, milliseconds))
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device) if flush else None
    once = statistics.median(cuda_times(work, 3, cache))
    repeats = min(200, max(5, int(milliseconds / once)))
    return statistics.median(cuda_times(work, repeats, cache))


def cpu_times(work: Work, milliseconds: float) -> list[float]:
    times: list[float] = []
    while len(times) < 3 or sum(times) < milliseconds:
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def cuda_times(work: Work, repeats: int, cache: Tensor | None) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        if cache is not None:
            cache.zero_()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def seconds_of(work: Work, repeats: int, device: str) -> float:
    """Seconds of one call, from `repeats` in a row and the wait for the device."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - start) / repeats


def wall_us(work: Work, device: str, milliseconds: float) -> float:
    """Microseconds of one call among as many in a row as fill the time."""
    once = seconds_of(work, 3, device)
    return seconds_of(work, min(1000, max(3, int(milliseconds / 1e3 / once))), device) * 1e6


def host_us(work: Work, device: str, milliseconds: float) -> float:
    """Microseconds until a call returns to Python: the median over batches, each begun with nothing queued.

    A batch is far shorter than the queue of launches, in which Python would wait for the device.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    means: list[float] = []
    end = time.perf_counter() + milliseconds / 1e3
    while len(means) < 3 or time.perf_counter() < end:
        wait()
        start = time.perf_counter()
        for _ in range(BATCH):
            work()
        means.append((time.perf_counter() - start) / BATCH)
    return statistics.median(means) * 1e6


def time_graph(work: Work, device: str, milliseconds: float) -> float:
    """Median milliseconds of one call inside a CUDA graph: what the device does, without launches from Python."""
    if device == "cpu":
        return time_calls(work, device, milliseconds)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            work()
    return time_calls(graph.replay, device, milliseconds, flush=False) / ROUNDS


def forward_work(attend: Attend, tensors: list[Tensor]) -> Work:
    *inputs, _ = tensors

    def work() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    return work


def backward_work(attend: Attend, tensors: list[Tensor]) -> Work:
    """The backward pass alone: the gradients of a graph that is kept."""
    *inputs, upstream = tensors
    out = attend(*inputs)
    return lambda: torch.autograd.grad(out, inputs, upstream, retain_graph=True)


def both_work(attend: Attend, tensors: list[Tensor]) -> Work:
    """Forward and backward; the output and the gradients come out."""
    *inputs, upstream = tensors

    def work() -> list[Tensor]:
        out = attend(*inputs)
        return [out, *torch.autograd.grad(out, inputs, upstream)]

    return work


def extra_percent(work: Work, tensors: list[Tensor], device: str) -> float:
    """Most bytes held besides inputs, output and gradients, in percent of those."""
    results = sum(tensor.nbytes for tensor in tensors)  # the output is as large as its gradient
    if device == "cpu":
        held = peak_allocation(work)
    else:
        work()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        held = torch.cuda.max_memory_allocated() - before
    return 100 * (held - results) / (2 * results)
