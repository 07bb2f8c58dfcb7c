"""The command as a user types it."""

import shutil
from pathlib import Path

import pytest

from rectiformer.errors import ArgumentError
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.recipes import CHOICES

DOCS = Path(__file__).parents[2] / "docs"


def test_list_shows_every_study(rectiformer):
    found = rectiformer("study", "list")
    assert found.code == 0
    for study in STUDIES.values():
        assert study.name in found.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory-swop", "--out", "OUT"], "unknown study 'memory-swop'; did you mean 'memory-swap'?"),
        (["memory-swop"], "unknown study 'memory-swop'; did you mean 'memory-swap'?"),
        (["memory-swap"], "study 'memory-swap' needs --out, a folder for its trainings and results"),
        (["memory-swap", "--out", "OUT", "--scale", "smal"], "unknown value of --scale 'smal'; did you mean 'small'"),
        (["memory-swap", "OUT", "--out", "OUT"], "only plan and report take a folder; name it with --out"),
        (["memory-swap", "--out", "OUT", "--only", "gelu"], "no training of memory-swap has 'gelu' in its name"),
        (
            ["memory-swap", "--out", "OUT", "--scale", "paper", "--data", "OUT/x"],
            "which is no folder; name it with --data",
        ),
        (["all", "--out", "OUT", "--only", "nobody"], "no training of translation-quality, learning-rate, ablations"),
        (["memory-swap,slot-swep", "--out", "OUT"], "unknown study 'slot-swep'; did you mean 'slot-sweep'?"),
        ([",", "--out", "OUT"], "',' names no study"),
        (["report"], "report needs a folder"),
        (["plan"], "plan needs a folder"),
        (["memory-swap", "--out", "OUT", "--whole"], "so it needs --minutes"),
        (["report", "OUT"], "holds no results of a study"),
        (["memory-swap", "--out", "OUT", "--one", "relu-seed9"], "unknown training of memory-swap 'relu-seed9'"),
    ],
)
def test_mistakes_are_one_line(rectiformer, tmp_path, arguments, says, monkeypatch):
    monkeypatch.setattr("rectiformer.cli.studying.stop_with_parent", lambda: None)  # standard input is nobody's here
    found = rectiformer("study", *(word.replace("OUT", str(tmp_path)) for word in arguments))
    assert found.code in (2, 3)
    assert says in found.err
    assert found.err.count("\n") == 1


def test_a_study_named_twice_is_done_once(rectiformer, tmp_path, monkeypatch):
    asked = []

    def ask(plans, out, **_):
        asked.extend(study.name for study, _ in plans)
        raise ArgumentError("nothing is run here")

    monkeypatch.setattr("rectiformer.cli.studying.run_studies", ask)
    assert "nothing is run here" in rectiformer("study", "slot-sweep,memory-swap,slot-sweep", "--out", tmp_path).err
    assert asked == ["slot-sweep", "memory-swap"]


def test_plan_shows_what_is_left_in_order_and_what_is_to_be_chosen(rectiformer, tmp_path):
    shutil.copytree(DOCS / "results", tmp_path / "results")
    found = rectiformer("study", "plan", tmp_path, "--scale", "small")
    assert found.code == 0, found.err
    saved = sum(path.read_text().count("\n") for path in (tmp_path / "results").glob("*.jsonl"))
    planned = sum(len(study.trainings(study.at("small"))) for study in STUDIES.values())
    assert f"{saved} of {planned} trainings are finished" in found.out
    waiting = [key for key, choice in CHOICES.items() if choice.chosen is None]
    assert found.out.count("to be chosen in CHOICES") == len(waiting)
    empty = rectiformer("study", "plan", tmp_path / "empty", "--scale", "small", "--only", "memory-swap/relu-seed").out
    assert "memory-swap: relu " in empty
    assert f"0 of {planned} trainings are finished; {tmp_path / 'empty'} does not exist yet" in empty.replace("\n", " ")
