"""Who is next and who goes along, without a model."""

import threading

from rectiformer.serve.jobs import RecordPairs, Task, TranslateLines
from rectiformer.serve.worker import Owner, TaskQueue
from rectiformer.translate.options import SearchOptions

LINES = TranslateLines(SearchOptions())


def tasks(*lengths, operation=LINES):
    return [Task(operation, f"{length} tokens", length, index) for index, length in enumerate(lengths)]


def waiting(*owners, batch_tokens=100):
    queue = TaskQueue(batch_tokens)
    return queue, [put(queue, *lengths) for lengths in owners]


def put(queue, *lengths, operation=LINES):
    owner = Owner()
    queue.put(owner, tasks(*lengths, operation=operation))
    return owner


def lengths(batch):
    return [entry.task.length for entry in batch]


def test_those_of_like_length_go_along_until_the_batch_is_full():
    queue, _ = waiting([20], [90], [21], [5], [19], [24], [60])
    assert lengths(queue.take()) == [20, 21, 19, 24]  # 4 x 24 padded tokens; one more would be 5 x 24
    assert lengths(queue.take()) == [90]


def test_a_task_beyond_the_batch_goes_alone():
    queue, _ = waiting([500], [500])
    assert [lengths(queue.take()), lengths(queue.take())] == [[500], [500]]


def test_only_equal_operations_share_a_batch():
    queue, _ = waiting([10])
    put(queue, 10, operation=TranslateLines(SearchOptions(beam=2)))
    put(queue, 10, operation=RecordPairs())
    put(queue, 10, operation=TranslateLines(SearchOptions()))
    assert [len(queue.take()) for _ in range(3)] == [2, 1, 1]


def test_a_long_request_is_overtaken_but_not_starved():
    """Next to a request of 20 long tasks, short ones that come later are each next; the long one goes on between."""
    queue, (document,) = waiting([50] * 20, batch_tokens=50)
    turns = [queue.take()[0].owner is document for _ in range(2)]
    assert turns == [True, True]
    for _ in range(10):
        short = put(queue, 50)
        owners = [queue.take()[0].owner, queue.take()[0].owner]
        assert short in owners
        assert document in owners


def test_requests_of_the_same_size_take_turns():
    queue, (first, second) = waiting([50] * 4, [50] * 4, batch_tokens=50)
    owners = [queue.take()[0].owner for _ in range(8)]
    assert owners == [first, second] * 4


def test_tasks_of_one_who_is_gone_are_not_given_out():
    queue, (one, other) = waiting([10, 10, 10], [10])
    queue.drop(one)
    assert one.gone
    assert [entry.owner for entry in queue.take()] == [other]
    assert len(queue) == 0


def test_a_closed_queue_wakes_the_one_who_waits():
    queue, _ = waiting()
    found = []
    thread = threading.Thread(target=lambda: found.append(queue.take()))
    thread.start()
    queue.close()
    thread.join(5)
    assert found == [[]]
