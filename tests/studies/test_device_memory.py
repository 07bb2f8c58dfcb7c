"""Trainings that need more memory than the device has run fewer side by side, and none fails for it."""

import json
from dataclasses import replace

import pytest
import torch
from studying import lay_out, play_trainings, run_study

from rectiformer.errors import DeviceMemoryError
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.plan import Scale, Task, find_task, seeded
from rectiformer.studies.single import run_single
from rectiformer.train.reporting import Reporter

SEARCH, SMOKE = STUDIES["reluformer-search"], Scale("smoke")
THREE = replace(SEARCH, trainings=lambda scale: seeded("rela-g", (1, 2, 3), SEARCH.trainings(scale)[0].config))
NO_MEMORY = "the device has no memory left"
# Plays a training on a full device: it runs out of memory as often as `refused` has letters, then it has its result.
PLAYED = f"""
refused = (folder / "refused").read_text()
if refused:
    (folder / "refused").write_text(refused[1:])
    tell("ends")
    print("rectiformer: {NO_MEMORY}")
    sys.exit({DeviceMemoryError.exit_code})
while not (out / "told").exists():
    time.sleep(0.02)
time.sleep(0.3)  # six looks of the study, in which it starts what it may
(folder / "result").rename(folder / "result.json")
tell("ends")
"""


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Runs three trainings that are refused memory so often: the results, what was said, and who ran when."""
    reporter = play_trainings(tmp_path, monkeypatch, PLAYED)

    def call(*refused, jobs, only=""):
        for training, times in zip(THREE.trainings(SMOKE), refused, strict=True):
            lay_out(Task(THREE, SMOKE, tmp_path, training), refused="x" * times)
        results = run_study(THREE, SMOKE, tmp_path, jobs=jobs, only=only, reporter=reporter)
        return results, reporter.said, (tmp_path / "journal").read_text().split("\n")[:-1]

    return call


def test_a_training_that_runs_out_of_memory_next_to_others_resumes_next_to_fewer(play):
    results, said, journal = play(1, 0, 0, jobs=3)
    assert said[0] == "rela-g-seed1: no device memory left next to the others; it waits, and 2 run side by side"
    assert said[-1].endswith("(3 of 3)")
    assert len(said) == 4
    assert [entry.failed for entry in results.entries] == ["", "", ""]
    refused = journal.index("ends reluformer-search/rela-g-seed1") + 1
    again = journal.index("begins reluformer-search/rela-g-seed1", refused)
    assert any(line.startswith("ends") for line in journal[refused:again])
    assert len(journal) == 8


def test_trainings_that_run_out_of_memory_together_are_tried_alone_once(play):
    """One of them has too little alone as well, which is its failure."""
    results, said, journal = play(9, 1, 1, jobs=3)
    assert [entry.failed for entry in results.entries] == [NO_MEMORY, "", ""]
    assert ["it waits" in text for text in said] == [True, True, True, False, False, False]
    assert said[2].endswith("next to the others; it waits, and the rest run one at a time")
    assert [line.split()[0] for line in journal[6:]] == ["begins", "ends"] * 3


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_training_without_memory_alone_fails(play, jobs):
    results, said, journal = play(9, 0, 0, jobs=jobs, only="seed1")
    assert [entry.failed for entry in results.entries] == [NO_MEMORY]
    assert said == [f"rela-g-seed1: failed: {NO_MEMORY} (1 of 1)"]
    assert journal == ["begins reluformer-search/rela-g-seed1", "ends reluformer-search/rela-g-seed1"]


def full(*given):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 is full")


def full_while_capturing(*given):
    """What a graph whose capture runs out of memory ends in."""
    try:
        full()
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def full_before_it_began(*given):
    raise RuntimeError("CUDA error: out of memory")


def broken(*given):
    raise RuntimeError("sizes of tensors do not match")


@pytest.fixture
def unmeasured(tmp_path):
    """A study with a training that is done, as its cost says, and is to be measured."""
    task = Task(THREE, SMOKE, tmp_path, THREE.trainings(SMOKE)[0])
    task.data.mkdir(parents=True)
    task.folder.mkdir(parents=True)
    (task.folder / "cost.json").write_text(json.dumps({"seconds": 1.0, "peak_bytes": 1}))
    return tmp_path


@pytest.mark.parametrize("measure", [full, full_while_capturing, full_before_it_began])
def test_too_little_memory_to_measure_is_one_line_with_its_own_exit_code(unmeasured, rectiformer, monkeypatch, measure):
    monkeypatch.setattr("rectiformer.cli.studying.stop_with_parent", lambda: None)  # standard input is nobody's here
    monkeypatch.setitem(STUDIES, SEARCH.name, replace(THREE, measure=measure))
    found = rectiformer("study", SEARCH.name, "--out", unmeasured, "--one", "rela-g-seed1")
    assert found.code == DeviceMemoryError.exit_code
    assert found.err == (
        "rectiformer: rela-g-seed1 cannot be measured: the device has no memory left; lower --jobs, so that fewer "
        "trainings share it\n"
    )


def test_too_little_memory_to_train_is_one_line_with_the_same_exit_code(tmp_path, rectiformer, monkeypatch):
    monkeypatch.setattr("rectiformer.cli.studying.stop_with_parent", lambda: None)
    monkeypatch.setitem(STUDIES, SEARCH.name, THREE)
    for update, says in (
        (full, "step 1: the device has no memory left; batches are "),
        (full_while_capturing, "rela-g-seed1 cannot be trained: the device has no memory left; lower --jobs"),
    ):
        monkeypatch.setattr("rectiformer.train.update.Updater.update", update)
        found = rectiformer("study", SEARCH.name, "--out", tmp_path, "--one", "rela-g-seed1")
        assert found.code == DeviceMemoryError.exit_code
        assert found.err.split("\n")[-2].startswith(f"rectiformer: {says}")


def test_other_errors_of_measuring_are_left_as_they_are(unmeasured):
    with pytest.raises(RuntimeError, match="sizes of tensors do not match"):
        run_single(find_task(replace(THREE, measure=broken), SMOKE, unmeasured, "rela-g-seed1"), Reporter())
