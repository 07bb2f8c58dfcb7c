"""How a training starts: anew, from another run with its weights and subwords, and what does not fit."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
from train.linked import write_corpus

from rectiformer.config import TrainingConfig
from rectiformer.distributed.ranks import Ranks
from rectiformer.errors import CheckpointError, ConfigError, DeviceMemoryError, DivergedError
from rectiformer.runs.checkpoint import best_checkpoint
from rectiformer.runs.folder import adopt_vocabularies, load_model, open_run, weights_of
from rectiformer.runs.metrics import read_metrics
from rectiformer.text.prepared import prepare
from rectiformer.toml import load_config
from rectiformer.train.reporting import Reporter
from rectiformer.train.start import announce, describe, describe_new_length, train

SETTINGS = [
    "data.grammar=documents",
    "data.sentences=300",
    "data.valid_sentences=20",
    "vocabulary.size=200",
    "model.hidden_size=16",
    "model.ffn_size=16",
    "training.batch_tokens=300",
    "training.steps=6",
    "training.learning_rate=1e-3",
    "training.schedule=constant",
    "training.warmup=1",
    "training.device=cpu",
    "training.ema=0.5",
    "validation.every=6",
    "checkpoint.every=6",
    "log.every=1",
]


class Notes(Reporter):
    def __init__(self):
        self.lines = []

    def note(self, message):
        self.lines.append(message)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "first"
    train(load_config(None, SETTINGS), folder)
    return folder


def settings(first, *changes):
    return load_config(None, [*SETTINGS, f"training.init_from={first}", *changes])


def weights(folder):
    return weights_of(load_model(open_run(folder), "latest")[0])


def test_a_run_starts_with_the_best_weights_and_the_subwords_of_another(first, tmp_path):
    notes = Notes()
    config = settings(
        first, "data.segment_length=64", "training.steps=1", "training.learning_rate=0", "model.dropout=0.2"
    )
    train(config, tmp_path / "run", reporter=notes)
    assert f"started from {first}, step 6" in notes.lines
    assert open_run(tmp_path / "run").source.sha256 == open_run(first).source.sha256
    for name, tensor in weights(tmp_path / "run").items():  # at rate 0 and of the moving average
        assert torch.equal(tensor, weights(first)[name]), name


def test_what_is_resumed_goes_on_from_its_own_checkpoint(first, tmp_path):
    train(settings(first, "training.steps=2", "checkpoint.every=2"), tmp_path / "run")
    half = weights(tmp_path / "run")
    notes = Notes()
    changes = ("training.steps=3", "training.learning_rate=1e-3", "checkpoint.every=2")
    train(settings(first, *changes), tmp_path / "run", resume=True, reporter=notes)
    assert "resumed at step 2" in notes.lines
    assert not [line for line in notes.lines if line.startswith("started from")]
    assert any(not torch.equal(tensor, half[name]) for name, tensor in weights(tmp_path / "run").items())


def test_resuming_a_finished_run_keeps_all_of_its_log(tmp_path):
    changes = ["training.steps=3", "validation.every=2", "checkpoint.every=1", "training.average_checkpoints=2"]
    config = load_config(None, [*SETTINGS, *changes])
    train(config, tmp_path / "run")
    log = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "weights" in record] == [3]
    train(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == log


def test_a_finished_run_keeps_its_averaged_weights_though_validations_are_due_at_other_steps_now(tmp_path):
    changes = ["training.steps=3", "checkpoint.every=1", "training.average_checkpoints=2", "validation.metric=loss"]
    for every in (2, 3):
        config = load_config(None, [*SETTINGS, *changes, "training.learning_rate=1e-2", f"validation.every={every}"])
        train(config, tmp_path, resume=every == 3)
        assert best_checkpoint(tmp_path).holds("averaged")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schedule": "cosine"}, "training.schedule = cosine"),
        ({"schedule": "constant", "penalty_warmdown": 0.5}, "training.penalty_warmdown"),
        ({"schedule": "constant"}, ""),
    ],
)
def test_a_new_length_is_warned_of_where_updates_depend_on_it(changes, reason):
    old, new = (TrainingConfig(**changes, steps=steps) for steps in (100, 200))
    warning = describe_new_length(old, new)
    assert reason in warning
    assert warning.startswith("training.steps = 200 (was 100) changes the updates from here on") == bool(reason)
    assert describe_new_length(old, old) == ""


def test_a_start_makes_the_first_loss_that_of_a_trained_model(first, tmp_path):
    for name, config in {"new": load_config(None, SETTINGS), "on": settings(first)}.items():
        train(config, tmp_path / name)
    losses = {
        name: [record["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in record]
        for name in ("new", "on")
    }
    assert losses["on"][0] < losses["new"][0] - 0.1


def test_other_sizes_and_other_subwords_are_refused(first, tmp_path):
    with pytest.raises(CheckpointError, match=r"does not fit the model: .*; use the run's own configuration"):
        train(settings(first, "model.ffn_size=32"), tmp_path / "wide")
    config = load_config(None, [*SETTINGS, "vocabulary.size=190"])
    prepare(config, tmp_path / "data")
    with pytest.raises(CheckpointError, match=r"its source vocabulary has hash .*, but that of the data is .*; leave"):
        train(settings(first), tmp_path / "other", data=tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == [
        "data"
    ]  # no folder is left that the next try would stumble on
    with pytest.raises(CheckpointError, match="there is no run folder"):
        train(settings(tmp_path / "nowhere"), tmp_path / "none")


def test_subwords_are_taken_over_unless_others_are_named(first):
    config = settings(first)
    assert adopt_vocabularies(config).vocabulary.source_model == str(first / "source.model")
    assert adopt_vocabularies(config).vocabulary.target_model == ""
    apart = dataclasses.replace(config, vocabulary=dataclasses.replace(config.vocabulary, shared=False))
    assert adopt_vocabularies(apart).vocabulary.target_model == str(first / "target.model")
    named = dataclasses.replace(config, vocabulary=dataclasses.replace(config.vocabulary, source_model="own"))
    assert adopt_vocabularies(named) == named
    assert adopt_vocabularies(load_config(None, SETTINGS)) == load_config(None, SETTINGS)


def test_mixed_segments_are_of_every_length_and_validation_is_not_mixed(first, tmp_path):
    whole, mixed = (
        prepare(settings(first, "data.segment_length=128", f"data.mixed={word}"), tmp_path / word)
        for word in ("false", "true")
    )
    assert mixed.train[0].pairs > 1.5 * whole.train[0].pairs
    assert mixed.valid.pairs == whole.valid.pairs
    separators = [(side.train[0].source(0) == side.source.separator).sum() for side in (whole, mixed)]
    assert separators[0] == separators[1] > 0  # the first document is cut at the longest limit
    with pytest.raises(ConfigError, match=r"data\.mixed = true, but data\.segment_length = 0"):
        prepare(load_config(None, [*SETTINGS, "data.mixed=true"]), tmp_path / "sentences")


@pytest.mark.parametrize("named", [False, True], ids=["as it was", "by a configuration"])
def test_a_run_resumes_when_the_run_it_started_from_is_gone(first, tmp_path, named):
    base = shutil.copytree(first, tmp_path / "base")
    config = settings(base, "training.steps=6")
    train(config, tmp_path / "run")
    shutil.rmtree(base)
    found = config if named else open_run(tmp_path / "run").config
    longer = dataclasses.replace(found, training=dataclasses.replace(found.training, steps=8))
    assert train(longer, tmp_path / "run", resume=True).step == 8


def test_resuming_where_nothing_is_says_that_it_starts_anew(tmp_path):
    folder = tmp_path / "run"
    config = load_config(None, [*SETTINGS, "training.steps=1"])
    for expected in ([f"there is no checkpoint in {folder} to resume; training starts anew"], []):
        notes = Notes()
        train(config, folder, resume=True, reporter=notes)
        assert [line for line in notes.lines if "anew" in line] == expected


def test_no_advice_is_to_resume_with_what_a_resumed_run_may_not_change(tmp_path, monkeypatch):
    with pytest.raises(DivergedError, match="train another run with a lower training") as caught:
        train(load_config(None, [*SETTINGS, "training.learning_rate=9e29"]), tmp_path / "diverged")
    assert "--resume" not in str(caught.value)

    def fill(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("rectiformer.train.update.Updater.update", fill)
    words = "go on with --resume where other processes held some of it, else train another run with lower training"
    with pytest.raises(DeviceMemoryError, match=words):
        train(load_config(None, SETTINGS), tmp_path / "full")
    changed = load_config(None, [*SETTINGS, "training.batch_tokens=150", "training.grad_accumulation=2"])
    with pytest.raises(CheckpointError, match=r"cannot resume .* with training.batch_tokens = 150"):
        train(changed, tmp_path / "full", resume=True)


@pytest.mark.parametrize(("warmup", "warned"), [(1, False), (2, False), (5, True)])
@pytest.mark.parametrize("schedule", ["noam", "inverse-sqrt", "constant", "linear", "wsd"])
def test_a_warm_up_longer_than_the_training_is_warned_of(tmp_path, schedule, warmup, warned):
    steps = ["training.steps=2", f"training.warmup={warmup}", f"training.schedule={schedule}"]
    notes = Notes()
    announce(load_config(None, [*SETTINGS, *steps]), tmp_path, False, notes)
    line = (
        "warning: training.warmup = 5 is more than training.steps = 2: the learning rate rises to the end and gets to "
        "40% of its peak; make one smaller or the other larger"
    )
    assert [each for each in notes.lines if "warmup" in each] == [line] * warned


@pytest.mark.parametrize(
    ("changes", "data", "warned"),
    [
        ([], None, False),
        (["data.source=a", "data.target=b"], None, True),
        (["data.stream=true"], None, True),
        (["data.source=a", "data.target=b"], "prepared", False),
        (["data.source=a", "data.target=b", "data.valid_source=c", "data.valid_target=d"], None, False),
    ],
)
def test_text_of_ones_own_without_validation_is_warned_of(tmp_path, changes, data, warned):
    notes = Notes()
    announce(load_config(None, ["training.steps=9", "training.warmup=1", *changes]), tmp_path, False, notes, data)
    assert [line.partition(", ")[0] for line in notes.lines] == ["warning: no validation text"] * warned


@pytest.mark.parametrize(
    ("schedule", "rate", "warned"), [("noam", 4e-3, True), ("noam", 0.5, False), ("linear", 4e-3, False)]
)
def test_a_factor_that_is_meant_as_a_rate_is_warned_of(tmp_path, schedule, rate, warned):
    settings = [f"training.schedule={schedule}", f"training.learning_rate={rate}", "training.warmup=2"]
    notes = Notes()
    announce(
        load_config(None, [*SETTINGS, *settings, "training.steps=4", "model.hidden_size=64"]), tmp_path, False, notes
    )
    assert [line.partition(";")[0] for line in notes.lines] == [
        'warning: with training.schedule = "noam", training.learning_rate = 0.004 is a factor, and the highest rate is '
        "0.0004"
    ] * warned


@pytest.mark.parametrize(("threads", "said"), [(1, "cpu, 1 thread"), (2, "cpu, 2 threads")])
def test_threads_are_counted(monkeypatch, threads, said):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert describe(torch.device("cpu"), Ranks()) == said


def test_the_warning_comes_before_the_text_is_prepared(tmp_path):
    notes = Notes()
    train(load_config(None, [*SETTINGS, "training.steps=1", "training.warmup=4"]), tmp_path / "run", reporter=notes)
    assert "training.warmup = 4 is more than training.steps = 1" in notes.lines[0]


def test_a_kill_while_prepared_data_is_replaced_leaves_a_run_that_resumes(tmp_path, monkeypatch):
    own = [*SETTINGS[1:], *write_corpus(tmp_path, 100, 10)[:4], "training.steps=1"]
    config, folder = load_config(None, own), tmp_path / "run"
    train(config, folder)
    os.utime(tmp_path / "train.de")  # so that it is prepared again, and compared

    class KilledError(BaseException):
        pass

    def killed(path, *args, **options):
        """Ends where the first folder of data is half removed, as a kill does, which runs no `finally` either."""
        if Path(path).parent == folder and Path(path).name in ("data", "data.again", "data.old"):
            for ids in Path(path).rglob("source.ids"):
                ids.unlink()
            raise KilledError

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KilledError):
        train(config, folder, resume=True)
    monkeypatch.undo()
    notes = Notes()
    train(config, folder, resume=True, reporter=notes)
    assert "resumed at step 1" in notes.lines
    assert {path.name for path in folder.iterdir() if "data" in path.name} == {"data"}
