"""How a token finds the slots of a memory: among all keys, by product keys, or by experts.

Axes are those of memory.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.errors import ConfigError
from rectiformer.model.dropout import Dropout

Weights = Callable[[], Tensor]  # called only when somebody looks; zero where a slot was not used


@dataclass(frozen=True)
class Sizes:
    """What a lookup is made of: the row of its memory, and what `KeyValueMemory` was given."""

    name: str
    weigh: Callable[[Tensor], Tensor]
    keeps: str
    width: int
    slots: int
    bias: bool
    dropout: float
    keep: int | None
    experts: int | None
    expert_dropout: float
    layers: int


class Lookup(nn.Module):
    """Keys, and a `forward(x [T, E], values [N, E])` that returns the mixed values [T, E] and the weights used."""

    gate_scores: Tensor | None = None  # [T, experts] of the latest forward pass, if in training and with experts

    def __init__(self, sizes: Sizes, key_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weigh = sizes.weigh
        self.drop = Dropout(sizes.dropout)
        self.keys = nn.Parameter(torch.empty(key_shape))
        self.key_bias = nn.Parameter(torch.zeros(key_shape[:-1])) if sizes.bias else None

    def initialize(self, values: Tensor) -> None:
        """Draw keys and values."""
        for matrix in (self.keys, values):
            limit = math.sqrt(6 / sum(matrix.shape[-2:]))  # fan_avg, uniform, gain 1, as the ReLA code has it
            nn.init.uniform_(matrix, -limit, limit)


class AllSlots(Lookup):
    """Every key is scored; where `keep` is set, only the K largest weights stay."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, (sizes.slots, sizes.width))
        self.keep = checked_keep(sizes.keep, min(32, sizes.slots), sizes.slots, "slots") if sizes.keeps else None

    def forward(self, x: Tensor, values: Tensor) -> tuple[Tensor, Weights]:
        weights = self.weigh(F.linear(x, self.keys, self.key_bias))  # [T, N]
        if self.keep is not None:
            top, slot = weights.topk(self.keep)  # [T, K]
            weights = torch.zeros_like(weights).scatter(-1, slot, top)
        return self.drop(weights) @ values, lambda: weights


class ProductKeys(Lookup):
    """Slot i has sub-key i mod S for the first half of a token and i div S for the second: 2 S scores rank S² slots."""

    def __init__(self, sizes: Sizes) -> None:
        side = math.isqrt(sizes.slots)
        near = f"{side**2} or {(side + 1) ** 2}"
        require(side**2 == sizes.slots, f"slots = {sizes.slots} is no square, as {sizes.name!r} needs; use {near}")
        near = " or ".join(str(width) for width in (sizes.width - 1, sizes.width + 1) if width)
        require(sizes.width % 2 == 0, f"width = {sizes.width} is odd, but {sizes.name!r} halves it; use {near}")
        super().__init__(sizes, (2, side, sizes.width // 2))
        self.keep = checked_keep(sizes.keep, min(32, sizes.slots), sizes.slots, "slots")
        self.norm = nn.LayerNorm(sizes.width)  # without it few slots are ever reached

    def forward(self, x: Tensor, values: Tensor) -> tuple[Tensor, Weights]:
        scores, slot = self._best(self._half_scores(x))  # [T, K]
        weights = self.weigh(scores)
        mixed = (self.drop(weights).unsqueeze(1) @ F.embedding(slot, values)).squeeze(1)  # [T, E]
        return mixed, lambda: weights.new_zeros(len(x), len(values)).scatter(-1, slot, weights)

    def _half_scores(self, x: Tensor) -> Tensor:
        """How well each half of each token fits the sub-keys of that half: [2, T, S]."""
        scores = torch.stack(self.norm(x).chunk(2, dim=-1)) @ self.keys.mT  # [2, T, E/2] times [2, E/2, S]
        return scores if self.key_bias is None else scores + self.key_bias.unsqueeze(1)

    def _best(self, halves: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and slots [T, K] of the K best sums; each is a sum of two among the K best of their halves."""
        side = halves.shape[-1]
        best, where = halves.topk(min(self.keep, side))  # [2, T, min(K, S)]
        sums = best[1].unsqueeze(-1) + best[0].unsqueeze(-2)
        scores, cell = sums.flatten(1).topk(self.keep)
        row, column = where[1].gather(-1, cell // best.shape[-1]), where[0].gather(-1, cell % best.shape[-1])
        return scores, row * side + column


class Experts(Lookup):
    """Slots in groups of G; a gate picks K groups for each token, and only picked groups are computed."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, (sizes.slots, sizes.width))
        self.experts = checked_experts(sizes.experts, sizes.slots)
        self.keep = checked_keep(sizes.keep, max(1, self.experts // 4), self.experts, "experts")
        self.expert_dropout, self.layers = sizes.expert_dropout, sizes.layers
        # The deviation of the keys, but rows of one norm: no expert starts ahead of the others.
        self.gate = nn.Parameter(F.normalize(torch.randn(self.experts, sizes.width)) * math.sqrt(2 / sizes.layers))

    def initialize(self, values: Tensor) -> None:
        # As for one dense layer of all N slots in a pre-norm network of this depth.
        nn.init.normal_(self.keys, std=math.sqrt(2 / (values.shape[1] * self.layers)))
        nn.init.normal_(values, std=math.sqrt(2 / (values.shape[0] * self.layers)))

    def forward(self, x: Tensor, values: Tensor) -> tuple[Tensor, Weights]:
        gates, picked = self._route(x)  # [T, K]
        # One row a (token, pick), sorted by expert so that each expert sees one slice; one host sync in all.
        order = picked.flatten().argsort(stable=True)
        counts = picked.flatten().bincount(minlength=self.experts).tolist()
        token = order // self.keep
        weights = self._expert_weights(x[token], gates.flatten()[order], counts)
        parts = values.chunk(self.experts)
        mixed = torch.cat([self.drop(rows) @ parts[expert] for expert, rows in weights.items()])  # [T K, E]
        # Undoing the sort and then adding, unlike index_add, adds in one order on every device.
        mixed = mixed[order.argsort()].unflatten(0, (len(x), self.keep)).sum(1)

        def place() -> Tensor:
            dense = x.new_zeros(len(x), self.experts, len(parts[0]))  # [T, experts, G]
            return dense.index_put((token, picked.flatten()[order]), torch.cat([*weights.values()]).to(x)).flatten(1)

        return mixed, place

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gates and the numbers of the K experts of each token; gates are not normalized over the K."""
        scores = F.linear(x, self.gate)  # [T, experts]
        self.gate_scores = scores if self.training else None
        gates = scores.sigmoid()
        if self.training and self.expert_dropout:
            gates = gates * torch.empty_like(gates).bernoulli_(1 - self.expert_dropout)
        return gates.topk(self.keep)

    def _expert_weights(self, x: Tensor, gates: Tensor, counts: list[int]) -> dict[int, Tensor]:
        """The weights [rows, G] of each expert that has rows in the sorted `x` [T K, E]."""
        keys = self.keys.chunk(self.experts)
        biases = [None] * self.experts if self.key_bias is None else self.key_bias.chunk(self.experts)
        rows, gate = x.split(counts), gates.unsqueeze(-1).split(counts)
        used = [expert for expert, count in enumerate(counts) if count] or [0]  # no tokens: one empty slice, one graph
        return {e: gate[e] * self.weigh(F.linear(rows[e], keys[e], biases[e])) for e in used}

    def __getstate__(self) -> dict[str, object]:
        # Scores belong to a graph, and tensors inside a graph can be neither copied nor pickled.
        return {**self.__dict__, "gate_scores": None}


def require(holds: bool, message: str) -> None:
    """ConfigError with this message, unless it holds."""
    if not holds:
        raise ConfigError(message)


def checked_keep(keep: int | None, default: int, limit: int, what: str) -> int:
    """How many to keep; ConfigError where there are not so many."""
    keep = default if keep is None else keep
    require(1 <= keep <= limit, f"keep = {keep} is outside 1 to {limit}, the number of {what}")
    return keep


def checked_experts(experts: int | None, slots: int) -> int:
    """How many groups of slots; ConfigError where that does not divide them."""
    divisors = [count for count in range(1, slots + 1) if slots % count == 0]
    if experts is None:
        return max(count for count in divisors if count <= max(4, slots // 128))
    near = [count for count in divisors if count < experts][-1:] + [count for count in divisors if count > experts][:1]
    use = " or ".join(map(str, near))
    require(experts in divisors, f"experts = {experts} does not divide slots = {slots}; use {use}")
    return experts
