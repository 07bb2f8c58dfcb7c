"""How a rank of torchrun ends: with the exit code of its command and all of its output, whatever torch still does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.tiny import overrides

from rectiformer import cli

TORCHRUNS = 60


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (None, 0), (7, 7), ("why", 1)])
@pytest.mark.parametrize("launched", [True, False])
def test_only_a_rank_ends_before_python_does(monkeypatch, tmp_path, code, expected, launched):
    """What is still to be done at the end of Python, here to exit with 99, a rank leaves undone."""
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(cli, "main", lambda: sys.exit(print("done") or code))
        sys.stdout = open(tmp_path / "out", "w")  # noqa: SIM115
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        os.environ |= {"TORCHELASTIC_RUN_ID": "test"} if launched else {}
        try:
            cli.start()
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (expected if launched else 99)
    assert (tmp_path / "out").read_text() == ("done\n" if launched else "")


@pytest.mark.slow
def test_a_thread_of_torch_that_waits_for_python_does_not_abort_a_rank():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("left_behind.py")
    ranks = [subprocess.Popen([sys.executable, script, str(rank), str(port)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]


@pytest.mark.slow
def test_torchrun_after_torchrun_ends_well(tmp_path):
    """Of 50, three ended with -6 before ranks left at once."""
    settings = [word for each in overrides(training_steps=4) for word in ("--set", each)]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "rectiformer",
    ]
    subprocess.run(
        [sys.executable, "-m", "rectiformer", "data", "prepare", "--out", tmp_path / "data", *settings], check=True
    )
    for number in range(TORCHRUNS):
        command = [*torchrun, "train", "--out", tmp_path / str(number), "--data", tmp_path / "data", *settings]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (found.returncode, "terminate called" in found.stderr) == (0, False), found.stderr
