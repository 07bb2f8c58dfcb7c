"""A variant's number that is learned: gamma of reluformer, alpha of entmax."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rectiformer.errors import ConfigError, unknown_name
from rectiformer.ops.variant import Variant

SHARING = ("head", "layer", "fixed")


class LearnedOption(nn.Module):
    """A variant's number as a parameter that cannot leave its range, however far it is pushed.

    gamma is exp(raw), between 1e-13 and 1e13. alpha is 1 + sigmoid(raw), kept 0.001 above 1: nearer to 1, its exponent
    1 / (alpha - 1) loses float32's digits, and at 1 there is none.
    """

    LEAST_ALPHA = 1.001

    def __init__(self, variant: Variant, name: str, heads: int = 1, init: float | None = None) -> None:
        super().__init__()
        option = variant.options.get(name)
        if option is None or not option.learn:
            raise ConfigError(f"variant {variant.name!r} has no learnable number {name!r}")
        self.name = name
        self.transform = option.learn
        self.start = self._inverse(option.default if init is None else init)
        self.raw = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.raw, self.start)

    def forward(self) -> Tensor:
        raw = self.raw.to(torch.promote_types(self.raw.dtype, torch.float32))
        if self.transform == "exp":
            return raw.clamp(-30, 30).exp()
        return self.LEAST_ALPHA + (2 - self.LEAST_ALPHA) * raw.sigmoid()

    def _inverse(self, value: float) -> float:
        least, most = (0, math.inf) if self.transform == "exp" else (self.LEAST_ALPHA, 2)
        if not least < value < most:
            raise ConfigError(
                f"{self.name} is learned between {least} and {most} and cannot start at {value:g}; start it inside of "
                f"that (model.{self.name}_init)"
            )
        if self.transform == "exp":
            return math.log(value)
        return -math.log((2 - self.LEAST_ALPHA) / (value - self.LEAST_ALPHA) - 1)

    @staticmethod
    def name_in(variant: Variant) -> str | None:
        """The option of `variant` that can be learned, if it has one."""
        return next((name for name, option in variant.options.items() if option.learn), None)


def build_learned(
    variant: Variant, sharing: str | LearnedOption, heads: int, fixed: Mapping[str, float], init: float | None = None
) -> LearnedOption | None:
    name = LearnedOption.name_in(variant)
    if isinstance(sharing, LearnedOption):
        if sharing.name != name:
            raise ConfigError(f"the shared {sharing.name!r} is not a number that variant {variant.name!r} learns")
        if name in fixed:
            raise ConfigError(f"{name} is given both fixed, as {fixed[name]}, and shared to be learned")
        return sharing
    if sharing not in SHARING:
        raise ConfigError(unknown_name("value of option_sharing", str(sharing), SHARING))
    if name is None or name in fixed or sharing == "fixed":
        return None
    return LearnedOption(variant, name, heads if sharing == "head" else 1, init)
