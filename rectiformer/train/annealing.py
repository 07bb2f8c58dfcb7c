"""Annealed attention: a power that falls while training, so that attention goes from near softmax to rectified."""

from rectiformer.config import TrainingConfig
from rectiformer.errors import ConfigError
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.transformer import Transformer
from rectiformer.ops.variants import VARIANTS, find_variant

RATIO = 0.7
"""Of each power to the one before. Kernels are compiled for a power and graphs captured with it, so there are few."""


class Annealing:
    """The power that attention has at each update: a function of the step alone, so resuming needs nothing more.

    ConfigError where a power is to fall that no attention of `model` has, or that is no larger than its final one, or
    in less than one update.
    """

    def __init__(self, model: Transformer, config: TrainingConfig) -> None:
        self.config = config
        self.powers: list[int] = []
        self.modules: list[RectifiedAttention] = []
        if not config.anneal_from:
            return
        self.modules = [site.attention for site in model.sites() if find_variant(site.attention.variant).anneals]
        if not self.modules:
            having = ", ".join(name for name, row in VARIANTS.items() if row.anneals)
            raise ConfigError(
                f"training.anneal_from = {config.anneal_from}, but no attention of this model has a power that can "
                f"fall; set it to 0, or model.variant to {having}"
            )
        row = find_variant(self.modules[0].variant)  # [model] has one power for all
        final = int(self.modules[0].options.get(row.anneals, row.options[row.anneals].default))
        if config.anneal_from <= final:
            raise ConfigError(
                f"training.anneal_from = {config.anneal_from} is not above the power of the model, {final}; raise it, "
                "or set it to 0"
            )
        if config.anneal_fraction * config.steps < 1:
            raise ConfigError(
                f"training.anneal_fraction = {config.anneal_fraction:g} of training.steps = {config.steps:,} is less "
                "than one update, so no power would ever fall; raise it, or set training.anneal_from = 0"
            )
        self.powers = falling(config.anneal_from, final)

    def at(self, step: int) -> int | None:
        """The power of update `step`, counted from 1; None for the model's own."""
        updates = self.config.anneal_fraction * self.config.steps
        if not self.powers or step > updates:
            return None
        return self.powers[int((step - 1) * len(self.powers) / updates)]

    def apply(self, power: int | None) -> None:
        for attention in self.modules:
            attention.anneal(power)


def falling(start: int, final: int) -> list[int]:
    """The powers from `start` down to the last one above `final`."""
    powers = []
    while start > final:
        powers.append(start)
        start = min(start - 1, round(RATIO * start))
    return powers
