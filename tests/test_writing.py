"""What commands write: a file is the old one or the new one, standard output is a stream."""

import io
import os
import signal
import sys
import threading

import pytest
from commands import run_main

OLD = b"all of my translations\n"


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two lines each of source and target, one that is damaged in its second thousand, files that must survive."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.de").write_bytes("Der Hund schläft.\nDie Katze schläft.\n".encode())
    (tmp_path / "test.en").write_bytes(b"The dog sleeps.\nThe cat sleeps.\n")
    (tmp_path / "damaged.de").write_bytes(b"Gut.\n" + b"\n" * 1000 + b"Sch\xf6n.\n")
    (tmp_path / "old").write_bytes(OLD)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("translate {run} missing --out old", 3),
        ("translate {run} damaged.de --beam 1 --out old", 3),
        ("translate {run} test.de --prefix empty --out old", 3),
        ("translate missing test.de --out old", 4),
        ("align {run} test.de missing --out old", 3),
        ("analyze {run} --source test.de --target missing --out old --report page --record record.gz", 3),
        ("analyze missing --out old", 4),
        ("data generate old/new --sentences 2", 3),
    ],
)
def test_a_command_that_fails_leaves_the_folder_as_it_was(tiny_run, rectiformer, folder, command, code):
    (folder / "empty").write_bytes(b"")
    before = files(folder)
    found = rectiformer(*command.format(run=tiny_run).split(" "))
    assert (found.code, found.err.count("\n")) == (code, 1), found.err
    assert files(folder) == before


WRITTEN = [
    "translate {run} test.de --beam 1 --out old",
    "translate {run} test.de --beam 1 --documents blank --out old",
    "align {run} test.de test.en --out old",
    "analyze {run} --source test.de --target test.en --out old",
    "analyze {run} --source test.de --target test.en --examples 1 --record old",
    "analyze {run} --source test.de --target test.en --examples 1 --report old",
]


@pytest.mark.parametrize("command", WRITTEN)
def test_a_link_is_written_through_and_nothing_else_appears(tiny_run, rectiformer, folder, command):
    (folder / "old").rename(folder / "real")
    (folder / "old").symlink_to("real")
    before = sorted(path.name for path in folder.iterdir())
    assert rectiformer(*command.format(run=tiny_run).split(" ")).code == 0
    assert os.readlink(folder / "old") == "real"
    assert (folder / "real").read_bytes() not in (b"", OLD)
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("command", [WRITTEN[0], WRITTEN[2], WRITTEN[3]])
def test_a_full_disk_is_named_with_its_file(tiny_run, rectiformer, folder, command):
    found = rectiformer(*command.format(run=tiny_run).replace("old", "/dev/full").split(" "))
    assert found.code == 6
    assert found.err.startswith("rectiformer: no space left while writing /dev/full (No space left on device; ")
    assert found.err.count("\n") == 1


def test_streams_are_written_as_they_are(tiny_run, rectiformer, folder):
    expected = rectiformer("translate", tiny_run, "test.de", "--beam", 1).out
    assert rectiformer("translate", tiny_run, "test.de", "--beam", 1, "--out", "/dev/stdout").out == expected
    assert rectiformer("translate", tiny_run, "test.de", "--beam", 1, "--out", "/dev/null").code == 0
    os.mkfifo(folder / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((folder / "pipe").read_bytes().decode()))
    reader.start()
    assert rectiformer("translate", tiny_run, "test.de", "--beam", 1, "--out", "pipe").code == 0
    reader.join()
    assert read == [expected]


class InterruptedLines(io.RawIOBase):
    """One line, then Ctrl-C."""

    def __init__(self):
        self.lines = ["Der Hund schläft.\n".encode()]

    def readable(self):
        return True

    def readinto(self, buffer):
        if not self.lines:
            signal.raise_signal(signal.SIGINT)
        line = self.lines.pop()
        buffer[: len(line)] = line
        return len(line)


@pytest.fixture
def _interruptible():
    """Ctrl-C is heard, also where the tests were started in the background of a shell, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_interrupting_leaves_the_old_file(tiny_run, folder, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(InterruptedLines())))
    before = files(folder)
    assert run_main("translate", tiny_run, "--batch-sentences", 1, "--out", "old") == 130
    assert capfd.readouterr() == ("", "")
    assert files(folder) == before
