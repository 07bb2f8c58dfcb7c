"""What a variant adds to the projections of attention: a score bias, learned options such as gamma, centered keys."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.errors import ConfigError, unknown_name
from rectiformer.ops.activations import unit_rms
from rectiformer.ops.distributed import AllReduce, ContextGroup, own_lengths
from rectiformer.ops.variants import Variant

SHARING = ("head", "layer", "fixed")


class ScoreBias(nn.Module):
    """A learned bias that each query adds to its scores, held in the first dimension of each head.

    Queries hold the number there: at first the same for all, then what they have learned to add to it, so that a head
    can close for a query, or open further. Keys hold sqrt(head_dim), which the scores are divided by. No kernel, cache
    or export has to know of it.

    With the power p of the variant as its start, [x + p]+^p begins like a softmax, with a gradient for every key;
    started at 0 it is a learned threshold (docs/variants.md, Score bias).

    Args:
        qkv_sizes: widths of queries, keys and values.
        init: the bias at first.
    """

    keep: Tensor
    values: Tensor
    keys: Tensor

    def __init__(self, qkv_sizes: Sequence[int], head_dim: int, init: float) -> None:
        super().__init__()
        if head_dim < 2:
            raise ConfigError(
                f"heads of {head_dim} dimension have none left for scores next to the one that holds their bias; use "
                "fewer heads, or model.score_bias = 'none'"
            )
        self.init, self.head_dim = init, head_dim
        queries, keys = (torch.arange(size) % head_dim == 0 for size in qkv_sizes[:2])
        kept = torch.cat([torch.ones(qkv_sizes[0]), ~keys, torch.ones(qkv_sizes[2])])
        self.register_buffer("keep", kept, persistent=False)
        values = torch.cat([queries * init, torch.zeros(sum(qkv_sizes[1:]))])
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("keys", keys * math.sqrt(head_dim), persistent=False)

    def reset(self, weight: Tensor) -> None:
        """Let queries add nothing yet."""
        weight[: len(weight) - 2 * len(self.keys)][:: self.head_dim] = 0

    def forward(self, weight: Tensor, bias: Tensor | None, rows: slice) -> tuple[Tensor, Tensor]:
        """Rows of the projections, with the bias in a query's first dimension and 0 in place of a key's."""
        keep, values = self.keep[rows].to(weight.dtype), self.values[rows].to(weight.dtype)
        return weight * keep[:, None], values if bias is None else bias * keep + values

    def add_to_keys(self, keys: Tensor) -> Tensor:
        """Keys [..., E], centered or not, with the factor of the bias in their first dimension."""
        return keys + self.keys.to(keys.dtype)


class QueryKeyNorm(nn.Module):
    """Queries and keys with a root mean square of 1, so that scores are cosines, and a learned factor for each head's.

    Args:
        heads: number of query heads.
        held: leading dimensions that are left as they are, since they hold the score bias.
    """

    def __init__(self, heads: int, held: int) -> None:
        super().__init__()
        self.held = held
        self.gain = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def queries(self, q: Tensor) -> Tensor:
        """Queries [B, H, M, D], times the factors."""
        return self._join(q, unit_rms(q[..., self.held :]) * self.gain[:, None, None].to(q.dtype))

    def keys(self, k: Tensor) -> Tensor:
        """Keys [B, K, N, D]."""
        return self._join(k, unit_rms(k[..., self.held :]))

    def _join(self, x: Tensor, normed: Tensor) -> Tensor:
        return torch.cat([x[..., : self.held], normed], -1) if self.held else normed


class LearnedOption(nn.Module):
    """A variant's gamma, beta, lam or alpha as a parameter that cannot leave its range, however far it is pushed.

    gamma is exp(raw), between 1e-13 and 1e13. beta is log(1 + exp(raw)), above 0. lam is sigmoid(raw). alpha is
    1 + sigmoid(raw), kept 0.001 above 1: nearer to 1, its exponent 1 / (alpha - 1) loses float32's digits, and at 1
    there is none. `other` is the next one of a variant that learns several.
    """

    LEAST_ALPHA = 1.001
    RANGES: ClassVar = {"sigmoid": (0, 1), "one-plus-sigmoid": (LEAST_ALPHA, 2)}

    def __init__(
        self,
        variant: Variant,
        name: str,
        heads: int = 1,
        init: float | None = None,
        other: "LearnedOption | None" = None,
    ) -> None:
        super().__init__()
        self.other = other
        option = variant.options.get(name)
        if option is None or not option.learn:
            raise ConfigError(f"variant {variant.name!r} has no learnable number {name!r}")
        self.name = name
        self.transform = option.learn
        self.raw_init = self._inverse(option.default if init is None else init)
        self.raw = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.raw, self.raw_init)
        if self.other is not None:
            self.other.reset_parameters()

    def values(self) -> dict[str, Tensor]:
        """All that is learned, by name."""
        return {self.name: self()} | ({} if self.other is None else self.other.values())

    def forward(self) -> Tensor:
        raw = self.raw.to(torch.promote_types(self.raw.dtype, torch.float32))
        if self.transform == "exp":
            return raw.clamp(-30, 30).exp()
        if self.transform == "softplus":
            return F.softplus(raw)
        if self.transform == "sigmoid":
            return raw.sigmoid()
        return self.LEAST_ALPHA + (2 - self.LEAST_ALPHA) * raw.sigmoid()

    def _inverse(self, value: float) -> float:
        least, most = self.RANGES.get(self.transform, (0, math.inf))
        if not least < value < most:
            raise ConfigError(
                f"{self.name} is learned between {least} and {most} and cannot start at {value:g}; start it inside of "
                f"that (model.{self.name}_init)"
            )
        if self.transform == "exp":
            return math.log(value)
        if self.transform == "softplus":
            return value + math.log(-math.expm1(-value))
        return -math.log((most - least) / (value - least) - 1)

    @staticmethod
    def names_in(variant: Variant) -> list[str]:
        """The options of `variant` that can be learned; `option_init` is of the first."""
        return [name for name, option in variant.options.items() if option.learn]


def build_learned(
    variant: Variant, sharing: str | LearnedOption, heads: int, fixed: Mapping[str, float], init: float | None = None
) -> LearnedOption | None:
    """The variant's learnable numbers, one per head or per layer, or the shared ones; None where all are fixed."""
    names = LearnedOption.names_in(variant)
    if isinstance(sharing, LearnedOption):
        for name in sharing.values():
            if name not in names:
                raise ConfigError(f"the shared {name!r} is not a number that variant {variant.name!r} learns")
            if name in fixed:
                raise ConfigError(f"{name} is given both fixed, as {fixed[name]}, and shared to be learned")
        return sharing
    if sharing not in SHARING:
        raise ConfigError(unknown_name("value of option_sharing", str(sharing), SHARING))
    learned = None
    for name in reversed(names):
        if name not in fixed and sharing != "fixed":
            start = init if name == names[0] else None
            learned = LearnedOption(variant, name, heads if sharing == "head" else 1, start, learned)
    return learned


def center_keys(k: Tensor, lengths: Tensor | None, group: ContextGroup | None = None) -> Tensor:
    """Keys [B, N, E] minus the mean over the first lengths[b] of them, or of those of all ranks of `group`."""
    if lengths is None:
        return k - k.mean(1, keepdim=True)
    own = lengths if group is None else own_lengths(lengths, k.shape[1] * group.size, group)
    real = (torch.arange(k.shape[1], device=k.device) < own[:, None])[..., None]
    wide = torch.promote_types(k.dtype, torch.float32)
    total = torch.where(real, k, 0).sum(1, keepdim=True, dtype=wide)
    total = total if group is None else AllReduce.apply(total, group)
    return k - (total / lengths.clamp_min(1)[:, None, None]).to(k.dtype)


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """ConfigError where the heads cannot share the width, or the key heads, equally."""
    if embed_dim < 1 or num_heads < 1 or num_kv_heads < 1:
        raise ConfigError(
            f"embed_dim = {embed_dim}, num_heads = {num_heads}, num_kv_heads = {num_kv_heads}; each must be at least 1"
        )
    if embed_dim % num_heads:
        raise ConfigError(f"num_heads = {num_heads} does not divide embed_dim = {embed_dim}")
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_kv_heads = {num_kv_heads} does not divide num_heads = {num_heads}")


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, length, E] to [B, num_heads, length, E / num_heads]."""
    B, length, width = x.shape  # Tensor.unflatten is Python, and takes three times as long as a view
    return x.view(B, length, num_heads, width // num_heads).transpose(1, 2)


def variance_scaling_(weight: Tensor) -> Tensor:
    """Uniform with limit sqrt(3 / mean of fan-in and fan-out): the ReLA authors' initializer of every matrix."""
    limit = math.sqrt(6 / sum(weight.shape))
    return nn.init.uniform_(weight, -limit, limit)
