"""Two hundred clients from a process of their own: none is lost, all are answered soon, memory stays flat."""

import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from serve.asking import Server, soon

CLIENTS = 200


def load(server, seconds, **body):
    """What `clients.py` found: statuses, and the seconds of answers and of refusals."""
    command = [sys.executable, str(Path(__file__).with_name("clients.py"))]
    words = [str(server.port), str(CLIENTS), str(seconds), json.dumps(body)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def watch(server, seen, stop):
    """Look at the server several times a second; how it was each time."""
    while not stop.is_set():
        live, ready = (server.ask("GET", path) for path in ("/livez", "/readyz"))
        (memory,) = server.gauges("process_resident_memory_bytes")
        seen.append((live.status, ready.status, memory, max(live.seconds, ready.seconds)))
        time.sleep(0.1)


def watched(server, seconds, **body):
    seen, stop = [], threading.Event()
    thread = threading.Thread(target=watch, args=(server, seen, stop))
    thread.start()
    found = load(server, seconds, **body)
    stop.set()
    thread.join()
    return found, seen


def test_more_clients_than_places_are_refused_at_once_and_the_accepted_finish(server):
    found, seen = watched(server, 5, sentences=["Der Hund schläft."], beam=1)
    assert set(found["statuses"]) == {"200", "429"}
    assert found["lost"] == 0
    assert found["without_retry_after"] == 0
    assert max(found["refusal_seconds"]) < soon()
    live, ready, _, _ = zip(*seen, strict=True)
    assert set(live) == {200}
    assert set(ready) == {200, 503} or set(ready) == {503}
    assert server.post({"sentences": ["Der Hund schläft."]}).status == 200
    assert server.gauges("queue_requests", "waiting_tasks") == [0, 0]


@pytest.mark.slow
def test_five_minutes_of_two_hundred_clients_lose_nothing_and_memory_stays_flat(run, capsys):
    server = Server(run, "--port", 0, "--device", "cpu", "--deadline", 120)
    server.until("/readyz", 200)
    load(server, 20, sentences=["Der Hund schläft."])  # buffers grow to their size
    found, seen = watched(server, 300, sentences=["Der Hund schläft."])
    assert server.end() == (0, b"", b"")
    assert set(found["statuses"]) == {"200"}
    assert found["lost"] == 0
    assert {live for live, _, _, _ in seen} == {200}
    memory = [each / 2**20 for _, _, each, _ in seen]
    tenth = len(memory) // 10
    series = [statistics.median(memory[start : start + tenth]) for start in range(0, tenth * 10, tenth)]
    cuts = statistics.quantiles(found["answer_seconds"], n=20)
    with capsys.disabled():
        print(
            f"\n{found['statuses']}, p50 {cuts[9]:.2f} s, p95 {cuts[18]:.2f} s, MiB {[round(each) for each in series]}"
        )
    assert max(series) - series[0] < 0.05 * series[0]
