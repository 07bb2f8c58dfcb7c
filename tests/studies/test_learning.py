"""What is chosen of the learning rates that were tried, and what is said of learning speed."""

from dataclasses import replace

import pytest

from rectiformer.studies.learning_rate import STEPS, best_tried, describe_choices, tables
from rectiformer.studies.learning_speed import curves, describe
from rectiformer.studies.recipes import CHOICES, Peak
from rectiformer.studies.results import Result, Results

KEY = ("europarl", "post", "softmax")
CORPUS = "europarl-en-de-words"
LOW, MIDDLE, CLIPPED = Peak(4e-4, 2500), Peak(6e-4, 5000), Peak(8e-4, 2500, clip=1)


def trained(variant, peak, seed, loss, curve=(), norm="post"):
    """A training of `translation-quality` to the end."""
    labels = {"corpus": CORPUS, "variant": variant, "norm": norm}
    labels |= {"learning_rate": peak.rate, "warmup": peak.warmup, "clip": peak.clip}
    return entry("translation-quality", labels, seed, loss, curve)


def short(variant, rate, loss, curve=(), norm="post"):
    labels = {"variant": variant, "norm": norm, "learning_rate": rate, "warmup": 0.25, "steps": STEPS["small"]}
    return entry("learning-rate", labels, 1, loss, curve)


def entry(study, labels, seed, loss, curve):
    return Result(
        study=study, scale="small", key="k", name="n", seed=seed, labels=labels, config="c",
        measures={"valid_loss": loss, "curve": [list(point) for point in curve]},
    )  # fmt: skip


def results_of(*entries):
    return Results("learning-rate", "small", len(entries), list(entries))


@pytest.fixture
def sweep(monkeypatch):
    choice = replace(CHOICES[KEY], chosen=None, tried=(LOW, MIDDLE, CLIPPED), seed=2)
    monkeypatch.setitem(CHOICES, KEY, choice)


def test_the_lowest_loss_of_the_deciding_seed_is_best_once_all_are_trained(sweep):
    entries = [trained("softmax", LOW, 2, 1.7), trained("softmax", MIDDLE, 2, 1.6)]
    assert best_tried(results_of(*entries), *KEY) is None
    entries += [trained("softmax", CLIPPED, 1, 1.5), trained("rela-g", CLIPPED, 2, 1.4), short("softmax", 4e-4, 1.0)]
    assert best_tried(results_of(*entries), *KEY) is None  # another seed, another variant, a short one
    entries += [trained("softmax", CLIPPED, 2, 3.6), trained("softmax", Peak(8e-4, 2500), 2, 1.1)]
    assert best_tried(results_of(*entries), *KEY) == (MIDDLE, 1.6)
    (line,) = [line for line in describe_choices(results_of(*entries)) if "europarl, post, softmax" in line]
    assert "0.0006" in line
    assert "has the lowest validation loss, 1.600" in line


def test_a_training_that_never_read_the_source_is_called_failed(sweep):
    entries = [trained("softmax", CLIPPED, 2, 3.6), trained("softmax", CLIPPED, 3, 1.6)]
    shown = tables(results_of(*entries, short("softmax", 4e-4, 3.5), short("rela-g", 4e-4, 1.4)))
    assert [(table.title.split(", ")[-1], table.rows) for table in shown] == [
        ("10,000 updates", [("8e-4, clipped at 1", "2,500", "3.600 (failed), 1.600", "")]),
        ("4,000 updates", [("4e-4", "1,000", "3.500", "1.400")]),
    ]


def test_short_trainings_are_compared_at_the_best_rate_of_each(sweep):
    worse, better = [(1000, 5.0), (4000, 3.0)], [(1000, 4.0), (4000, 2.0)]
    entries = [short("softmax", 4e-4, 3.0, worse), short("softmax", 8e-4, 2.5, [(1000, 4.5), (4000, 2.5)])]
    assert curves(results_of(*entries)) == {}  # the other variant is missing
    found = curves(results_of(*entries, short("rela-g", 8e-4, 2.0, better)))
    assert found == {("post", 4000): {"softmax": {1000: [4.5], 4000: [2.5]}, "rela-g": {1000: [4.0], 4000: [2.0]}}}


def test_who_learns_faster_is_said_in_words():
    lines = {"softmax": {500: [6.0], 1000: [5.0], 2000: [3.0]}, "rela-g": {500: [5.0], 1000: [3.0], 2000: [2.5]}}
    text = describe("post", 2000, lines)
    assert text == (
        "Post-norm, 2,000 updates: rela-g learns faster. The difference is largest after 1,000 updates (3.00 vs. 5.00)."
        " It has the final loss of softmax after 1,000. At the end rela-g's loss is 0.50 below softmax's."
    )
    level = {"softmax": {500: [4.0], 1000: [2.0]}, "rela-g": {500: [5.0], 1000: [2.005]}}
    assert describe("pre", 1000, level).endswith("At the end they are level.")
    assert "softmax learns faster" in describe("pre", 1000, level)
