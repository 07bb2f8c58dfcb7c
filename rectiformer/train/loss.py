"""The translation loss with label smoothing, and the penalties on attention."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rectiformer.config import TrainingConfig
from rectiformer.errors import ConfigError
from rectiformer.model.transformer import Transformer
from rectiformer.ops.variants import find_variant
from rectiformer.ops.weights import RowStatistics

EPSILON = 1e-8
"""Inside the logarithm of the row sum."""


def token_losses(logits: Tensor, target: Tensor, config: TrainingConfig) -> tuple[Tensor, Tensor]:
    """Smoothed and plain cross-entropy of every position; logits [..., V], target [...].

    With smoothing s, "others" gives the target 1 - s and each of the V - 1 other words s / (V - 1), and subtracts the
    entropy of that distribution, so that a perfect model has loss 0. "all" gives every word s / V more.
    """
    V = logits.shape[-1]
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    plain = -log_p.gather(-1, target[..., None]).squeeze(-1)
    s = config.label_smoothing
    if not s:
        return plain, plain
    share = s / (V - 1) if config.label_smoothing_over == "others" else s / V
    smoothed = (1 - share * V) * plain - share * log_p.sum(-1)
    if config.label_smoothing_over == "others":
        smoothed = smoothed + (1 - s) * math.log(1 - s) + s * math.log(share)
    return smoothed, plain


def batch_losses(logits: Tensor, target: Tensor, lengths: Tensor, config: TrainingConfig) -> tuple[Tensor, Tensor]:
    """Sums over the real positions of a batch: logits [B, M, V], target [B, M], lengths [B].

    First what is minimized, before penalties: smoothed cross-entropy, each token weighed as `loss_mean` says. Then,
    detached, cross-entropy in nats without smoothing. Whoever adds micro-batches divides once, at the end.
    """
    smoothed, plain = token_losses(logits, target, config)
    real = torch.arange(target.shape[1], device=target.device) < lengths[:, None]
    if config.loss_mean == "sentence":
        smoothed = smoothed / lengths.clamp_min(1)[:, None]
    return torch.where(real, smoothed, 0).sum(), torch.where(real, plain, 0).sum().detach()


def penalty_strength(config: TrainingConfig, step: int) -> float:
    """The factor of the penalties on attention in update `step`, counted from 1."""
    if not config.penalty_warmdown:
        return 1.0
    return max(0.0, 1 - (step - 1) / (config.penalty_warmdown * config.steps))


def penalties(stats: RowStatistics, lengths: Tensor | None, config: TrainingConfig) -> Tensor:
    """ReLUFormer's regularizers for one attention module, each with its weight, averaged over rows that are not null.

    |log(row sum)| draws the sum of a row to 1; max(entropy - 0.7 log n, 0) bounds the entropy of the row divided by
    its sum or, if the configuration says so, of the weights as they are. A null row would be a constant without
    gradient, so it counts in neither. Signed weights count by their absolute value. `lengths` says which queries of
    each sequence are real.
    """
    mass = stats.mass  # [B, H, M]
    counted = mass > 0
    if lengths is not None:
        counted = counted & (torch.arange(mass.shape[-1], device=mass.device) < lengths[:, None])[:, None]
    total = (mass + EPSILON).log().abs() * config.mass_penalty
    if config.entropy_penalty:
        entropy = stats.entropy if config.entropy_of == "share" else stats.raw_entropy
        cap = 0.7 * stats.visible.clamp_min(1).log()
        total = total + (entropy - cap).clamp_min(0) * config.entropy_penalty
    return torch.where(counted, total, 0).sum() / counted.sum().clamp_min(1)


def is_penalized(config: TrainingConfig) -> bool:
    """Whether the rows of attention weights are part of the loss."""
    return config.mass_penalty > 0 or config.entropy_penalty > 0


def require_weights(model: Transformer, config: TrainingConfig) -> None:
    """ConfigError where penalties or guided alignment need weights that some attention does not have."""
    cross = find_variant(model.config.variant_at("cross"))
    if config.guided_alignment and (cross.difference_of or not cross.has_weights):
        raise ConfigError(
            f"training.guided_alignment needs a weight for each score, but cross-attention is {cross.name!r}, which "
            "has none; set it to 0 or choose another model.cross_variant"
        )
    for site in model.sites() if is_penalized(config) else ():
        if not find_variant(site.attention.variant).has_weights:
            raise ConfigError(
                f"training.mass_penalty and training.entropy_penalty need weights, but {site.kind} attention is "
                f"{site.attention.variant!r}, which has none; set them to 0 or choose another variant"
            )


@contextmanager
def collect_penalties(
    model: Transformer, source_lengths: Tensor, target_lengths: Tensor, config: TrainingConfig
) -> Iterator[list[Tensor]]:
    """While open, every attention of the model appends its penalty, if it has one, to the list that is yielded."""
    found: list[Tensor] = []
    sites = list(model.sites()) if is_penalized(config) else []
    for site in sites:
        lengths = source_lengths if site.kind == "encoder" else target_lengths
        site.attention.row_observer = lambda stats, lengths=lengths: found.append(penalties(stats, lengths, config))
    try:
        yield found
    finally:
        for site in sites:
            site.attention.row_observer = None
