"""Lines of files: counted by LF alone, whatever else they hold, and named where they cannot be read."""

import gzip
import io
import lzma
import os
import re
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rectiformer.text.lines as lines_module
from rectiformer.errors import DataError, NoSpaceError
from rectiformer.text.lines import is_stream, read_lines, spool

HOSTILE = "a\rb\r\nc\u2028d\u2029e\u0085f\x0bg\x0ch\x1c\x00i\n\n\u202eזה e\u0301\u0301 😀"


def write(folder, content, name="text.txt"):
    path = folder / name
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\xef\xbb\xbfa\n", ["a"]),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbf\n", [""]),
        (b"\xef\xbb\xbf\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["\ufeffa", "\ufeffb"]),
        (b"a\x00b\nc", ["a\0b", "c"]),
        (HOSTILE.encode(), HOSTILE.split("\n")),
    ],
)
def test_lines_end_at_lf_and_nowhere_else(tmp_path, content, expected):
    assert list(read_lines(write(tmp_path, content))) == expected


@given(st.binary(max_size=200))
def test_there_are_as_many_lines_as_lfs(content):
    read, write_end = os.pipe()
    with open(write_end, "wb") as file:
        file.write(b"x" + content + b"\n")
    with open(read, "rb"):
        assert len(list(read_lines(f"/dev/fd/{read}", "skip"))) == content.count(b"\n") + 1


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_files_read_like_plain_ones(tmp_path, suffix, pack):
    path = write(tmp_path, pack(HOSTILE.encode()), "text" + suffix)
    assert list(read_lines(path)) == HOSTILE.split("\n")


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("damage", ["truncated", "not compressed", "flipped"])
def test_damaged_compressed_files_are_named(tmp_path, suffix, pack, damage):
    packed = pack(os.urandom(1000).hex().encode() + b"\n")
    middle = len(packed) // 2
    flipped = packed[:middle] + bytes([packed[middle] ^ 0xFF]) + packed[middle + 1 :]
    content = {"truncated": packed[:middle], "not compressed": b"plain text\n", "flipped": flipped}[damage]
    path = write(tmp_path, content, "text" + suffix)
    with pytest.raises(DataError, match=f"cannot read .*text{suffix}: "):
        list(read_lines(path))


@pytest.mark.parametrize(("name", "reason"), [("missing.txt", "No such file"), (".", "Is a directory")])
def test_what_cannot_be_opened_is_named(tmp_path, name, reason):
    with pytest.raises(DataError, match=reason) as error:
        list(read_lines(str(tmp_path / name)))
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize(
    ("content", "location"),
    [
        (b"ok\nab\xe9c\n", "2:3"),
        (b"\xef\xbb\xbfa\xff", "1:5"),
        (b"a\n\xed\xa0\x80", "2:1"),
        (b"a\n\n\xf0\x9f\x98", "3:1"),
    ],
)
def test_bad_utf8_is_named_by_line_and_byte(tmp_path, content, location):
    path = write(tmp_path, content)
    with pytest.raises(DataError, match="not UTF-8") as error:
        list(read_lines(path))
    assert str(error.value).startswith(f"{path}:{location}: not UTF-8 (0x")
    assert error.value.exit_code == 3


@pytest.mark.parametrize(("bad_utf8", "expected"), [("replace", ["a", "b\ufffdc", "d"]), ("skip", ["a", None, "d"])])
def test_bad_utf8_keeps_the_line_count(tmp_path, bad_utf8, expected):
    assert list(read_lines(write(tmp_path, b"a\nb\xe9c\nd\n"), bad_utf8)) == expected


def test_standard_input_is_read_as_bytes(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\r\nb\xe9"), encoding="ascii"))
    assert list(read_lines("-", "replace")) == ["a\r", "b\ufffd"]
    assert not sys.stdin.buffer.closed


def test_bad_utf8_of_standard_input_is_named(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\xe9\n")))
    with pytest.raises(DataError, match=r"stdin:2:2: not UTF-8 \(0xE9\)"):
        list(read_lines("-"))


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_beyond_the_limit_is_named(tmp_path, monkeypatch, end):
    monkeypatch.setattr(lines_module, "MAX_LINE", 10)
    assert list(read_lines(write(tmp_path, b"a\n" + b"x" * 10 + end))) == ["a", "x" * 10]
    with pytest.raises(DataError, match=r"text\.txt:2: line is longer than 10 bytes"):
        list(read_lines(write(tmp_path, b"a\n" + b"x" * 11 + end)))
    with pytest.raises(DataError, match=r"text\.txt:1: line is longer than 10 bytes"):  # and not cut into two
        list(read_lines(write(tmp_path, b"\xef\xbb\xbf" + b"x" * 12 + end)))


def test_a_pipe_is_spooled_once_and_read_often(tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    (tmp_path / "copies").mkdir()
    assert is_stream(str(fifo))
    writer = threading.Thread(target=fifo.write_bytes, args=(b"a\nb\n",))
    writer.start()
    copy = spool(str(fifo), tmp_path / "copies")
    writer.join()
    assert not is_stream(copy)
    assert list(read_lines(copy)) == list(read_lines(copy)) == ["a", "b"]


def test_input_without_end_is_refused_at_half_of_the_disk(small_disk):
    warned = []
    with pytest.raises(
        NoSpaceError, match=r"/dev/zero has more than [0-9,]+ bytes, half of what the disk of"
    ) as caught:
        spool("/dev/zero", small_disk, lambda: warned.append(1))
    assert 2**21 <= int(re.search("more than ([0-9,]+)", str(caught.value))[1].replace(",", "")) < 2**22
    assert len(warned) > 1
    assert list(small_disk.iterdir()) == []
