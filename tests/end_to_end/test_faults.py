"""What goes wrong around a run: full disks, damage, changed files, a second process, folders made to harm."""

import json
import os
import pickle
import re
import shutil
import signal
import time

import pytest
from end_to_end.tiny import outcome, overrides, steps_on_disk

from rectiformer.errors import CheckpointError, DataError
from rectiformer.runs.checkpoint import file_entry, seal
from rectiformer.runs.folder import change_config, open_run
from rectiformer.runs.metrics import read_metrics
from rectiformer.toml import load_config, override_config
from rectiformer.train.start import train
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator


@pytest.fixture(scope="module")
def stopped(launcher, data, tmp_path_factory):
    """A run of 16 steps with checkpoints of steps 8 and 10, where it was stopped."""
    folder = tmp_path_factory.mktemp("stopped")
    assert launcher.train(folder, data=data, moments={"advance 10": "SIGTERM"}).exit == 143
    assert steps_on_disk(folder)[-2:] == [8, 10]
    return folder


@pytest.fixture
def run(stopped, tmp_path):
    """A copy of it, to be harmed."""
    return shutil.copytree(stopped, tmp_path / "run")


def test_a_disk_that_fills_up_costs_nothing_but_time(launcher, straight, data, small_disk):
    """A checkpoint has 0.35 MiB and all are kept, until one does not fit; then the old ones free their space."""
    folder, options = small_disk / "run", {"data": data, "checkpoint_every": 1, "training_steps": 12}
    ended = launcher.train(folder, **options, checkpoint_keep=99)
    kept = steps_on_disk(folder)
    assert ended.exit == 6
    assert f"no space for {folder / 'checkpoints'}/step-{kept[-1] + 1:08d}: " in ended.error
    needed, free = map(int, re.findall("([0-9]+) bytes are needed, ([0-9]+) are free", ended.error)[0])
    assert 350_000 < free < needed < 3_000_000
    assert 4 < kept[-1] < 12
    for step in set(kept[:-1]) - {6}:  # the best
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    ended = launcher.train(folder, **options)
    assert (ended.exit, ended.error) == (0, "")
    assert f"resumed at step {kept[-1]}" in ended.notes
    assert outcome(folder) == straight(**options)


def test_a_run_does_not_start_where_two_checkpoints_do_not_fit(launcher, data, small_disk):
    (small_disk / "filler").write_bytes(bytes(3 * 2**19))
    ended = launcher.train(small_disk / "run", data=data)
    assert (ended.exit, "bytes are needed" in ended.error) == (6, True)
    (small_disk / "filler").unlink()
    assert launcher.train(small_disk / "run", data=data).exit == 0


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "truncated": lambda step: os.truncate(step / "optimizer.safetensors", 999),
    "bit flipped": lambda step: flip(step / "model.safetensors"),
    "empty state": lambda step: (step / "state.json").write_bytes(b""),
    "no manifest": lambda step: (step / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_the_end_is_the_same(launcher, straight, data, run, damage):
    damage(run / "checkpoints" / "step-00000010")
    ended = launcher.train(run, data=data)
    assert ended.exit == 0
    assert any(note.endswith("taken instead: step-00000008") for note in ended.notes)
    assert "resumed at step 8" in ended.notes
    assert outcome(run) == straight(data=data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_num_heads": 4}, "model.num_heads = 4 (was 2); undo this"),
        ({"vocabulary_size": 280}, "vocabulary.size = 280 (was 300); undo this"),
        ({"validation_metric": "loss"}, "validation.metric = 'loss' (was 'bleu'); undo this"),
        (
            {"data_seed": 2, "training_learning_rate": 0.5},
            "data.seed = 2 (was 1), training.learning_rate = 0.5 (was 1.0); undo this",
        ),
    ],
)
def test_a_run_is_not_resumed_as_another(launcher, data, run, changes, message):
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    ended = launcher.train(run, data=data, **changes)
    assert (ended.exit, message in ended.error) == (4, True)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_what_may_change_changes_nothing_in_the_weights(launcher, straight, data, run):
    free = {"log_every": 3, "validation_every": 5, "validation_beam": 2, "checkpoint_keep": 3, "training_compile": "no"}
    assert launcher.train(run, data=data, **free).exit == 0
    assert outcome(run)["tensors"] == straight(data=data)["tensors"]


def test_a_changed_corpus_is_refused_and_a_touched_one_is_not(launcher, tmp_path):
    texts = {"data_source": tmp_path / "source.txt", "data_target": tmp_path / "target.txt"}
    lines = [f"{'wort ' * (n % 7)}{n}\n" for n in range(200)]
    for path in texts.values():
        path.write_text("".join(lines))
    options = {**texts, "vocabulary_size": 40}
    assert launcher.train(tmp_path / "run", moments={"advance 2": "SIGTERM"}, **options).exit == 143
    texts["data_target"].write_text("".join([*lines[:-1], "wort wort\n"]))
    ended = launcher.train(tmp_path / "run", **options)
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_bytes())
    assert (ended.exit, f"but it was trained on {manifest['hash'][:12]}" in ended.error) == (4, True)
    texts["data_target"].write_text("".join(lines))
    assert launcher.train(tmp_path / "run", **options).exit == 0
    assert sorted(path.name for path in (tmp_path / "run").glob("data*")) == ["data"]


def test_an_older_best_survives_and_translates(launcher, data, tmp_path):
    """Validations are at steps 6 and 12, so the best is neither of the two newest."""
    folder = tmp_path / "run"
    assert launcher.train(folder, data=data, checkpoint_every=2).exit == 0
    best = outcome(folder)["best"][0]
    assert best in (6, 12)
    assert steps_on_disk(folder) == [best, 14, 16]
    assert len(Translator.from_run(folder, device="cpu").translate(["der Hund"], SearchOptions(beam=1))) == 1


def test_a_second_process_is_refused_and_the_lock_of_a_killed_one_taken_over(launcher, straight, data, tmp_path):
    folder = tmp_path / "run"
    holder = launcher.start(folder, data=data, moments={"advance 5": "SIGSTOP"})
    deadline = time.monotonic() + 60
    while len(read_metrics(folder / "metrics.jsonl")) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for resume, message in ((True, f"in use by process {holder} on "), (False, "exists; use --resume")):
        with pytest.raises(CheckpointError, match=message):
            train(load_config(None, overrides()), folder, resume=resume, data=data)
    os.kill(holder, signal.SIGKILL)
    assert launcher.finish().exit == -signal.SIGKILL
    ended = launcher.train(folder, data=data)
    assert ended.exit == 0
    assert any(f"took over the lock of process {holder} on " in note for note in ended.notes)
    assert outcome(folder) == straight(data=data)


class Payload:
    """Makes a folder when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("forged", [False, True], ids=["found by its hash", "found by its format"])
def test_a_pickle_in_place_of_weights_never_runs(launcher, straight, data, run, tmp_path, forged):
    marker, step = tmp_path / "marker", run / "checkpoints" / "step-00000010"
    payload = pickle.dumps(Payload(marker))
    (step / "model.safetensors").write_bytes(payload)
    if forged:
        manifest = json.loads((step / "manifest.json").read_bytes())
        del manifest["sha256"]
        manifest["files"]["model.safetensors"] = file_entry(payload)
        (step / "manifest.json").write_bytes(seal(manifest))
    with pytest.raises(CheckpointError, match="is damaged"):
        Translator.from_run(run, checkpoint="10")
    ended = launcher.train(run, data=data)
    assert (ended.exit, "it is not safetensors" in ended.error) == ((4, True) if forged else (0, False))
    assert not marker.exists()


@pytest.fixture
def no_waiting():
    """Fail, instead of hanging, where something waits for a FIFO."""

    def give_up(*_):
        raise AssertionError("still waiting after 20 s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


PLANTED = {
    "FIFO": lambda path, original: os.mkfifo(path),
    "link out": lambda path, original: path.symlink_to(original),
    "folder": lambda path, original: path.mkdir(),
}


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("name", ["run.json", "config.toml", "source.model", "metrics.jsonl", "run.lock"])
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_only_files_of_the_folder_itself_are_read(data, run, tmp_path, plant, name):
    plant(run / name, (run / name).rename(tmp_path / "original"))
    before = (tmp_path / "original").read_bytes()
    with pytest.raises((CheckpointError, DataError), match=name) as caught:
        train(load_config(None, overrides()), run, resume=True, data=data)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "original").read_bytes() == before


@pytest.mark.usefixtures("no_waiting")
def test_paths_in_a_configuration_from_elsewhere_are_not_followed(run, tmp_path):
    """Translating needs none of the texts that a run was trained on."""
    os.mkfifo(tmp_path / "fifo")
    opened = open_run(run)
    planted = {"data.source": "../fifo", "data.valid_source": "../fifo", "vocabulary.source_model": "../fifo"}
    config = override_config(opened.config, [f"{key}={value}" for key, value in planted.items()])
    change_config(opened, config)
    assert (run / "config.toml").read_text().count("../fifo") == 3
    assert Translator.from_run(run, device="cpu").translate([""], SearchOptions())[0].text == ""


def test_a_checkpoint_of_another_run_is_not_resumed(launcher, data, run, tmp_path):
    assert launcher.train(tmp_path / "other", data=data, model_variant="softmax", training_steps=12).exit == 0
    shutil.copytree(tmp_path / "other/checkpoints/step-00000012", run / "checkpoints/step-00000012")
    ended = launcher.train(run, data=data)
    assert (ended.exit, f"does not belong to run {run}: config is " in ended.error) == (4, True)
