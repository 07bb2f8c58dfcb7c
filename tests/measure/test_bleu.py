"""Scores against closed forms and the sacrebleu command; what may not be scored is refused."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import sacrebleu

from rectiformer import ArgumentError, __version__
from rectiformer.errors import DataError
from rectiformer.measure.bleu import METRICS, compare, score


def corpus(lines, wrong, seed=0):
    """References of ten made-up words, and hypotheses with a share of `wrong` words."""
    random = np.random.default_rng(seed)
    words = random.integers(50, size=(lines, 10))
    changed = np.where(random.random(words.shape) < wrong, 99, words)
    return [[" ".join(f"w{word}" for word in row) for row in side] for side in (changed, words)]


def test_scores_have_their_closed_forms():
    """Four of five words are right: n-gram precisions 4/5, 3/4, 2/3, 1/2 and, for characters, 0/1; one edit in five."""
    scores = score(["a b c d e"], ["a b c d f"], ["bleu", "chrf", "ter"])
    assert scores["bleu"].value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert scores["chrf"].value == pytest.approx(100 * (4 / 5 + 3 / 4 + 2 / 3 + 1 / 2 + 0) / 5)
    assert scores["ter"].value == pytest.approx(100 / 5)


def test_every_score_says_how_it_was_counted():
    scores = score(["a b c d e"], ["a b c d f"], list(METRICS))
    tail = f"version:{sacrebleu.__version__}"
    assert {name: (found.name, found.signature) for name, found in scores.items()} == {
        "bleu": ("BLEU", f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|{tail}"),
        "chrf": ("chrF2", f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|{tail}"),
        "ter": ("TER", f"nrefs:1|case:lc|tok:tercom|norm:no|punct:yes|asian:no|{tail}"),
    }
    assert {found.version for found in scores.values()} == {__version__}
    assert {(found.low, found.high) for found in scores.values()} == {(None, None)}


@pytest.mark.parametrize(("hypotheses", "references"), [(2, 1), (1, 2), (0, 1), (1, 0)])
def test_counts_that_differ_are_never_scored(hypotheses, references):
    sides = ["same line"] * hypotheses, ["same line"] * references
    with pytest.raises(DataError, match=f"hypotheses: {hypotheses} lines for {references} references"):
        score(*sides)
    with pytest.raises(DataError, match=f"'mine': {hypotheses} lines for {references} references"):
        compare({"baseline": sides[1], "mine": sides[0]} if references else {"mine": sides[0]}, sides[1])


def test_nothing_is_never_scored():
    with pytest.raises(DataError, match="0 lines for 0 references; there is nothing to score"):
        score([], [])
    with pytest.raises(DataError, match="no systems to compare"):
        compare({}, ["a"])


def test_empty_hypotheses_are_counted_and_cost_what_they_miss():
    whole = "a b c d e"
    scores = score([whole, "", " \u2028\r"], [whole] * 3, ["bleu", "ter"])
    assert [found.empty for found in scores.values()] == [2, 2]
    assert scores["bleu"].value == pytest.approx(100 * np.exp(1 - 15 / 5))  # the brevity penalty alone
    assert scores["ter"].value == pytest.approx(100 * 10 / 15)
    assert {name: found.value for name, found in score([""], [whole], list(METRICS)).items()} == {
        "bleu": 0.0,
        "chrf": 0.0,
        "ter": 100.0,
    }


@pytest.mark.parametrize("oddity", ["\0", "\u2028", "\r", "\ufeff", "\u202e", "\u0301", "\ud800", "\x85"])
def test_odd_characters_shift_no_line(oddity):
    lines = [f"the {oddity} first of{oddity} all lines", "and then the second one"]
    assert {name: found.value for name, found in score(lines, lines, list(METRICS)).items()} == {
        "bleu": pytest.approx(100),
        "chrf": pytest.approx(100),
        "ter": 0.0,
    }
    assert score(lines, lines[::-1])["bleu"].value < 50


def test_unknown_metrics_name_the_nearest():
    with pytest.raises(ArgumentError, match="unknown metric 'blue'; did you mean 'bleu'"):
        score(["a"], ["a"], ["blue"])


def test_the_interval_has_no_width_over_equal_lines():
    found = score(["a b c d e"] * 4, ["a b c d f"] * 4, ["bleu"], samples=50)["bleu"]
    assert (found.low, found.high) == (pytest.approx(found.value), pytest.approx(found.value))
    assert "|bs:50|seed:12345|" in found.signature


def test_the_interval_halves_over_four_times_the_lines():
    widths = []
    for lines in (50, 200):
        found = score(*corpus(lines, 0.2), ["bleu"], samples=500)["bleu"]
        assert found.low < found.value < found.high
        widths.append(found.high - found.low)
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.25)


def test_the_seed_decides_the_interval(monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "99")
    sides = corpus(20, 0.3)
    first, again, other = (score(*sides, samples=100, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first["bleu"].low != other["bleu"].low
    assert os.environ["SACREBLEU_SEED"] == "99"


def test_comparing_leaves_no_trace_in_the_environment(monkeypatch):
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    score(["a"], ["a"], samples=2)
    assert "SACREBLEU_SEED" not in os.environ


def test_a_comparison_is_that_of_the_sacrebleu_command(tmp_path):
    baseline, references = corpus(30, 0.2)
    systems = {"baseline": baseline, "worse": corpus(30, 0.3)[0], "else": corpus(30, 0.22)[0]}
    for name, lines in {"references": references, **systems}.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", *systems, "-m", "bleu"]
    command += ["--paired-bs", "--paired-bs-n", "200", "-f", "json", "-w", "9"]
    environment = {**os.environ, "SACREBLEU_SEED": "7"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    rows = [row["BLEU"] for row in json.loads(done.stdout)]
    found = compare(systems, references, "bleu", samples=200, seed=7)
    assert [row.system for row in found] == list(systems)
    for ours, row in zip(found, rows, strict=True):
        assert ours.score.value == pytest.approx(row["score"])
        assert ours.mean == pytest.approx(row["mean"])
        assert ours.score.high - ours.mean == pytest.approx(row["ci"])
        assert ours.mean - ours.score.low == pytest.approx(row["ci"])
        assert ours.p_value == (None if row["p_value"] is None else pytest.approx(row["p_value"]))


@pytest.mark.parametrize("metric", METRICS)
def test_comparisons_can_be_written_as_json(metric):
    """sacreBLEU's own numbers for chrF and TER cannot: some are of numpy."""
    baseline, references = corpus(5, 0.2)
    for row in compare({"baseline": baseline, "perfect": references}, references, metric, samples=10):
        assert json.loads(json.dumps(asdict(row))) == asdict(row)


def test_only_real_differences_are_significant():
    baseline, references = corpus(60, 0.2)
    systems = {"baseline": baseline, "copy": list(baseline), "perfect": references}
    assert [row.p_value for row in compare(systems, references, samples=200)] == [None, 1.0, pytest.approx(1 / 201)]


@pytest.mark.parametrize("arguments", [{"samples": 1}, {"samples": -5}, {"samples": 10, "seed": 0}])
def test_resampling_that_cannot_be_repeated_is_refused(arguments):
    with pytest.raises(ArgumentError, match=f"{list(arguments)[-1]} = {list(arguments.values())[-1]}, but"):
        score(["a"], ["a"], **arguments)


def test_sacrebleu_says_nothing(caplog, capfd):
    """Left alone it logs every step of a test, and warns of a hundred lines that end in a spaced period."""
    caplog.set_level(logging.DEBUG)
    lines = ["a b c ."] * 100
    score(lines, lines)
    compare({"one": lines, "other": lines}, lines, samples=2)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    assert not logging.getLogger("sacrebleu").disabled
