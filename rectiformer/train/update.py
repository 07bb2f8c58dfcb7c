"""One update: forward and backward of its micro-batches, a finite gradient or none at all, one step of Adam.

The random numbers of a micro-batch are seeded by (seed, step, micro-batch), so nothing of a generator's state has to
be kept. On a GPU a micro-batch is one replay of a CUDA graph, captured once for each of the few shapes there are.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rectiformer.config import Config, TrainingConfig
from rectiformer.distributed.ranks import SINGLE_PROCESS, Ranks
from rectiformer.distributed.sharding import UpdateShare, is_sharded
from rectiformer.model.transformer import Transformer
from rectiformer.runs.checkpoint import Checkpoint
from rectiformer.runs.folder import Run, load_tensors, load_weights, weights_of
from rectiformer.text.batches import Batch
from rectiformer.train.annealing import Annealing
from rectiformer.train.guided import alignment_loss, guided_site, observe_scores
from rectiformer.train.loss import batch_losses, collect_penalties, is_penalized, penalty_strength, require_weights
from rectiformer.train.optimizer import (
    MovingAverage,
    build_optimizer,
    held_here,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
)

WORTH_COMPILING = 10_000
"""Updates from which on compiling is worth its minute or two."""
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where users say how torch is to allocate device memory."""


class Totals(NamedTuple):
    """What happened since the totals were last read."""

    smoothed: float
    """Mean of the minimized loss over updates, without penalties."""
    plain: float | None
    """Cross-entropy in nats per target token, without smoothing; None where it was not measured."""
    penalty: float
    grad_norm: float
    """Of the latest update."""
    tokens: int


def micro_seed(seed: int, step: int, index: int) -> int:
    digest = hashlib.sha256(f"{seed}|{step}|{index}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def autocast(config: TrainingConfig, device: torch.device) -> AbstractContextManager[object]:
    """The precision of forward passes."""
    return nullcontext() if config.precision == "fp32" else torch.autocast(device.type, torch.bfloat16)


def device_inputs(batch: Batch, device: torch.device) -> list[Tensor]:
    """What `Updater._accumulate` takes of a batch; the links last, where there are any."""
    tensors = [batch.source, batch.source_lengths, batch.target_input, batch.target, batch.target_lengths]
    tensors += [] if batch.links is None else [batch.links]
    if device.type == "cpu":
        return tensors
    return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]


class Updater:
    """Owns the optimizer of a model and turns micro-batches into updates.

    With several ranks each holds the whole model, and the gradients of their micro-batches are summed by a single
    all-reduce: they lie in one vector already, and a micro-batch on a GPU is one replay of a graph, into which
    DistributedDataParallel could not reach to send some of them earlier.
    """

    sharded = False
    """Whether each rank holds some rows of every parameter instead of all of it."""

    def __init__(self, model: Transformer, config: Config, device: torch.device, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.model, self.config, self.device, self.ranks = model, config.training, device, ranks
        self.guided = guided_site(model, config)
        self.eval_model = model
        on_gpu = device.type == "cuda"
        worth_it = self.config.compile == "auto" and self.config.steps >= WORTH_COMPILING
        self.compiled = on_gpu and not self.sharded and (self.config.compile == "yes" or worth_it)
        waits = any(memory.memory.keeps == "experts" for memory in model.memories())  # for each expert's tokens
        self.captured = on_gpu and self.config.compile != "no" and not self.sharded and not waits
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [held_here(parameter) for parameter in model.parameters()]
        self.optimizer = build_optimizer(self.config, self.parameters)
        counts = [parameter.numel() for parameter in self.parameters]
        self.all_reduced = torch.zeros(sum(counts) + 3, device=device)  # the gradient, then the three sums of an update
        self.flat_grad = self.all_reduced[:-3]
        self.gradients = [
            part.view_as(parameter)
            for part, parameter in zip(self.flat_grad.split(counts), self.parameters, strict=True)
        ]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient  # at one address for good: graphs and the optimizer find it there
        self.average = MovingAverage(model, self.config.ema) if self.config.ema else None
        require_weights(model, self.config)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # smoothed, plain, penalty
        self.grad_norm = torch.zeros((), device=device)
        self.step = torch.zeros((), dtype=torch.long, device=device)
        self.penalty_strength = torch.ones((), device=device)
        self.bad_step = torch.full((), -1, dtype=torch.long, device=device)
        """The first update whose loss or gradient was not finite, -1 if there was none. It changed nothing, nor did any
        update after it."""
        self.optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        self.tokens = self.updates = 0
        self.losses = self._compile() if self.compiled else batch_losses
        self.annealing = Annealing(model, self.config)
        self.stage: object = None
        """What graphs were captured with, besides shapes."""
        self.graphs: dict[tuple[object, ...], CapturedPass] = {}
        self.pool = GraphPool() if self.captured else None
        self.apply: Callable[[], None] = self._apply

    def _compile(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Compile layer by layer, since all share one program; with penalties, which observe layers, only the loss."""
        # Sums over rows and columns in one kernel end in hundreds of small sums: 17.0 vs. 14.4 ms per step.
        torch._inductor.config.triton.mix_order_reduction = False
        embeddings = [self.model.source_embedding, self.model.target_embedding]
        if not is_penalized(self.config):
            layers = [*self.model.encoder, *self.model.decoder]
            if self.guided is not None:
                layers.remove(self.model.decoder[self.guided.site.layer])  # it is observed
            for part in [*embeddings, *layers]:
                part.compile()
        return torch.compile(batch_losses)

    def update(self, step: int, batches: Sequence[Batch], share: UpdateShare | None = None) -> None:
        """Do update `step`, counted from 1, from `batches`: all its micro-batches, or this rank's `share` of them."""
        share = share or UpdateShare.of(batches)
        counted = share.tokens if self.config.loss_mean == "token" else share.pairs
        divisor = torch.tensor(float(counted), device=self.device)
        inputs = [device_inputs(batch, self.device) for batch in batches]
        self.penalty_strength.fill_(penalty_strength(self.config, step))
        if self.stage != (stage := self._stage(step)):
            self.stage = stage
            if self.graphs:
                torch.cuda.synchronize()  # none of them may be running
                self.graphs.clear()
        self.annealing.apply(self.annealing.at(step))
        passes = [self._pass_for(batch, tensors) for batch, tensors in zip(batches, inputs, strict=True)]
        self.flat_grad.zero_()
        before = self.sums.clone() if self.ranks.world_size > 1 else self.sums
        for index, run, tensors in zip(share.indices, passes, inputs, strict=True):
            torch.manual_seed(micro_seed(self.config.seed, step, index))
            self._before_micro_batch(last=index == share.indices[-1])
            run(tensors, divisor)
        self._all_reduce(before)
        self.step.fill_(step)
        self.optimizer.param_groups[0]["lr"].fill_(learning_rate(self.config, self.model.config.hidden_size, step))
        self.apply()
        if self.pool is not None and self.apply == self._apply:  # the first ran plainly, so that Adam has its state
            self.apply = self.pool.capture(self._apply)
        self.tokens += share.tokens
        self.updates += 1

    def _stage(self, step: int) -> object:
        """All that decides what a pass of update `step` computes and is no tensor."""
        return self.annealing.at(step)

    def _before_micro_batch(self, last: bool) -> None:
        """Prepare for a micro-batch, which may be the last of its update on this rank."""

    def _all_reduce(self, before: Tensor) -> None:
        """Sum gradient and sums over all ranks; `before` is what the sums were before this update."""
        if self.ranks.world_size > 1:
            self.all_reduced[-3:] = self.sums - before
            self.ranks.all_reduce(self.all_reduced)
            self.sums.copy_(before + self.all_reduced[-3:])

    def _pass_for(self, batch: Batch, tensors: list[Tensor]) -> Callable[[list[Tensor], Tensor], None]:
        accumulate = partial(self._accumulate, full=batch.full)
        if self.pool is None:
            return accumulate
        key = (batch.full, *batch.source.shape, *batch.target.shape)
        if key not in self.graphs:
            held = self.sums.clone()
            self.graphs[key] = CapturedPass(accumulate, tensors, self.pool)
            self.sums.copy_(held)  # the warm-up has added to it
        return self.graphs[key]

    def _accumulate(self, inputs: list[Tensor], divisor: Tensor, full: bool) -> None:
        """Add the gradient of one micro-batch, divided by the tokens or pairs of the whole update."""
        source, source_lengths, target_input, _, target_lengths, *links = inputs
        lengths = None if full else source_lengths
        penalties = collect_penalties(self.model, source_lengths, target_lengths, self.config)
        with penalties as found, observe_scores(self.guided) as scores, autocast(self.config, self.device):
            logits = self.model(source, lengths, target_input)
        smoothed, plain = self._losses(logits, inputs, lengths)
        penalty = self._penalty(found, target_lengths, divisor)
        if self.guided is not None:
            loss = alignment_loss(scores[0], links[0], target_lengths, self.guided, self.config)
            penalty = penalty + self.config.guided_alignment * loss / divisor
        self._backward(smoothed / divisor + penalty)
        parts = (smoothed.detach() / divisor, plain, penalty.detach())
        self.sums += torch.stack([part.double() for part in parts])

    def _losses(self, logits: Tensor, inputs: list[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums over a micro-batch, as `batch_losses` has them; `lengths` are those of the sources, None if all full."""
        _, _, _, target, target_lengths, *_ = inputs
        return self.losses(logits, target, target_lengths, self.config)

    def _backward(self, loss: Tensor) -> None:
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        used = [(held, new) for held, new in zip(self.gradients, found, strict=True) if new is not None]
        torch._foreach_add_(*map(list, zip(*used, strict=True)))  # a few kernels, where autograd would take hundreds

    def _penalty(self, found: list[Tensor], target_lengths: Tensor, divisor: Tensor) -> Tensor:
        """Penalties of this micro-batch, weighted by its share of the update."""
        total = divisor.new_zeros(())
        if found:
            total = total + self.penalty_strength * torch.stack(found).mean()
        if self.config.balance_penalty:
            total = total + self.config.balance_penalty * sum(memory.balance() for memory in self.model.memories())
        counted = target_lengths.sum() if self.config.loss_mean == "token" else (target_lengths > 0).sum()
        return total * (counted / divisor)

    @torch.no_grad()
    def _apply(self) -> None:
        """Update the weights, unless the gradient of this or an earlier update was not finite."""
        self.grad_norm.copy_(self._grad_norm())
        fine = self.grad_norm.isfinite() & self.sums.isfinite().all()
        self.bad_step.copy_(torch.where((self.bad_step < 0) & ~fine, self.step, self.bad_step))
        if self.config.clip_grad_norm:
            self.flat_grad.mul_((self.config.clip_grad_norm / (self.grad_norm + 1e-12)).clamp_max(1.0))
        # Adam itself checks this flag on the device and leaves everything as it is.
        self.optimizer.found_inf.copy_(self.bad_step >= 0)  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.average is not None:
            self.average.update()

    def _grad_norm(self) -> Tensor:
        return self.flat_grad.norm()

    def gather_eval_weights(self) -> None:
        """Make `eval_model` whole on rank 0, before `eval_weights`; all ranks must call it."""

    @contextmanager
    def eval_weights(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """While open, `eval_model` has these weights or, by default, the moving average where there is one."""
        if weights is not None:
            held = {name: tensor.clone() for name, tensor in weights_of(self.model).items()}
            load_weights(self.model, weights)
        elif self.average is not None:
            self.average.swap()
        self.annealing.apply(None)  # until the next update
        try:
            yield
        finally:
            if weights is not None:
                load_weights(self.model, held)
            elif self.average is not None:
                self.average.swap()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint has to hold, as far as this process holds it, without a copy."""
        own = {name: parameter.detach() for name, parameter in zip(self.names, self.parameters, strict=True)}
        found = {"model": own, "optimizer": optimizer_tensors(self.optimizer, self.names)}
        return found if self.average is None else {**found, "ema": self.average.tensors()}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load what `tensors` returned, on whatever number of ranks."""
        load_tensors(self.tensors()["model"], self._read(checkpoint, "model"), str(checkpoint.path))
        if checkpoint.step:
            restore_optimizer(self.optimizer, self.names, self._read(checkpoint, "optimizer"))
        if self.average is not None:
            load_tensors(self.average.tensors(), self._read(checkpoint, "ema"), str(checkpoint.path))

    def _read(self, checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
        return checkpoint.tensors(name)

    def sums_so_far(self) -> tuple[tuple[float, ...], int, int]:
        """What `read` would be computed from, for a checkpoint between two reads."""
        return tuple(self.sums.tolist()), self.tokens, self.updates

    def restore_sums(self, sums: tuple[float, ...], tokens: int, updates: int) -> None:
        self.sums.copy_(torch.tensor(sums, dtype=torch.float64))
        self.tokens, self.updates = tokens, updates

    def read(self) -> Totals:
        """Totals since the last call. This waits for the device."""
        smoothed, plain, penalty = self.sums.tolist()
        updates, tokens = max(1, self.updates), self.tokens
        totals = Totals(smoothed / updates, plain / max(1, tokens), penalty / updates, self.grad_norm.item(), tokens)
        self.sums.zero_()
        self.tokens = self.updates = 0
        return totals


def build_updater(
    run: Run, model: Transformer, teacher: Transformer | None, device: torch.device, ranks: Ranks
) -> Updater:
    """The updater of `model`: whole on each rank, or sharded over them; of a student where there is a teacher."""
    if teacher is not None:
        from rectiformer.train.distill import DistillingUpdater

        return DistillingUpdater(model, teacher, run.config, device, ranks)
    if not is_sharded(run.config.training, ranks.world_size):
        return Updater(model, run.config, device, ranks)
    from rectiformer.train.fsdp import ShardedUpdater  # a second to import

    with device if ranks.is_rank0 else torch.device("meta"):
        eval_model = run.build_model()
    return ShardedUpdater(model, run.config, device, ranks, eval_model)


class GraphPool:
    """The device memory that all CUDA graphs of a training share: they run one after the other and keep nothing in it.

    Torch is asked to take it as one range of addresses that grows. In blocks, which is the default, a tensor a little
    larger than the one before would not fit where that was, and blocks are never joined: graphs of 28 shapes held
    29.4 GiB where 10.1 are enough (docs/log.md).
    """

    def __init__(self) -> None:
        if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        """Where work runs before it is captured; one for all, since libraries keep workspaces for each stream."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Compile, choose algorithms and allocate workspaces, none of which can be captured."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.empty_cache()  # what the stream took, nothing else would ever use

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` does on the device, as one CUDA graph, which is not run yet."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.handle):
            work()
        return graph.replay


class CapturedPass:
    """Forward and backward of one shape as a CUDA graph, with its own static inputs."""

    def __init__(self, work: Callable[[list[Tensor], Tensor], None], inputs: list[Tensor], pool: GraphPool) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        self.divisor = torch.ones((), device=inputs[0].device)
        pool.warm_up(lambda: work(self.inputs, self.divisor))
        self.replay = pool.capture(lambda: work(self.inputs, self.divisor))

    def __call__(self, inputs: list[Tensor], divisor: Tensor) -> None:
        torch._foreach_copy_([*self.inputs, self.divisor], [*inputs, divisor])
        self.replay()
