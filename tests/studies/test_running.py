"""Real trainings of a second each: stopped, killed, failed, side by side; what is on disk is the same in the end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch
from studying import run_study

from rectiformer.errors import ArgumentError, CheckpointError, DataError
from rectiformer.runs.checkpoint import newest_checkpoints
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.plan import Scale, find_task
from rectiformer.studies.report import write_report
from rectiformer.studies.results import read_result
from rectiformer.studies.running import load_results
from rectiformer.studies.single import run_single
from rectiformer.train.reporting import Reporter
from rectiformer.translate.translator import Translator

pytestmark = pytest.mark.long
SEARCH, SMOKE = STUDIES["reluformer-search"], Scale("smoke")
KEYS = ("paper-gamma1-penalty0-seed1", "centered-gamma4-penalty0-seed1")
TIMES = ("valid_tokens_per_second", "training_tokens_per_second")


class Notes(Reporter):
    """Keeps what was said."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


def outcome(results):
    """Everything but times."""
    found = {}
    for entry in results.entries:
        content = asdict(entry)
        content["seconds"] = 0
        content["measures"] = {name: value for name, value in entry.measures.items() if name not in TIMES}
        found[entry.key] = content
    return found


def start(out, *more, **environment):
    command = [sys.executable, "-m", "rectiformer", "study", *more, "--out", str(out)]
    env = {**os.environ, "NO_COLOR": "1", **environment}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A folder with two trainings that nothing interrupted, in this process, and their results."""
    torch.set_num_threads(1)  # as the processes have, or sums are rounded otherwise
    out = tmp_path_factory.mktemp("straight")
    for key in KEYS:
        run_single(find_task(SEARCH, SMOKE, out, key), Reporter())
    return out, load_results(SEARCH, SMOKE, out)


@pytest.fixture
def copied(straight, tmp_path):
    """The same in a folder to be spoiled."""
    return shutil.copytree(straight[0], tmp_path / "copied")


def test_results_say_what_they_are_results_of(straight):
    results = straight[1]
    assert [entry.key for entry in results.entries] == list(KEYS)
    for entry in results.entries:
        assert not entry.failed
        assert entry.torch
        assert entry.device
        assert entry.seconds > 0
        assert entry.signature.startswith("beam 4, nrefs:1|")
        assert {len(entry.config), len(entry.data)} == {64}
        assert [step for step, _ in entry.measures["curve"]] == [10, 20, 30]
        assert 0 < entry.measures["cross_zeros"] < 1
    assert results.entries[0].measures != results.entries[1].measures


def test_text_is_prepared_once(straight):
    assert len(list((straight[0] / "data").iterdir())) == 1


def test_only_the_best_weights_are_kept(straight):
    run = straight[0] / SEARCH.name / "smoke" / KEYS[0] / "run"
    (checkpoint,) = newest_checkpoints(run, 9, pytest.fail)
    assert [name for name in checkpoint.manifest["files"] if name.endswith(".safetensors")] == ["model.safetensors"]
    Translator.from_run(run, device="cpu", notice=pytest.fail)


def test_what_is_finished_is_left_alone(straight):
    out, results = straight
    files = [out / SEARCH.name / "smoke" / key / "result.json" for key in KEYS]
    before = [path.stat().st_mtime_ns for path in files]
    notes = Notes()
    assert run_study(SEARCH, SMOKE, out, only="penalty0", reporter=notes) == results
    assert [path.stat().st_mtime_ns for path in files] == before
    assert notes.said == []


def test_a_killed_training_is_recorded_and_then_goes_on_to_the_same_result(straight, copied, monkeypatch):
    folder = copied / SEARCH.name / "smoke" / KEYS[0]
    shutil.rmtree(folder)
    monkeypatch.setenv("RECTIFORMER_FAILPOINT", "before-latest:2")
    results = run_study(SEARCH, SMOKE, copied, only="penalty0")
    assert [(entry.key, entry.failed) for entry in results.failures] == [(KEYS[0], "killed by signal 9")]
    assert not (folder / "result.json").exists()
    monkeypatch.delenv("RECTIFORMER_FAILPOINT")
    assert outcome(run_study(SEARCH, SMOKE, copied, only="penalty0")) == outcome(straight[1])
    assert "resumed at step 20" in (folder / "log.txt").read_text()
    assert not (folder / "failed.json").exists()


def test_a_failed_training_is_recorded_and_does_not_stop_the_others(straight, tmp_path):
    """Two side by side; the other is the same as of trainings one after the other in one process."""
    broken = tmp_path / SEARCH.name / "smoke" / KEYS[0]
    (broken / "run").mkdir(parents=True)
    (broken / "run" / "run.json").write_text("{}")
    notes = Notes()
    results = run_study(SEARCH, SMOKE, tmp_path, jobs=2, only="penalty0", reporter=notes)
    (failure,) = results.failures
    assert failure.key == KEYS[0]
    assert "is no complete run folder" in failure.failed
    assert "\n" not in failure.failed
    assert json.loads((broken / "failed.json").read_text())["failed"] == failure.failed
    assert notes.said[0] == f"{KEYS[0]}: failed: {failure.failed} (1 of 2)"
    write_report(tmp_path)
    assert f"- {KEYS[0]} failed: `{failure.failed}`" in (tmp_path / "studies" / f"{SEARCH.name}.md").read_text()
    assert [entry.key for entry in results.finished] == [KEYS[1]]
    assert outcome(results)[KEYS[1]] == outcome(straight[1])[KEYS[1]]


def test_a_study_that_is_asked_to_stop_saves_its_trainings(tmp_path):
    """Asked to, and then killed: a training stops with its study either way, and saves."""
    run = tmp_path / "memory-swap" / "smoke" / "relu-seed1" / "run"
    process = start(tmp_path, "memory-swap", "--only", "relu-seed1")
    wait_until((run / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "rectiformer: stopped as asked with 1 trainings left" in said
    (first,) = newest_checkpoints(run, 1, pytest.fail)
    assert 25 <= first.step < 300
    assert read_result(run.parent) is None

    process = start(tmp_path, "memory-swap", "--only", "relu-seed1")
    wait_until(lambda: f"resumed at step {first.step}" in (run.parent / "log.txt").read_text(), process)
    child = json.loads((run / "run.lock").read_text())["pid"]
    process.kill()
    process.communicate()
    wait_until(lambda: not is_alive(child))
    assert newest_checkpoints(run, 1, pytest.fail)[0].step >= first.step


def wait_until(holds, process=None):
    deadline = time.monotonic() + 120
    while not holds():
        assert process is None or process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_nothing_is_started_when_time_is_up(tmp_path):
    results = run_study(SEARCH, SMOKE, tmp_path, only="penalty0", deadline=time.monotonic() - 1)
    assert results.entries == []
    assert results.planned == len(SEARCH.trainings(SMOKE))
    assert not list((tmp_path / SEARCH.name / "smoke").glob("*/"))


@pytest.mark.parametrize("kept", [True, False], ids=["with its run", "with its result only"])
def test_other_settings_are_refused_before_anything_is_trained(copied, kept):
    folder = copied / SEARCH.name / "smoke" / KEYS[0]
    if kept:
        path = folder / "run" / "config.toml"
        path.write_text(path.read_text().replace("steps = 30", "steps = 29"))
        says = "training.steps = 29, now 30"
    else:
        shutil.rmtree(folder / "run")
        content = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps({**content, "config": "0" * 64}))
        says = "other settings than it has now"
        assert load_results(SEARCH, SMOKE, copied).changed == [KEYS[0].removesuffix("-seed1")]
        write_report(copied)
        page = (copied / "studies" / f"{SEARCH.name}.md").read_text()
        assert f"(with other settings than the study has now: {KEYS[0].removesuffix('-seed1')})" in page
    with pytest.raises(CheckpointError, match=says) as caught:
        run_study(SEARCH, SMOKE, copied)
    assert str(folder) in str(caught.value)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(
        ArgumentError,
        match="no training of reluformer-search has 'relax' in its name; there are paper-gamma1-pen",
    ):
        run_study(SEARCH, SMOKE, tmp_path, only="relax")
    with pytest.raises(DataError, match=r"--scale small reads its text in .*nowhere, which is no folder"):
        run_study(SEARCH, SEARCH.at("small", tmp_path / "nowhere"), tmp_path)
    with pytest.raises(DataError, match="holds no results of a study"):
        write_report(tmp_path)
