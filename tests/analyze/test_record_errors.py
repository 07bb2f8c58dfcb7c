"""Whatever is wrong with an attention record, the reader says so in one clear line."""

import base64
import copy
import gzip
import tracemalloc

import numpy as np
import pytest
from records import CARD, change, make_record, make_side

from rectiformer.analyze import record
from rectiformer.analyze.record import (
    AttentionRecord,
    Example,
    SiteRecord,
    from_json,
    read_record,
    to_json,
    write_record,
)
from rectiformer.errors import DataError

SITE = ("examples", 0, "sites", 2)


def pack(values, dtype, count=None):
    data = np.array(values, dtype=f"<{dtype}").tobytes()
    shape = [len(values) if count is None else count]
    return {"dtype": dtype, "shape": shape, "data": base64.b64encode(gzip.compress(data)).decode()}


def edit(path, replace):
    """A change of the value at `path` to what `replace` makes of it."""

    def apply(content):
        value = content
        for key in path:
            value = value[key]
        return change(content, path, replace(copy.deepcopy(value)))

    return apply


def values_of(packed):
    return np.frombuffer(gzip.decompress(base64.b64decode(packed["data"])), f"<{packed['dtype']}").copy()


def edit_array(name, replace):
    def apply(packed):
        values = values_of(packed)
        return pack(replace(values), packed["dtype"])

    return edit((*SITE, name), apply)


def put(index, value):
    def apply(values):
        values[index] = value
        return values

    return apply


BROKEN = {
    "newer": (edit(("version",), lambda _: 2), r"here is version 2; this rectiformer reads 1; upgrade rectiformer$"),
    "older": (edit(("version",), lambda _: 0), r"here: record.version is 0, but it must be 1"),
    "format": (
        edit(("format",), lambda _: "x\ny"),
        r"here is not an attention record: its format is 'x\\ny', not 'rectif",
    ),
    "list": (lambda _: [], r"here is not an attention record: its format is None"),
    "cut data": (
        edit((*SITE, "weights", "data"), lambda data: base64.b64encode(base64.b64decode(data)[:-12]).decode()),
        r"here: examples\[0\].sites\[2\].weights is truncated or corrupt: \d+ bytes of \d+",
    ),
    "bad base64": (
        edit((*SITE, "weights", "data"), lambda data: "!" + data[1:]),
        r"here: examples\[0\].sites\[2\].weights is corrupt: ",
    ),
    "flipped bits": (
        edit((*SITE, "mass", "data"), lambda data: base64.b64encode(gzip.compress(b"x" * 36)[:-8] + b"y" * 8).decode()),
        r"here: examples\[0\].sites\[2\].mass is corrupt: .*incorrect data check",
    ),
    "more data": (
        edit((*SITE, "null"), lambda packed: {**packed, "shape": [3]}),
        r"sites\[2\].null is truncated or corrupt: more than 3 bytes of 3",
    ),
    "short array": (
        edit_array("null", lambda n: n[:-1]),
        r"here: examples\[0\].sites\[2\].null has 8 numbers, but .* 9$",
    ),
    "gold beyond source": (
        edit(("examples", 0, "gold", "sure"), lambda _: [[3, 0]]),
        r"examples\[0\].gold: link 3-0 is beyond the sentence, which has 3 source and 2 target words",
    ),
    "gold beyond target": (edit(("examples", 0, "gold", "possible"), lambda _: [[0, 2]]), r"gold: link 0-2 is beyond"),
    "gold without target": (
        edit(("examples", 2), lambda example: {**example, "gold": {"sure": [[0, 0]], "possible": []}}),
        r"examples\[2\].gold: link 0-0 is beyond the sentence, which has 8 source and 0 target words",
    ),
    "column beyond": (edit_array("columns", put(-1, 4)), r"sites\[2\].columns has 4, but there are 4 keys"),
    "row starts fall": (edit_array("row_starts", put(1, 10**6)), r"sites\[2\].row_starts does not rise from 0 to \d+"),
    "row starts end": (edit_array("row_starts", put(-1, 2)), r"sites\[2\].row_starts does not rise"),
    "unordered columns": (
        edit_array("columns", lambda columns: np.sort(columns)[::-1]),
        r"sites\[2\].columns does not rise within a row",
    ),
    "stored zero": (edit_array("weights", put(0, 0)), r"sites\[2\].weights has a 0, NaN or infinity"),
    "nan": (edit_array("weights", put(0, np.nan)), r"sites\[2\].weights has a 0, NaN or infinity"),
    "null bit": (edit_array("null", lambda null: 1 - null), r"sites\[2\].null does not mark exactly"),
    "visible": (edit_array("visible", put(0, 5)), r"sites\[2\].visible does not lie between .* the 4 keys"),
    "axes": (
        edit((*SITE, "kind"), lambda _: "encoder"),
        r"sites\[2\]: encoder layer 1 has 3 queries and 4 keys, but the example has 4 source and 3 target pieces",
    ),
    "no target": (edit(("examples", 0, "target"), lambda _: None), r"examples\[0\] lacks 'target'"),
    "piece beyond": (
        edit(("examples", 0, "source", "pieces", 0), lambda _: ["x", 0, 99]),
        r"examples\[0\].source.pieces\[0\] covers characters 0 to 99 of a text of 11",
    ),
    "word beyond": (
        edit(("examples", 0, "target", "words", 1), lambda _: [1, 7, 0, 1]),
        r"examples\[0\].target.words\[1\] has pieces 1 to 7 of 3",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_break_is_one_clear_line(name):
    breaking, message = BROKEN[name]
    with pytest.raises(DataError, match=message) as error:
        from_json(breaking(to_json(make_record())), "here")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


FILES = {
    "not-json.json": (b"{'format'", r"not-json.json is not JSON"),
    "not-utf8.json": (b'{"format": "\xff"}', r"not-utf8.json is not JSON"),
    "deep.json": (b"[" * 100_000, r"deep.json is not JSON"),
    "empty.json": (b"", r"empty.json is not JSON"),
    "not-gzip.json.gz": (b'{"format": 1}', r"not-gzip.json.gz is truncated or not gzip"),
    "cut.json.gz": (gzip.compress(b'{"format": 1}')[:-9], r"cut.json.gz is truncated or not gzip"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_record_say_so(tmp_path, name):
    content, message = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_record(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_cut_record_says_so(tmp_path):
    path = tmp_path / "a.json"
    write_record(make_record(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"a.json is not JSON, or not all of it"):
        read_record(path)


def test_missing_files_and_folders_say_so(tmp_path):
    with pytest.raises(DataError, match=r"cannot read attention record .*none.json: No such file"):
        read_record(tmp_path / "none.json")
    with pytest.raises(DataError, match=r"cannot write .*a.json: No such file"):
        write_record(make_record(), tmp_path / "none" / "a.json")


def test_nothing_is_written_that_could_not_be_read(tmp_path):
    site = SiteRecord.from_dense("cross", 0, np.full((3, 1, 1), np.nan, np.float32), np.ones((3, 1)))
    record = AttentionRecord(CARD, [Example(make_side(), make_side(), False, "", None, [site])])
    with pytest.raises(DataError, match=r"examples\[0\].sites\[0\].weights has a 0, NaN or infinity"):
        write_record(record, tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_arrays_that_grow_without_end_are_not_unpacked():
    bomb = {"dtype": "u1", "shape": [9], "data": base64.b64encode(gzip.compress(bytes(1 << 27))).decode()}
    content = change(to_json(make_record()), (*SITE, "null"), bomb)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"null is truncated or corrupt: more than 9 bytes of 9"):
        from_json(content, "here")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 23


def test_a_small_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "LARGEST_TEXT", 1 << 20, raising=False)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(bytes(1 << 26)))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"a.json.gz holds more than 1,048,576 bytes, which no attention record has$"):
        read_record(tmp_path / "a.json.gz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 23


def test_arrays_that_say_they_are_huge_are_not_unpacked():
    content = change(to_json(make_record()), (*SITE, "columns", "shape"), [4294967295])
    with pytest.raises(
        DataError, match=r"^here: its arrays have 17,179,\d+,\d+ bytes, but at most 1,073,741,824 are read"
    ):
        from_json(content, "here")
