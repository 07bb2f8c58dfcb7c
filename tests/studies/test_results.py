"""Means, intervals and verdicts against closed forms."""

import math

import pytest

from rectiformer.errors import CheckpointError, DataError
from rectiformer.studies.results import (
    Claim,
    Estimate,
    Result,
    Results,
    Table,
    difference,
    estimate,
    judge_rows,
    read_result,
    read_saved,
    save_results,
    t_quantile,
    verdict,
)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (120, 1.9799)],
)
def test_t_quantiles_are_those_of_the_tables(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_t_quantiles_of_one_and_two_degrees_have_closed_forms():
    for share in (0.5, 0.9, 0.95, 0.99):
        assert t_quantile(1, share) == pytest.approx(math.tan(math.pi * share / 2), rel=1e-7)
        assert t_quantile(2, share) == pytest.approx(share * math.sqrt(2 / (1 - share**2)), rel=1e-7)


def test_mean_and_interval_over_seeds():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half == pytest.approx(t_quantile(2) / math.sqrt(3))
    assert found.describe() == "2.00 ± 2.48"
    assert estimate([5.0]) == Estimate(5.0, None)
    assert estimate([5.0]).describe(1) == "5.0"
    assert estimate([]) is None


def test_a_difference_is_taken_seed_by_seed():
    """Seeds far apart, but always 9 to 11 between two models: the interval is that of 9, 10, 11."""
    first, second = {1: 10.0, 2: 60.0, 3: 111.0, 4: 0.0}, {3: 100.0, 1: 1.0, 2: 50.0, 5: 0.0}
    assert difference(first, second) == estimate([9.0, 10.0, 11.0])
    assert difference({1: 1.0}, {1: 3.0}) == Estimate(-2.0, None)
    assert difference({1: 2.0, 2: 2.0}, {1: 1.0, 2: 1.0}) == Estimate(1.0, 0.0)
    assert difference({1: 1.0}, {2: 1.0}) is None


@pytest.mark.parametrize(
    ("expected", "mean", "half", "says"),
    [
        ("above", 1.0, 0.9, "agree"),
        ("above", -1.0, 0.9, "disagree"),
        ("above", 1.0, 1.1, "open"),
        ("below", -1.0, 0.9, "agree"),
        ("below", 1.0, 0.9, "disagree"),
        ("below", -1.0, 1.1, "open"),
        ("equal", 0.1, 0.3, "agree"),
        ("equal", 1.0, 0.3, "disagree"),
        ("equal", -1.0, 0.3, "disagree"),
        ("equal", 0.4, 0.3, "open"),
        ("equal", 0.0, 3.0, "open"),
        ("no worse", 0.0, 0.4, "agree"),
        ("no worse", -2.0, 0.4, "disagree"),
        ("no worse", -0.4, 0.4, "open"),
        ("above", 9.0, None, "open (one seed)"),
    ],
)
def test_a_verdict_is_given_by_the_interval_alone(expected, mean, half, says):
    assert verdict(Estimate(mean, half), Claim("a", "b", expected, "?")) == says


def entry(name, seed, bleu=None, failed=""):
    measures = {} if bleu is None else {"bleu": bleu}
    return Result(
        study="s", scale="smoke", key=f"{name}-seed{seed}", name=name, seed=seed, labels={}, config="c",
        measures=measures, failed=failed,
    )  # fmt: skip


def test_claims_are_judged_only_where_both_rows_are_known():
    entries = [entry(name, seed, seed + shift) for name, shift in (("a", 10), ("b", 0)) for seed in (1, 2, 3)]
    entries[0] = entry("a", 1, 12.0)
    results = Results("s", "smoke", 9, [*entries, entry("c", 1, failed="no memory left")])
    claims = [Claim("a", "b", "above", "+1.14"), Claim("a", "c", "above", "?"), Claim("a", "missing", "above", "?")]
    assert judge_rows(claims, results, "bleu", "BLEU") == [
        ("a above b", "+1.14", "+10.33 ± 1.43 BLEU", "agree"),
        ("a above c", "?", "", "not measured"),
    ]
    assert [results.cell(name, "bleu") for name in results.names()] == ["12.33 ± 1.43", "2.00 ± 2.48", "failed"]
    assert results.cell("a", "chrf") == ""


def test_a_table_is_markdown_whatever_is_in_its_cells():
    table = Table("Title", ("a", "b"), [("x|y", "two\nlines"), ("\\", "")], ("A note.",))
    assert table.to_markdown().split("\n") == [
        "**Title**", "", "| a | b |", "| --- | --- |", "| x\\|y | two lines |", "| \\\\ |  |", "", "A note.", "",
    ]  # fmt: skip


def test_results_are_read_as_they_were_written(tmp_path):
    assert read_result(tmp_path) is None
    failed, found = entry("a", 1, failed="why"), entry("a", 1, 33.25)
    failed.write(tmp_path)
    assert read_result(tmp_path) == failed
    found.write(tmp_path)
    assert read_result(tmp_path) == found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("{", CheckpointError, "not JSON"),
        ('{"format": 99}', DataError, "format 99"),
        ('{"format": 1, "other": 2}', DataError, "no result of a study"),
    ],
)
def test_a_damaged_result_is_named(tmp_path, text, error, says):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(error, match=says) as caught:
        read_result(tmp_path)
    assert str(tmp_path / "result.json") in str(caught.value)


def test_results_are_saved_as_lines_without_folders_of_this_machine(tmp_path):
    entries = [entry("a", 1, 33.25), entry("a", 2, failed=f"{tmp_path}/s/run is no complete run folder")]
    save_results(Results("s", "smoke", 5, entries), tmp_path)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["s-smoke.jsonl"]
    found = read_saved(tmp_path, "s", "smoke")
    assert list(found) == ["a-seed1", "a-seed2"]
    assert found["a-seed1"] == entries[0]
    assert found["a-seed2"].failed == "OUT/s/run is no complete run folder"
    assert read_saved(tmp_path, "s", "small") == {}
    (tmp_path / "results" / "s-small.jsonl").write_text('{"format": 1}\n')
    with pytest.raises(DataError, match=r"s-small\.jsonl is no result of a study"):
        read_saved(tmp_path, "s", "small")
