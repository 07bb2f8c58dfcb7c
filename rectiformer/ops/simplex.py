"""Maps from a row of scores onto the probability simplex that reach exact zeros: sparsemax, 1.5-entmax, alpha-entmax.

Each finds its support or threshold without recording a gradient and then writes the answer once more as a plain smooth
formula of the scores. First and second derivatives and forward mode follow from that formula; nothing is sorted,
gathered or bisected in the graph. Hidden cells arrive as any finite number; every row must have one visible cell.
"""

import torch
from torch import Tensor


def sparsemax(scores: Tensor, visible: Tensor | None) -> Tensor:
    """[x - tau]+ with tau such that the row sums to one (Martins and Astudillo 2016)."""
    x = _below_top(scores, visible)
    with torch.no_grad():
        ordered, rank = _descending(x, visible)
        support = _largest(x, visible, ordered, 1 + rank * ordered > ordered.cumsum(-1))
    size = support.sum(-1, keepdim=True)
    tau = (torch.where(support, x, 0).sum(-1, keepdim=True) - 1) / size
    return torch.where(support, x - tau, 0).clamp_min(0)


def entmax15(scores: Tensor, visible: Tensor | None) -> Tensor:
    """[x/2 - tau]+ squared, with tau such that the row sums to one (Peters et al. 2019)."""
    x = _below_top(scores / 2, visible)
    with torch.no_grad():
        ordered, rank = _descending(x, visible)
        mean = ordered.cumsum(-1) / rank
        spread = ordered.square().cumsum(-1) - rank * mean.square()
        support = _largest(x, visible, ordered, mean - ((1 - spread) / rank).clamp_min(0).sqrt() <= ordered)
    size = support.sum(-1, keepdim=True)
    x = torch.where(support, x, 0)  # a score of -inf would make the gradient of a square NaN
    mean = x.sum(-1, keepdim=True) / size
    spread = torch.where(support, (x - mean).square(), 0).sum(-1, keepdim=True)
    tau = mean - ((1 - spread) / size).sqrt()
    return torch.where(support, x - tau, 0).clamp_min(0).square()


def entmax(scores: Tensor, visible: Tensor | None, alpha: Tensor) -> Tensor:
    """[(alpha - 1) x - tau]+ to the power 1 / (alpha - 1), summing to one; `alpha` > 1 broadcasts, with a gradient."""
    x = (alpha - 1) * scores
    power = 1 / (alpha - 1)
    x = _below_top(x, visible)
    with torch.no_grad():
        tau = _bisect(x, visible, power)
    # Newton steps from the root change nothing in the value, but carry derivatives: one step those of first order,
    # two steps those of second order as well.
    for _ in range(2):
        weights, slope = _power_weights(x - tau, visible, power)
        tau = tau + (weights.sum(-1, keepdim=True) - 1) / slope
    return _power_weights(x - tau, visible, power)[0]


def _bisect(x: Tensor, visible: Tensor | None, power: Tensor) -> Tensor:
    """The tau at which the row sums to one: it lies at most 1 below the largest entry, which is 0."""
    low = torch.full_like(x[..., :1], -1)
    width = 1.0
    for _ in range(26 if x.dtype == torch.float32 else 54):
        width = width / 2
        mass = _power_weights(x - (low + width), visible, power)[0].sum(-1, keepdim=True)
        low = torch.where(mass >= 1, low + width, low)
    return low


def _power_weights(gap: Tensor, visible: Tensor | None, power: Tensor) -> tuple[Tensor, Tensor]:
    """gap+ ** power, and the row sum of its derivative. The base is 1 where the answer is 0: no 0 * log 0 below."""
    positive = ~(gap <= 0)  # NaN stays NaN
    positive = positive if visible is None else positive & visible
    base = torch.where(positive, gap, 1)
    weights = torch.where(positive, base**power, 0)
    slope = torch.where(positive, power * base ** (power - 1), 0).sum(-1, keepdim=True)
    return weights, slope


def _below_top(x: Tensor, visible: Tensor | None) -> Tensor:
    """The row moved so that its largest visible entry is 0: only differences matter, and small numbers keep digits."""
    with torch.no_grad():
        top = (x if visible is None else torch.where(visible, x, -torch.inf)).amax(-1, keepdim=True)
    return x - top


def _descending(x: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """The row sorted, largest first, and the ranks 1, 2, ... 1 below the top a weight is 0, so -2 stands for less."""
    hidden = x if visible is None else torch.where(visible, x, -2)
    rank = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    return hidden.clamp_min(-2).sort(-1, descending=True).values, rank


def _largest(x: Tensor, visible: Tensor | None, ordered: Tensor, chosen: Tensor) -> Tensor:
    """True for the visible entries as large as the `chosen` ones, which are a prefix of the `ordered` row."""
    size = chosen.sum(-1, keepdim=True).clamp_min(1)
    support = ~(x < ordered.gather(-1, size - 1))  # all of a row with a NaN, which is NaN throughout
    return support if visible is None else support & visible
