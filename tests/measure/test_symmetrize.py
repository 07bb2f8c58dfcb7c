"""Two directions become one alignment: by hand, by Koehn's program taken literally, and by what has to hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rectiformer import ArgumentError
from rectiformer.measure.alignment import HEURISTICS, flip, symmetrize

LINKS = st.frozensets(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14)
SETTINGS = [how for how in HEURISTICS if how.startswith("grow")]


def links(text):
    """Links of a Pharaoh line, read by other means than those of the package."""
    return {tuple(map(int, token.split("-"))) for token in text.split()}


# Each case: forward, backward, and what is added to what is already there, step by step.
CASES = {
    # 1-1 touches 0-0 and both its words are free. 2-1 touches 1-1, and 2 is free.
    "a chain": ("0-0 1-1", "0-0 2-1", "0-0", "1-1 2-1", "", ""),
    # 2-2 touches nothing: both of its words are free, so either way to finish takes it.
    "an island": ("0-0 2-2", "0-0", "0-0", "", "2-2", "2-2"),
    # Of 0-2 the source has a link already: only "final" takes it.
    "half free": ("0-0 0-2", "0-0", "0-0", "", "0-2", ""),
    # 0-1 and 1-0 have a free word next to 0-0; then 1-1 has none.
    "a square": ("0-0 0-1 1-1", "0-0 1-0", "0-0", "0-1 1-0", "", ""),
    # Nothing to grow from: forward comes first, and leaves 1-1 nothing free.
    "no common link": ("0-1 1-0", "0-0 1-1", "", "", "0-1 1-0", "0-1 1-0"),
    # As before, but 2-0 of the backward alignment has one free word when its turn comes.
    "one word left": ("0-1 1-0", "0-0 1-1 2-0", "", "", "0-1 1-0 2-0", "0-1 1-0"),
    # 2-2 is an island, and 1-1 a neighbor of both; the second pass finds 3-3, a neighbor of 2-2 that is there already.
    "meeting": ("0-0 1-1 2-2", "0-0 2-2 3-3", "0-0 2-2", "1-1 3-3", "", ""),
    # From 2-2 up and to the left: the first pass has gone by, so 0-0 is found in the second.
    "backward growth": ("0-0 1-1 2-2", "2-2", "2-2", "0-0 1-1", "", ""),
    "nothing": ("", "", "", "", "", ""),
    "one side": ("0-0", "", "", "", "0-0", "0-0"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_heuristic_by_hand(case):
    forward, backward, common, grown, final, final_and = map(links, case)
    expected = {
        "intersection": common,
        "union": forward | backward,
        "grow-diag": common | grown,
        "grow-diag-final": common | grown | final,
        "grow-diag-final-and": common | grown | final_and,
    }
    assert {how: symmetrize(forward, backward, how) for how in HEURISTICS} == expected


def by_the_book(forward, backward, how, size=7):
    """Koehn's program as it is printed: walks over the whole matrix, and nothing remembered but the matrix."""
    aligned = {cell for cell in forward if cell in backward}

    def free(word, side):
        return all(link[side] != word for link in aligned)

    changed = True
    while changed:
        changed = False
        for j in range(size):
            for i in range(size):
                if (i, j) in aligned:
                    for y, x in [(-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)]:
                        new = (i + x, j + y)
                        if (free(new[0], 0) or free(new[1], 1)) and (new in forward or new in backward):
                            aligned.add(new)
                            changed = True
    if how != "grow-diag":
        enough = all if how.endswith("and") else any
        for one in (forward, backward):
            for j in range(size):
                for i in range(size):
                    if (i, j) in one and enough([free(i, 0), free(j, 1)]):
                        aligned.add((i, j))
    return aligned


@pytest.mark.parametrize("how", SETTINGS)
@given(forward=LINKS, backward=LINKS)
def test_the_result_is_that_of_koehns_program(how, forward, backward):
    assert symmetrize(forward, backward, how) == by_the_book(forward, backward, how)


@given(LINKS, LINKS)
def test_each_heuristic_keeps_the_links_of_the_one_before(forward, backward):
    common, grown, final, all_links = (
        symmetrize(forward, backward, how) for how in ("intersection", "grow-diag", "grow-diag-final-and", "union")
    )
    assert common == forward & backward
    assert all_links == forward | backward
    assert common <= grown <= final <= all_links
    assert grown <= symmetrize(forward, backward, "grow-diag-final") <= all_links


@pytest.mark.parametrize("how", ["intersection", "union"])
@given(forward=LINKS, backward=LINKS)
def test_sets_do_not_care_which_direction_comes_first(how, forward, backward):
    assert symmetrize(forward, backward, how) == symmetrize(backward, forward, how)
    assert symmetrize(flip(forward), flip(backward), how) == flip(symmetrize(forward, backward, how))


@pytest.mark.parametrize("how", HEURISTICS)
@given(both=LINKS)
def test_directions_that_agree_stay_as_they_are(how, both):
    assert symmetrize(both, both, how) == both


@pytest.mark.parametrize("how", HEURISTICS)
@given(data=st.data(), forward=LINKS, backward=LINKS)
def test_the_order_in_which_links_came_changes_nothing(how, data, forward, backward):
    shuffled = [set(data.draw(st.permutations(sorted(each)))) for each in (forward, backward)]
    kept = [set(each) for each in shuffled]
    assert symmetrize(*shuffled, how) == symmetrize(forward, backward, how)
    assert shuffled == kept


@given(LINKS, LINKS)
def test_after_the_last_step_no_link_of_two_free_words_is_left(forward, backward):
    found = symmetrize(forward, backward, "grow-diag-final-and")
    sources, targets = ({link[side] for link in found} for side in (0, 1))
    assert all(i in sources or j in targets for i, j in forward | backward)


def test_an_unknown_heuristic_is_refused_with_the_nearest():
    with pytest.raises(ArgumentError, match="unknown symmetrization 'grow-diag-final-or'; did you mean 'grow-diag-f"):
        symmetrize(set(), set(), "grow-diag-final-or")
