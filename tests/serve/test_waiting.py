"""Who is next and who goes along, without a model."""

import threading

from rectiformer.serve.tasks import Task, TranslateLines, WatchPairs
from rectiformer.serve.waiting import Owner, WaitingLine
from rectiformer.translate.options import SearchOptions

LINES = TranslateLines(SearchOptions())


def tasks(*lengths, kind=LINES):
    return [Task(kind, f"{length} tokens", length, place) for place, length in enumerate(lengths)]


def waiting(*owners, batch_tokens=100):
    line = WaitingLine(batch_tokens)
    return line, [put(line, *lengths) for lengths in owners]


def put(line, *lengths, kind=LINES):
    owner = Owner()
    line.put(owner, tasks(*lengths, kind=kind))
    return owner


def lengths(batch):
    return [entry.task.length for entry in batch]


def test_those_of_like_length_go_along_until_the_batch_is_full():
    line, _ = waiting([20], [90], [21], [5], [19], [24], [60])
    assert lengths(line.take()) == [20, 21, 19, 24]  # 4 x 24 padded tokens; one more would be 5 x 24
    assert lengths(line.take()) == [90]


def test_a_task_beyond_the_batch_goes_alone():
    line, _ = waiting([500], [500])
    assert [lengths(line.take()), lengths(line.take())] == [[500], [500]]


def test_only_equal_kinds_share_a_batch():
    line, _ = waiting([10])
    put(line, 10, kind=TranslateLines(SearchOptions(beam=2)))
    put(line, 10, kind=WatchPairs())
    put(line, 10, kind=TranslateLines(SearchOptions()))
    assert [len(line.take()) for _ in range(3)] == [2, 1, 1]


def test_a_long_request_is_overtaken_but_not_starved():
    """Beside a request of 20 long tasks, short ones that come later are each next; the long one goes on between."""
    line, (document,) = waiting([50] * 20, batch_tokens=50)
    turns = [line.take()[0].owner is document for _ in range(2)]
    assert turns == [True, True]
    for _ in range(10):
        short = put(line, 50)
        owners = [line.take()[0].owner, line.take()[0].owner]
        assert short in owners
        assert document in owners


def test_requests_of_the_same_size_take_turns():
    line, (first, second) = waiting([50] * 4, [50] * 4, batch_tokens=50)
    owners = [line.take()[0].owner for _ in range(8)]
    assert owners == [first, second] * 4


def test_tasks_of_one_who_is_gone_are_not_given_out():
    line, (one, other) = waiting([10, 10, 10], [10])
    line.drop(one)
    assert one.gone
    assert [entry.owner for entry in line.take()] == [other]
    assert len(line) == 0


def test_a_closed_line_wakes_the_one_who_waits():
    line, _ = waiting()
    found = []
    thread = threading.Thread(target=lambda: found.append(line.take()))
    thread.start()
    line.close()
    thread.join(5)
    assert found == [[]]
