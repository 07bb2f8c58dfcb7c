"""Work on a GPU recorded once as CUDA graphs, and replayed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where users say how torch is to hold the memory of a GPU."""


class GraphMemory:
    """The memory that all graphs of a training share: they run one after the other, and leave their results in places
    of ours.

    Torch is asked to take it as one range of addresses that grows. In blocks, as it does by itself, a tensor that is a
    little larger than the one before would not fit in its place, and blocks are never joined: graphs of 28 shapes held
    29.4 GiB where 10.1 are enough (docs/log.md).
    """

    def __init__(self) -> None:
        if not any(name in os.environ for name in SETTINGS):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        """Where work runs before it is recorded; one for all, since libraries keep workspaces for each stream."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Compile, choose algorithms and allocate workspaces, none of which can be recorded."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.empty_cache()  # what that took belongs to its stream, so that nothing else would ever use it

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` does on the device, as one CUDA graph. Recording does nothing yet."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            work()
        return graph.replay


class CapturedStep:
    """Forward and backward of one shape as a CUDA graph with input places of its own."""

    def __init__(self, work: Callable[[list[Tensor], Tensor], None], inputs: list[Tensor], memory: GraphMemory) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        self.divisor = torch.ones((), device=inputs[0].device)
        memory.warm_up(lambda: work(self.inputs, self.divisor))
        self.replay = memory.capture(lambda: work(self.inputs, self.divisor))

    def __call__(self, inputs: list[Tensor], divisor: Tensor) -> None:
        torch._foreach_copy_([*self.inputs, self.divisor], [*inputs, divisor])
        self.replay()
