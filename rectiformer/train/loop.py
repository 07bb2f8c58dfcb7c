"""The loop: updates, validations, checkpoints, and an end that can come at any moment without losing more than time."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from rectiformer.config import Config
from rectiformer.errors import ConfigError, DivergedError, RectiformerError
from rectiformer.runs.checkpoint import Checkpoint, check_space, newest_checkpoints, point_to, save_checkpoint
from rectiformer.runs.durable import damaged, replace_file, write_failure
from rectiformer.runs.folder import Run, load_weights, require_own, weights_of
from rectiformer.runs.metrics import MetricsLog
from rectiformer.text.batches import BatchPlan
from rectiformer.text.prepared import Prepared
from rectiformer.train.health import newly_dead, summarize
from rectiformer.train.optimizer import learning_rate, optimizer_tensors, restore_optimizer
from rectiformer.train.reporting import Board, Reporter
from rectiformer.train.signals import StoppedError, StopRequest
from rectiformer.train.update import Updater
from rectiformer.train.validation import Validation, Validator, symbols_of


@dataclass
class State:
    """What the loop remembers beside the tensors."""

    step: int = 0
    validated: int = 0
    """The latest step that was validated."""
    best: float | None = None
    best_step: int = 0
    bad_validations: int = 0
    stopped_early: bool = False
    finished: bool = False
    batches: str = ""
    """A digest of the pairs of every batch so far, chained: equal digests mean the same batches in the same order."""
    sums: tuple[float, ...] = (0.0, 0.0, 0.0)
    tokens: int = 0
    updates: int = 0
    planned: list[int] = field(default_factory=list)
    """The newest checkpoints that were due, as many as are averaged; those saved at a stop or an end are not."""


class Trainer:
    """One run being trained. `train` in train/start.py opens or resumes the folder and calls `run`."""

    def __init__(
        self, run: Run, prepared: Prepared, device: torch.device, reporter: Reporter, stop: StopRequest
    ) -> None:
        self.run_folder, self.config, self.prepared = run, run.config, prepared
        self.device, self.reporter, self.stop = device, reporter, stop
        torch.manual_seed(self.config.training.seed)
        self.model = run.build_model().to(device).train()
        self.names = [name for name, _ in self.model.named_parameters()]
        seed = f"{prepared.hash}|{self.config.training.seed}"
        self.plan = BatchPlan(prepared.train, self.config.training.tokens, symbols_of(prepared), seed)
        self.updater = Updater(self.model, self.config, device)
        self.validator = None
        if prepared.valid is not None:
            self.validator = Validator(self.model, prepared, self.config, self.updater.autocast, self._leave_if_asked)
        self.metrics = MetricsLog(run.path / "metrics.jsonl")
        self.board = Board(run.path / "tensorboard" if self.config.log.tensorboard else None)
        self.state = State()
        self.dead: dict[tuple[str, int], int] = {}
        self.since = time.perf_counter()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where `checkpoint` was saved, and forget what the log says of later steps."""
        require_own(self.run_folder, checkpoint)
        state = checkpoint.state()
        try:
            self.state = State(**{**state, "sums": tuple(state["sums"])})
        except (KeyError, TypeError) as error:
            raise damaged(checkpoint.path / "state.json", f"it is not the state of a run ({error})") from error
        self._reconsider_end()
        load_weights(self.model, checkpoint.tensors("model"), str(checkpoint.path))
        if self.state.step:
            restore_optimizer(self.updater.optimizer, self.names, checkpoint.tensors("optimizer"))
        if self.updater.average is not None:
            self.updater.average.restore(checkpoint.tensors("ema"))
        self.updater.restore_sums(self.state.sums, self.state.tokens, self.state.updates)
        try:  # again, if it was killed before it could
            point_to(checkpoint.path, best=self.validator is None or self.state.best_step == self.state.step)
        except OSError as error:
            raise write_failure(checkpoint.path, error) from error

    def _reconsider_end(self) -> None:
        """A resumed run may have been given more steps or patience than it ended with."""
        patience = self.config.validation.patience
        self.state.stopped_early = bool(patience) and self.state.bad_validations >= patience
        self.state.finished &= self.state.stopped_early or self.state.step >= self.config.training.steps

    def run(self) -> State:
        """Train to the end; StoppedError, with everything saved, when asked to stop before."""
        done = {"valid_loss": self.state.validated == self.state.step, "weights": self.state.finished}
        self.metrics.rewind(self.state.step, [key for key in done if not done[key]])
        check_space(self.run_folder.path, 4 * 4 * sum(parameter.numel() for parameter in self.model.parameters()))
        self.reporter.begin(self.state.step, self.config.training.steps)
        self.since = time.perf_counter()
        try:
            if self._validation_due() and self.state.validated < self.state.step:
                self._validate_and_save()  # it was stopped before it could
            while self.state.step < self.config.training.steps and not self.state.stopped_early:
                self._leave_if_asked()
                self._step()
            if not self.state.finished:
                self._finish()
        except InterruptedError:
            saved = self._save(planned=False).path
            raise StoppedError(
                f"stopped at step {self.state.step} as asked; all is saved in {saved}; go on with --resume"
            ) from None
        except torch.OutOfMemoryError as error:
            raise RectiformerError(self._describe_memory()) from error
        finally:
            self.reporter.end()
        return self.state

    def _step(self) -> None:
        step, accumulate = self.state.step + 1, self.config.training.accumulate
        first = self.state.step * accumulate
        batches = [self.plan.batch(first + index, self.updater.captured) for index in range(accumulate)]
        self.updater.update(step, batches)
        digest = hashlib.sha256(self.state.batches.encode())
        for batch in batches:
            digest.update(batch.pairs.astype("<i8").tobytes())
        self.state.batches = digest.hexdigest()[:16]
        logging = step % self.config.log.every == 0 or step == self.config.training.steps
        if self.device.type == "cpu" or logging or self._due(self.config.checkpoint.every, step):
            self._refuse_non_finite(step)
        self.state.step = step
        if logging:
            self._log()
        self.reporter.advance(step)
        if self._validation_due():
            self._validate_and_save()
        elif self._due(self.config.checkpoint.every):
            self._save()

    def _due(self, every: int, step: int | None = None) -> bool:
        step = self.state.step if step is None else step
        return step > 0 and step % every == 0

    def _validation_due(self) -> bool:
        return self.validator is not None and self._due(self.config.validation.every)

    def _leave_if_asked(self) -> None:
        if self.stop.requested:
            raise InterruptedError

    def _refuse_non_finite(self, step: int) -> None:
        bad = int(self.updater.bad_step)
        if bad < 0:
            return
        accumulate = self.config.training.accumulate
        pairs = [self.plan.pairs_of((bad - 1) * accumulate + index).tolist() for index in range(accumulate)]
        path = self.run_folder.path / "diverged.json"
        try:
            replace_file(path, json.dumps({"step": bad, "pairs": pairs}).encode())
        except OSError as error:
            raise write_failure(path, error) from error
        raise DivergedError(
            f"step {bad}: loss or gradient is not a finite number; nothing was updated with it, its pairs are in "
            f"{path}, the last checkpoint is kept; lower training.rate or set training.clip, then --resume"
        )

    def _log(self) -> None:
        totals, now = self.updater.read(), time.perf_counter()
        step = self.state.step
        record = {
            "step": step,
            "epoch": self.plan.locate(step * self.config.training.accumulate - 1)[0],
            "loss": totals.smoothed,
            "nll": totals.plain,
            "penalty": totals.penalty,
            "norm": totals.norm,
            "rate": learning_rate(self.config.training, self.config.model.width, step),
            "batches": self.state.batches,
            "tokens_per_second": totals.tokens / max(1e-9, now - self.since),
        }
        self.since = now
        self.metrics.write(record)
        self.board.write("train", record)
        self.reporter.logged(record)

    def _validate_and_save(self) -> None:
        """Validate, remember whether it was the best, stop early if it is time, save if it is the best or time to."""
        found = self._validate()
        self.state.validated = self.state.step
        patience = self.config.validation.patience
        best = self._is_best(found)
        self.state.bad_validations = 0 if best else self.state.bad_validations + 1
        if patience and self.state.bad_validations >= patience:
            self.state.stopped_early = True
            self.reporter.note(
                f"stopped early: {patience} validations without a better {self.config.validation.metric}"
            )
        if best or self.state.stopped_early or self._due(self.config.checkpoint.every):
            self._save(best=best)

    def _validate(self, weights: str = "") -> Validation:
        assert self.validator is not None
        average = self.updater.average
        if average is not None and not weights:
            average.swap()
        try:
            found = self.validator.validate()
        finally:
            if average is not None and not weights:
                average.swap()
        numbers = {**asdict(found), **summarize(found.health)}
        record = {"step": self.state.step, **{f"valid_{name}": value for name, value in numbers.items()}}
        if weights:
            record["weights"] = weights
        self.metrics.write(record)
        self.board.write("valid", record)
        self.reporter.validated(record)
        for phrase in newly_dead(found.health, self.dead):
            self.reporter.note(f"step {self.state.step}: {phrase}")
        self.since += found.seconds  # not time of training
        return found

    def _is_best(self, found: Validation) -> bool:
        value = found.value(self.config.validation.metric)
        if self.state.best is not None and value <= self.state.best:
            return False
        self.state.best, self.state.best_step = value, self.state.step
        return True

    def _save(self, best: bool = False, averaged: dict[str, Tensor] | None = None, planned: bool = True) -> Checkpoint:
        self._refuse_non_finite(self.state.step)
        if planned:
            self.state.planned = sorted({*self.state.planned, self.state.step})[-self.config.training.average :]
        self.state.sums, self.state.tokens, self.state.updates = self.updater.sums_so_far()
        tensors = {"model": weights_of(self.model), "optimizer": optimizer_tensors(self.updater.optimizer, self.names)}
        if self.updater.average is not None:
            tensors["ema"] = self.updater.average.tensors()
        if averaged is not None:
            tensors["averaged"] = averaged
        return save_checkpoint(
            self.run_folder.path,
            self.state.step,
            tensors,
            asdict(self.state),
            self.run_folder.identity,
            best=best or (self.validator is None),
            keep=self.config.checkpoint.keep,
            keep_also=self.state.planned,
        )

    def _finish(self) -> None:
        """Average the newest checkpoints where asked to, and say that the run is complete."""
        count = self.config.training.average
        averaged = None
        best = self.state.step == self.state.best_step
        if count > 1:
            self._save(best=best, planned=False)
            saved = newest_checkpoints(self.run_folder.path, sys.maxsize, self.reporter.note)
            steps = sorted({*self.state.planned, self.state.step})[-count:]
            averaged = average_weights([checkpoint for checkpoint in saved if checkpoint.step in steps])
            if self.validator is not None:
                held = {name: tensor.clone() for name, tensor in weights_of(self.model).items()}
                load_weights(self.model, averaged)
                try:
                    best = self._is_best(self._validate(f"average of {count}"))
                finally:
                    load_weights(self.model, held)
        self.state.finished = True
        self._save(best=best, averaged=averaged if best or self.validator is None else None, planned=False)

    def _describe_memory(self) -> str:
        shapes = [f"{rows} x {length}" for rows, length in self.plan.shapes()]
        return (
            f"step {self.state.step + 1}: the device has no memory left; batches are {', '.join(shapes)} tokens; lower "
            "training.tokens and raise training.accumulate as much; checkpoints are untouched, go on with --resume"
        )


def average_weights(checkpoints: list[Checkpoint]) -> dict[str, Tensor]:
    """The mean of the weights of several checkpoints."""
    total: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        for name, tensor in checkpoint.tensors("model").items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(checkpoints)).float() for name, tensor in total.items()}


def require_validation(config: Config, prepared: Prepared) -> None:
    """ConfigError where the configuration asks for something that needs validation data, and there is none."""
    if prepared.valid is None and config.validation.patience:
        raise ConfigError("validation.patience needs data.valid_source and data.valid_target")
