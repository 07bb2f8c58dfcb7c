"""Training where every rank holds some rows of each parameter, by FSDP2, and all of them of one layer at a time.

Adam, the moving average and the checkpoints work on this rank's rows as plain tensors. No graph is captured and nothing
is compiled here, since the collectives run inside the forward and backward passes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rectiformer.config import Config
from rectiformer.distributed.ranks import Ranks
from rectiformer.distributed.sharding import shard_model, shard_range
from rectiformer.model.transformer import Transformer
from rectiformer.runs.checkpoint import Checkpoint
from rectiformer.runs.folder import load_weights
from rectiformer.train.update import Updater


class ShardedUpdater(Updater):
    """An updater that shards its model; `eval_model` is a whole copy of it on rank 0, for validation."""

    sharded = True

    def __init__(
        self, model: Transformer, config: Config, device: torch.device, ranks: Ranks, eval_model: Transformer
    ) -> None:
        shard_model(model, device, ranks)
        super().__init__(model, config, device, ranks)
        self.eval_model = eval_model
        self.lengths = {name: len(parameter) for name, parameter in model.named_parameters()}
        self.squared_norm = torch.zeros((), dtype=torch.float64, device=device)

    def _before_micro_batch(self, last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def _all_reduce(self, before: Tensor) -> None:
        """FSDP has summed the gradients already; what is left are the sums, and the norm over all ranks' rows."""
        for held, parameter in zip(self.gradients, self.model.parameters(), strict=True):
            if isinstance(parameter.grad, DTensor):
                held.copy_(parameter.grad.to_local())
            parameter.grad = None
        squared_norm = torch.linalg.vector_norm(self.flat_grad, dtype=torch.float64)[None] ** 2
        reduced = torch.cat([self.sums - before, squared_norm])
        self.ranks.all_reduce(reduced)
        self.sums.copy_(before + reduced[:3])
        self.squared_norm.copy_(reduced[3])

    def _grad_norm(self) -> Tensor:
        return self.squared_norm.sqrt()

    @torch.no_grad()
    def gather_eval_weights(self) -> None:
        """Gather the weights to be evaluated, a parameter at a time; rank 0 keeps them in `eval_model`."""
        if self.average is not None:
            self.average.swap()
        for parameter, whole in zip(self.model.parameters(), self.eval_model.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            full = parameter.full_tensor()
            if self.ranks.is_rank0:
                whole.copy_(full)
        if self.average is not None:
            self.average.swap()

    @contextmanager
    def eval_weights(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        if weights is not None:
            load_weights(self.eval_model, weights)
        yield

    def _read(self, checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
        return checkpoint.tensors(name, self._row_range)

    def _row_range(self, key: str) -> tuple[int, int]:
        """Which rows of a tensor of a checkpoint are this rank's; one the model lacks is refused later, by name."""
        return shard_range(self.lengths.get(key.partition("/")[0], 0), self.ranks)
