"""A rank that is stopped is not waited for; one that is slow, and all that were stopped together, are."""

import os
import signal
import sys
import time

import pytest
import torch.distributed as dist

from rectiformer.distributed.pulse import Pulse
from rectiformer.distributed.ranks import SINGLE_PROCESS, LostRankError, Ranks

BEAT, SILENCE = 0.02, 50
LONG = 1.5 * BEAT * SILENCE


def start_rank(rank, folder, work):
    """The process id of a rank that does `work` under a pulse, and exits with 0 after it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)  # pytest has its own
            with Pulse(Ranks(rank, 2), dist.FileStore(str(folder / "store"), 2), BEAT, SILENCE):
                work()
            code = 0
        finally:
            os._exit(code)
    return child


def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def ranks(tmp_path):
    """Starts two ranks with some work each; what is left of them is killed."""
    started = []

    def start(*works):
        started.extend(start_rank(rank, tmp_path, work) for rank, work in enumerate(works))
        return started

    yield start
    for child in started:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def stop_later():
    time.sleep(3 * BEAT)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_ends_the_others_with_one_line(ranks, tmp_path):
    waiting, _ = ranks(lambda: time.sleep(60), stop_later)
    assert exit_code(waiting) == LostRankError.exit_code
    message = (tmp_path / "0.err").read_text()
    assert message.startswith("rectiformer: rank 0: rank 1 has given no sign for 1 seconds: it is stopped")
    assert message.count("\n") == 1


def test_a_rank_that_never_came_is_lost_too(ranks):
    waiting, _ = ranks(lambda: time.sleep(60), lambda: os._exit(0))
    assert exit_code(waiting) == LostRankError.exit_code


def test_ranks_that_run_are_not_lost_however_long_they_take(ranks):
    assert [exit_code(child) for child in ranks(lambda: time.sleep(LONG), lambda: time.sleep(LONG))] == [0, 0]


def test_ranks_that_were_stopped_together_go_on_together(ranks):
    children = ranks(lambda: time.sleep(LONG), lambda: time.sleep(LONG))
    time.sleep(0.1)
    for child in children:
        os.kill(child, signal.SIGSTOP)
    time.sleep(LONG)
    for child in children:
        os.kill(child, signal.SIGCONT)
    assert [exit_code(child) for child in children] == [0, 0]


def test_a_process_alone_watches_nobody():
    with Pulse(SINGLE_PROCESS, None) as pulse:
        assert not pulse.thread.is_alive()
