"""The lock of a run folder, held by real processes."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from rectiformer.errors import CheckpointError
from rectiformer.runs.lock import lock_run

HOLDER = """
import sys
from pathlib import Path
from rectiformer.runs.lock import lock_run

with lock_run(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def unnoticed(message):
    raise AssertionError(f"noticed: {message}")


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path` until its input ends."""
    command = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_held_folder_is_refused_naming_the_holder(tmp_path, holder):
    named = (
        rf"{re.escape(str(tmp_path))} is in use by process {holder.pid} on {re.escape(socket.gethostname())} since 20"
    )
    for _ in range(2):  # being refused does not disturb the lock
        with pytest.raises(CheckpointError, match=named) as caught, lock_run(tmp_path, unnoticed):
            pass
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (4, False)
    holder.communicate()
    with lock_run(tmp_path, unnoticed):
        pass


def test_the_lock_of_a_killed_process_is_taken_over_with_a_notice(tmp_path, holder):
    holder.kill()
    holder.wait()
    notices = []
    with lock_run(tmp_path, notices.append):
        assert json.loads((tmp_path / "run.lock").read_bytes())["pid"] == os.getpid()
    assert len(notices) == 1
    assert f"process {holder.pid} on {socket.gethostname()}" in notices[0]
    with lock_run(tmp_path, unnoticed):
        pass


def test_a_lock_is_released_when_its_block_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), lock_run(tmp_path, unnoticed):
        raise ZeroDivisionError
    with lock_run(tmp_path, unnoticed), pytest.raises(CheckpointError), lock_run(tmp_path, unnoticed):
        pass


@pytest.mark.parametrize(
    "left", [b"nonsense", b"\xff\x00", b"{}", b"[1]", b'{"pid":1,"host":"a\\nb","started":""}', b"[" * 9999]
)
def test_a_lock_file_of_nonsense_is_taken_over_in_one_line(tmp_path, left):
    (tmp_path / "run.lock").write_bytes(left)
    notices = []
    with lock_run(tmp_path, notices.append):
        pass
    assert ["took over the lock of another process" in notice and "\n" not in notice for notice in notices] == [True]


def test_a_link_in_place_of_the_lock_is_not_written_through(tmp_path):
    other = tmp_path / "precious"
    other.write_text("content")
    (tmp_path / "run.lock").symlink_to(other)
    with pytest.raises(CheckpointError, match=r"run\.lock"), lock_run(tmp_path, unnoticed):
        pass
    assert other.read_text() == "content"


@pytest.mark.parametrize("folder", ["missing", "fifo"])
def test_a_folder_that_cannot_be_locked_is_an_error_of_one_line(tmp_path, folder):
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "run.lock")
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*run\.lock: ") as caught,
        lock_run(tmp_path / folder, unnoticed),
    ):
        pass
    assert "\n" not in str(caught.value)
