"""Updates that learn from a teacher: first each attention by itself, then the whole model by its predictions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rectiformer.config import Config
from rectiformer.distributed.ranks import SINGLE_PROCESS, Ranks
from rectiformer.distributed.sharding import UpdateShare
from rectiformer.errors import ConfigError
from rectiformer.model.imitation import ModuleCall, divergence, recording, relative_error
from rectiformer.model.transformer import Transformer
from rectiformer.text.batches import Batch
from rectiformer.train.teacher import SitePair, attentions, differing, real_queries
from rectiformer.train.update import Totals, Updater, autocast


class DistillingUpdater(Updater):
    """An updater whose loss is what a teacher says in place of the text.

    At first each attention that differs from the teacher's learns to give the teacher's output for the teacher's
    inputs. None depends on another then, so one pass of the teacher serves all of them. After that the loss is the
    Kullback-Leibler divergence of the model's next word from the teacher's.
    """

    def __init__(
        self,
        model: Transformer,
        teacher: Transformer,
        config: Config,
        device: torch.device,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self.teacher, self.pairs, self.aligning = teacher, differing(model, teacher), False
        self.align_updates = config.distillation.align * config.training.steps
        if self.align_updates and not self.pairs:
            raise ConfigError(
                "all attention is that of distillation.teacher, so there is none to align; set distillation.align = 0, "
                "or choose another model.variant"
            )
        super().__init__(model, config, device, ranks)

    def aligns(self, step: int) -> bool:
        """Whether update `step` is one of each attention by itself."""
        return step <= self.align_updates

    def update(self, step: int, batches: Sequence[Batch], share: UpdateShare | None = None) -> None:
        self.aligning = self.aligns(step)
        super().update(step, batches, share)

    def _stage(self, step: int) -> object:
        return super()._stage(step), self.aligns(step)

    def _accumulate(self, inputs: list[Tensor], divisor: Tensor, full: bool) -> None:
        if not self.aligning:
            return super()._accumulate(inputs, divisor, full)
        source, source_lengths, target_input, _, target_lengths, *_ = inputs
        with autocast(self.config, self.device):
            with torch.no_grad(), recording(attentions(self.teacher)) as calls:
                self.teacher(source, None if full else source_lengths, target_input)
            found = [
                self._align(pair, calls[pair.teacher.attention], source_lengths, target_lengths) for pair in self.pairs
            ]
        counted = target_lengths.sum() if self.config.loss_mean == "token" else (target_lengths > 0).sum()
        loss = torch.stack(found).mean() * (counted / divisor)
        self._backward(loss)
        self.sums[0] += loss.detach().double()
        return None

    def _align(self, pair: SitePair, call: ModuleCall, source_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        """How far the student's attention is off, given what went into the teacher's."""
        real = real_queries(pair.student, source_lengths, target_lengths, call.output.shape[1])
        return relative_error(call.repeat(pair.student.attention), call.output, real)

    def _losses(self, logits: Tensor, inputs: list[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        source, _, target_input, target, target_lengths, *_ = inputs
        _, plain = super()._losses(logits, inputs, lengths)
        with torch.no_grad(), autocast(self.config, self.device):
            wanted = self.teacher(source, lengths, target_input)
        real = torch.arange(target.shape[1], device=target.device) < target_lengths[:, None]
        apart = divergence(logits, wanted)
        if self.config.loss_mean == "sentence":
            apart = apart / target_lengths.clamp_min(1)[:, None]
        return torch.where(real, apart, 0).sum(), plain

    def read(self) -> Totals:
        """Totals since the last call; no cross-entropy where some of these updates had none."""
        first = int(self.step) - self.updates + 1
        totals = super().read()
        return totals._replace(plain=None) if self.aligns(first) else totals
