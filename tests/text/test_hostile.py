"""Text that nobody would write, through files and streams: no crash, no hang, and what is documented comes out."""

import os
import random
import re
import threading
import time

import pytest

from rectiformer.config import Config, DataConfig, VocabularyConfig
from rectiformer.text.batches import Symbols
from rectiformer.text.prepared import prepare
from rectiformer.text.stream import StreamPlan

PARTS = [
    *("\0", "\r", "\u2028", "\u0085", "\ufeff", "\u2581", "\u200d", "\ufffe", "\U0010ffff", " ", "a", "<sep>", "</s>"),
    *("\u202e", "\u2066", "\u2069", "\u200f", "\u061c"),  # directions
    *("e" + "\u0301" * 40, "日本", "😀🏽", "x" * 300),
    *(b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\xe2\x82"),  # no UTF-8: lone surrogates and worse
]


def draw_line(random):
    parts = (random.choice(PARTS) for _ in range(random.randrange(12)))
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)


def normalize(line):
    """What text/vocabulary.py documents, after what is not UTF-8 was replaced."""
    text = re.sub("\0", "\ufffd", line.decode("utf-8", errors="replace"))
    return re.sub("[ \r\u2581]+", " ", text).strip(" ")


def feed(content):
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "wb") as file:
            file.write(content)

    threading.Thread(target=write, daemon=True).start()
    return reading


@pytest.fixture(scope="module")
def drawn():
    generator = random.Random(19)
    return [(draw_line(generator), draw_line(generator)) for _ in range(400)]


@pytest.fixture(scope="module")
def prepared(drawn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "a.tsv").write_bytes(b"".join(b"%s\t%s\n" % pair for pair in drawn))
    names = (str(folder / "a.tsv"),)
    data = DataConfig(source=names, valid_source=names, format="tsv", bad_utf8="replace", max_length=100_000)
    return prepare(Config(data=data, vocabulary=VocabularyConfig(size=400, byte_fallback=True)), folder / "data")


def kept(drawn):
    texts = [[line.decode("utf-8", errors="replace") for line in pair] for pair in drawn]
    return [pair for pair, sides in zip(drawn, texts, strict=True) if all(side.strip() for side in sides)]


def test_hostile_lines_come_back_as_documented(drawn, prepared):
    expected = [tuple(map(normalize, pair)) for pair in kept(drawn)]
    train = prepared.train[0]
    words = prepared.source
    found = [(words.decode(train.source(index)), words.decode(train.target(index))) for index in range(train.pairs)]
    assert len(found) > 200
    assert found == [pair for pair in expected if all(pair)]  # a side of U+2581 alone is blank to sentencepiece
    assert len(prepared.valid_text) == len(found)


def test_a_stream_has_the_ids_of_a_file(drawn, prepared):
    content = b"".join(b"%s\t%s\n" % pair for pair in drawn)
    symbols = Symbols(0, 3, 0, 2, 3)
    config = DataConfig(bad_utf8="replace", max_length=100_000)
    plan = StreamPlan(feed(content), (prepared.source, prepared.target), config, 10_000_000, symbols, "x")
    batch = plan.batch(0)
    assert len(batch.pairs) == prepared.train[0].pairs
    for index, row in enumerate(batch.pairs.argsort()):
        length = int(batch.target_lengths[row]) - 1
        assert batch.target[row, :length].tolist() == prepared.train[0].target(index).tolist()


@pytest.mark.parametrize("unit", ["a", "\u0301", "日", "\u202e"])
def test_a_million_characters_without_a_space_are_no_hang(prepared, unit):
    """Cut as configured, and the pair after it is untouched. The time is the process's own."""
    content = f"{unit * 1_000_000}\t{unit * 1_000_000}\na\ta\n".encode()
    config = DataConfig(max_length=50, too_long="truncate")
    started = time.process_time()
    plan = StreamPlan(feed(content), (prepared.source, prepared.target), config, 10_000, Symbols(0, 3, 0, 2, 3), "x")
    batch = plan.batch(0)
    assert sorted(batch.pairs.tolist()) == [1, 2]
    assert sorted(batch.source_lengths.tolist()) == [1 + len(prepared.source.encode("a")), 51]
    assert plan.counts.truncated == 1
    assert time.process_time() - started < 5
