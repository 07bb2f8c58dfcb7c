"""Inline markup: well formed whatever the line and the links are, and around the words that it was about."""

import html
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from rectiformer.measure.alignment import parse_links
from rectiformer.measure.words import word_spans
from rectiformer.translate.markup import TAG, VOID, read_markup
from rectiformer.translate.placement import place_tags

LINES = Path(__file__).with_name("markup_cases.txt").read_text(encoding="utf-8").split("\n")[2:]
CASES = [tuple(LINES[start : start + 4]) for start in range(0, len(LINES) - 3, 5)]


def in_order(source, translation):
    """Links of the first word of both, of the second, and so on."""
    return {(word, word) for word in range(min(len(word_spans(source)), len(word_spans(translation))))}


def test_there_are_a_hundred_cases():
    assert len({source for source, *_ in CASES}) == len(CASES) == 101
    assert not any(LINES[4::5]), "cases are four lines, with an empty one between"


@pytest.mark.parametrize(("line", "translation", "links", "expected"), CASES, ids=[line for line, *_ in CASES])
def test_tags_are_where_a_reader_expects_them(line, translation, links, expected):
    marked = read_markup(line)
    linked = in_order(marked.text, translation) if links == "=" else parse_links(links, line).sure
    words = len(word_spans(marked.text)), len(word_spans(translation))
    assert all(i < words[0] and j < words[1] for i, j in linked), "a link of the case leads nowhere"
    assert place_tags(marked, translation, linked) == expected


def read_back(output):
    """The tags of an output and its text, as any reader of markup would have them; asserts that tags are nested."""
    tags, texts, waiting, position = Counter(), [], [], 0
    for tag in TAG.finditer(output):
        texts.append(output[position : tag.start()])
        position = tag.end()
        tags[tag[0]] += 1
        if tag["close"]:
            assert waiting, output
            assert waiting.pop() == tag["name"], output
        elif tag["name"] and not tag["alone"] and tag["name"].lower() not in VOID:
            waiting.append(tag["name"])
    assert not waiting, output
    return tags, "".join([*texts, output[position:]])


def assert_conserved(line, translation, output):
    """Every tag once, well nested; what is left is the translation, with tags that have no partner as text."""
    tags, text = read_back(output)
    unpaired = Counter(read_markup(line).unpaired)
    assert tags + unpaired == Counter(tag[0] for tag in TAG.finditer(line))
    for tag in unpaired.elements():
        written = html.escape(tag, quote=False)
        assert written in text
        text = text.replace(written, "", 1)
    # Escaped tags of the translation itself may be told apart from those of the line by nobody.
    if unpaired:
        assert Counter(html.unescape(text)) == Counter(translation)
    else:
        assert "<" not in text
        assert html.unescape(text) == translation


PIECES = [
    "Haus", "der", "un", ".", ",", " ", " ", " ", " ", "&amp;", "&lt;", "&foo;", "<", "< b", "<b", "</", "5<6",
    "<b>", "</b>", "<b>", "</b>", "<i>", "</i>", "<i>", "</i>", '<a href="x > y">', "</a>", "<B>", "<b><b>", "</b></b>",
    "<br/>", "<br>", "</br>", "<x id='1' />", "<!-- a-b -->", "<!--", "日本", "é", "\u2028", "&#10;", "&nbsp;",
]  # fmt: skip
WORDS = ["the", "house", "a.", "&", "<", ">", "(5)", "日本", "&amp;"]


def test_ten_thousand_random_lines_are_never_malformed_and_lose_no_tag():
    draw = random.Random(1)
    paired = 0
    for _ in range(10_000):
        line = "".join(draw.choices(PIECES, k=draw.randrange(20)))
        translation = " ".join(draw.choices(WORDS, k=draw.randrange(7)))
        links = {(draw.randrange(8), draw.randrange(8)) for _ in range(draw.randrange(9))}
        marked = read_markup(line)
        paired += any(element.closing for element in marked.elements)
        assert_conserved(line, translation, place_tags(marked, translation, links))
    assert paired > 2_000


def test_a_line_without_tags_stays_as_it_is():
    for line, text, written in [("Ein Hund.", "Ein Hund.", "A dog."), ("a &lt; b &", "a < b &", "a &lt; b &amp;")]:
        marked = read_markup(line)
        assert (marked.text, len(marked.elements)) == (text, 1)
        assert place_tags(marked, html.unescape(written), set()) == written


def test_a_tag_by_itself_separates_words_and_a_pair_does_not():
    texts = {"eins<br/>zwei": "eins zwei", "eins <br/>zwei": "eins zwei", "un<b>ter</b>": "unter", "a<br>.": "a."}
    texts |= {"eins<br/><b>zwei</b>": "eins zwei", "eins<wbr>zwei": "einszwei", "eins<!-- -->zwei": "einszwei"}
    assert {line: read_markup(line).text for line in texts} == texts


@pytest.mark.parametrize(
    "line",
    [
        "<b>" * 10_000 + "Hallo Welt" + "</b>" * 10_000,
        "<b>" * 10_000 + "Hallo Welt",
        "</b>" * 10_000,
        "<b><i>" * 5_000 + "</b></i>" * 5_000 + "Hallo",
        "<b>Hallo</b> " * 3_000,
        "<br/>" * 10_000 + "Hallo",
        "<b>a</b>" * 3_000,
        "<b>a" * 3_000 + "</b>" * 3_000,
        "<!--" * 100_000,
        '<a "' * 100_000,
        "<a '\" " * 100_000,
        "<a " * 100_000,
        "&" * 100_000 + "#" * 100_000,
        "&#" + "9" * 100_000 + ";",
    ],
    ids=lambda line: f"{line[:12]} x {len(line):,}",
)
def test_hostile_lines_take_seconds_at_most(line):
    start = time.process_time()
    marked = read_markup(line)
    translation = "hello world, hello"
    assert_conserved(line, translation, place_tags(marked, translation, in_order(marked.text, translation)))
    assert time.process_time() - start < 10
