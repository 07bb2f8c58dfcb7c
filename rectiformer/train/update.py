"""One update: forward and backward of its micro-batches, a finite gradient or none at all, one step of Adam.

The random numbers of a micro-batch are seeded by (seed, step, micro-batch), so nothing of a generator's state has to
be kept. On a GPU a micro-batch is one replay of a CUDA graph, captured once for each of the few shapes there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rectiformer.config import Config
from rectiformer.distributed.ranks import SINGLE_PROCESS, Ranks
from rectiformer.model.transformer import Transformer
from rectiformer.runs.checkpoint import Checkpoint
from rectiformer.runs.folder import load_tensors, load_weights, weights_of
from rectiformer.text.batches import Batch
from rectiformer.train.graphs import CapturedStep, GraphMemory
from rectiformer.train.loss import (
    Losses,
    batch_losses,
    collect_penalties,
    is_penalized,
    penalty_strength,
    require_weights,
)
from rectiformer.train.optimizer import (
    MovingAverage,
    build_optimizer,
    held_here,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
)
from rectiformer.train.share import Whole

WORTH_COMPILING = 10_000
"""Updates from which on compiling is worth its minute or two."""


@dataclass(frozen=True)
class Totals:
    """What happened since the totals were last read."""

    smoothed: float
    """Mean of the minimized loss over updates, without penalties."""
    plain: float
    """Cross-entropy in nats a target token, without smoothing."""
    penalty: float
    norm: float
    """Gradient norm of the latest update."""
    tokens: int
    updates: int
    bad_step: int
    """The first update whose loss or gradient was not finite, -1 if there was none. It changed nothing, nor did any
    update after it."""


def micro_seed(seed: int, step: int, index: int) -> int:
    digest = hashlib.sha256(f"{seed}|{step}|{index}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def device_inputs(batch: Batch, device: torch.device) -> list[Tensor]:
    tensors = [batch.source, batch.source_lengths, batch.target_input, batch.target, batch.target_lengths]
    if device.type == "cpu":
        return tensors
    return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]


class Updater:
    """Owns the optimizer of a model and turns micro-batches into updates.

    With several ranks every one of them holds the whole model, and the gradients of their micro-batches are added by
    a single collective: they lie in one vector already, and a micro-batch on a GPU is one replay of a graph, into which
    DistributedDataParallel could not reach to send parts of it earlier.
    """

    splits = False
    """Whether ranks hold rows of every parameter instead of all of it."""

    def __init__(self, model: Transformer, config: Config, device: torch.device, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.model, self.config, self.device, self.ranks = model, config.training, device, ranks
        self.shown = model
        on_gpu = device.type == "cuda"
        worth_it = self.config.compile == "auto" and self.config.steps >= WORTH_COMPILING
        self.compiled = on_gpu and not self.splits and (self.config.compile == "yes" or worth_it)
        waits = any(memory.memory.keeps == "experts" for memory in model.memories())  # for how many tokens each has
        self.captured = on_gpu and self.config.compile != "no" and not self.splits and not waits
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [held_here(parameter) for parameter in model.parameters()]
        self.optimizer = build_optimizer(self.config, self.parameters)
        count = sum(parameter.numel() for parameter in self.parameters)
        self.sent = torch.zeros(count + 3, device=device)  # the gradient, then the three sums of an update
        self.flat = self.sent[:count]
        self.gradients = split_like(self.flat, self.parameters)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient  # one place for good: graphs and the optimizer find it there
        self.average = MovingAverage(model, self.config.ema) if self.config.ema else None
        self.penalized = is_penalized(self.config)
        require_weights(model, self.config)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # smoothed, plain, penalty
        self.norm = torch.zeros((), device=device)
        self.step = torch.zeros((), dtype=torch.long, device=device)
        self.strength = torch.ones((), device=device)  # of the penalties on attention
        self.bad_step = torch.full((), -1, dtype=torch.long, device=device)
        self.optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        self.tokens = self.updates = 0
        self.losses: Callable[..., Losses] = batch_losses
        if self.compiled:
            self.losses = self._compile()
        self.graphs: dict[tuple[object, ...], CapturedStep] = {}
        self.memory = GraphMemory() if self.captured else None
        self.apply: Callable[[], None] = self._apply

    def _compile(self) -> Callable[..., Losses]:
        """Layers one by one, since they all share one compiled program; penalties look inside, so they run plain."""
        # Sums over rows and columns in one kernel end in hundreds of small sums: 17.0 against 14.4 ms a step.
        torch._inductor.config.triton.mix_order_reduction = False
        embeddings = [self.model.source_embedding, self.model.target_embedding]
        if not self.penalized:
            for part in [*embeddings, *self.model.encoder, *self.model.decoder]:
                part.compile()
        return torch.compile(batch_losses)

    def update(self, step: int, batches: Sequence[Batch], whole: Whole | None = None) -> None:
        """Update number `step`, counted from 1, from all of `batches` together; or from those of all ranks, `whole`."""
        whole = whole or Whole.of(batches)
        counted = whole.tokens if self.config.loss_mean == "token" else whole.pairs
        divisor = torch.tensor(float(counted), device=self.device)
        inputs = [device_inputs(batch, self.device) for batch in batches]
        self.strength.fill_(penalty_strength(self.config, step))
        steps = [self._step_for(batch, tensors) for batch, tensors in zip(batches, inputs, strict=True)]
        self.flat.zero_()
        before = self.sums.clone() if self.ranks.world_size > 1 else self.sums
        for number, run, tensors in zip(whole.numbers, steps, inputs, strict=True):
            torch.manual_seed(micro_seed(self.config.seed, step, number))
            self._begin(last=number == whole.numbers[-1])
            run(tensors, divisor)
        self._add_up(before)
        self.step.fill_(step)
        self.optimizer.param_groups[0]["lr"].fill_(learning_rate(self.config, self.model.config.hidden_size, step))
        self.apply()
        if self.memory is not None and self.apply == self._apply:  # the first ran plainly, so that Adam has its memory
            self.apply = self.memory.capture(self._apply)
        self.tokens += whole.tokens
        self.updates += 1

    def _begin(self, last: bool) -> None:
        """A micro-batch comes, which may be the last of its update on this rank."""

    def _add_up(self, before: Tensor) -> None:
        """Have gradient and sums be those of all ranks; `before` is what the sums were before this update."""
        if self.ranks.world_size > 1:
            self.sent[-3:] = self.sums - before
            self.ranks.all_reduce(self.sent)
            self.sums.copy_(before + self.sent[-3:])

    def _step_for(self, batch: Batch, tensors: list[Tensor]) -> Callable[[list[Tensor], Tensor], None]:
        full = batch.full
        if self.memory is None:
            return lambda inputs, divisor: self._accumulate(inputs, divisor, full)
        key = (full, *batch.source.shape, *batch.target.shape)
        if key not in self.graphs:
            held = self.sums.clone()
            self.graphs[key] = CapturedStep(
                lambda inputs, divisor: self._accumulate(inputs, divisor, full), tensors, self.memory
            )
            self.sums.copy_(held)  # warming up has added to it
        return self.graphs[key]

    def _accumulate(self, inputs: list[Tensor], divisor: Tensor, full: bool) -> None:
        """Add the gradient of one micro-batch, divided by what the whole update counts."""
        source, source_lengths, target_input, target, target_lengths = inputs
        lengths = None if full else source_lengths
        with self._watch(source_lengths, target_lengths) as found, self.autocast():
            logits = self.model(source, lengths, target_input)
        losses = self.losses(logits, target, target_lengths, self.config)
        penalty = self._penalty(found, target_lengths, divisor)
        self._backward(losses.smoothed / divisor + penalty)
        parts = (losses.smoothed.detach() / divisor, losses.plain, penalty.detach())
        self.sums += torch.stack([part.double() for part in parts])

    def _backward(self, loss: Tensor) -> None:
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        used = [(held, new) for held, new in zip(self.gradients, found, strict=True) if new is not None]
        torch._foreach_add_(*map(list, zip(*used, strict=True)))  # a few kernels, where autograd would take hundreds

    def _watch(self, source_lengths: Tensor, target_lengths: Tensor) -> AbstractContextManager[list[Tensor]]:
        if not self.penalized:
            return nullcontext([])
        return collect_penalties(self.model, source_lengths, target_lengths, self.config)

    def _penalty(self, found: list[Tensor], target_lengths: Tensor, divisor: Tensor) -> Tensor:
        """Penalties of this micro-batch, in the share that it has in the update."""
        total = divisor.new_zeros(())
        if found:
            total = total + self.strength * torch.stack(found).mean()
        if self.config.balance_penalty:
            total = total + self.config.balance_penalty * sum(memory.balance() for memory in self.model.memories())
        counted = target_lengths.sum() if self.config.loss_mean == "token" else (target_lengths > 0).sum()
        return total * (counted / divisor)

    def autocast(self) -> AbstractContextManager[object]:
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    @torch.no_grad()
    def _apply(self) -> None:
        """Update the weights, unless the gradient of this or an earlier update was not finite."""
        self.norm.copy_(self._norm())
        fine = self.norm.isfinite() & self.sums.isfinite().all()
        self.bad_step.copy_(torch.where((self.bad_step < 0) & ~fine, self.step, self.bad_step))
        if self.config.clip_grad_norm:
            self.flat.mul_((self.config.clip_grad_norm / (self.norm + 1e-12)).clamp_max(1.0))
        # Adam itself looks at this flag on the device and leaves everything as it is.
        self.optimizer.found_inf.copy_(self.bad_step >= 0)  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.average is not None:
            self.average.update()

    def _norm(self) -> Tensor:
        return self.flat.norm()

    def collect(self) -> None:
        """Have `shown` be a whole model on rank 0, for `showing`; all ranks must call it."""

    @contextmanager
    def showing(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """While open, `shown` has these weights, or those to be judged: the moving average where there is one."""
        if weights is not None:
            held = {name: tensor.clone() for name, tensor in weights_of(self.model).items()}
            load_weights(self.model, weights)
        elif self.average is not None:
            self.average.swap()
        try:
            yield
        finally:
            if weights is not None:
                load_weights(self.model, held)
            elif self.average is not None:
                self.average.swap()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint has to hold, as far as this process holds it; the memory is the updater's own."""
        own = {name: parameter.detach() for name, parameter in zip(self.names, self.parameters, strict=True)}
        found = {"model": own, "optimizer": optimizer_tensors(self.optimizer, self.names)}
        return found if self.average is None else {**found, "ema": self.average.tensors()}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put back what `tensors` gave, to whatever number of ranks."""
        load_tensors(self.tensors()["model"], self._read(checkpoint, "model"), str(checkpoint.path))
        if checkpoint.step:
            restore_optimizer(self.optimizer, self.names, self._read(checkpoint, "optimizer"))
        if self.average is not None:
            self.average.restore(self._read(checkpoint, "ema"))

    def _read(self, checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
        return checkpoint.tensors(name)

    def sums_so_far(self) -> tuple[tuple[float, ...], int, int]:
        """What `read` would be made of, for a checkpoint between two reads."""
        return tuple(self.sums.tolist()), self.tokens, self.updates

    def restore_sums(self, sums: tuple[float, ...], tokens: int, updates: int) -> None:
        self.sums.copy_(torch.tensor(sums, dtype=torch.float64))
        self.tokens, self.updates = tokens, updates

    def read(self) -> Totals:
        """Totals since the last call. This waits for the device."""
        smoothed, plain, penalty = self.sums.tolist()
        updates, tokens = max(1, self.updates), self.tokens
        totals = Totals(
            smoothed / updates,
            plain / max(1, tokens),
            penalty / updates,
            self.norm.item(),
            tokens,
            self.updates,
            int(self.bad_step),
        )
        self.sums.zero_()
        self.tokens = self.updates = 0
        return totals


def split_like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of one vector in the shapes of `like`, one after the other."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]
