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

from rectiformer.errors import ConfigError, ShapeError, unknown_name
from rectiformer.model.dropout import Dropout

Weights = Callable[[], Tensor]
"""Called only when an observer asks; zero where a slot was not used."""


def _squared_relu(scores: Tensor) -> Tensor:
    return scores.relu().square()


@dataclass(frozen=True)
class MemoryObservation:
    """What one forward pass did; still part of its graph, so detach what is kept."""

    weights: Weights  # weights() is [..., N], before dropout
    output: Tensor  # [..., E], what the module returns


@dataclass(frozen=True)
class Settings:
    """What `KeyValueMemory` was given, and the row of its memory."""

    memory: Memory
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

    def __init__(self, settings: Settings, key_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weigh = settings.memory.weigh
        self.drop = Dropout(settings.dropout)
        self.keys = nn.Parameter(torch.empty(key_shape))
        self.key_bias = nn.Parameter(torch.zeros(key_shape[:-1])) if settings.bias else None

    def initialize(self, values: Tensor) -> None:
        """Draw keys and values."""
        for matrix in (self.keys, values):
            limit = math.sqrt(6 / sum(matrix.shape[-2:]))  # fan_avg, uniform, gain 1, as the ReLA code has it
            nn.init.uniform_(matrix, -limit, limit)


class AllSlots(Lookup):
    """Every key is scored; where `keep` is set, only the K largest weights stay."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, (settings.slots, settings.width))
        self.keep = checked_keep(settings, settings.slots, min(32, settings.slots)) if settings.memory.keeps else None

    def forward(self, x: Tensor, values: Tensor) -> tuple[Tensor, Weights]:
        weights = self.weigh(F.linear(x, self.keys, self.key_bias))  # [T, N]
        if self.keep is not None:
            top, slot = weights.topk(self.keep)  # [T, K]
            weights = torch.zeros_like(weights).scatter(-1, slot, top)
        return self.drop(weights) @ values, lambda: weights


class ProductKeys(Lookup):
    """Slot i has sub-key i mod S for the first half of a token and i div S for the second: 2 S scores rank S² slots."""

    def __init__(self, settings: Settings) -> None:
        name, width, slots, side = settings.memory.name, settings.width, settings.slots, math.isqrt(settings.slots)
        near = f"{side**2} or {(side + 1) ** 2}"
        require(side**2 == slots, f"slots = {slots} is no square, as {name!r} needs; use {near}")
        near = " or ".join(str(even) for even in (width - 1, width + 1) if even)
        require(width % 2 == 0, f"width = {width} is odd, but {name!r} halves it; use {near}")
        super().__init__(settings, (2, side, settings.width // 2))
        self.keep = checked_keep(settings, settings.slots, min(32, settings.slots))
        self.norm = nn.LayerNorm(settings.width)  # without it few slots are ever reached

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

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, (settings.slots, settings.width))
        self.experts = checked_experts(settings.experts, settings.slots)
        self.keep = checked_keep(settings, self.experts, max(1, self.experts // 4))
        self.expert_dropout, self.layers = settings.expert_dropout, settings.layers
        # The deviation of the keys, but rows of one norm: no expert starts ahead of the others.
        self.gate = nn.Parameter(
            F.normalize(torch.randn(self.experts, settings.width)) * math.sqrt(2 / settings.layers)
        )

    def initialize(self, values: Tensor) -> None:
        # As for one dense layer of all N slots in a pre-norm network of this depth.
        nn.init.normal_(self.keys, std=math.sqrt(2 / (values.shape[1] * self.layers)))
        nn.init.normal_(values, std=math.sqrt(2 / (values.shape[0] * self.layers)))

    def forward(self, x: Tensor, values: Tensor) -> tuple[Tensor, Weights]:
        gates, picked = self._route(x)  # [T, K]
        # One row per (token, pick), sorted by expert so that each expert sees one slice; one host sync in all.
        order = picked.flatten().argsort(stable=True)
        counts = picked.flatten().bincount(minlength=self.experts).tolist()
        token = order // self.keep
        weights = self._expert_weights(x[token], gates.flatten()[order], counts)
        parts = values.chunk(self.experts)
        mixed = torch.cat([self.drop(rows) @ parts[expert] for expert, rows in weights.items()])  # [T K, E]
        # Undoing the sort and then adding, unlike index_add, adds in one order on every device.
        mixed = mixed[order.argsort()].unflatten(0, (len(x), self.keep)).sum(1)

        def scatter() -> Tensor:
            dense = x.new_zeros(len(x), self.experts, len(parts[0]))  # [T, experts, G]
            return dense.index_put((token, picked.flatten()[order]), torch.cat([*weights.values()]).to(x)).flatten(1)

        return mixed, scatter

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gates and the indices of the K experts of each token; gates are not normalized over the K."""
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


def _wide(scores: Tensor) -> torch.dtype:
    return torch.promote_types(scores.dtype, torch.float32)


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=_wide(scores)).to(scores.dtype)


@dataclass(frozen=True)
class Memory:
    """One way from a token's scores to the mix of values it gets."""

    name: str
    formula: str
    paper: str
    use: str  # when to choose it
    lookup: Callable[[Settings], Lookup]  # which keys are scored: all, product keys, or those of some experts
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
               "To see slots compete: the output is small next to the residual.", AllSlots, _softmax),
        Memory("softmax-ln", "LayerNorm(softmax(x K^T + b1) V + b2)", "Shen et al. 2023",
               "For competing slots whose output keeps its scale.", AllSlots, _softmax, output_norm=True),
        Memory("relu2", "relu(x K^T + b1)^2 V + b2", "So et al. 2021",
               "For sharper weights than relu at the same cost.", AllSlots, _squared_relu),
        Memory("topk", "top_K(relu(x K^T + b1)) V + b2", "Csordas et al. 2023",
               "For a fixed number of active slots per token.", AllSlots, F.relu, keeps="slots"),
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
        keep: slots per token (default: 32, or all if fewer), or experts per token (default: a quarter of them).
        experts: equal groups of slots (default: 4, or one for every 128 slots; fewer if that does not divide).
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
        settings = Settings(self.memory, width, slots, bias, dropout, keep, experts, expert_dropout, layers)
        check_settings(settings)
        self.lookup = self.memory.lookup(settings)
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


def check_settings(settings: Settings) -> None:
    """ConfigError for a number out of range, or one that this memory has no use for."""
    for name in ("width", "slots", "layers"):
        require(getattr(settings, name) >= 1, f"{name} = {getattr(settings, name)} is below 1; use 1 or more")
    for name in ("dropout", "expert_dropout"):
        share = getattr(settings, name)
        require(0 <= share < 1, f"{name} = {share} is outside [0, 1); use 0 for none")
    given = {"keep": settings.keep, "experts": settings.experts, "expert_dropout": settings.expert_dropout or None}
    for name, value in given.items():
        takers = [row.name for row in MEMORIES.values() if row.keeps == "experts" or (name == "keep" and row.keeps)]
        memory = settings.memory.name
        holds = value is None or memory in takers
        require(holds, f"{name} = {value} means nothing to memory {memory!r}; it is for {', '.join(takers)}")


def require(holds: bool, message: str) -> None:
    """ConfigError with this message, unless it holds."""
    if not holds:
        raise ConfigError(message)


def checked_keep(settings: Settings, limit: int, default: int) -> int:
    """How many to keep of `limit` slots or experts; ConfigError where there are not so many."""
    keep = default if settings.keep is None else settings.keep
    require(1 <= keep <= limit, f"keep = {keep} is outside 1 to {limit}, the number of {settings.memory.keeps}")
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
