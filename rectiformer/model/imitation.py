"""What one model learns from another: the output of each attention for the other's inputs, and what it predicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ModuleCall:
    """One call of an attention: what went in, and what came out."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor  # [B, M, E]

    def repeat(self, module: nn.Module) -> Tensor:
        """What another attention gives for the same inputs."""
        return first_output(module(*self.inputs, **self.keywords))


def first_output(found: Any) -> Tensor:
    """The output proper: modules of transformers return weights and the like with it."""
    output: Tensor = found[0] if isinstance(found, tuple) else found
    return output


@contextmanager
def recording(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, ModuleCall]]:
    """While open, the latest call of each of these modules is kept in the mapping that is yielded."""
    calls: dict[nn.Module, ModuleCall] = {}

    def keep(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        calls[module] = ModuleCall(inputs, keywords, first_output(output))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(keep, with_kwargs=True).remove)
        yield calls


def relative_error(ours: Tensor, theirs: Tensor, real: Tensor) -> Tensor:
    """The squared error of `ours` [B, M, E] as a share of `theirs`, of the positions [B, M] that are real."""
    real, theirs = real[..., None], theirs.float()
    error = torch.where(real, ours.float() - theirs, 0).square().sum()
    return error / torch.where(real, theirs, 0).square().sum().clamp_min(1e-30)


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """The Kullback-Leibler divergence in nats of the distributions of `logits` [..., V] from those of `wanted`."""
    ours, theirs = logits.float().log_softmax(-1), wanted.float().log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1)
