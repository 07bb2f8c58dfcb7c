"""The metrics log: what is written is read, a kill tears at most the last line, a resumed run continues it."""

import json
import math
import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rectiformer.errors import CheckpointError, DataError, NoSpaceError
from rectiformer.runs.metrics import MetricsLog, read_metrics

RECORDS = [
    {"step": 1, "loss": 2.5},
    {"event": "start"},
    {"step": 2, "loss": 0.1 + 0.2},
    {"step": 3, "text": "a\u2028\r\nb\x00"},
]


@pytest.fixture
def log(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for record in RECORDS:
        log.write(record)
    return log


def test_records_are_read_as_written_one_a_line(log):
    assert read_metrics(log.path) == RECORDS
    assert [json.loads(line) for line in log.path.read_bytes().split(b"\n")[:-1]] == RECORDS


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_json_lacks_become_words_that_float_reads(tmp_path, value):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "loss": value, "heads": [[value, 0.5]], "by": {"layer": (value,)}})
    word = str(value)
    assert read_metrics(log.path) == [{"step": 1, "loss": word, "heads": [[word, 0.5]], "by": {"layer": [word]}}]
    assert repr(float(word)) == repr(value)
    json.loads(log.path.read_bytes(), parse_constant=pytest.fail)  # strict JSON


@pytest.mark.parametrize(
    ("step", "left"), [(0, [1]), (1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_rewinding_drops_later_steps_only(log, step, left):
    log.rewind(step)
    log.write({"step": 10})
    assert read_metrics(log.path) == [*(RECORDS[index] for index in left), {"step": 10}]
    assert os.listdir(log.path.parent) == [log.path.name]


def test_rewinding_leaves_other_lines_byte_for_byte(log):
    by_hand = b'{ "step":1,\t"loss": 1.50 }\n'
    log.path.write_bytes(by_hand + b'{"step": 2}\n')
    log.rewind(1)
    assert log.path.read_bytes() == by_hand


@given(length=st.integers(0, sum(len(json.dumps(record)) + 1 for record in RECORDS)))
def test_a_log_cut_anywhere_loses_only_the_record_that_was_cut(tmp_path_factory, length):
    log = MetricsLog(tmp_path_factory.mktemp("log") / "metrics.jsonl")
    for record in RECORDS:
        log.write(record)
    data = log.path.read_bytes()
    log.path.write_bytes(data[:length])
    whole = RECORDS[: (data[:length] + b"\n" * (data[length : length + 1] == b"\n")).count(b"\n")]
    assert read_metrics(log.path) == whole
    log.rewind(9)
    log.write({"step": 10})
    assert read_metrics(log.path) == [*whole, {"step": 10}]


def test_no_log_has_no_records(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    MetricsLog(tmp_path / "metrics.jsonl").rewind(5)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("line", [b"", b"nonsense", b"[1]", b"\xff", b"[" * 100_000])
def test_a_broken_line_before_the_last_is_named_and_kept(log, line):
    data = b'{"step": 1}\n' + line + b'\n{"step": 2}\n'
    log.path.write_bytes(data)
    with pytest.raises(DataError, match=r"metrics.jsonl:2: .* is not a JSON object") as caught:
        log.rewind(1)
    assert "\n" not in str(caught.value)
    assert log.path.read_bytes() == data


def test_a_folder_in_place_of_the_log_is_an_error_of_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="Is a directory"):
        MetricsLog(tmp_path).write({"step": 1})
    with pytest.raises(DataError, match="Is a directory"):
        read_metrics(tmp_path)


def test_a_full_disk_is_named_and_rewinding_keeps_the_log(log):
    before = log.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(NoSpaceError, match=r"metrics.jsonl"):
            log.rewind(9)
        with pytest.raises(NoSpaceError, match=r"metrics.jsonl"):
            log.write({"step": 4})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.path.read_bytes() == before
    assert os.listdir(log.path.parent) == [log.path.name]


def test_tensorboard_shows_no_step_twice_after_rewinding(tmp_path):
    shown = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, reached in (((1, 2, 3), 0), ((2, 3, 4), 1)):
        log = MetricsLog(tmp_path / "metrics.jsonl", tensorboard=True)
        log.rewind(reached)
        for step in steps:
            log.write({"step": step, "loss": reached + step})
        log.writer.close()
    events = shown.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1), (2, 3), (3, 4), (4, 5)]
