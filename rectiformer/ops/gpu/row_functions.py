"""What the two numbers of a row make of its scores: rows with a threshold or a normalizer, and their gradients.

A weight is a function of its own score and of two numbers that its row has. There are two kinds of rows:

    on the simplex    [x/power - tau]+ ** power    numbers: tau, as the sum of two parts
    normalized        numerator(x) / total         numbers: top, and 1 / total or 0 where the total is 0

A normalized row is two device functions and a row of `ROW_FUNCTIONS`: PARTS gives numerators and what each cell adds to
the total, GRADIENT the gradients of scores. All of that is times e^-top, with top no lower than any score of the row:
nothing overflows, and one pass over the keys is enough, since what was summed up before can follow a higher top.

With g the gradient of a weight, a score's is (numerator'(x) g - part'(x) mean) / total, where mean is the sum over the
row of weight times g.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from rectiformer.ops.gpu.pointwise import relu, whole_power

LOWEST = tl.constexpr(-1e30)
"""Below any score, and finite: what the largest of no scores is."""
HIDDEN = tl.constexpr(-2e30)
"""The score of a hidden key: far below even that."""


@triton.jit
def softmax1(x, top):
    weights = tl.exp(x - top)
    return weights, weights


@triton.jit
def softmax1_gradient(x, top, d, mean):
    return tl.exp(x - top) * (d - mean)


@triton.jit
def self_adjust(x, top):
    part = tl.exp(x - top)
    return x * part, part


@triton.jit
def self_adjust_gradient(x, top, d, mean):
    return tl.exp(x - top) * (d + x * d - mean)


@triton.jit
def one_minus_exp(a):
    """1 - e^-a for a of at least 0. Where that is small, subtraction leaves few digits, and a series has them all."""
    u = tl.minimum(a, 0.125)
    series = 1.0 - u * (1 / 2 - u * (1 / 6 - u * (1 / 24 - u / 120)))
    return tl.where(a < 0.125, u * series, 1.0 - tl.exp(-a))


@triton.jit
def softpick(x, top):
    part = tl.exp(relu(x) - top) * one_minus_exp(tl.abs(x))
    return tl.where(x <= 0.0, 0.0, part), part


@triton.jit
def softpick_gradient(x, top, d, mean):
    rising = tl.where(x == 0.0, 0.0, tl.exp(x - top))
    return rising * tl.where(x > 0.0, d - mean, mean)


@dataclass(frozen=True)
class RowFunction:
    """How rows are computed: on the simplex where there is a power, else normalized."""

    power: int = 0
    parts: Any = None
    """(x, top) to numerators and what cells add to the total."""
    gradient: Any = None
    """(x, top, gradients of weights, the row's mean of these) to gradients of scores, not yet divided by the total."""
    floor: float = 0.0
    """What top is at least: 0 where e^0 enters the row."""
    null: float = 0.0
    """How often e^0 is in the total besides what the keys add."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Those that a call and its gradient run, by their names in `TILINGS`."""
        return ("threshold", "forward", "means", "keys", "queries") if self.power else ("forward", "keys", "queries")


ROW_FUNCTIONS = {
    "sparsemax": RowFunction(power=1),
    "entmax15": RowFunction(power=2),
    "softmax1": RowFunction(parts=softmax1, gradient=softmax1_gradient, null=1.0),
    "self-adjust": RowFunction(parts=self_adjust, gradient=self_adjust_gradient, floor=LOWEST.value),
    "softpick": RowFunction(parts=softpick, gradient=softpick_gradient),
}


@triton.jit
def row_weights(x, first, second, POWER: tl.constexpr, PARTS: tl.constexpr):
    """Weights of scores, from the two numbers of their rows."""
    return whole_power(relu(x - first - second), POWER) if POWER > 0 else PARTS(x, first)[0] * second


@triton.jit
def times_slope(gap, numbers, POWER: tl.constexpr):
    """`numbers` times the slopes of weights [gap]+ ** power; 0 outside the support, whatever they are there."""
    return tl.where(gap <= 0.0, 0.0, numbers if POWER == 1 else relu(gap) * numbers)


@triton.jit
def row_gradients(x, first, second, d_weights, mean, POWER: tl.constexpr, GRADIENT: tl.constexpr):
    """Gradients of scores, from those of their weights and the row's mean of these."""
    if POWER > 0:
        d_scores = times_slope(x - first - second, d_weights - mean, POWER)
    else:
        d_scores = GRADIENT(x, first, d_weights, mean) * second
    return d_scores
