"""A run that was stopped, killed or extended ends as one that was not: bit for bit on a CPU."""

import os
import random
import signal
import time

import pytest
from end_to_end.tiny import outcome, steps_on_disk

from rectiformer.files import FAILPOINTS
from rectiformer.runs.metrics import read_metrics

pytestmark = pytest.mark.long
SHORT = {"training_steps": 36, "validation_every": 10, "checkpoint_every": 5}
CASES = {
    "plain": {**SHORT, "training_steps": 100},
    "moving average": {
        **SHORT,
        "training_ema": 0.9,
        "training_label_smoothing_over": "all",
        "training_loss_mean": "sentence",
        "training_clip_grad_norm": 1.0,
        "log_every": 4,
    },
    "average of two": {
        **SHORT,
        "training_average_checkpoints": 2,
        "training_grad_accumulation": 1,
        "training_optimizer": "adamw",
        "training_weight_decay": 0.01,
        "training_precision": "bf16",
        "validation_metric": "loss",
    },
    "stopped early": {**SHORT, "validation_every": 4, "validation_patience": 3, "model_variant": "reluformer"},
}
STOPS = {
    "plain": [37],
    "moving average": [13, 17, 20, 22, 23],  # three in one epoch, one at its end, one in the next
    "average of two": [9, 31, 33],
    "stopped early": [3, 9, 13],
}


def finish(launcher, folder, **options):
    ended = launcher.train(folder, **options)
    assert (ended.exit, ended.error) == (0, "")
    return ended.notes


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_ends_like_one_that_was_not(launcher, straight, data, tmp_path, case):
    options, folder = {"data": data, **CASES[case]}, tmp_path / "run"
    for step in STOPS[case]:
        ended = launcher.train(folder, moments={f"advance {step}": "SIGTERM"}, **options)
        assert (ended.exit, f"stopped at step {step} as asked" in ended.error) == (143, True)
    assert f"resumed at step {step}" in finish(launcher, folder, **options)
    assert outcome(folder) == straight(**options)


def test_what_is_compared_is_all_of_a_run(straight, data):
    plain, averaged, _, early = (straight(data=data, **options) for options in CASES.values())
    updates = [record for record in plain["log"] if "loss" in record]
    assert [record["step"] for record in updates] == list(range(1, 101))
    assert [record["step"] for record in plain["log"] if "valid_loss" in record] == list(range(10, 101, 10))
    assert len({record["batches"] for record in updates}) == 100
    assert [record["epoch"] for record in updates[10:23:11]] == [0, 1]
    assert updates[-1]["loss"] < updates[0]["loss"] / 1.5
    assert plain["state"]["batches"] == updates[-1]["batches"]
    assert plain["tensors"].keys() == {"model.safetensors", "optimizer.safetensors"}
    assert averaged["tensors"].keys() == {"model.safetensors", "optimizer.safetensors", "ema.safetensors"}
    assert (early["state"]["stopped_early"], early["state"]["bad_validations"]) == (True, 3)
    assert 13 < early["state"]["step"] < 36


def test_a_finished_run_goes_on_when_it_is_given_more_steps(launcher, straight, data, tmp_path):
    """Nothing is due at step 7 or 13."""
    for steps in (7, 13):
        finish(launcher, tmp_path / "run", data=data, training_steps=steps)
    assert steps_on_disk(tmp_path / "run")[-1] == 13
    assert outcome(tmp_path / "run") == straight(data=data, training_steps=13)


def test_an_early_stop_is_taken_back_with_more_patience(launcher, data, tmp_path):
    finish(launcher, tmp_path / "run", data=data, **CASES["stopped early"])
    finish(launcher, tmp_path / "run", data=data, **{**CASES["stopped early"], "validation_patience": 99})
    assert outcome(tmp_path / "run")["state"]["step"] == 36


KILLED = ["plain", *(pytest.param(case, marks=pytest.mark.slow) for case in ("moving average", "average of two"))]


@pytest.mark.parametrize("case", KILLED)
def test_five_kills_at_random_moments_change_nothing(launcher, straight, data, tmp_path, case):
    options, folder, draw = {"data": data, **CASES[case]}, tmp_path / "run", random.Random(case)
    for step in sorted(draw.sample(range(1, options["training_steps"] - 12), 5)):
        process = launcher.start(folder, **options)
        wait_for_step(folder / "metrics.jsonl", step)
        time.sleep(draw.uniform(0, 0.02))
        os.kill(process, signal.SIGKILL)
        assert launcher.finish().exit == -signal.SIGKILL
    finish(launcher, folder, **options)
    assert outcome(folder) == straight(**options)


def wait_for_step(log, step):
    """Until the log holds a record of `step` or a later one."""
    deadline = time.monotonic() + 60
    while max((record["step"] for record in read_metrics(log)), default=0) < step:
        assert time.monotonic() < deadline, f"step {step} never came"
        time.sleep(0.001)


@pytest.mark.parametrize("failpoint", [*(f"{name}:2" for name in FAILPOINTS), "mid-tensor:1", "mid-tensor:6"])
def test_a_kill_in_a_save_costs_an_interval_at_most(launcher, straight, data, tmp_path, failpoint):
    """Checkpoints are due every 4 updates."""
    folder = tmp_path / "run"
    assert launcher.train(folder, data=data, failpoint=failpoint).exit == -signal.SIGKILL
    left = sorted(path.name for path in folder.glob("checkpoints/*.tmp"))
    reached = max(record["step"] for record in read_metrics(folder / "metrics.jsonl"))
    notes = finish(launcher, folder, data=data)
    assert [f"removed {folder / 'checkpoints' / name}, left by a killed save" for name in left] == [
        note for note in notes if note.startswith("removed")
    ]
    resumed = [int(note.removeprefix("resumed at step ")) for note in notes if note.startswith("resumed")]
    assert reached - sum(resumed) <= 4
    assert outcome(folder) == straight(data=data)


KILLS_IN_CREATION = {
    "vocabulary": "open train-0/source.ids",
    "encoding": "open valid/target.txt",
    "configuration": "open run/target.model.tmp",
    "record": "open run/run.json.tmp",
    "weights": "open step-00000004.tmp/model.safetensors",
}


@pytest.mark.parametrize("moment", KILLS_IN_CREATION.values(), ids=KILLS_IN_CREATION)
def test_a_run_killed_before_its_first_checkpoint_begins_anew(launcher, straight, tmp_path, moment):
    folder = tmp_path / "run"
    assert launcher.train(folder, moments={moment: "SIGKILL"}).exit == -signal.SIGKILL
    finish(launcher, folder)
    assert outcome(folder) == straight()
    assert not list(folder.rglob("*.tmp*"))


STOP_MOMENTS = {
    "the step loop": "advance 5",
    "preparation": "open train-0/target.ids",
    "a save": "open step-00000008.tmp/optimizer.safetensors",
}


@pytest.mark.parametrize("moment", STOP_MOMENTS.values(), ids=STOP_MOMENTS)
def test_a_stop_is_obeyed_at_any_moment(launcher, straight, tmp_path, moment):
    folder = tmp_path / "run"
    ended = launcher.train(folder, moments={moment: "SIGTERM"})
    assert (ended.exit, "as asked" in ended.error, "\n" in ended.error) == (143, True, False)
    if moment == STOP_MOMENTS["preparation"]:
        assert [path.name for path in folder.iterdir()] == ["run.lock"]
    finish(launcher, folder)
    assert outcome(folder) == straight()


def test_a_second_stop_ends_at_once_and_the_previous_checkpoint_is_taken(launcher, straight, data, tmp_path):
    folder = tmp_path / "run"
    moments = {f"open step-00000008.tmp/{name}.safetensors": "SIGTERM" for name in ("model", "optimizer")}
    ended = launcher.train(folder, data=data, moments=moments)
    assert (ended.exit, ended.error) == (143, "")
    unfinished = folder / "checkpoints" / "step-00000008.tmp"
    assert not (unfinished / "manifest.json").exists()
    notes = finish(launcher, folder, data=data)
    assert f"removed {unfinished}, left by a killed save" in notes
    assert outcome(folder) == straight(data=data)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "stopped, then killed"])
def test_a_validation_that_could_not_end_is_done_again_and_logged_once(launcher, straight, data, tmp_path, killed):
    """Its text is opened once to be verified, and then by every validation."""
    folder = tmp_path / "run"
    assert launcher.train(folder, data=data, moments={"open valid/source.txt": "SIGTERM 2"}).exit == 143
    stopped = outcome(folder)
    assert (stopped["state"]["step"], stopped["state"]["validated"]) == (6, 0)
    if killed:
        ended = launcher.train(folder, data=data, moments={"open step-00000006.tmp/model.safetensors": "SIGKILL"})
        assert ended.exit == -signal.SIGKILL
        assert "valid_loss" in read_metrics(folder / "metrics.jsonl")[-1]
    finish(launcher, folder, data=data)
    assert outcome(folder) == straight(data=data)


def test_an_average_that_was_killed_is_logged_once(launcher, straight, data, tmp_path):
    """The third save of the last step is the one after the averaged weights were validated."""
    folder, moment = tmp_path / "run", "open step-00000016.tmp/model.safetensors"
    killed = launcher.train(folder, data=data, training_average_checkpoints=2, moments={moment: "SIGKILL 3"})
    assert killed.exit == -signal.SIGKILL
    assert "weights" in read_metrics(folder / "metrics.jsonl")[-1]
    finish(launcher, folder, data=data, training_average_checkpoints=2)
    assert outcome(folder) == straight(data=data, training_average_checkpoints=2)


def test_a_run_without_validation_data_resumes_where_one_would_be_due(launcher, straight, tmp_path):
    texts = {"data_source": tmp_path / "source.txt", "data_target": tmp_path / "target.txt"}
    for path in texts.values():
        path.write_text("".join(f"{'wort ' * (n % 7)}{n}\n" for n in range(200)))
    options = {**texts, "vocabulary_size": 40, "validation_every": 2}
    ended = launcher.train(tmp_path / "run", moments={"advance 6": "SIGTERM"}, **options)
    assert ended.exit == 143
    finish(launcher, tmp_path / "run", **options)
    assert outcome(tmp_path / "run") == straight(**options)
