"""Guided alignment: one head of cross-attention learns the word links of the training text (Garg et al. 2019).

The loss of a target subword is the divergence of two distributions over the source: the even one over the subwords it
is linked to, and that of the head's scores. The scores are those of the step that has the target subword as its input
(shifted induction), so the head knows the word it links. Subwords without links have no loss.

The distribution of the scores is their softmax, which is the row of weights itself where the variant is softmax. A row
that can attend to nothing has one more class of score 0, the score at which a rectified weight opens. So a linked key
is drawn above 0 and the others below it or behind, and a null row or a closed key, whose weights have no gradient,
learns as any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rectiformer.config import Config, TrainingConfig
from rectiformer.measure.alignment import steps_of
from rectiformer.model.attention import Observation
from rectiformer.model.transformer import Site, Transformer
from rectiformer.ops.variants import find_variant
from rectiformer.ops.weights import head_scores


@dataclass(frozen=True)
class GuidedHead:
    """The head that learns links, counted from 0, and the induction by which it is read."""

    site: Site
    head: int
    induction: str

    @property
    def can_attend_to_nothing(self) -> bool:
        return find_variant(self.site.attention.variant).can_attend_to_nothing


def guided_site(model: Transformer, config: Config) -> GuidedHead | None:
    """The head of this model that is configured to learn links; None if none is."""
    if config.guided is None:
        return None
    layer, head, induction = config.guided
    (site,) = [site for site in model.sites() if (site.kind, site.layer) == ("cross", layer)]
    return GuidedHead(site, head, induction)


@contextmanager
def observe_scores(guided: GuidedHead | None) -> Iterator[list[Tensor]]:
    """While open, each forward pass of the model appends the scores [B, M, N] of the guided head to the list."""
    found: list[Tensor] = []
    if guided is None:
        yield found
        return

    def observe(seen: Observation) -> None:
        found.append(head_scores(seen.q, seen.k, guided.head, seen.variant, **seen.call))

    attention = guided.site.attention
    before, attention.observer = attention.observer, observe
    try:
        yield found
    finally:
        attention.observer = before


def alignment_loss(
    scores: Tensor, links: Tensor, lengths: Tensor, guided: GuidedHead, config: TrainingConfig
) -> Tensor:
    """The sum over the linked target subwords of a batch, each weighed as `loss_mean` weighs its translation loss.

    Args:
        scores: of the guided head at every decoder step, [B, M, N].
        links: whether target subword m is linked to source subword n, [B, M, N].
        lengths: target tokens of each row, [B].
    """
    steps = scores[:, steps_of(guided.induction)]
    losses = row_divergences(steps, links[:, :-1], guided.can_attend_to_nothing)
    if config.loss_mean == "sentence":
        losses = losses / lengths.clamp_min(1)[:, None]
    return losses.sum()


def row_divergences(scores: Tensor, links: Tensor, nothing: bool) -> Tensor:
    """KL divergence of even distributions over linked keys and the softmax of scores [..., N]: [...], 0 without links.

    Args:
        nothing: whether the softmax has one more class, of score 0.
    """
    total = scores.logsumexp(-1)
    if nothing:
        total = F.softplus(total)  # log(exp(total) + exp(0))
    count = links.sum(-1)
    linked = torch.where(links, scores, 0).sum(-1) / count.clamp_min(1)
    return torch.where(count > 0, total - linked - count.clamp_min(1).log(), 0)
