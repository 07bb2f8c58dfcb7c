"""Alignments from weights to error rate, against hand-made answers and an independent count."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rectiformer import ArgumentError, ShapeError
from rectiformer.errors import DataError
from rectiformer.measure.alignment import (
    Links,
    alignment_error,
    format_links,
    links_from_steps,
    read_gold,
    rows_for,
    score_with_intervals,
    strongest,
)
from rectiformer.measure.words import given_spans, merge_links, pieces_to_words, word_spans

LINK_SETS = st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8)
SENTENCES = st.lists(st.tuples(LINK_SETS, LINK_SETS, LINK_SETS), min_size=1, max_size=5)


def test_each_target_is_linked_to_its_largest_weight():
    weights = np.array([[0.1, 0.7, 0.2], [0.4, 0.1, 0.4], [0.0, 0.0, 0.0], [-2.0, 0.0, 1e-30], [-2.0, -1.0, -3.0]])
    assert links_from_steps(strongest(weights)) == {(1, 0), (0, 1), (2, 3)}  # ties take the first; two rows are null


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_no_weights_give_no_links(shape):
    assert links_from_steps(strongest(np.zeros(shape))) == set()


def test_links_are_plain_integers():
    [(source, target)] = links_from_steps(strongest(np.ones((1, 1), dtype=np.float32)))
    assert (type(source), type(target)) == (int, int)


@pytest.mark.parametrize(("induction", "rows"), [("normal", [0, 1]), ("shifted", [1, 2])])
def test_induction_decides_the_step_a_piece_takes_its_row_from(induction, rows):
    weights = np.arange(12.0).reshape(3, 4)
    assert rows_for(weights, induction, 3).tolist() == weights[rows][:, [0, 1, 2]].tolist()


def test_a_target_without_pieces_has_no_rows():
    assert rows_for(np.ones((1, 4)), "normal", 3).shape == rows_for(np.ones((1, 4)), "shifted", 3).shape == (0, 3)


def test_rows_that_cannot_be_taken_are_refused():
    with pytest.raises(ArgumentError, match="unknown induction 'shift'; did you mean 'shifted'"):
        rows_for(np.ones((2, 2)), "shift", 2)
    for shape, source_pieces in [((0, 4), 4), ((3, 4), 5), ((4,), 4), ((3, 4), -1)]:
        with pytest.raises(ShapeError, match=r"weights are .*, but they need \[M N\]"):
            rows_for(np.ones(shape), "normal", source_pieces)


# Each case: source and its pieces, target and its pieces, the source piece that each decoder step looks at (None for
# nothing, -1 for the end of the source), induction, and the Pharaoh line to come out.
CASES = {
    "end of sentence": ("das Haus", [(0, 3), (3, 8)], "the house", [(0, 3), (3, 9)], [0, 1, -1], "normal", "0-0 1-1"),
    "shifted": ("das Haus", [(0, 3), (3, 8)], "the house", [(0, 3), (3, 9)], [-1, 0, 1], "shifted", "0-0 1-1"),
    "looks at the end": ("das Haus", [(0, 3), (3, 8)], "the house", [(0, 3), (3, 9)], [-1, 1, -1], "normal", "1-1"),
    "null word": ("Haus", [(0, 4)], "a house", [(0, 1), (1, 7)], [None, 0, -1], "normal", "0-1"),
    "subwords": (
        "zum Bahnhof.",
        [(0, 1), (1, 3), (3, 8), (8, 12)],  # z um ▁Bahn hof.
        "to the station.",
        [(0, 2), (2, 6), (6, 10), (10, 14), (14, 15)],
        [0, 1, 2, 3, 3, -1],
        "normal",
        "0-0 0-1 1-2 1-3 2-2 2-3",
    ),
    "unknown": (
        "der Ж☃",
        [(0, 3), (3, 6)],  # unknown characters in a row are one piece, with the space before them
        "the ☃Ж",
        [(0, 3), (3, 4), (4, 6)],
        [0, None, 1, -1],
        "normal",
        "0-0 1-1 1-2 2-1 2-2",
    ),
    "no spaces": (
        "我爱你。",
        [(0, 0), (0, 1), (1, 3), (3, 4)],  # ▁ 我 爱你 。
        "I love you.",
        [(0, 1), (1, 6), (6, 10), (10, 11)],
        [1, 2, 2, 3, -1],
        "normal",
        "0-0 1-1 1-2 2-1 2-2 3-3",
    ),
    "empty source": ("", [], "a", [(0, 1)], [None, -1], "normal", ""),
    "empty target": ("a", [(0, 1)], "", [], [0], "shifted", ""),
}


def words_linked(case):
    """The links of words that a case's weights give."""
    source, source_offsets, target, target_offsets, looks_at, induction, _ = case
    weights = np.zeros((len(target_offsets) + 1, len(source_offsets) + 1))
    for step, piece in enumerate(looks_at):
        if piece is not None:
            weights[step, piece] = 0.5
    links = links_from_steps(strongest(rows_for(weights, induction, len(source_offsets))))
    source_words = pieces_to_words(source_offsets, word_spans(source))
    target_words = pieces_to_words(target_offsets, word_spans(target))
    return merge_links(links, source_words, target_words)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_weights_become_the_links_of_words(case):
    assert format_links(words_linked(case)) == case[-1]


# Gold for four of the cases, and counted on paper: |A & S|, |A & P|, |A|, |S|.
COUNTED = {
    "looks at the end": ("0-0 1-1", (1, 1, 1, 2)),
    "null word": ("0p0 0-1", (1, 1, 1, 1)),
    "subwords": ("0-0 0p1 1-2 2-3", (3, 4, 6, 3)),
    "no spaces": ("0-0 1-1 1p2 2-2 3-3", (4, 5, 6, 4)),
}


@pytest.mark.parametrize("names", [*([name] for name in COUNTED), list(COUNTED)], ids=" and ".join)
def test_the_error_from_weights_to_rate_is_the_one_counted_on_paper(names):
    gold = read_gold([COUNTED[name][0] for name in names])
    found_sure, found_possible, links, sure = (sum(COUNTED[name][1][index] for name in names) for index in range(4))
    score = alignment_error([words_linked(CASES[name]) for name in names], gold)
    assert score.aer == pytest.approx(1 - (found_sure + found_possible) / (links + sure), abs=1e-15)
    assert (score.precision, score.recall) == (found_possible / links, found_sure / sure)
    assert (score.predicted, score.sure) == (links, sure)


def test_the_error_of_all_four_is_a_sixth():
    score = alignment_error([words_linked(CASES[name]) for name in COUNTED], read_gold(g for g, _ in COUNTED.values()))
    assert score.aer == pytest.approx(1 - 20 / 24)


def test_given_tokens_keep_the_numbers_of_the_gold():
    line = "zum Beispiel : l' Union , z.B. 3 %"
    assert len(given_spans(line)) == 9


def test_alignment_error_by_hand():
    """Of 4 links 1 is sure and 2 more possible; 1 of 2 sure ones is found: 1 - (1 + 3) / (4 + 2)."""
    gold = [Links(frozenset({(0, 0)}), frozenset({(0, 0), (0, 1), (1, 1)})), Links(frozenset({(2, 2)}))]
    score = alignment_error([{(0, 0), (0, 1), (1, 1)}, {(2, 1)}], gold)
    assert score.aer == pytest.approx(1 - 4 / 6)
    assert (score.precision, score.recall) == (3 / 4, 1 / 2)
    assert (score.predicted, score.sure, score.possible) == (4, 2, 2)


@given(SENTENCES)
def test_alignment_error_is_that_of_another_count(sentences):
    """Cell by cell in exact fractions: every predicted and every sure link is a claim that may be wrong."""
    wrong = claims = 0
    for predicted, sure, possible in sentences:
        for cell in np.ndindex(5, 5):
            if cell in predicted:
                claims += 1
                wrong += cell not in sure and cell not in possible
            if cell in sure:
                claims += 1
                wrong += cell not in predicted
    expected = float(Fraction(wrong, claims)) if claims else 0.0
    gold = [Links(sure, possible) for _, sure, possible in sentences]
    assert alignment_error([predicted for predicted, _, _ in sentences], gold).aer == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("predicted", "sure", "expected"),
    [(set(), set(), (0, 1, 1)), (set(), {(0, 0)}, (1, 1, 0)), ({(0, 0)}, set(), (1, 0, 1))],
)
def test_error_where_one_side_is_empty(predicted, sure, expected):
    score = alignment_error([predicted], [Links(frozenset(sure))])
    assert (score.aer, score.precision, score.recall) == expected


@pytest.mark.parametrize("measure", [alignment_error, score_with_intervals])
def test_counts_that_differ_have_no_error_rate(measure):
    with pytest.raises(DataError, match="2 predicted alignments for 1 gold ones"):
        measure([set(), set()], [Links(frozenset())])
    with pytest.raises(DataError, match="nothing to compare"):
        measure([], [])


def half_right(sentences):
    """One sure link a sentence, predicted in every other one: the error is 1 - 2 * 0.5 / 1.5 = 1/3."""
    gold = [Links(frozenset({(0, 0)}))] * sentences
    return [{(0, 0)} if number % 2 else set() for number in range(sentences)], gold


def test_the_intervals_are_those_of_the_binomial_distribution():
    """With k of n sentences right, recall is k / n and the error 1 - 2k / (k + n), and drawing makes k binomial."""
    found = score_with_intervals(*half_right(400), resamples=4000)
    spread = 1.96 * np.sqrt(400 * 0.25)
    recalls = [k / 400 for k in (200 - spread, 200 + spread)]
    # A quantile of 4,000 draws moves by 0.04 standard deviations of k, and k is whole: two steps of k are ample.
    assert found.intervals["recall"] == pytest.approx(recalls, abs=2 / 400)
    assert found.intervals["aer"] == pytest.approx(
        [1 - 2 / (1 + 1 / recall) for recall in recalls[::-1]], abs=2 * 2 / 900
    )
    assert found.intervals["precision"] == (1, 1)
    assert found.intervals["aer"][0] < found.aer < found.intervals["aer"][1]
    assert replace(found, intervals={}) == alignment_error(*half_right(400))


def test_intervals_are_percentiles_of_the_scores_of_drawn_corpora():
    """Scored one by one, by the function that scores a corpus."""
    predicted = [{(0, 0)}, {(0, 0), (1, 0)}, set(), {(2, 2)}, {(1, 1), (0, 1)}]
    gold = read_gold(["0-0", "1-0 0p0", "0-0 1-1", "2p2", "0-0"])
    found = score_with_intervals(predicted, gold, resamples=200, seed=3)
    random = np.random.default_rng(3)
    scores = []
    for _ in range(200):
        drawn = random.integers(5, size=5)
        scores.append(alignment_error([predicted[i] for i in drawn], [gold[i] for i in drawn]))
    for name in ("aer", "precision", "recall"):
        assert found.intervals[name] == pytest.approx(
            np.percentile([getattr(score, name) for score in scores], [2.5, 97.5])
        )


def test_the_seed_decides_the_intervals():
    first, again, other = (score_with_intervals(*half_right(21), seed=seed, resamples=50) for seed in (1, 1, 2))
    assert first == again != other


def test_an_interval_over_one_sentence_has_no_width():
    found = score_with_intervals([{(0, 0), (1, 1)}], [Links(frozenset({(0, 0)}))], resamples=10)
    for name in ("aer", "precision", "recall"):
        assert found.intervals[name] == (getattr(found, name),) * 2


def test_an_interval_needs_resamples():
    with pytest.raises(ArgumentError, match="resamples = 1, but an interval needs at least 2"):
        score_with_intervals(*half_right(4), resamples=1)


def test_a_scored_alignment_is_described_in_a_line():
    found = score_with_intervals([{(0, 0), (1, 1)}], read_gold(["0-0 1p2"]), resamples=2)
    counts = "; 2 links found, 1 sure and 1 more possible in the gold file"
    assert (
        found.describe(intervals=False)
        == f"AER 0.3333 (95 % 0.3333 to 0.3333), precision 0.5000, recall 1.0000{counts}"
    )
    assert "precision 0.5000 (95 % 0.5000 to 0.5000), recall 1.0000 (95 % 1.0000 to 1.0000);" in found.describe()
