"""The parts that variants are made of, where they take more than one line: above all, how scores become weights.

x is a block of scores [B, H, M, N] in which hidden cells hold 0. What a function returns for hidden cells does not
matter, as long as it is finite: `reference.py` overwrites them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rectiformer.ops.simplex import entmax

Value = float | int | Tensor


@dataclass(frozen=True)
class RowContext:
    """What a weight function may know besides the scores."""

    visible: Tensor | None
    """Broadcasts to the scores; None when all keys are seen. Rows that see nothing are all-visible here, so that no
    function has to guard against them; their weights are zeroed afterwards."""
    count: Tensor
    """Keys each row sees, at least 1, as a float of shape [B|1, H|1, M, 1]."""
    options: Mapping[str, Value]


@dataclass(frozen=True)
class RowScale:
    """A factor for whole rows, factor * n ** -exponent, with n the keys a row sees: both are read from the options."""

    exponent: Callable[[Mapping[str, Value]], float]
    factor: Callable[[Mapping[str, Value]], Value] = lambda options: 1.0

    def head_factor(self, options: Mapping[str, Value], dtype: torch.dtype) -> Value:
        """The part that no count enters: one number or, where an option is a tensor, one per head in `dtype`."""
        wide = {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in options.items()}
        return self.factor(wide)

    def __call__(self, count: Tensor, options: Mapping[str, Value]) -> Tensor:
        """The factors, for rows that see `count` [B|1, H|1, M, 1] keys, at least 1."""
        power = count ** -self.exponent(options)
        return power * _per_head(self.head_factor(options, power.dtype))


def dot_scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def negative_distance(q: Tensor, k: Tensor) -> Tensor:
    """Minus the Manhattan distance of every query to every key."""
    return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)


def weighted_sum(weights: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    return (weights if keep is None else weights * keep) @ v


def inhibited_sum(weights: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """sum over keys of [v - inhibition]+. Hidden keys arrive with inhibition +inf and pass nothing."""
    passed = (v[..., None, :, :] - weights[..., None]).relu()  # [B, H, M, N, D]
    return (passed if keep is None else passed * keep[..., None]).sum(-2)


def _per_head(value: Value) -> Value:
    """A per-head tensor [H] shaped to broadcast over [B, H, M, N]; anything else as it is."""
    return value[:, None, None] if isinstance(value, Tensor) and value.dim() == 1 else value


def _only_visible(x: Tensor, rows: RowContext, hidden: float = -torch.inf) -> Tensor:
    return x if rows.visible is None else torch.where(rows.visible, x, hidden)


def softmax_weights(x: Tensor, rows: RowContext) -> Tensor:
    return _only_visible(x, rows).softmax(-1)


def softmax_off_by_one(x: Tensor, rows: RowContext) -> Tensor:
    with_null_slot = F.pad(_only_visible(x, rows), (1, 0))
    return with_null_slot.softmax(-1)[..., 1:]


def top_softmax(x: Tensor, rows: RowContext) -> Tensor:
    shown = _only_visible(x, rows)
    with torch.no_grad():
        keep = min(int(rows.options["keep"]), x.shape[-1])
        smallest_kept = shown.topk(keep, -1).values[..., -1:]
    return torch.where(shown < smallest_kept, -torch.inf, shown).softmax(-1)  # NaN is not below anything, and stays


def self_adjust_normalized(x: Tensor, rows: RowContext) -> Tensor:
    low = _only_visible(x, rows, torch.inf).amin(-1, keepdim=True).clamp_max(0)
    high = _only_visible(x, rows).amax(-1, keepdim=True).clamp_min(0)
    span = high - low
    return (x - low) / torch.where(span > 0, span, 1) * softmax_weights(x, rows)


def polynomial(x: Tensor, rows: RowContext) -> Tensor:
    # A length is known to torch.compile, which has no gradient of a symbolic power.
    degree = len(range(int(rows.options["degree"])))
    return x**degree * rows.count.rsqrt()


def entmax_weights(x: Tensor, rows: RowContext) -> Tensor:
    alpha = _per_head(rows.options["alpha"])
    if not isinstance(alpha, Tensor):  # filled on the device: a CUDA graph cannot capture a copy from the host
        alpha = torch.full((), alpha, dtype=x.dtype, device=x.device)
    return entmax(x, rows.visible, alpha.to(x))


unit_variance = RowScale(exponent=lambda options: 0.5, factor=lambda options: 2**0.5 / options["gamma"])
"""1 / (gamma sqrt(n / 2)): with unit-normal scores and values the output has variance 1 / gamma^2 for every n."""
inverse_count = RowScale(exponent=lambda options: float(options["exponent"]))
