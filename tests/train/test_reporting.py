"""Threads that wait for cores which other processes use."""

from types import SimpleNamespace

import pytest

from rectiformer.train import reporting
from rectiformer.train.reporting import LOOK_SECONDS, CoreWatch


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass, and those that this process runs in them."""
    now = SimpleNamespace(wall=50.0, own=7.0)
    monkeypatch.setattr(reporting.time, "perf_counter", lambda: now.wall)
    monkeypatch.setattr(reporting.time, "process_time", lambda: now.own)
    return now


def spend(clock, seconds, cores):
    clock.wall, clock.own = clock.wall + seconds, clock.own + seconds * cores


@pytest.mark.parametrize(
    ("threads", "cores", "advice"), [(2, 1.9, ""), (2, 1.1, "1"), (2, 0.7, "1"), (1, 0.3, ""), (8, 3.5, "3")]
)
def test_fewer_threads_are_advised_where_they_get_fewer_cores(clock, threads, cores, advice):
    watch = CoreWatch(threads)
    spend(clock, LOOK_SECONDS, cores)
    said = watch.look()
    assert bool(said) == bool(advice)
    if said:
        assert said.startswith(f"warning: {threads} threads get {cores:.1f} cores")
        assert f"OMP_NUM_THREADS={advice} " in said


def test_it_is_said_once_and_not_before_it_is_known(clock):
    watch = CoreWatch(2)
    spend(clock, LOOK_SECONDS / 2, 0.5)
    assert not watch.look()
    watch.start()  # a validation came between
    spend(clock, LOOK_SECONDS, 2)
    assert not watch.look()
    spend(clock, LOOK_SECONDS, 0.5)
    assert watch.look()
    spend(clock, LOOK_SECONDS, 0.5)
    assert not watch.look()
