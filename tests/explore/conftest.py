"""Records made up for a real browser, and reports of them opened in it."""

import numpy as np
import pytest

from rectiformer.analyze.html_report import write_report
from rectiformer.analyze.record import AttentionRecord, Example, ModelCard, PieceSpan, Side, SiteRecord
from rectiformer.measure.alignment import Links

LAYERS, HEADS = 2, 3


def side(text, length=3):
    """Words between spaces, in pieces of some characters, and the end."""
    pieces, words, start = [], [], 0
    for word in text.split(" "):
        first, stop = len(pieces), start + len(word)
        pieces += [
            PieceSpan(text[at : min(at + length, stop)], at, min(at + length, stop))
            for at in range(start, stop, length)
        ]
        words.append((first, len(pieces), start, stop))
        start = stop + 1
    return Side(text, [*pieces, PieceSpan("</s>", len(text), len(text))], words)


def site(random, kind, layer, queries, keys, heads=HEADS, signed=False):
    """Weights of which most are 0; in layer 0 the first head is dead and the last one always on."""
    sees = np.tri(queries, keys, dtype=bool) if kind == "decoder" else np.ones((queries, keys), bool)
    weights = np.maximum(random.normal(-0.5, 1.5, (heads, queries, keys)), 0) * sees
    weights[:, random.random(queries) < 0.3] = 0
    if layer == 0:
        weights[0], weights[-1, :, 0] = 0, 0.5
    if signed:
        weights *= random.choice([-1, 1], weights.shape)
    return SiteRecord.from_dense(kind, layer, weights.astype(np.float32), np.tile(sees.sum(1), (heads, 1)))


def example(
    random, source="einsam wohnen drei alte Leute", target="three old people live alone", signed=False, length=3
):
    own, other = side(source, length), side(target, length)
    sizes = {"cross": (other, own), "encoder": (own, own), "decoder": (other, other)}
    sites = [
        site(random, kind, layer, len(queries.pieces), len(keys.pieces), signed=signed)
        for kind, (queries, keys) in sizes.items()
        for layer in range(LAYERS)
    ]
    pairs = [(i, j) for i in range(len(own.words)) for j in range(len(other.words))]
    chosen = random.permutation(len(pairs))[:7]
    gold = Links(frozenset(pairs[i] for i in chosen[:4]), frozenset(pairs[i] for i in chosen[4:]))
    return Example(own, other, True, target, gold, sites)


def record(examples, name="made up"):
    variants = {"encoder": "rela-g", "decoder": "rela-g", "cross": "rela-g"}
    return AttentionRecord(ModelCard(name, "", variants, {"encoder": LAYERS, "decoder": LAYERS}, HEADS), examples)


@pytest.fixture
def random():
    return np.random.default_rng(5)


@pytest.fixture
def make_example(random):
    return lambda *texts, **options: example(random, *texts, **options)


@pytest.fixture
def make_record():
    return record


@pytest.fixture
def made_up(random):
    """Three examples, all attention sites, gold links."""
    texts = [(), ("eins zwei drei", "one two three four"), ("שלום עולם 日本語 テキスト", "hello world of text")]
    return record([example(random, *pair) for pair in texts])


@pytest.fixture
def show(visit, tmp_path):
    """The page of a report, opened from disk; `at` is the part of the address that says what to show.

    Every edge is drawn unless it says otherwise: what the page leaves out by itself has tests of its own.
    """

    def open_report(records, findings=None, at="", title="", **options):
        path = write_report(tmp_path / "report.html", records, findings, title)
        return visit(f"file://{path}#{at if 'edges=' in at else f'{at}&edges=all'}", **options)

    return open_report
