"""What one row of the table of attention variants says.

It says how a query and a key make a score, how a row of scores becomes weights, how weights and values are mixed, which
norm the output wants, and what its options are. Rules that hold for every row, kept by `reference.py`: a hidden key
weighs exactly 0, a row that sees no key is exactly 0, and n is the number of keys *that row sees*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.ops.activations import Rows, RowScale, Value, dot_scores, weighted_sum

BOUNDS: dict[str, Callable[[float], bool]] = {
    "a number above 0": lambda value: value > 0,
    "a number of at least 0": lambda value: value >= 0,
    "a number above 1": lambda value: value > 1,
    "a whole number above 0": lambda value: value > 0 and value == int(value),
}


def is_finite(value: float) -> bool:
    """math.isfinite by comparisons, which torch.compile can follow where the number is symbolic."""
    return -math.inf < value < math.inf


@dataclass(frozen=True)
class Option:
    """A number that shapes a variant: given by the caller or, where `learn` names a transform, learned by a model."""

    default: float | int
    about: str
    needs: str
    """A key of `BOUNDS`."""
    learn: Literal["", "exp", "one-plus-sigmoid"] = ""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to attend."""

    name: str
    formula: str
    """Weight of one key, with x its score, n the keys its row sees, [.]+ = ReLU."""
    paper: str
    use: str
    """When to choose it, in one sentence."""
    weigh: Callable[[Tensor, Rows], Tensor] | None = None
    """Scores to weights; None for rectified rows, which `power` and `row_scale` describe in full."""
    power: int = 0
    """A rectified row's weights are [x]+ ** power times its `row_scale`. 0: not rectified."""
    row_scale: RowScale | None = None
    """A positive factor for a whole row. It is linear, so fast paths may apply it to the output."""
    scale: str = "none"
    """The row scale in words, for the tables."""
    output_norm: str = "none"
    """Name in model/norms.py of the norm over the concatenated heads, before the output projection."""
    centered: bool = False
    """Whether a translator subtracts from keys the mean of their sentence, unless it is told otherwise."""
    learned_start: float = 0.0
    """Where a translator that learns the variant's number begins, unless it is told otherwise; 0: at the default."""
    options: Mapping[str, Option] = field(default_factory=dict)
    score: Callable[[Tensor, Tensor], Tensor] = dot_scores
    mix: Callable[[Tensor, Tensor, Tensor | None], Tensor] = weighted_sum
    hidden: float = 0.0
    """What a hidden key's weight becomes: 0, except where `mix` reads weights otherwise."""

    @property
    def rectified(self) -> bool:
        return self.power > 0

    @property
    def has_weights(self) -> bool:
        """Whether the output is a weighted sum of values, so that asking for the weights makes sense."""
        return self.mix is weighted_sum

    @property
    def implementations(self) -> tuple[str, ...]:
        products = ("products",) if self.score is dot_scores and self.mix is weighted_sum else ()
        fused = ("fused",) if self.rectified else ("sdpa", "fused") if self.name == "softmax" else ()
        return ("reference", *products, *(("blocked",) if self.rectified else ()), *fused)

    def weights(self, x: Tensor, rows: Rows) -> Tensor:
        """Weights of a block of scores [B, H, M, N]; cells hidden in `rows` come out as anything finite."""
        if self.weigh is not None:
            return self.weigh(x, rows)
        rectified = torch.relu(x) if self.power == 1 else torch.relu(x).square()
        return rectified if self.row_scale is None else rectified * self.row_scale(rows)

    def resolve_options(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """Defaults overlaid with what the caller gave; unknown names and senseless numbers are refused.

        A tensor's numbers are read where that costs nothing: on the CPU, outside `torch.compile` and `torch.func`.
        Elsewhere nothing waits for them, and a senseless one becomes NaN, as does all that it weighs.
        """
        resolved: dict[str, Value] = {name: option.default for name, option in self.options.items()}
        for name, value in given.items():
            if name not in self.options:
                if not self.options:
                    raise ArgumentError(f"variant {self.name!r} takes no options, but {name!r} was given")
                raise ArgumentError(unknown_name(f"option of variant {self.name!r}:", name, self.options))
            needs = self.options[name].needs
            if isinstance(value, Tensor):
                value = self._check_tensor(name, value)
            elif not (is_finite(value) and BOUNDS[needs](value)):
                raise ArgumentError(f"{name} = {value}, but variant {self.name!r} needs {needs}")
            resolved[name] = value
        return resolved

    def _check_tensor(self, name: str, value: Tensor) -> Tensor:
        """An option given as a tensor, whose numbers obey the same bound as a single number."""
        option = self.options[name]
        if not option.learn:
            raise ArgumentError(f"{name} is a tensor, but variant {self.name!r} needs {option.needs}; give a number")
        within: Any = BOUNDS[option.needs]
        fine = within(value) & (value < math.inf)
        if not is_readable(value):
            return torch.where(fine, value, math.nan)
        if not fine.all():
            found = value[~fine].flatten()[0].item()
            raise ArgumentError(f"{name} holds {found:g}, but variant {self.name!r} needs {option.needs}")
        return value


def is_readable(tensor: Tensor) -> bool:
    """Whether its numbers can be read without waiting for a device, and at all: not where torch traces or maps it."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not wrapped(tensor)
