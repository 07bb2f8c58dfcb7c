"""The thread that has the model: what is under way stops at the next token once nobody waits for it."""

import os
import sys
from pathlib import Path

import pytest
import torch
from serve.asking import LONG

from rectiformer.serve.jobs import RecordPairs, Task, TranslateLines, TranslateSegments
from rectiformer.serve.worker import Owner, TaskQueue, Worker
from rectiformer.translate.documents import Segment
from rectiformer.translate.options import SearchOptions

OPTIONS = SearchOptions(beam=2)
STEPS = 3


def work(translator, queue, monkeypatch, leaving):
    """The batches that a worker runs until the queue is empty, and the rows of each step of the model.

    Owners in `leaving` are gone while the first batch decodes its third token.
    """
    ran, rows, step = [], [], translator.model.step

    def count(ids, state):
        rows.append(len(ids))
        if len(rows) == STEPS:
            for owner in leaving:
                queue.drop(owner)
        return step(ids, state)

    def done(batch, seconds):
        ran.append(batch)
        if not queue:
            queue.close()

    def warm():
        monkeypatch.setattr(translator.model, "step", count)

    worker = Worker(translator, queue, warm=warm, done=done, ended=lambda: None)
    worker.start()
    worker.join()
    return ran, rows


def put(queue, operation, *contents):
    owner = Owner()
    queue.put(owner, [Task(operation, content, 200, index) for index, content in enumerate(contents)])
    return owner


def lines_of(owner, ran):
    return [entry.result.text for batch in ran for entry in batch if entry.owner is owner]


@pytest.mark.parametrize("operation", [TranslateLines, TranslateSegments])
def test_a_batch_that_nobody_waits_for_stops_at_the_next_token(translator, monkeypatch, operation):
    """It would have generated some 200; the next one, which somebody waits for, is translated."""
    queue = TaskQueue(batch_tokens=700)
    segment = Segment([LONG], [translator.source.encode(LONG)], 1)
    contents = [LONG if operation is TranslateLines else segment] * 3
    gone = put(queue, operation(OPTIONS), *contents)
    stays = put(queue, TranslateLines(OPTIONS), "Der Hund schläft.")
    ran, rows = work(translator, queue, monkeypatch, [gone])
    assert rows[:STEPS] == [6] * STEPS
    assert 6 not in rows[STEPS:]
    assert lines_of(stays, ran) == [translator.translate(["Der Hund schläft."], OPTIONS)[0].text]


def test_where_only_some_are_gone_the_rest_goes_on_without_them(translator, monkeypatch):
    queue = TaskQueue(batch_tokens=1000)
    gone = put(queue, TranslateLines(OPTIONS), LONG, LONG[:200])
    sources = ["Der Hund schläft.", LONG]
    stays = put(queue, TranslateLines(OPTIONS), *sources)
    ran, rows = work(translator, queue, monkeypatch, [gone])
    assert rows[: STEPS + 1] == [8] * STEPS + [4]
    assert lines_of(stays, ran) == [each.text for each in translator.translate(sources, OPTIONS)]


def test_heads_are_not_recorded_for_those_who_are_gone(translator):
    pairs = [("Der Hund schläft.", "The dog sleeps."), ("Er ist müde.", "He is tired.")]
    first, second = RecordPairs().run(translator, pairs, 100, lambda index: index == 1)
    assert first is None
    assert second.source.text == "Er ist müde."


class Wasteful:
    """A batch that frees 96 MiB, between results that stay: glibc's heap then cannot shrink by itself."""

    def run(self, translator, contents, *_):
        torch.ones(7 << 20)  # freed at once; so large, it tells glibc to take tensors from its heap from now on
        freed, results = [], []
        for _ in range(24):
            freed.append(torch.ones(1 << 20))
            results.append(torch.ones(1000))
        return [results for _ in contents]


def resident():
    """MiB that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_batch_freed_goes_back_to_the_system(translator):
    queue, ran = TaskQueue(batch_tokens=1000), []

    def done(batch, seconds):
        ran.append(batch)
        queue.close()

    put(queue, Wasteful(), "anything")
    worker = Worker(translator, queue, warm=lambda: None, done=done, ended=lambda: None)
    before = resident()
    worker.start()
    worker.join()
    assert len(ran[0][0].result) == 24
    assert resident() - before < 48
