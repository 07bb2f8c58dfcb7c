"""How ranks train one model: whole on each of them, or sharded over them."""

from __future__ import annotations

import torch

from rectiformer.config import TrainingConfig
from rectiformer.distributed.ranks import Ranks
from rectiformer.errors import ConfigError
from rectiformer.model.transformer import Transformer
from rectiformer.runs.folder import Run
from rectiformer.train.update import Updater


def is_sharded(config: TrainingConfig, ranks: int) -> bool:
    """Whether each rank has some rows of every parameter."""
    return ranks > 1 and config.parallel == "fsdp"


def require_parallel(config: TrainingConfig, ranks: int) -> None:
    """ConfigError where the model is to be sharded and compiled or captured, which does not go together."""
    if is_sharded(config, ranks) and config.compile in ("yes", "capture"):
        raise ConfigError(
            f'training.compile = "{config.compile}" and training.parallel = "fsdp" do not go together; '
            'use "auto" or "no", or "ddp"'
        )


def build_updater(run: Run, model: Transformer, device: torch.device, ranks: Ranks) -> Updater:
    """What updates `model`: whole on each rank, or sharded over them."""
    if not is_sharded(run.config.training, ranks.world_size):
        return Updater(model, run.config, device, ranks)
    from rectiformer.train.sharded import ShardedUpdater  # a second to import

    with device if ranks.is_rank0 else torch.device("meta"):
        shown = run.build_model()
    return ShardedUpdater(model, run.config, device, ranks, shown)
