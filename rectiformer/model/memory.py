"""The feed-forward layer as a key-value memory: a token's match with each key weighs that key's value.

Axes: T tokens (every leading axis of the input, as one), E width, N slots, K kept slots or kept experts,
S = sqrt(N) sub-keys of a product key, G slots of one expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.errors import ShapeError, unknown_name
from rectiformer.model.lookups import AllSlots, Experts, Lookup, ProductKeys, Sizes, Weights, require


@dataclass(frozen=True)
class MemoryObservation:
    """What one forward pass did; still part of its graph, so detach what is kept."""

    weights: Weights  # weights() is [..., N], before dropout
    output: Tensor  # [..., E], what the module returns


def _wide(scores: Tensor) -> torch.dtype:
    return torch.promote_types(scores.dtype, torch.float32)


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=_wide(scores)).to(scores.dtype)


def _squared_relu(scores: Tensor) -> Tensor:
    return scores.relu().square()


@dataclass(frozen=True)
class Memory:
    """One way from a token's scores to the mix of values it gets."""

    name: str
    formula: str
    paper: str
    use: str  # when to choose it
    lookup: Callable[[Sizes], Lookup]  # which keys are scored: all, product keys, or those of some experts
    weigh: Callable[[Tensor], Tensor]  # from the scores of the slots in play, along the last axis, to their weights
    keeps: str = ""  # what the argument `keep` counts: slots, experts, or nothing
    output_norm: bool = False  # whether a LayerNorm follows, before the residual is added


# fmt: off
MEMORIES: dict[str, Memory] = {
    row.name: row
    for row in [
        Memory("relu", "relu(x K^T + b1) V + b2", "Vaswani et al. 2017",
               "The usual feed-forward layer, and the default.", AllSlots, F.relu),
        Memory("softmax", "softmax(x K^T + b1) V + b2", "Shen et al. 2023",
               "To see slots compete: the output is small beside the residual.", AllSlots, _softmax),
        Memory("softmax-ln", "LayerNorm(softmax(x K^T + b1) V + b2)", "Shen et al. 2023",
               "For competing slots whose output keeps its scale.", AllSlots, _softmax, output_norm=True),
        Memory("relu2", "relu(x K^T + b1)^2 V + b2", "So et al. 2021",
               "For sharper weights than relu at the same cost.", AllSlots, _squared_relu),
        Memory("topk", "top_K(relu(x K^T + b1)) V + b2", "Csordas et al. 2023",
               "For a fixed number of active slots a token.", AllSlots, F.relu, keeps="slots"),
        Memory("product-softmax", "softmax(top_K(u)) V + b2, u_i = u_b[i div S] + u_a[i mod S]", "Lample et al. 2019",
               "For very many slots, with the weights of the original.", ProductKeys, _softmax, keeps="slots"),
        Memory("product-relu", "relu(top_K(u)) V + b2, u_i = u_b[i div S] + u_a[i mod S]", "Csordas et al. 2023",
               "For very many slots: ahead of product-softmax in its paper.", ProductKeys, F.relu, keeps="slots"),
        Memory("sigma-moe", "sum_e s_e relu(x K_e^T + b1_e) V_e + b2, s = top_K(sigmoid(x W^T))", "Csordas et al. 2023",
               "For many slots at the cost of a few experts.", Experts, F.relu, keeps="experts"),
    ]
}
# fmt: on


class KeyValueMemory(nn.Module):
    """Give each token [..., E] the mix [..., E] of N values that `memory`, a name from `MEMORIES`, says.

    `values` is the matrix [N, E]. An `observer`, when set, is called with a `MemoryObservation` of each forward pass.

    Args:
        bias: add b1 to the scores and b2 to the mix. The memory view of the ReLUFormer paper has neither: False.
        dropout: share of the weights dropped in training; the others grow to make up for it.
        keep: slots a token keeps (unless told 32, or all if fewer), or experts (unless told a quarter of them).
        experts: equal groups of slots (unless told 4, or one for every 128 slots; fewer if that does not divide).
        expert_dropout: chance that an expert's gate is 0 for a token in training; the others do not grow.
        layers: depth of the network around, which scales the initial weights of experts; the rest ignore it.
    """

    def __init__(
        self,
        width: int,
        slots: int,
        memory: str = "relu",
        *,
        bias: bool = True,
        dropout: float = 0.0,
        keep: int | None = None,
        experts: int | None = None,
        expert_dropout: float = 0.0,
        layers: int = 1,
    ) -> None:
        super().__init__()
        require(memory in MEMORIES, unknown_name("memory", memory, MEMORIES))
        self.memory, self.width, self.slots = MEMORIES[memory], width, slots
        row = (self.memory.name, self.memory.weigh, self.memory.keeps)
        sizes = Sizes(*row, width, slots, bias, dropout, keep, experts, expert_dropout, layers)
        _check_sizes(sizes)
        self.lookup = self.memory.lookup(sizes)
        self.values = nn.Parameter(torch.empty(slots, width))
        self.value_bias = nn.Parameter(torch.zeros(width)) if bias else None
        # A softmax averages: with thousands of slots the variance is about 1e-7, which the usual 1e-5 would swamp.
        self.norm = nn.LayerNorm(width, eps=1e-12) if self.memory.output_norm else nn.Identity()
        self.observer: Callable[[MemoryObservation], None] | None = None
        self.lookup.initialize(self.values)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.width:
            raise ShapeError(f"x is {list(x.shape)}, but the memory needs [..., E] with E = {self.width}")
        out, weights = self.lookup(x.reshape(-1, self.width), self.values)
        out = self.norm(out if self.value_bias is None else out + self.value_bias).reshape(x.shape)
        if self.observer is not None:
            self.observer(MemoryObservation(lambda: weights().reshape(*x.shape[:-1], self.slots), out))
        return out

    def balance(self) -> Tensor:
        """sum_e p_e log p_e, p the token mean of softmax(gate scores): add some to a loss to keep all experts in use.

        It tells of the latest forward pass; 0 unless that was in training and there were experts and tokens.
        """
        scores = self.lookup.gate_scores
        if scores is None or not len(scores):
            return self.values.new_zeros(())
        log_p = scores.log_softmax(-1, _wide(scores)).logsumexp(0) - math.log(len(scores))  # [experts]
        return (log_p.exp() * log_p).sum()


def _check_sizes(sizes: Sizes) -> None:
    for name in ("width", "slots", "layers"):
        require(getattr(sizes, name) >= 1, f"{name} = {getattr(sizes, name)} is below 1; use 1 or more")
    for name in ("dropout", "expert_dropout"):
        require(0 <= getattr(sizes, name) < 1, f"{name} = {getattr(sizes, name)} is outside [0, 1); use 0 for none")
    given = {"keep": sizes.keep, "experts": sizes.experts, "expert_dropout": sizes.expert_dropout or None}
    for name, value in given.items():
        takers = [row.name for row in MEMORIES.values() if row.keeps == "experts" or (name == "keep" and row.keeps)]
        holds = value is None or sizes.name in takers
        require(holds, f"{name} = {value} means nothing to memory {sizes.name!r}; it is for {', '.join(takers)}")
