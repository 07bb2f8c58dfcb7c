"""Agreement across sentences: what is right, wrong and neither, by exact rules and on the grammar's own documents."""

from dataclasses import dataclass

import pytest

from rectiformer.measure.agreement import Agreement, count_agreement, judge
from rectiformer.text.grammar import draw_documents

PAIRS = [pair for document in draw_documents(400, seed=3, split="test") for pair in document]
DEPENDENTS = [pair.dependents for pair in PAIRS]


@dataclass
class Row:
    kind: str
    correct: str
    wrong: tuple[str, ...]


@pytest.mark.parametrize(
    ("hypothesis", "expected"),
    [
        ("It sleeps.", Agreement(right=1)),
        ("We see it.", Agreement(right=1)),
        ("IT", Agreement(right=1)),
        ("She sleeps.", Agreement(wrong=1)),
        ("it sees her and she sees it", Agreement(wrong=1)),  # a wrong form spoils the right one
        ("He sleeps.", Agreement(neither=1)),
        ("Its item, sheer.", Agreement(neither=1)),  # whole words only
        ("", Agreement(neither=1)),
    ],
)
def test_a_word_is_right_wrong_or_neither(hypothesis, expected):
    assert judge(hypothesis, Row("pronoun", "It", ("She",))) == expected


def test_the_right_translations_agree_all():
    counts = count_agreement([pair.target for pair in PAIRS], DEPENDENTS)
    assert set(counts) == {"all", "pronoun", "term"}
    total = sum(map(len, DEPENDENTS))
    assert counts["all"] == counts["pronoun"] + counts["term"] == Agreement(right=total)
    assert counts["all"].share == 1.0


def swap(pair):
    """The right translation with a wrong form in place of every dependent word."""
    words = list(pair.target_words)
    for row in pair.dependents:
        words[row.target_index] = row.wrong[0]
    return " ".join(words)


def test_swapped_forms_agree_nowhere():
    counts = count_agreement([swap(pair) for pair in PAIRS], DEPENDENTS)
    assert counts["all"] == Agreement(wrong=sum(map(len, DEPENDENTS)))
    assert counts["all"].share == 0.0


def test_half_of_them_swapped_agree_by_half():
    pairs = [pair for pair in PAIRS if pair.dependents][:200]
    texts = [swap(pair) if index % 2 else pair.target for index, pair in enumerate(pairs)]
    assert count_agreement(texts, [pair.dependents for pair in pairs])["all"] == Agreement(right=100, wrong=100)


def test_what_says_nothing_is_neither():
    counts = count_agreement([""] * len(PAIRS), DEPENDENTS)
    assert counts["all"] == Agreement(neither=sum(map(len, DEPENDENTS)))


def test_without_dependents_there_is_nothing_to_share():
    assert count_agreement(["a"], [[]]) == {"all": Agreement()}
    assert Agreement().share == 0.0


def test_sentences_and_dependents_belong_together():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        count_agreement(["a"], [[], []])
