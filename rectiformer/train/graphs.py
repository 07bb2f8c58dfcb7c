"""Work on a GPU recorded once as a CUDA graph, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pool = Any
"""Memory that graphs share, as torch.cuda.graph_pool_handle gives it; its type differs by version of torch."""


def capture(work: Callable[[], None], pool: Pool = None) -> Callable[[], None]:
    """What `work` does on the device, as one CUDA graph in the memory of `pool`. Recording does nothing yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph.replay


class CapturedStep:
    """Forward and backward of one shape as a CUDA graph with input places of its own."""

    def __init__(self, work: Callable[[list[Tensor], Tensor], None], inputs: list[Tensor], pool: Pool) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        self.divisor = torch.ones((), device=inputs[0].device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile, choose algorithms and allocate before anything is recorded
            for _ in range(2):
                work(self.inputs, self.divisor)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()  # what that took belongs to its stream, so that nothing else would ever use it
        self.replay = capture(lambda: work(self.inputs, self.divisor), pool)

    def __call__(self, inputs: list[Tensor], divisor: Tensor) -> None:
        torch._foreach_copy_([*self.inputs, self.divisor], [*inputs, divisor])
        self.replay()
