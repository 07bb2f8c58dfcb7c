"""What every row of the kernel benchmark is made of: sizes, tensors, contestants, a meter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from kernel_errors import Errors
from kernel_timing import Attend, Work, time_calls, time_graph
from torch import Tensor

from rectiformer import attention

Case = dict[str, object]


@dataclass(frozen=True)
class Scale:
    """How large the problems are. `tokens` and `width` (heads times their size) stay the same over lengths."""

    tokens: int = 32768
    width: int = 2048
    sizes: tuple[int, ...] = (64, 128)
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    entmax_lengths: tuple[int, ...] = (4096, 16384, 32768)
    matrix: int = 8192
    short_tokens: int = 25_000
    short_lengths: tuple[int, int] = (8, 128)
    short_heads: int = 8
    decode_rows: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (64, 1), (16, 4))  # sentences, beam
    decode_keys: tuple[int, ...] = (32, 512, 2048, 8192)
    decode_heads: tuple[tuple[int, int, int], ...] = ((8, 8, 64), (32, 8, 128))  # of queries, of keys, their size
    layers: int = 8

    @property
    def one_length(self) -> int:
        """Where one size has to do."""
        return self.lengths[1]


TINY = Scale(
    tokens=64,
    width=32,
    sizes=(16,),
    lengths=(16, 32),
    entmax_lengths=(32,),
    matrix=64,
    short_tokens=100,
    short_lengths=(2, 16),
    short_heads=2,
    decode_rows=((1, 1), (2, 2)),
    decode_keys=(8,),
    decode_heads=((2, 2, 16), (4, 2, 16)),
    layers=2,
)


@dataclass(frozen=True)
class Bench:
    """Where and how large. The CPU has other kernels than the fused ones, and float32 to test in."""

    device: str
    scale: Scale
    milliseconds: float  # of measuring a contestant

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def backend(self) -> str:
        return "fused" if self.device == "cuda" else "auto"

    def draw(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return drawn.requires_grad_()

    def draw_dense(self, size: int, length: int) -> list[Tensor]:
        """q, k, v and the gradient of the output, [B, H, N, D]."""
        shape = (self.scale.tokens // length, self.scale.width // size, length, size)
        return [self.draw(*shape, seed=seed) for seed in range(4)]

    def ours(self, variant: str = "rela", **arguments: object) -> Attend:
        return lambda q, k, v: attention(q, k, v, variant, backend=self.backend, **arguments)

    def eagerly(self, work: Work) -> float:
        return time_calls(work, self.device, self.milliseconds)

    def captured(self, work: Work) -> float:
        return time_graph(work, self.device, self.milliseconds)


@dataclass(frozen=True)
class Trial:
    """What is measured in one row, by `meter`, in `unit`; contestants are made one after the other."""

    contestants: dict[str, Callable[[], Work]]
    meter: Callable[[Work], float]
    unit: str = "ms"
    flops: float | None = None
    checks: dict[str, Callable[[], Errors]] = field(default_factory=dict)
    facts: Case = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One point to measure, and the tensors only once its turn comes."""

    section: str
    case: Case
    build: Callable[[], Trial]


def enter(
    work: Callable[[Attend, list], Work], tensors: list, **attends: Callable[[], Attend]
) -> dict[str, Callable[[], Work]]:
    """Each contestant's work on the same tensors; its attention is made, and may fail, when its turn comes."""

    def prepare(make: Callable[[], Attend]) -> Work:
        return work(make(), tensors)

    return {name.replace("_", " "): partial(prepare, make) for name, make in attends.items()}
