"""Pairs from a pipe: the same lines give the same batches, a run goes on where it stopped, an end is an end."""

import hashlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from end_to_end.tiny import outcome, overrides

from rectiformer.config import DataConfig, VocabularyConfig
from rectiformer.errors import ConfigError, DataError
from rectiformer.text import stream
from rectiformer.text.batches import Symbols
from rectiformer.text.grammar import draw_sentences
from rectiformer.text.prepared import Prepared, prepare
from rectiformer.text.stream import StreamEndedError, StreamPlan, plan_batches, read_stream
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.toml import load_config
from rectiformer.train.start import train

SYMBOLS = Symbols(source_pad=0, source_end=3, target_pad=0, target_start=2, target_end=3)
PAIRS = [(pair.source, pair.target) for pair in draw_sentences(600, 3, "train")]
LINES = [f"{source}\t{target}\textra" for source, target in PAIRS]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train([text for pair in PAIRS for text in pair], VocabularyConfig(size=300))


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(stream, "BATCH_PAIRS", 40)
    monkeypatch.setattr(stream, "WINDOW_BATCHES", 8)


def feed(content, piece=None):
    """A pipe that is given `content`, so many bytes at a time; the end to read from."""
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "wb") as file:
            for start in range(0, len(content), piece or max(1, len(content))):
                file.write(content[start : start + (piece or len(content))])
                file.flush()

    threading.Thread(target=write, daemon=True).start()
    return reading


def to_bytes(lines):
    return "".join(line + "\n" for line in lines).encode()


def plan(vocabulary, content, tokens=200, piece=None, **data):
    vocabularies = (vocabulary, vocabulary)
    return StreamPlan(feed(content, piece), vocabularies, DataConfig(**data), tokens, SYMBOLS, "data|1")


def read_all(batches, first=0):
    """Every batch from `first` on: its lines and a digest of its ids."""
    return [
        (batch.pairs.tolist(), hashlib.sha256(batch.target.numpy().tobytes()).hexdigest())
        for batch in each(batches, first=first)
    ]


def each(batches, static=False, first=0):
    """All batches there are, from `first` on."""
    for index in itertools.count(first):
        try:
            yield batches.batch(index, static)
        except StreamEndedError:
            return


def test_every_line_stands_in_one_batch_as_it_was(vocabulary):
    batches = plan(vocabulary, to_bytes(LINES))
    seen = []
    for index, batch in enumerate(each(batches)):
        for row, line in enumerate(batch.pairs):
            source, target = PAIRS[line - 1]
            assert batch.source[row, : int(batch.source_lengths[row]) - 1].tolist() == vocabulary.encode(source)
            assert batch.target[row, : int(batch.target_lengths[row]) - 1].tolist() == vocabulary.encode(target)
        assert np.array_equal(batches.pairs_of(index), batch.pairs)
        seen += batch.pairs.tolist()
    assert sorted(seen) == list(range(1, 601))
    with pytest.raises(StreamEndedError, match="standard input ended after 600 lines: 600 pairs"):
        batches.batch(index + 1)


def test_batches_keep_to_the_shapes_and_are_nearly_all_full(vocabulary):
    batches = plan(vocabulary, to_bytes(LINES))
    shapes, full = set(batches.shapes()), []
    for batch in each(batches, static=True):
        assert tuple(batch.source.shape) == tuple(batch.target.shape)
        assert tuple(batch.source.shape) in shapes
        full.append(len(batch.pairs) == batch.source.shape[0])
    assert np.mean(full) > 0.8
    assert batches.locate(77) == (0, 77)


@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_batches_do_not_depend_on_how_lines_come(vocabulary, piece):
    content = to_bytes(LINES[:200])
    assert read_all(plan(vocabulary, content, piece=piece)) == read_all(plan(vocabulary, content))
    assert read_all(plan(vocabulary, content.removesuffix(b"\n"))) == read_all(plan(vocabulary, content))


def test_a_plan_goes_on_from_two_numbers(vocabulary):
    content = to_bytes(LINES)
    batches = plan(vocabulary, content)
    expected = read_all(batches)
    for index in (0, 1, len(expected) // 3, len(expected) // 2, len(expected) - 1, len(expected)):
        lines, made = batches.consumed(index)
        assert made <= index
        assert index - made < 40  # no more than a window is read again
        again = plan(vocabulary, content)
        again.resume(lines, made)
        assert read_all(again, index) == expected[index:]
    assert batches.consumed(len(expected)) == (600, len(expected))


def test_a_stream_shorter_than_what_was_read_is_refused(vocabulary):
    batches = plan(vocabulary, to_bytes(LINES[:10]))
    batches.resume(11, 1)
    with pytest.raises(DataError, match="stdin has 10 lines, but this run has read 11 already"):
        batches.batch(1)


def test_memory_is_bounded_by_the_window(vocabulary, monkeypatch):
    """A pipe holds 64 KiB: whoever writes has to wait until somebody asks for more batches."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    batches = StreamPlan(reading, (vocabulary, vocabulary), DataConfig(), 200, SYMBOLS, "x")
    written = 0
    for _ in range(200):
        try:
            written += os.write(writing, to_bytes(LINES[:100]))
        except BlockingIOError:
            break
    batches.batch(0)
    held = batches._window.pairs
    assert held < 400
    os.close(writing)
    monkeypatch.setattr(stream, "REMEMBERED", 5)
    read_all(batches)
    assert len(batches._lines_of) < 100


BAD = [
    ("a\tb\nnothing\n", {}, r"stdin:2: 1 column, but 2 are needed"),
    (b"a\tb\n\n\tx\na\t\xff\n", {}, r"stdin:4:3: not UTF-8 \(0xFF\)"),
    (b"\xef\xbb\xbfa\t\xff\n", {}, r"stdin:1:6: not UTF-8 \(0xFF\)"),
    (b"a\tb\n\na b c d e f\tg\n", {"max_length": 3, "too_long": "error"}, r"stdin:3 has \d+ subwords on a side"),
]


@pytest.mark.parametrize(("content", "data", "message"), BAD, ids=["column", "utf-8", "mark", "long"])
def test_a_bad_line_is_named_by_its_number(vocabulary, content, data, message):
    content = content if isinstance(content, bytes) else content.encode()
    with pytest.raises(DataError, match=message):
        read_all(plan(vocabulary, content, **data))


def test_a_line_without_an_end_is_refused(vocabulary, monkeypatch):
    monkeypatch.setattr(stream, "MAX_LINE", 1 << 20)
    with pytest.raises(DataError, match="stdin:2: line is longer than 1,048,576 bytes"):
        list(read_stream(feed(b"a\tb\n" + b"x" * (3 << 20), piece=1 << 16), lambda: None))


def test_lines_are_dropped_replaced_and_cut_as_configured(vocabulary):
    content = b"\xef\xbb\xbfder Hund\tthe dog\n\na\t \n\xff\tx\n" + b"der Hund " * 50 + b"\tdog\r\n"
    batches = plan(vocabulary, content, bad_utf8="skip", max_length=20)
    assert [lines for lines, _ in read_all(batches)] == [[1]]
    counts = batches.counts
    assert (counts.pairs, counts.empty, counts.bad_utf8, counts.too_long) == (1, 2, 1, 1)
    batches = plan(vocabulary, content, bad_utf8="replace", max_length=20, too_long="truncate")
    assert sorted(line for lines, _ in read_all(batches) for line in lines) == [1, 4, 5]
    assert batches.counts.truncated == 1


def test_only_bad_lines_for_long_are_no_end(vocabulary):
    batches = plan(vocabulary, b"\n" * 1000 + to_bytes(LINES[:3]))
    assert sorted(line for lines, _ in read_all(batches) for line in lines) == [1001, 1002, 1003]


def test_waiting_can_be_left(vocabulary, monkeypatch):
    monkeypatch.setattr(stream, "WAIT", 0.01)
    asked = []

    def check():
        asked.append(True)
        if len(asked) == 3:
            raise InterruptedError

    reading, writing = os.pipe()
    batches = StreamPlan(reading, (vocabulary, vocabulary), DataConfig(), 200, SYMBOLS, "x", check)
    with pytest.raises(InterruptedError):
        batches.batch(0)
    os.close(writing)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "valid.tsv").write_bytes(to_bytes(LINES[:20]))
    return tmp_path


STREAMED = ["data.stream=true", "data.valid_source=valid.tsv", "data.format=tsv", "vocabulary.size=120"]


def test_a_folder_for_a_stream_has_vocabularies_and_validation_text(folder):
    prepared = prepare(load_config(None, STREAMED), folder / "data")
    assert (prepared.train, prepared.valid.pairs, prepared.source.size) == ([], 20, 120)
    assert Prepared.open(folder / "data").is_from(load_config(None, STREAMED))
    assert not (folder / "data/train-0").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.source=a.tsv"], r"data\.source names 1 files; leave it empty"),
        (["data.valid_source=[]"], "leaves no text to train subwords on"),
        (
            ["data.segment_length=40", "data.documents=blank", "data.grammar=documents"],
            r"data\.segment_length needs prepared text",
        ),
        (["data.weights=[2]"], r"data\.weights needs prepared text"),
        (["vocabulary.sampling=0.1"], r"vocabulary\.sampling = 0\.1 needs prepared text"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(folder, changes, message):
    config = load_config(None, [*STREAMED, *changes])
    with pytest.raises(ConfigError, match=message):
        plan_batches(config, prepare(config, folder / "data"), SYMBOLS, lambda: None)


def test_ranks_cannot_share_a_stream(folder):
    config = load_config(None, STREAMED)
    with pytest.raises(ConfigError, match="4 ranks cannot share standard input"):
        plan_batches(config, prepare(config, folder / "data"), SYMBOLS, lambda: None, ranks=4)


def test_a_stream_too_short_for_an_update_trains_nothing(folder, monkeypatch):
    """A feeder that failed must not end in a model that looks trained."""
    config = load_config(None, [*overrides(), *STREAMED])
    with open(os.devnull) as empty:
        monkeypatch.setattr(sys, "stdin", empty)
        with pytest.raises(DataError, match=r"ended after 0 lines: .* so nothing was trained; feed it more lines"):
            train(config, folder / "run")
    assert not list(folder.glob("run/checkpoints/*"))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="cannot read stdin: it is closed"):
        train(config, folder / "run", resume=True)


def start(run, *more, resume=False, **changes):
    """`rectiformer train` on what will be written to it."""
    tiny = [setting for setting in overrides(**changes) if not setting.startswith("data.")]
    words = [word for setting in [*tiny, *STREAMED, *more] for word in ("--set", setting)]
    command = [sys.executable, "-m", "rectiformer", "train", "--out", run, *words, *(["--resume"] if resume else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )


def test_a_training_fed_through_a_pipe_resumes_exactly_and_ends_with_it(folder):
    """The second run is stopped in the middle of 4,320 lines or while it waits for more, and fed anew from line 1."""
    content = to_bytes(LINES * 8)  # 4,800 lines; 4,096 of them are held at once
    settings = {"training_steps": 1000, "training_batch_tokens": 800, "validation_every": 500, "checkpoint_every": 10}
    whole, parted = start("whole", **settings), start("parted", **settings)
    feeder = threading.Thread(target=parted.stdin.write, args=(content[: len(content) * 9 // 10],))
    feeder.start()
    said, _ = whole.communicate(content)
    assert whole.returncode == 0, said.decode()
    assert b"standard input ended after 4,800 lines: 4,800 pairs" in said
    feeder.join()
    while parted.poll() is None and not (folder / "parted/checkpoints/latest").exists():
        time.sleep(0.05)
    parted.send_signal(signal.SIGTERM)
    said = parted.stdout.read().decode()
    assert parted.wait() == 143, said
    assert "as asked; all is saved" in said
    again = start("parted", resume=True, **settings)
    said, _ = again.communicate(content)
    assert again.returncode == 0, said.decode()
    assert outcome(folder / "parted") == outcome(folder / "whole")
    for process in (whole, parted, again):
        process.stdin.close()
        process.stdout.close()
