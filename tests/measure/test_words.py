"""Words of a line and what their pieces give them, against hand-made answers and plain definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rectiformer import ShapeError
from rectiformer.measure.words import given_spans, merge_links, merge_weights, pieces_to_words, word_spans

ODD = st.sampled_from(list("ab 1.'\"$-\t\r\0\u2028\u00a0\ufeff\u202e\u0301字ไม่ガ。・\ufe0f😀\U00020000"))
LINES = st.text(st.one_of(ODD, st.characters()), max_size=30)


def words(line, spans):
    return [line[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", []),
        (" \t\u2028\r", []),
        ("Haus.", ["Haus", "."]),
        ("z.B. don't", ["z.B", ".", "don't"]),
        ("(»Ja!?«)", ["(", "»", "Ja", "!", "?", "«", ")"]),
        ("5,50€ + $3", ["5,50", "€", "+", "$", "3"]),
        ("...", [".", ".", "."]),
        ("E-Mail\u00a0an\u2028alle", ["E-Mail", "an", "alle"]),
        ("我用iPhone。", ["我", "用", "iPhone", "。"]),
        ("カ\u3099ス・ス", ["カ\u3099", "ス", "・", "ス"]),
        ("ไม่ดี", ["ไ", "ม่", "ดี"]),
        ("葛\U000e0100城", ["葛\U000e0100", "城"]),
        ("\u0301e\u0301.", ["\u0301e\u0301", "."]),
        ("\ufeffa\0b\u202e", ["\ufeffa\0b\u202e"]),
        ("👍🏽!", ["👍", "🏽", "!"]),
    ],
)
def test_words_of_a_line(line, expected):
    assert words(line, word_spans(line)) == expected


@given(LINES)
def test_words_hold_every_character_but_white_space_once(line):
    covered = [index for start, end in word_spans(line) for index in range(start, end)]
    assert covered == [index for index, character in enumerate(line) if not character.isspace()]
    assert all(start < end for start, end in word_spans(line))


@pytest.mark.parametrize("line", ["x" * 100_000, "." * 100_000, "字" * 100_000, "\u0301" * 100_000, "x." * 50_000])
def test_long_runs_without_a_space_are_split_in_one_pass(line):
    spans = word_spans(line)
    assert (spans[0][0], spans[-1][1]) == (0, 100_000)


@given(LINES)
def test_given_words_are_split_by_spaces_alone(line):
    assert words(line, given_spans(line)) == [word for word in line.split(" ") if word]


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([(0, 2), (2, 4), (4, 5)], [[0], [0], [1]]),  # Ha us .
        ([(0, 3), (3, 5)], [[0], [0, 1]]),  # Hau s.
        ([(4, 8), (8, 9)], [[1, 2], [2]]),  # ". da" with its space, s
        ([(5, 6), (6, 6), (6, 6), (6, 7)], [[], [2], [2], [2]]),  # white space alone; the bytes of d
        ([(9, 9)], [[]]),  # end of sentence
        ([(0, 9)], [[0, 1, 2]]),
        ([], []),
    ],
)
def test_pieces_of_a_line(offsets, expected):
    spans = word_spans("Haus. das")
    assert spans == [(0, 4), (4, 5), (6, 9)]
    assert pieces_to_words(offsets, spans) == expected


@given(LINES, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8))
def test_a_piece_is_in_the_words_it_shares_characters_with(line, pieces):
    offsets = [(start, start + length) for start, length in pieces]
    spans = word_spans(line)
    for (start, end), found in zip(offsets, pieces_to_words(offsets, spans), strict=True):
        characters = set(range(start, end)) or {start}
        assert found == [index for index, span in enumerate(spans) if characters & set(range(*span))]


def test_words_are_linked_if_any_of_their_pieces_are():
    source_words = [[0], [0], [1, 2], []]
    target_words = [[0], [1], [1]]
    links = [(0, 1), (1, 2), (2, 0), (3, 0)]
    assert merge_links(links, source_words, target_words) == {(0, 1), (1, 0), (2, 0)}
    assert merge_links([], source_words, target_words) == set()


def test_weights_are_summed_over_source_and_averaged_over_target_pieces():
    weights = np.array([[0.5, 0.25, 0.25, 0.0], [0.0, 0.5, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]], dtype=np.float32)
    merged = merge_weights(weights, [[0], [0], [1], []], [[0], [0], [2]], 2, 4)
    assert merged.tolist() == [[(0.75 + 0.5) / 2, 0.25 / 2], [0, 0], [0, 0], [0, 0]]


def test_weights_keep_their_mass_where_each_source_piece_is_in_one_word():
    weights = np.random.default_rng(0).random((6, 7))
    merged = merge_weights(weights, [[0], [0], [1], [2], [2], [2], [3]], [[0], [1], [2], [3], [4], [5]], 4, 6)
    assert np.allclose(merged.sum(1), weights.sum(1))
    assert np.allclose(merged[:, 2], weights[:, 3:6].sum(1))


def test_a_piece_in_two_words_counts_in_both():
    assert merge_weights(np.array([[3.0]]), [[0, 1]], [[0, 1]], 2, 2).tolist() == [[3, 3], [3, 3]]


def test_weights_of_nothing_have_no_cells():
    assert merge_weights(np.zeros((0, 0)), [], [], 0, 0).shape == (0, 0)
    assert merge_weights(np.zeros((2, 0)), [], [[0], [1]], 0, 2).shape == (2, 0)


def test_weights_must_have_a_cell_for_each_pair_of_pieces():
    with pytest.raises(ShapeError, match=r"weights are \[2, 3\], but there are 3 target and 2 source pieces"):
        merge_weights(np.zeros((2, 3)), [[0], [1]], [[0], [1], [2]], 2, 3)
