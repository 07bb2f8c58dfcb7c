"""The training loop: updates, validations, checkpoints; it can end at any moment and lose no more than time."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rectiformer.distributed.ranks import SINGLE_PROCESS, Ranks
from rectiformer.distributed.sharding import take_share
from rectiformer.errors import DataError, DeviceMemoryError, DivergedError
from rectiformer.files import damaged, replace_file, require_space, writing
from rectiformer.runs.checkpoint import Checkpoint, point_to
from rectiformer.runs.folder import Run, inherit_weights, require_own, weights_of
from rectiformer.runs.metrics import MetricsLog
from rectiformer.text.batches import BatchPlan
from rectiformer.text.prepared import Prepared
from rectiformer.text.stream import StreamEndedError, StreamPlan, plan_batches
from rectiformer.train.annealing import Annealing
from rectiformer.train.fitting import calibration_batches, fit_student
from rectiformer.train.optimizer import learning_rate
from rectiformer.train.reporting import CoreWatch, Reporter
from rectiformer.train.saving import Saver, State, average_checkpoints
from rectiformer.train.signals import StoppedError, StopRequest
from rectiformer.train.teacher import load_teacher
from rectiformer.train.update import build_updater
from rectiformer.train.validation import Validator, newly_dead, summarize_health
from rectiformer.translate.evaluate import symbols_of


class Trainer:
    """One run being trained. `train` in train/start.py opens or resumes the folder and calls `run`.

    All ranks do the same steps and take the same decisions; rank 0 alone validates, logs and reports.
    """

    def __init__(
        self,
        run: Run,
        prepared: Prepared,
        device: torch.device,
        reporter: Reporter,
        stop: StopRequest,
        ranks: Ranks = SINGLE_PROCESS,
        *,
        fresh: bool = True,
    ) -> None:
        """`fresh`: whether training starts here; otherwise `restore` will be called with a checkpoint."""
        self.run_folder, self.config, self.prepared = run, run.config, prepared
        self.device, self.reporter, self.stop, self.ranks = device, reporter, stop, ranks
        self.cores = CoreWatch(torch.get_num_threads() if device.type == "cpu" else 1)
        torch.manual_seed(self.config.training.seed)
        self.model = run.build_model().to(device).train()
        if fresh and self.config.training.init_from:
            ranks.on_rank0(lambda: inherit_weights(self.model, run, reporter.note))
        self.plan = plan_batches(self.config, prepared, symbols_of(prepared), stop.check, ranks.world_size)
        self.teacher = load_teacher(run, device) if self.config.distillation.teacher else None
        if fresh and self.teacher is not None:
            ranks.on_rank0(self._fit)
        ranks.broadcast(weights_of(self.model).values())  # other processors may draw other numbers from the same seed
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.updater = build_updater(run, self.model, self.teacher, device, ranks)
        self.saver = Saver(run, ranks, self.updater.sharded)
        self.validates = prepared.valid is not None
        self.validator = None
        if self.validates and ranks.is_rank0:
            self.validator = Validator(self.updater.eval_model, prepared, self.config, stop.check)
        self.metrics = MetricsLog(run.path / "metrics.jsonl", self.config.log.tensorboard and ranks.is_rank0)
        self.state = State()
        self.dead: dict[tuple[str, int], int] = {}
        self.since = time.perf_counter()

    def _fit(self) -> None:
        """Start from the teacher's weights, and with heads that are as near to its own as scales can bring them."""
        assert self.teacher is not None
        assert isinstance(self.plan, BatchPlan)
        self.reporter.note(f"starting from {self.config.distillation.teacher}; fitting scores and values of each head")
        annealing = Annealing(self.model, self.config.training)
        annealing.apply(annealing.at(1))
        fit_student(self.model.eval(), self.teacher, calibration_batches(self.plan, self.device))
        annealing.apply(None)
        self.model.train()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from `checkpoint`."""
        require_own(self.run_folder, checkpoint)
        state = checkpoint.state()
        try:
            self.state = State(**{**state, "sums": tuple(state["sums"])})
        except (KeyError, TypeError) as error:
            raise damaged(checkpoint.path / "state.json", f"it is not the state of a run ({error})") from error
        self._reconsider_end()
        if isinstance(self.plan, StreamPlan):
            self.plan.resume(*self.state.consumed)
        self.updater.restore(checkpoint)
        self.updater.restore_sums(self.state.sums, self.state.tokens, self.state.updates)
        if self.ranks.is_rank0:
            with writing(checkpoint.path):  # again, in case it was killed before this
                point_to(checkpoint.path, best=not self.validates or self.state.best_step == self.state.step)

    def _reconsider_end(self) -> None:
        """A resumed run may have been given more steps or patience than it ended with."""
        patience = self.config.validation.patience
        self.state.stopped_early = bool(patience) and self.state.bad_validations >= patience
        self.state.finished &= self.state.stopped_early or self.state.step >= self.config.training.steps

    def run(self) -> State:
        """Train to the end; StoppedError, with everything saved, if asked to stop before."""
        self.ranks.on_rank0(self._open_log)
        self.reporter.begin(self.state.step, self.config.training.steps)
        if self.updater.compiled:
            self.reporter.note("compiling for this GPU: the first updates take a minute or two")
        self.since = time.perf_counter()
        self.cores.start()
        try:
            with self.ranks.error_guard():
                self._train()
        except InterruptedError:
            saved = self._save(planned=False)
            self.saver.finish()
            self.ranks.on_rank0(lambda: self._raise_stopped(saved))
        except torch.OutOfMemoryError as error:
            shapes = [f"{pairs} x {length}" for pairs, length in self.plan.shapes()]
            raise DeviceMemoryError(
                f"step {self.state.step + 1}: the device has no memory left; batches are {', '.join(shapes)} tokens; "
                "checkpoints are untouched: go on with --resume where other processes held some of it, else train "
                "another run with lower training.batch_tokens and training.grad_accumulation raised as much"
            ) from error
        finally:
            self.saver.close()
            self.reporter.end()
        return self.state

    def _open_log(self) -> None:
        undone: list[str] = []  # what will be logged anew for this very step
        if not self.state.finished:
            undone = ["weights"] if self.state.validated == self.state.step else ["weights", "valid_loss"]
        self.metrics.rewind(self.state.step, undone)
        size = 4 * 4 * self.parameters
        require_space(self.run_folder.path / "checkpoints", size, size)  # two checkpoints have to fit

    def _train(self) -> None:
        if self._validation_due() and self.state.validated < self.state.step and not self.state.finished:
            self._validate_and_save()  # stopped before it could
        try:
            while self.state.step < self.config.training.steps and not self.state.stopped_early:
                if self.ranks.any(self.stop.requested):
                    raise InterruptedError  # on all ranks together
                self._step()
        except StreamEndedError as end:
            if not self.state.step:
                raise DataError(
                    f"{end}; too little for one update, so nothing was trained; feed it more lines"
                ) from end
            self.reporter.note(str(end))
        if not self.state.finished:
            self._finish()
        self.saver.finish()

    def _raise_stopped(self, saved: Path) -> None:
        raise StoppedError(f"stopped at step {self.state.step} as asked; all is saved in {saved}; go on with --resume")

    def _step(self) -> None:
        step, count = self.state.step + 1, self.config.training.grad_accumulation
        first = self.state.step * count
        batches, share, all_pairs = take_share(self.plan, first, count, self.ranks, self.updater.captured)
        self.updater.update(step, batches, share)
        digest = hashlib.sha256(self.state.batches.encode())
        for pairs in all_pairs:
            digest.update(pairs.astype("<i8").tobytes())
        self.state.batches = digest.hexdigest()[:16]
        logging = step % self.config.log.every == 0 or step == self.config.training.steps
        if self.device.type == "cpu" or logging or is_due(self.config.checkpoint.every, step):  # it waits for a GPU
            self._refuse_non_finite()
        self.state.step = step
        if logging:
            self._log()
        self.reporter.advance(step)
        if warning := self.cores.look():
            self.reporter.note(warning)
        if self._validation_due():
            self._validate_and_save()
            self.cores.start()
        elif is_due(self.config.checkpoint.every, step):
            self._save()
            self.cores.start()

    def _validation_due(self) -> bool:
        return self.validates and is_due(self.config.validation.every, self.state.step)

    def _refuse_non_finite(self) -> None:
        bad = int(self.updater.bad_step)
        if bad >= 0:
            self.ranks.on_rank0(lambda: self._raise_diverged(bad))

    def _raise_diverged(self, bad: int) -> None:
        accumulate = self.config.training.grad_accumulation
        pairs = [self.plan.pairs_of((bad - 1) * accumulate + index).tolist() for index in range(accumulate)]
        path = self.run_folder.path / "diverged.json"
        with writing(path):
            replace_file(path, json.dumps({"step": bad, "pairs": pairs}).encode())
        raise DivergedError(
            f"step {bad}: loss or gradient is not a finite number; nothing was updated with it, its pairs are in "
            f"{path}, the last checkpoint is kept; train another run with a lower training.learning_rate or with "
            "training.clip_grad_norm"
        )

    def _log(self) -> None:
        totals, now = self.updater.read(), time.perf_counter()
        step = self.state.step
        record = {
            "step": step,
            "epoch": self.plan.locate(step * self.config.training.grad_accumulation - 1)[0],
            "loss": totals.smoothed,
            **({} if totals.plain is None else {"nll": totals.plain}),
            "penalty": totals.penalty,
            "grad_norm": totals.grad_norm,
            "learning_rate": learning_rate(self.config.training, self.config.model.hidden_size, step),
            "batches": self.state.batches,
            "tokens_per_second": totals.tokens / max(1e-9, now - self.since),
        }
        self.since = now
        self.ranks.on_rank0(lambda: self.metrics.write(record, "train"))
        self.reporter.logged(record)

    def _validate_and_save(self) -> None:
        """Validate, and save if it is the best or a save is due; stop early if patience is over."""
        value = self._validate()
        self.state.validated = self.state.step
        patience = self.config.validation.patience
        best = self._is_best(value)
        self.state.bad_validations = 0 if best else self.state.bad_validations + 1
        if patience and self.state.bad_validations >= patience:
            self.state.stopped_early = True
            self.reporter.note(
                f"stopped early: {patience} validations without a better {self.config.validation.metric}"
            )
        if best or self.state.stopped_early or is_due(self.config.checkpoint.every, self.state.step):
            self._save(best=best)

    def _validate(self, averaged: Mapping[str, Tensor] | None = None, weights: str = "") -> float:
        """The deciding metric, of the weights in training, or of those `averaged`, which are logged as `weights`."""
        start = time.perf_counter()
        self.updater.gather_eval_weights()
        value = self.ranks.on_rank0(lambda: self._validate_here(averaged, weights))
        self.since += time.perf_counter() - start  # which is no training time
        return value

    def _validate_here(self, averaged: Mapping[str, Tensor] | None, weights: str) -> float:
        assert self.validator is not None
        with self.updater.eval_weights(averaged):
            found = self.validator.validate()
        metrics = {**asdict(found), **summarize_health(found.health)}
        record = {"step": self.state.step, **{f"valid_{name}": value for name, value in metrics.items()}}
        if weights:
            record["weights"] = weights
        self.metrics.write(record, "valid")
        self.reporter.validated(record)
        for phrase in newly_dead(found.health, self.dead):
            self.reporter.note(f"step {self.state.step}: {phrase}")
        return found.value(self.config.validation.metric)

    def _is_best(self, value: float) -> bool:
        if self.state.best is not None and value <= self.state.best:
            return False
        self.state.best, self.state.best_step = value, self.state.step
        return True

    def _save(self, best: bool = False, averaged: dict[str, Tensor] | None = None, planned: bool = True) -> Path:
        self._refuse_non_finite()
        if planned:
            count = self.config.training.average_checkpoints
            self.state.planned = sorted({*self.state.planned, self.state.step})[-count:]
        self.state.sums, self.state.tokens, self.state.updates = self.updater.sums_so_far()
        if isinstance(self.plan, StreamPlan):
            self.state.consumed = self.plan.consumed(self.state.step * self.config.training.grad_accumulation)
        extra = {"averaged": averaged} if averaged else {}
        return self.saver.save(self.state, self.updater.tensors(), extra, best=best or not self.validates)

    def _finish(self) -> None:
        """Average the newest checkpoints if so configured, and mark the run as complete."""
        count = self.config.training.average_checkpoints
        averaged: dict[str, Tensor] = {}  # on rank 0 only
        best = self.state.step == self.state.best_step
        if count > 1:
            self._save(best=best, planned=False)
            self.saver.finish()
            steps = sorted({*self.state.planned, self.state.step})[-count:]
            average = partial(average_checkpoints, self.run_folder.path, steps, self.reporter.note)
            self.ranks.on_rank0(lambda: averaged.update(average()))
            if self.validates:
                best = self._is_best(self._validate(averaged, f"average of {count}"))
        self.state.finished = True
        self._save(best=best, averaged=averaged if best or not self.validates else None, planned=False)


def is_due(every: int, step: int) -> bool:
    return step > 0 and step % every == 0
