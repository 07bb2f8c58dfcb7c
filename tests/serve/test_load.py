"""Hundreds of clients: none that stays is lost, those that go leave nothing behind, memory stays flat."""

import json
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from end_to_end.tiny import overrides
from serve.asking import LONG, Server, soon

from rectiformer.toml import load_config
from rectiformer.train.start import train

CLIENTS = 200
SHORT = {"sentences": ["Der Hund schläft."], "beam": 1}


def load(server, seconds, **body):
    """What `clients.py` found: statuses, and the seconds of answers and of refusals."""
    command = [sys.executable, str(Path(__file__).with_name("clients.py"))]
    words = [str(server.port), str(CLIENTS), str(seconds), json.dumps(body)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def poll(server, seen, stop):
    """Look at the server several times a second; how it was each time."""
    while not stop.is_set():
        live, ready = (server.ask("GET", path) for path in ("/livez", "/readyz"))
        (memory,) = server.gauges("process_resident_memory_bytes")
        seen.append((live.status, ready.status, memory, max(live.seconds, ready.seconds)))
        time.sleep(0.1)


def load_and_poll(server, seconds, **body):
    seen, stop = [], threading.Event()
    thread = threading.Thread(target=poll, args=(server, seen, stop))
    thread.start()
    found = load(server, seconds, **body)
    stop.set()
    thread.join()
    return found, seen


def test_more_clients_than_places_are_refused_at_once_and_the_accepted_finish(server):
    found, seen = load_and_poll(server, 5, sentences=["Der Hund schläft."], beam=1)
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
    found, seen = load_and_poll(server, 300, sentences=["Der Hund schläft."])
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


def come_and_go(server, clients, seconds, most):
    """So many clients who come within `seconds`, send up to `most` sentences with beam 8, and go within a second."""
    draw = random.Random(1)

    def visit(comes, stays, count, length):
        time.sleep(comes)
        with server.send(json.dumps({"sentences": [LONG[:length]] * count, "beam": 8}).encode()):
            time.sleep(stays)

    visits = [
        (draw.uniform(0, seconds), draw.uniform(0, 1), draw.randint(1, most), draw.randint(20, len(LONG)))
        for _ in range(clients)
    ]
    threads = [threading.Thread(target=visit, args=each) for each in visits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_clients_who_go_leave_nothing_behind(server):
    come_and_go(server, 40, 1, most=8)
    answer = server.post(SHORT)
    assert answer.status == 200
    assert answer.seconds < soon()
    assert server.gauges("queue_requests", "queue_sentences", "waiting_tasks") == [0, 0, 0]


@pytest.mark.slow
def test_three_hundred_clients_who_go_leave_nothing_behind(tmp_path, capsys):
    """With a model whose full batches take seconds, and hundreds of MiB for a beam of 8."""
    torch.set_num_threads(1)
    larger = {"model_hidden_size": 256, "model_num_heads": 4, "model_ffn_size": 1024, "model_encoder_layers": 3}
    steps = {"training_steps": 2, "validation_every": 2, "checkpoint_every": 2, "model_decoder_layers": 3}
    train(load_config(None, overrides(vocabulary_size=1000, data_sentences=1500, **larger, **steps)), tmp_path / "run")
    server = Server(tmp_path / "run", "--port", 0, "--device", "cpu")
    server.until("/readyz", 200)
    server.post(SHORT)
    before = server.gauge("process_resident_memory_bytes") / 2**20
    come_and_go(server, 300, 20, most=30)
    answer = server.post(SHORT)
    time.sleep(1)
    after, abandoned = server.gauges("process_resident_memory_bytes", "abandoned_requests_total")
    with capsys.disabled():
        print(f"\n{abandoned:g} abandoned, next answer {answer.seconds:.2f} s, MiB {before:.0f} -> {after / 2**20:.0f}")
    assert server.end() == (0, b"", b"")
    assert abandoned > 200
    assert answer.seconds < soon()
    assert after / 2**20 < before + 40
