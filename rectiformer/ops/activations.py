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


@dataclass(frozen=True)
class RowShift:
    """What is subtracted from all scores of a row, factor * unit(n), with n the keys the row sees."""

    unit: str
    """A key of `SHIFTS`."""
    factor: Callable[[Mapping[str, Value]], Value] = lambda options: 1.0
    """One number or, where an option is a tensor, one per head; read from the options."""

    def __call__(self, count: Tensor, options: Mapping[str, Value]) -> Tensor:
        """The shifts of rows that see `count` [B|1, H|1, M, 1] keys, at least 1."""
        factor = self.factor(options)
        unit = SHIFTS[self.unit](count)
        return unit * _per_head(factor.to(unit.dtype) if isinstance(factor, Tensor) else factor)


@dataclass(frozen=True)
class Pointwise:
    """Weights that are a function of their own score alone: function(x - shift of the row) ** power."""

    function: str
    """A key of `FUNCTIONS`, of those in cpu.py and, for the kernels, of `DEVICE_FUNCTIONS` in gpu/pointwise.py."""
    power: int | str = 1
    """A whole number, or the name of the option that holds it."""
    shift: RowShift | None = None

    def find_power(self, options: Mapping[str, Value]) -> int:
        if isinstance(self.power, int):
            return self.power
        # A length is known to torch.compile, which has no gradient of a symbolic power.
        return len(range(int(options[self.power])))

    def __call__(self, x: Tensor, rows: RowContext) -> Tensor:
        """Weights of a block of scores, without the row scale."""
        shifted = x if self.shift is None else x - self.shift(rows.count, rows.options)
        weights, power = FUNCTIONS[self.function](shifted), self.find_power(rows.options)
        return weights if power == 1 else weights**power


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "leaky-relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}
SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "1": torch.ones_like,
    "log n": lambda count: count.log(),
    "sqrt(2 log n)": lambda count: (2 * count.log()).sqrt(),  # about the largest of n normal numbers
}


RMS_EPSILON = 1e-6
"""Added to the mean square that `cosine_scores` divide by, so that a query or key of zeros has scores of 0."""


def dot_scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def unit_rms(x: Tensor) -> Tensor:
    """Vectors along the last axis divided by their root mean square, by way of float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPSILON)).to(x.dtype)


def cosine_scores(q: Tensor, k: Tensor) -> Tensor:
    """D times the cosine: with the scale 1 / sqrt(D), normal numbers of variance 1 for random directions."""
    return unit_rms(q) @ unit_rms(k).mT


def negative_distance(q: Tensor, k: Tensor) -> Tensor:
    """Minus the Manhattan distance of every query to every key."""
    return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)


def weighted_sum(weights: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    return (weights if keep is None else weights * keep) @ v


def inhibited_sum(weights: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """sum over keys of [v - inhibition]+. Hidden keys arrive with inhibition +inf and pass nothing."""
    passed = (v[..., None, :, :] - weights[..., None]).relu()  # [B, H, M, N, D]
    return (passed if keep is None else passed * keep[..., None]).sum(-2)


def subtract(first: Tensor, second: Tensor, lam: Value) -> Tensor:
    """first - lam * second, rounded once, of weights or mixed values [B, H, M, ...]; lam may be one per head."""
    if isinstance(lam, Tensor):
        return (first - lam.to(first.device).view(-1, 1, 1) * second).to(first.dtype)
    return torch.sub(first, second, alpha=lam)


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


def softpick(x: Tensor, rows: RowContext) -> Tensor:
    """[e^x - 1]+ / sum |e^x - 1|, both times e^-top: nothing overflows, and small scores keep their digits. A hidden
    score is 0 and adds nothing; a row without a positive score is 0."""
    top = x.detach().amax(-1, keepdim=True).clamp_min(0)
    size = torch.exp(x.relu() - top) * -torch.expm1(-x.abs())
    total = size.sum(-1, keepdim=True)
    return torch.where(x > 0, size, 0) / torch.where(total == 0, 1, total)  # NaN is in the total


def entmax_weights(x: Tensor, rows: RowContext) -> Tensor:
    alpha = _per_head(rows.options["alpha"])
    if not isinstance(alpha, Tensor):  # filled on the device: a CUDA graph cannot capture a copy from the host
        alpha = torch.full((), alpha, dtype=x.dtype, device=x.device)
    return entmax(x, rows.visible, alpha.to(x))


unit_variance = RowScale(exponent=lambda options: 0.5, factor=lambda options: 2**0.5 / options["gamma"])
"""1 / (gamma sqrt(n / 2)): with unit-normal scores and values the output has variance 1 / gamma^2 for every n."""
inverse_root = RowScale(exponent=lambda options: 0.5)
inverse_count = RowScale(exponent=lambda options: float(options["exponent"]))
inverse_count_opened = RowScale(
    exponent=lambda options: float(options["exponent"]),
    factor=lambda options: float(options["power"]) ** -options["power"],
)
"""Of [p + x]+^p, which is p^p [1 + x/p]+^p."""
