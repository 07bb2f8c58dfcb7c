"""Training where every rank holds some rows of each parameter, by FSDP2, and all of them of one layer at a time.

Adam, the moving average and the checkpoints work on this rank's rows as plain tensors. No graph is captured and nothing
is compiled here: the collectives stand inside the passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from rectiformer.config import Config
from rectiformer.distributed.ranks import Ranks
from rectiformer.model.transformer import Transformer
from rectiformer.runs.checkpoint import Checkpoint
from rectiformer.runs.folder import load_weights
from rectiformer.train.update import Updater


def shard(model: Transformer, device: torch.device, ranks: Ranks) -> None:
    """Leave this rank its rows of every parameter: a group a layer, and one of the rest with the tied embeddings."""
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    if "model" not in (
        model.config.gamma_sharing,
        model.config.alpha_sharing,
    ):  # otherwise layers share numbers, which can be in one group only
        for layer in [*model.encoder, *model.decoder]:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):  # gradients are divided by the tokens of the update already
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


class ShardedUpdater(Updater):
    """An updater of a model that is sharded here; `shown` is a whole copy of it on rank 0, for validation."""

    splits = True

    def __init__(
        self, model: Transformer, config: Config, device: torch.device, ranks: Ranks, shown: Transformer
    ) -> None:
        shard(model, device, ranks)
        super().__init__(model, config, device, ranks)
        self.shown = shown
        self.sizes = {name: len(parameter) for name, parameter in model.named_parameters()}
        self.square = torch.zeros((), dtype=torch.float64, device=device)

    def _begin(self, last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def _add_up(self, before: Tensor) -> None:
        """The ranks' gradients are added by now; what is left are the sums, and the norm over all rows."""
        for held, parameter in zip(self.gradients, self.model.parameters(), strict=True):
            if isinstance(parameter.grad, DTensor):
                held.copy_(parameter.grad.to_local())
            parameter.grad = None
        told = torch.cat([self.sums - before, torch.linalg.vector_norm(self.flat, dtype=torch.float64)[None] ** 2])
        self.ranks.all_reduce(told)
        self.sums.copy_(before + told[:3])
        self.square.copy_(told[3])

    def _norm(self) -> Tensor:
        return self.square.sqrt()

    @torch.no_grad()
    def collect(self) -> None:
        """Gather the weights to be judged, a parameter at a time; rank 0 keeps them in `shown`."""
        if self.average is not None:
            self.average.swap()
        for parameter, whole in zip(self.model.parameters(), self.shown.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            full = parameter.full_tensor()
            if self.ranks.is_rank0:
                whole.copy_(full)
        if self.average is not None:
            self.average.swap()

    @contextmanager
    def showing(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        if weights is not None:
            load_weights(self.shown, weights)
        yield

    def _read(self, checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
        return checkpoint.tensors(name, self._rows)

    def _rows(self, key: str) -> tuple[int, int]:
        """Which rows of a tensor of a checkpoint are this rank's: FSDP2 cuts as torch.chunk does."""
        size = self.sizes.get(key.partition("/")[0], 0)  # one the model does not know is refused later, by name
        each = -(-size // self.ranks.world_size)
        return min(size, self.ranks.rank * each), min(size, (self.ranks.rank + 1) * each)
