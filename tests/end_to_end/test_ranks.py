"""Training on several real ranks: the same model as on one, whatever kills a rank and however many there are next."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from end_to_end.ranks import RankLauncher
from end_to_end.tiny import outcome, overrides, refuse, steps_on_disk
from train.linked import write_corpus

from rectiformer.errors import CheckpointError
from rectiformer.runs.checkpoint import newest_checkpoints
from rectiformer.runs.folder import create_run
from rectiformer.runs.metrics import read_metrics
from rectiformer.text.prepared import Prepared, prepare
from rectiformer.toml import load_config
from rectiformer.train.start import open_made
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

pytestmark = pytest.mark.long
TWENTY = {
    "training_steps": 20,
    "training_grad_accumulation": 4,
    "training_warmup": 200,
    "checkpoint_every": 8,
    "validation_every": 99,
}
PENALIZED = {"model_variant": "reluformer", "training_mass_penalty": 0.1, "training_entropy_penalty": 0.1}
SECONDS = 20
"""By which all ranks have ended after one of them was killed."""


@pytest.fixture(scope="module")
def ranks():
    ranks = RankLauncher()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def many(ranks, data, tmp_path_factory):
    """The folder of a run that so many ranks trained without interruption; each is run once."""
    found = {}

    def run(count, **options):
        key = repr((count, sorted(options.items())))
        if key not in found:
            found[key] = tmp_path_factory.mktemp("many")
            ended = ranks.train(found[key], count, data=data, **options)
            assert (ended.exits, ended.errors) == ([0] * count, {})
        return found[key]

    return run


def assert_equal(folder, expected, tolerance=1e-9):
    """Weights, losses of every step, and which batches they were of."""
    (found,), (right,) = (newest_checkpoints(path, 1, refuse) for path in (folder, expected))
    assert (found.step, found.state()["batches"]) == (right.step, right.state()["batches"])
    weights = found.tensors("model")
    assert weights.keys() == right.tensors("model").keys()
    for name, weight in right.tensors("model").items():
        torch.testing.assert_close(weights[name], weight, rtol=tolerance, atol=tolerance)
    logs = [[each for each in read_metrics(path / "metrics.jsonl") if "loss" in each] for path in (folder, expected)]
    assert [each["step"] for each in logs[0]] == [each["step"] for each in logs[1]] == list(range(1, found.step + 1))
    for key in ("loss", "nll", "penalty", "grad_norm"):
        values = [torch.tensor([each[key] for each in log]) for log in logs]
        torch.testing.assert_close(*values, rtol=tolerance, atol=tolerance)


CASES = {
    "ddp, 2": (2, {"training_parallel": "auto"}, {}),
    "ddp, 4, penalties": (4, {"training_parallel": "ddp"}, PENALIZED),
    "fsdp, 2, penalties": (2, {"training_parallel": "fsdp"}, PENALIZED),
    "fsdp, 4": (4, {"training_parallel": "fsdp"}, {}),
}


@pytest.mark.parametrize(("count", "engine", "options"), CASES.values(), ids=CASES)
def test_ranks_train_as_one_does(many, count, engine, options):
    """With dropout, at Adam's usual rates, which make much of a rounding error: in float64 there is next to none."""
    options = {**TWENTY, **options, "dtype": "float64"}
    folder, expected = many(count, **engine, **options), many(1, **options)
    assert_equal(folder, expected)


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """Prepared data with word links."""
    folder = tmp_path_factory.mktemp("linked")
    settings = [*overrides(), *write_corpus(folder, pairs=150, valid=10)]
    return prepare(load_config(None, settings), folder / "data").folder


def test_ranks_learn_links_as_one_does(ranks, linked, tmp_path):
    options = {**TWENTY, "training_steps": 6, "training_guided_alignment": 0.3, "dtype": "float64"}
    for count, engine in ((1, "auto"), (2, "ddp"), (2, "fsdp")):
        ended = ranks.train(tmp_path / engine, count, data=linked, training_parallel=engine, **options)
        assert (ended.exits, ended.errors) == ([0] * count, {})
    assert all(each["penalty"] > 0 for each in read_metrics(tmp_path / "auto/metrics.jsonl") if "loss" in each)
    for engine in ("ddp", "fsdp"):
        assert_equal(tmp_path / engine, tmp_path / "auto")


MINUTES = ("ddp, 4 to 1", "fsdp, 4 to 2")
"""In `make test-long`: what they do is done by the others too."""
RESHARDED = {
    "fsdp, 4 to 1": ("fsdp, 4", 1, "auto"),
    "fsdp, 4 to 2": ("fsdp, 4", 2, "fsdp"),
    "ddp, 4 to 1": ("ddp, 4, penalties", 1, "auto"),
    "ddp, 4 to fsdp, 2": ("ddp, 4, penalties", 2, "fsdp"),
}
EACH = [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in MINUTES)) for name, case in RESHARDED.items()]


@pytest.mark.parametrize(("saved", "count", "engine"), EACH)
def test_what_four_ranks_saved_goes_on_with_one_and_two(ranks, many, data, tmp_path, saved, count, engine):
    by, how, options = CASES[saved]
    options = {**TWENTY, **options, "dtype": "float64"}
    folder = shutil.copytree(many(by, **how, **options), tmp_path / "run")
    more = {**options, "training_steps": 24}
    ended = ranks.train(folder, count, data=data, **more, training_parallel=engine)
    assert (ended.exits, ended.errors) == ([0] * count, {})
    assert "resumed at step 20" in ended.notes
    assert_equal(folder, many(1, **more))


def test_what_ranks_saved_in_parts_translates(many):
    lines = ["der Hund schläft", "", "ein Mann sieht die Frau"]
    folders = [many(count, **TWENTY, **how, dtype="float64") for count, how in ((4, CASES["fsdp, 4"][1]), (1, {}))]
    assert {path.name for path in folders[0].glob("checkpoints/step-00000020/model*")} == {
        f"model.{rank}-of-4.safetensors" for rank in range(4)
    }
    several, alone = (
        Translator.from_run(folder, checkpoint="latest", device="cpu").translate(lines, SearchOptions(beam=2))
        for folder in folders
    )
    assert [found.text for found in several] == [found.text for found in alone]


FORTY = {"training_steps": 40, "checkpoint_every": 4, "validation_every": 10, "training_ema": 0.9}


def wait_for_step(folder, step):
    deadline = time.monotonic() + 120
    while max((record["step"] for record in read_metrics(folder / "metrics.jsonl")), default=0) < step:
        assert time.monotonic() < deadline, f"step {step} never came"
        time.sleep(0.002)


def assert_same_end(folder, expected):
    """Bit for bit: two ranks have a micro-batch each, and the sum of two has no order."""
    found, right = (outcome(path) for path in (folder, expected))
    assert_same_log(found["log"], right["log"])
    assert found["state"]["batches"] == right["state"]["batches"]
    (newest,), (last,) = (newest_checkpoints(path, 1, refuse) for path in (folder, expected))
    for name in ("model", "optimizer", "ema"):
        tensors = newest.tensors(name)
        assert tensors.keys() == last.tensors(name).keys()
        for key, tensor in last.tensors(name).items():
            assert torch.equal(tensors[key], tensor), key


def assert_same_log(found, expected):
    """The same records of the same steps, losses as near as sums in float32 are."""
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for record, right in zip(found, expected, strict=True):
        for key, value in right.items():
            assert record[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), key


@pytest.mark.parametrize(("engine", "async_save", "killed"), [("ddp", "false", 0), ("fsdp", "true", 1)])
def test_a_killed_rank_ends_all_and_a_restart_ends_alike(ranks, many, data, tmp_path, engine, async_save, killed):
    folder = tmp_path / "run"
    options = {**FORTY, "data": data, "training_parallel": engine, "checkpoint_async_save": async_save}
    pids = ranks.start(folder, 2, **options)
    wait_for_step(folder, 13 + killed)
    os.kill(pids[killed], signal.SIGKILL)
    start = time.monotonic()
    ended = ranks.finish()
    assert time.monotonic() - start < SECONDS
    assert (ended.exits[killed], ended.exits[1 - killed]) == (-signal.SIGKILL, 7)
    assert f"rank {1 - killed}: another rank is gone" in ended.errors[1 - killed]
    assert "run the same command again, a training with --resume" in ended.errors[1 - killed]
    assert "\n" not in ended.errors[1 - killed]
    ended = ranks.train(folder, 2, **options)
    assert (ended.exits, ended.errors) == ([0, 0], {})
    assert [int(note.split()[-1]) >= 8 for note in ended.notes if note.startswith("resumed")] == [True]
    assert_same_end(folder, many(1, **FORTY))


def test_a_kill_in_a_part_of_a_checkpoint_leaves_the_one_before(ranks, many, data, tmp_path):
    """Rank 1 writes three files of a step: the fourth is the first of step 8."""
    folder, options = tmp_path / "run", {**FORTY, "data": data, "training_parallel": "fsdp"}
    ended = ranks.train(folder, 2, **options, failpoint="mid-tensor:4", fails=1)
    assert ended.exits == [7, -signal.SIGKILL]
    assert steps_on_disk(folder) == [4]
    ended = ranks.train(folder, 2, **options)
    assert (ended.exits, "resumed at step 4" in ended.notes) == ([0, 0], True)
    assert_same_end(folder, many(1, **FORTY))


@pytest.mark.parametrize("asked", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_rank_that_is_asked_to_stop_stops_all(ranks, many, data, tmp_path, asked):
    folder, options = tmp_path / "run", {**FORTY, "data": data, "training_parallel": ("ddp", "fsdp")[asked]}
    pids = ranks.start(folder, 2, **options)
    wait_for_step(folder, 13)
    os.kill(pids[asked], signal.SIGTERM)
    ended = ranks.finish()
    (saved,) = newest_checkpoints(folder, 1, refuse)
    assert ended.exits == [143, 143]
    assert list(ended.errors) == [0]
    assert f"stopped at step {saved.step} as asked" in ended.errors[0]
    assert saved.step >= 13


REFUSED = {
    "micro-batches that cannot be dealt out": (
        {"training_grad_accumulation": 3},
        2,
        {0: "training.grad_accumulation = 3 is not a multiple of the 2 ranks; set it to 4"},
    ),
    "a disk too small for rank 1": (
        {"training_parallel": "fsdp", "limit": 50_000, "fails": 1},
        6,
        {1: "no space left while writing "},
    ),
    "a disk too small for rank 0": (
        {"training_parallel": "ddp", "limit": 50_000, "fails": 0, "checkpoint_async_save": "true"},
        6,
        {0: "no space left while writing "},
    ),
    "what does not go together": (
        {"training_parallel": "fsdp", "training_compile": "yes"},
        2,
        {0: 'training.compile = "yes" and training.parallel = "fsdp"'},
    ),
}


@pytest.mark.parametrize(("options", "code", "messages"), REFUSED.values(), ids=REFUSED)
def test_what_one_rank_meets_ends_all_alike(ranks, data, tmp_path, options, code, messages):
    ended = ranks.train(tmp_path / "run", 2, data=data, **options)
    assert ended.exits == [code, code]
    assert ended.errors.keys() == messages.keys()
    assert all(text in ended.errors[rank] and "\n" not in ended.errors[rank] for rank, text in messages.items())
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_rank_that_finds_other_data_than_rank_0_is_refused(data, tmp_path):
    own = Prepared.open(data)
    config = load_config(None, overrides())
    create_run(tmp_path / "same", config, own.source, own.target, own.hash)
    create_run(tmp_path / "other", config, own.source, own.target, "e" * 64)
    assert open_made(tmp_path / "same", data)[1].hash == own.hash
    with pytest.raises(CheckpointError, match=f"has hash {own.hash[:12]} here, but {'e' * 12} for rank 0"):
        open_made(tmp_path / "other", data)


LONG = {"training_steps": 150, "checkpoint_every": 10, "validation_every": 70, "training_ema": 0.9}


@pytest.mark.slow
def test_torchrun_restarts_its_ranks_and_stops_them_together(ranks, many, data, tmp_path):
    folder, settings = tmp_path / "run", [word for each in overrides(**LONG) for word in ("--set", each)]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    torchrun = subprocess.Popen(
        [sys.executable, *command, "-m", "rectiformer", "train", "--out", str(folder), *settings],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        wait_for_step(folder, 30)
        os.kill(children(torchrun.pid)[1], signal.SIGKILL)
        wait_for_step(folder, 60)
        torchrun.send_signal(signal.SIGTERM)
        error = torchrun.communicate(timeout=60)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(torchrun.pid, signal.SIGKILL)
    (saved,) = newest_checkpoints(folder, 1, refuse)
    assert torchrun.returncode != 0
    assert error.count(f"rectiformer: stopped at step {saved.step} as asked") == 1
    assert ranks.train(folder, 2, **LONG).exits == [0, 0]
    assert_same_end(folder, many(1, **LONG))


def children(process):
    return sorted(
        int(pid) for path in Path(f"/proc/{process}/task").glob("*/children") for pid in path.read_text().split()
    )
