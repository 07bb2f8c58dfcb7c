"""Work on a GPU recorded once as CUDA graphs, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SPARE = 1.25
"""How much more than the first shape needs is taken for all: the others have about as many tokens, some a few more."""


class GraphMemory:
    """The memory that all graphs of a training share: they run one after the other, and leave their results in places
    of ours.

    It is taken as one block, cut anew for each graph. Taken as they ask for it, shape after shape, a tensor that is a
    little larger than the one before would not fit in its place, and blocks are never joined: 25 shapes held 34 GiB of
    a GPU with 7.5 in use.
    """

    def __init__(self) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.taker: torch.cuda.CUDAGraph | None = None
        """The graph that took the block; while it lives, the block is the pool's."""

    def take(self, size: int, device: torch.device) -> None:
        """Take so many bytes, unless some are taken."""
        if self.taker is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                block = torch.empty(max(1, size), dtype=torch.uint8, device=device)
                block[:1].zero_()  # torch warns of a graph of nothing
                del block
            self.taker = graph

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` does on the device, as one CUDA graph. Recording does nothing yet."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            work()
        return graph.replay


class CapturedStep:
    """Forward and backward of one shape as a CUDA graph with input places of its own."""

    def __init__(self, work: Callable[[list[Tensor], Tensor], None], inputs: list[Tensor], memory: GraphMemory) -> None:
        device = inputs[0].device
        self.inputs = [tensor.clone() for tensor in inputs]
        self.divisor = torch.ones((), device=device)
        before = torch.cuda.memory_allocated(device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile, choose algorithms and allocate before anything is recorded
            for _ in range(2):
                work(self.inputs, self.divisor)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()  # what that took belongs to its stream, so that nothing else would ever use it
        memory.take(int(SPARE * (torch.cuda.max_memory_allocated(device) - before)), device)
        self.replay = memory.capture(lambda: work(self.inputs, self.divisor))

    def __call__(self, inputs: list[Tensor], divisor: Tensor) -> None:
        torch._foreach_copy_([*self.inputs, self.divisor], [*inputs, divisor])
        self.replay()
