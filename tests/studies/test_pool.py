"""Trainings of several studies share the jobs: which wait for which, which run alone, and none waits forever."""

import json
import time
from dataclasses import replace

import pytest
from studying import lay_out, play_trainings

from rectiformer.errors import ArgumentError, CheckpointError
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.plan import Scale, Task, seeded
from rectiformer.studies.results import Results, save_results
from rectiformer.studies.running import list_tasks, run_studies
from rectiformer.studies.single import describe
from rectiformer.toml import to_toml

SMOKE, SEARCH = Scale("smoke"), STUDIES["reluformer-search"]
CONFIG = SEARCH.trainings(SMOKE)[0].config
# Plays a training: after a while it is trained, and a while later measured.
PLAYED = """
time.sleep(0.3)
(folder / "cost").rename(folder / "cost.json")
tell("is trained")
time.sleep(0.3)
tell("ends")
(folder / "result").rename(folder / "result.json")
"""


def study(name, rows, start="", tier=0, **others):
    """A study with one training per row."""
    config = replace(CONFIG, training=replace(CONFIG.training, init_from=start))
    return replace(
        SEARCH,
        name=name,
        trainings=lambda scale: [training for row in rows for training in seeded(row, (1,), config, tier=tier)],
        tables=lambda results: [],
        **others,
    )


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Runs studies with `jobs` trainings side by side: the notes, and what happened in which order."""
    reporter = play_trainings(tmp_path, monkeypatch, PLAYED)

    def call(*studies, jobs, only=""):
        for each in studies:
            for training in each.trainings(SMOKE):
                lay_out(Task(each, SMOKE, tmp_path, training), cost=json.dumps({"seconds": 1, "peak_bytes": 1}))
        plans = [(each, SMOKE) for each in studies]
        found = run_studies(plans, tmp_path, jobs=jobs, only=only, reporter=reporter)
        if not only:
            assert [len(results.finished) for results in found] == [len(each.trainings(SMOKE)) for each in studies]
        return reporter.said, (tmp_path / "journal").read_text().split("\n")[:-1]

    return call


def test_studies_run_side_by_side_and_name_the_study_of_a_training(play):
    said, journal = play(study("first", ["a"]), study("second", ["b"]), jobs=2)
    assert journal.index("begins second/b-seed1") < journal.index("ends first/a-seed1")
    assert {line.split(":")[0] for line in said} == {"first/a-seed1", "second/b-seed1"}


def test_what_starts_from_a_model_waits_until_that_is_trained_and_not_longer(play):
    _, journal = play(study("second", ["b"], start="first/a-seed1"), study("first", ["a"]), jobs=2)
    trained, begun = journal.index("is trained first/a-seed1"), journal.index("begins second/b-seed1")
    assert trained < begun < journal.index("ends first/a-seed1") + 2


def test_a_model_that_others_start_from_is_trained_first(play):
    _, journal = play(study("first", ["a", "b", "c"]), study("second", ["d"], start="first/c-seed1"), jobs=1)
    begun = [line.split("/")[1] for line in journal if line.startswith("begins")]
    assert begun == ["c-seed1", "a-seed1", "b-seed1", "d-seed1"]


def test_the_lowest_tier_comes_first_whatever_its_study(play):
    _, journal = play(study("first", ["a"], tier=2), study("second", ["b"], tier=1), jobs=1)
    assert journal.index("begins second/b-seed1") < journal.index("begins first/a-seed1")


def test_a_model_to_start_from_is_trained_when_what_starts_from_it_is_due(play):
    late, urgent = study("first", ["a", "c"], tier=5), study("second", ["b"], start="first/a-seed1", tier=2)
    _, journal = play(late, urgent, study("third", ["d"], tier=1), jobs=1)
    begun = [line.split("/")[1] for line in journal if line.startswith("begins")]
    assert begun == ["d-seed1", "a-seed1", "b-seed1", "c-seed1"]


def test_only_what_fits_into_the_time_is_started(tmp_path, monkeypatch):
    """Estimated: an update of a model as large as this takes seconds of any GPU, and one of the grammar's none."""
    reporter = play_trainings(tmp_path, monkeypatch, PLAYED)
    short, large = study("short", ["a"]), study("large", ["b"])
    model = replace(CONFIG.model, hidden_size=8192, num_heads=8, ffn_size=65536)
    config = replace(CONFIG, model=model, training=replace(CONFIG.training, batch_tokens=10**6))
    large = replace(large, trainings=lambda scale: seeded("b", (1,), config))
    for each in (large, short):
        for training in each.trainings(SMOKE):
            lay_out(Task(each, SMOKE, tmp_path, training), cost=json.dumps({"seconds": 1, "peak_bytes": 1}))
    end = time.monotonic() + 60
    found = run_studies([(large, SMOKE), (short, SMOKE)], tmp_path, jobs=2, reporter=reporter, deadline=end, whole=True)
    assert [len(results.finished) for results in found] == [0, 1]
    assert time.monotonic() < end
    assert "large" not in (tmp_path / "journal").read_text()


def test_what_measures_a_model_waits_until_its_own_study_has_measured_it(play):
    _, journal = play(study("second", ["a"], reads="first"), study("first", ["a"]), jobs=2)
    assert journal.index("ends first/a-seed1") < journal.index("begins second/a-seed1")


def test_a_study_that_measures_time_runs_alone(play):
    _, journal = play(study("first", ["c"]), study("timed", ["a", "b"], alone=True), study("last", ["d", "e"]), jobs=3)
    for key in ("timed/a-seed1", "timed/b-seed1"):
        begun = journal.index(f"begins {key}")
        assert journal[begun + 1 : begun + 3] == [f"is trained {key}", f"ends {key}"]
    assert journal.index("ends last/e-seed1") < journal.index("begins timed/a-seed1")


def test_a_model_that_is_not_trained_here_is_not_waited_for(play):
    _, journal = play(study("second", ["b"], start="first/a-seed1"), jobs=1)
    assert journal[0] == "begins second/b-seed1"


def save(tmp_path, *studies, **changes):
    """Write down results, as a report does, of trainings that were done elsewhere."""
    for each in studies:
        tasks = list_tasks([(each, SMOKE)], tmp_path)
        entries = [replace(describe(task), **changes) for task in tasks]
        save_results(Results(each.name, "smoke", len(entries), entries), tmp_path)


def test_what_was_done_elsewhere_is_not_done_again(play, tmp_path):
    first, second = study("first", ["a"]), study("second", ["b"])
    save(tmp_path, first)
    said, journal = play(first, second, jobs=1)
    assert {line.split()[-1] for line in journal} == {"second/b-seed1"}
    assert said[-1].endswith("(2 of 2)")


@pytest.mark.parametrize("changes", [{"config": "other"}, {"failed": "no memory"}], ids=["other settings", "failed"])
def test_what_was_done_otherwise_or_failed_elsewhere_is_done(play, tmp_path, changes):
    first = study("first", ["a"])
    save(tmp_path, first, **changes)
    _, journal = play(first, jobs=1)
    assert journal[0] == "begins first/a-seed1"


def test_a_model_to_start_from_is_trained_though_its_result_is_known_and_nobody_named_it(play, tmp_path):
    first, second = study("first", ["a"]), study("second", ["b"], start="first/a-seed1")
    save(tmp_path, first)
    said, journal = play(first, second, jobs=2, only="second/")
    assert journal.index("is trained first/a-seed1") < journal.index("begins second/b-seed1")
    assert said[-1].endswith("(2 of 2)")


def test_a_model_to_start_from_that_was_stopped_is_trained_to_its_end_first(play, tmp_path):
    first, second = study("first", ["a"]), study("second", ["b"], start="first/a-seed1")
    (half,) = list_tasks([(first, SMOKE)], tmp_path)
    half.run.mkdir(parents=True)
    (half.run / "run.json").touch()
    with pytest.raises(ArgumentError, match="starts from a-seed1 of first, which is not trained"):
        list_tasks([(second, SMOKE)], tmp_path)[0].locate_start()
    _, journal = play(first, second, jobs=2, only="second/")
    assert journal.index("is trained first/a-seed1") < journal.index("begins second/b-seed1")


def test_a_model_to_start_from_that_was_trained_otherwise_is_refused(play, tmp_path):
    first, second = study("first", ["a"]), study("second", ["b"], start="first/a-seed1")
    (other,) = list_tasks([(first, SMOKE)], tmp_path)
    other.run.mkdir(parents=True)
    longer = replace(CONFIG, training=replace(CONFIG.training, steps=CONFIG.training.steps + 1))
    (other.run / "config.toml").write_text(to_toml(longer))
    with pytest.raises(CheckpointError, match=r"a-seed1 was made with .*training\.steps = "):
        play(first, second, jobs=2, only="second/")
