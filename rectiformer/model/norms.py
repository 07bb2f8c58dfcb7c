"""Norms of the mixed values, over all heads together, before the output projection.

The ReLA authors norm the concatenated heads once. A null row stays exactly zero, since nothing is subtracted, and when
one head is null the others are scaled up by the joint root mean square. Inside, everything is float32 or wider.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rectiformer.errors import ConfigError, unknown_name
from rectiformer.ops.norm import plain_rms_norm, rms_norm

EPSILON = 1e-8
"""Added to the mean square, inside the root, as in ReLA. Rows with a mean square far below it stay small."""


class RMSNorm(nn.Module):
    """gain * z / sqrt(mean(z^2) + epsilon); if `gated`, times sigmoid(gate * z), where z is not normed: ReLA-g.

    `small` draws the gain from U(-sqrt(3/width), sqrt(3/width)): ReLA-i.
    """

    def __init__(self, width: int, epsilon: float = EPSILON, *, small: bool = False, gated: bool = False) -> None:
        super().__init__()
        self.small, self.epsilon = small, epsilon
        self.gain = nn.Parameter(torch.empty(width))
        self.gate = nn.Parameter(torch.empty(width)) if gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.small:
            uniform_vector_(self.gain)
        else:
            nn.init.ones_(self.gain)
        if self.gate is not None:
            uniform_vector_(self.gate)  # near zero, so every gate starts about half open

    def forward(self, z: Tensor) -> Tensor:
        return rms_norm(z, self.gain, self.gate, self.epsilon)


class HeadRMSNorm(nn.Module):
    """The same for every head by itself, which the authors found worse than one norm over all of them."""

    def __init__(self, width: int, heads: int, epsilon: float = EPSILON) -> None:
        super().__init__()
        self.heads, self.epsilon = heads, epsilon
        self.gain = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, z: Tensor) -> Tensor:
        apart = z.unflatten(-1, (self.heads, -1))
        ones = self.gain.new_ones(apart.shape[-1])
        return plain_rms_norm(apart, ones, None, self.epsilon).flatten(-2) * self.gain.to(z.dtype)


def uniform_vector_(vector: Tensor) -> Tensor:
    """The authors' default initializer applied to a vector: U(-sqrt(3/width), sqrt(3/width))."""
    limit = math.sqrt(3 / vector.numel())
    return nn.init.uniform_(vector, -limit, limit)


OUTPUT_NORMS: dict[str, Callable[[int, int, float], nn.Module]] = {
    "none": lambda width, heads, epsilon: nn.Identity(),
    "rms": lambda width, heads, epsilon: RMSNorm(width, epsilon),
    "rms-small": lambda width, heads, epsilon: RMSNorm(width, epsilon, small=True),
    "gated-rms": lambda width, heads, epsilon: RMSNorm(width, epsilon, gated=True),
    "head-rms": HeadRMSNorm,
    "layer": lambda width, heads, epsilon: nn.LayerNorm(width, epsilon),
}
"""Name: the norm of rows of a width that so many heads share."""


def build_output_norm(name: str, width: int, heads: int = 1, epsilon: float = EPSILON) -> nn.Module:
    if name not in OUTPUT_NORMS:
        raise ConfigError(unknown_name("output norm", name, OUTPUT_NORMS))
    return OUTPUT_NORMS[name](width, heads, epsilon)
