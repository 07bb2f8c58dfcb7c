"""Files of links: Pharaoh, TALP and NAACL, read, written, and refused where they are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rectiformer import ArgumentError
from rectiformer.errors import DataError
from rectiformer.measure.alignment import (
    FORMATS,
    Links,
    format_links,
    parse_links,
    read_gold,
    write_links,
)

LINK_SETS = st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8)


@pytest.mark.parametrize(
    ("line", "sure", "possible"),
    [
        ("", set(), set()),
        ("0-0 12-3 1p2\n", {(0, 0), (12, 3)}, {(1, 2)}),
        (" 1p1\t1-1  1-1\r\n", {(1, 1)}, set()),
        ("007-1", {(7, 1)}, set()),
    ],
)
def test_links_of_a_line(line, sure, possible):
    assert parse_links(line, "gold:1") == Links(frozenset(sure), frozenset(possible))


@pytest.mark.parametrize(
    "token", ["1", "1-", "-1-2", "1-2-3", "1P2", "1?2", "a-b", "1-2\0", "²-1", "٣-1", "9" * 5000 + "-1"]
)
def test_what_is_no_link_is_named_with_its_location(token):
    with pytest.raises(DataError) as caught:
        read_gold(["0-0", f"0-0 1p1 {token} 2-2"], "gold.align")
    message = str(caught.value)
    assert message.startswith(f"gold.align:2:9: {token[:40]!r} is not a link; write i-j")
    assert "\n" not in message


def test_the_location_is_counted_in_bytes():
    with pytest.raises(DataError, match="gold:1:4: 'x' is not a link"):
        read_gold(["\u2028x"])


def test_links_are_written_in_order():
    assert format_links([(10, 0), (2, 1), (2, 0)], [(2, 0), (0, 5)]) == "0p5 2-0 2-1 10-0"
    assert format_links(set()) == ""


@given(LINK_SETS, LINK_SETS)
def test_written_links_are_read_back(sure, possible):
    assert parse_links(format_links(sure, possible), "gold:1") == Links(sure, possible - sure)


@pytest.mark.parametrize(
    ("format", "lines"),
    [
        ("pharaoh", ["0-0 12-3 1p2", "", "2-1"]),
        ("talp", ["1-1 13-4 2p3", "", "3-2"]),
        ("naacl", ["0003 3 2 S 1.0", "1 1 1", "", "1 13 4\tS\r", "1 2 3 P .5", " 1 0 7 S", "2 1 0"]),
    ],
)
def test_the_same_links_in_every_format(format, lines):
    """In NAACL sentences come in any order, a link without a letter is sure, and word 0 is no word."""
    first, second, third = read_gold(lines, format=format, sentences=3)
    assert first == Links(frozenset({(0, 0), (12, 3)}), frozenset({(1, 2)}))
    assert (second, third) == (Links(frozenset()), Links(frozenset({(2, 1)})))


def test_links_are_written_in_every_format():
    links = [{(10, 0), (2, 1)}, set(), {(0, 0)}]
    assert list(write_links(links)) == ["2-1 10-0", "", "0-0"]
    assert list(write_links(links, "talp")) == ["3-2 11-1", "", "1-1"]
    assert list(write_links(links, "naacl")) == ["1 3 2 S", "1 11 1 S", "3 1 1 S"]


@pytest.mark.parametrize("format", FORMATS)
@given(links=st.lists(LINK_SETS, max_size=4))
def test_what_is_written_is_read_back_in_every_format(format, links):
    assert read_gold(write_links(links, format), format=format, sentences=len(links)) == [Links(each) for each in links]


@pytest.mark.parametrize("token", ["0-1", "1-0", "0p1", "1-", "1 1 S"])
def test_talp_counts_from_one(token):
    with pytest.raises(DataError) as caught:
        read_gold(["1-1", f"2p2 {token}"], "gold.talp", "talp")
    first = token.split(" ")[0]
    assert str(caught.value).startswith(f"gold.talp:2:5: {first!r} is not a link; write i-j where it is sure")
    assert str(caught.value).endswith("words counted from 1")


@pytest.mark.parametrize(
    "line",
    ["1 1", "1-1 2-2", "1 1 1 Q", "1 1 1 S P", "1 1 1 s", "1 -1 1", "² 1 1", "1 1 1 S 0.5 x", "1 1 1\0", "9" * 99],
)
def test_a_line_that_is_no_naacl_link_is_named_with_its_location(line):
    with pytest.raises(DataError) as caught:
        read_gold(["1 1 1 S", line], "test.wa", "naacl", 1)
    message = str(caught.value)
    assert message.startswith(f"test.wa:2: {line[:40]!r} is not a link; write `sentence source target S`")
    assert "\n" not in message


@pytest.mark.parametrize("sentence", [0, 3, 999_999_999])
def test_a_naacl_link_of_no_sentence_is_refused(sentence):
    with pytest.raises(DataError, match=f"test.wa:1: a link of sentence {sentence}, but there are 2, from 1"):
        read_gold([f"{sentence} 1 1"], "test.wa", "naacl", 2)


def test_naacl_needs_the_number_of_sentences():
    with pytest.raises(ArgumentError, match="does not say how many sentences there are"):
        read_gold(["1 1 1"], format="naacl")


@pytest.mark.parametrize("use", [lambda: read_gold([], format="talpp"), lambda: list(write_links([], "talpp"))])
def test_an_unknown_format_is_refused_with_the_nearest(use):
    with pytest.raises(ArgumentError, match="unknown alignment format 'talpp'; did you mean 'talp'"):
        use()
