"""The long halves of what a run survives: many kills, and heads that all attend to nothing."""

import os
import random
import signal
import time

import pytest
import torch
from end_to_end.tiny import outcome, overrides

from rectiformer.model.attention import RectifiedAttention
from rectiformer.runs.folder import create_run
from rectiformer.runs.metrics import read_metrics
from rectiformer.text.prepared import Prepared
from rectiformer.toml import load_config
from rectiformer.train.loop import Trainer
from rectiformer.train.reporting import Reporter
from rectiformer.train.signals import StopRequest

PATIENCE = 120
"""Seconds until a step must have come."""


@pytest.mark.slow
@pytest.mark.parametrize("async_save", ["false", "true"])
def test_twenty_five_kills_at_random_moments_change_nothing(launcher, straight, data, tmp_path, async_save):
    """Moments are drawn over starting, preparing to resume, updates, validations and saves alike."""
    options = {"data": data, "training_steps": 150, "checkpoint_every": 3, "validation_every": 10}
    folder, draw = tmp_path / "run", random.Random(async_save)
    for step in sorted(draw.choices(range(1, 130), k=25)):
        process = launcher.start(folder, **options, checkpoint_async_save=async_save)
        deadline = time.monotonic() + PATIENCE
        while max((record["step"] for record in read_metrics(folder / "metrics.jsonl")), default=0) < step:
            assert time.monotonic() < deadline, f"step {step} never came"
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.1))
        os.kill(process, signal.SIGKILL)
        assert launcher.finish().exit == -signal.SIGKILL
    ended = launcher.train(folder, **options, checkpoint_async_save=async_save)
    assert (ended.exit, ended.error) == (0, "")
    assert outcome(folder) == straight(**options)


class Witness(Reporter):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def silence(attention):
    """Have every query point away from every key, so that no score is positive and no gradient changes that."""
    with torch.no_grad():
        for part, value in ((0, -100.0), (1, 100.0)):
            rows = slice(part * attention.embed_dim, (part + 1) * attention.embed_dim)
            attention.input_weight[rows] *= 0.01
            attention.input_bias[rows] = value


@pytest.mark.parametrize("variant", ["rela-g", "reluformer"])
def test_a_model_whose_heads_all_attend_to_nothing_trains_on_and_says_so(data, tmp_path, variant):
    """With centered keys a bias of all keys would be nothing, so they are not."""
    steps = {"training_steps": 40, "validation_every": 20, "training_grad_accumulation": 1}
    config = load_config(None, overrides(model_variant=variant, model_center_keys="no", **steps))
    prepared, witness = Prepared.open(data), Witness()
    with StopRequest() as stop:
        run = create_run(tmp_path / "run", config, prepared.source, prepared.target, prepared.hash)
        trainer = Trainer(run, prepared, torch.device("cpu"), witness, stop)
        for module in trainer.model.modules():
            if isinstance(module, RectifiedAttention):
                silence(module)
        state = trainer.run()
    assert (state.step, state.finished) == (40, True)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [record["loss"] for record in log if "loss" in record]
    assert all(torch.tensor(losses).isfinite())
    assert losses[-1] < losses[0]
    checks = [record for record in log if "valid_loss" in record]
    assert [(record["valid_null_rate"], record["valid_dead_heads"]) for record in checks] == [(1.0, 6), (1.0, 6)]
    assert [note for note in witness.notes if "attend to nothing" in note] == [
        f"step 20: all 2 heads of {kind} layer 1 attend to nothing" for kind in ("encoder", "decoder", "cross")
    ]
