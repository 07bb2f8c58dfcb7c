"""Who holds what where ranks train one model: micro-batches of an update and, under FSDP2, rows of every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rectiformer.config import TrainingConfig
from rectiformer.distributed.ranks import Ranks
from rectiformer.errors import ConfigError
from rectiformer.model.transformer import Transformer
from rectiformer.text.batches import Batch, BatchPlan
from rectiformer.text.stream import StreamPlan


@dataclass(frozen=True)
class UpdateShare:
    """One rank's share of an update: the indices of its micro-batches, and the tokens and pairs of all ranks'."""

    indices: Sequence[int]
    tokens: int
    pairs: int

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> UpdateShare:
        """The share of a single process: all micro-batches."""
        return cls(range(len(batches)), sum(b.tokens for b in batches), sum(len(b.pairs) for b in batches))


def take_share(
    plan: BatchPlan | StreamPlan, first: int, count: int, ranks: Ranks, static: bool
) -> tuple[list[Batch], UpdateShare, list[np.ndarray]]:
    """This rank's micro-batches of the update of batches `first` to `first + count - 1`, and the pairs of all of them.

    Rank r of R takes r, r + R and so on. The plan is a pure function, so every rank knows what the others' hold.
    """
    batches: list[Batch] = []
    all_pairs: list[np.ndarray] = []
    tokens = 0
    indices = range(ranks.rank, count, ranks.world_size)
    for index in range(count):
        if index in indices:
            batches.append(plan.batch(first + index, static))
            pairs = batches[-1].pairs
            tokens += batches[-1].tokens
        else:
            assert isinstance(plan, BatchPlan)  # a stream has one rank only
            pairs = plan.pairs_of(first + index)
            corpus = plan.corpora[plan.locate(first + index)[0] % len(plan.corpora)]
            tokens += len(pairs) + sum(len(corpus.target(int(pair))) for pair in pairs)  # each with its EOS
        all_pairs.append(pairs)
    return batches, UpdateShare(indices, tokens, sum(map(len, all_pairs))), all_pairs


def is_sharded(config: TrainingConfig, world_size: int) -> bool:
    """Whether each rank holds some rows of every parameter."""
    return world_size > 1 and config.parallel == "fsdp"


def require_ranks(config: TrainingConfig, world_size: int) -> None:
    """ConfigError where so many ranks cannot train a run, be it new or resumed."""
    grad_accumulation = config.grad_accumulation
    if grad_accumulation % world_size:
        fitting = -(-grad_accumulation // world_size) * world_size
        raise ConfigError(
            f"training.grad_accumulation = {grad_accumulation} is not a multiple of the {world_size} ranks; set it to "
            f"{fitting}, and training.batch_tokens lower to keep the size of an update, or start a different number of "
            "ranks"
        )
    if is_sharded(config, world_size) and config.compile in ("yes", "capture"):
        raise ConfigError(
            f'training.compile = "{config.compile}" and training.parallel = "fsdp" do not go together; '
            'use "auto" or "no", or "ddp"'
        )


def shard_model(model: Transformer, device: torch.device, ranks: Ranks) -> None:
    """Leave this rank its rows of every parameter: one FSDP group per layer, and one for the rest."""
    from torch.distributed.device_mesh import init_device_mesh  # a second to import
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (ranks.world_size,))
    if "model" not in (model.config.gamma_sharing, model.config.alpha_sharing, model.config.beta_sharing):
        # Otherwise layers share a parameter, which can be in one group only.
        for layer in [*model.encoder, *model.decoder]:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):  # gradients are divided by the tokens of the update already
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def shard_range(size: int, ranks: Ranks) -> tuple[int, int]:
    """Which of the `size` rows of a parameter are this rank's: FSDP2 cuts as torch.chunk does."""
    each = -(-size // ranks.world_size)
    return min(size, ranks.rank * each), min(size, (ranks.rank + 1) * each)
