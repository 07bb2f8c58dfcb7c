"""The server as a user starts it: what it refuses, what it frees, how it starts and ends."""

import json
import shutil
import signal
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve.asking import LONG, Server, read_response, soon, wait_until

from rectiformer.cli import main

SOURCE = "Der Hund schläft."
GOOD = {"sentences": [SOURCE], "beam": 1}
MANY = {"sentences": [LONG] * 30, "beam": 8}
"""Seconds of work, in batches of one or two sentences."""


@pytest.fixture(autouse=True)
def _answers_afterwards(server, good):
    """Whatever a test did, the next request is answered, and no slot is left taken."""
    yield
    body, text = good
    answer = server.post(body)
    assert (answer.status, answer.content["translations"][0]["text"]) == (200, text)
    assert server.gauges("queue_requests", "queue_sentences", "waiting_tasks") == [0, 0, 0]


def refused(answer, status, code):
    """The line of a refusal, which has one shape."""
    assert (answer.status, list(answer.content)) == (status, ["error"])
    assert answer.content["error"]["code"] == code
    assert "\n" not in answer.content["error"]["message"]
    return answer.content["error"]["message"]


ABUSE = {
    "a million sentences": (json.dumps({"sentences": [""] * 1_000_000}).encode(), 413, "too_large"),
    "many sentences": ({"sentences": [""] * 41}, 422, "over_limit"),
    "many documents": ({"documents": [[]] * 41}, 422, "over_limit"),
    "many in documents": ({"documents": [["a"] * 21, ["a"] * 20]}, 422, "over_limit"),
    "a long sentence": ({"sentences": [LONG * 2]}, 422, "over_limit"),
    "many tokens": ({"sentences": [LONG] * 40}, 422, "over_limit"),
    "many heads": ({"sentences": ["a"] * 3, "heads": True}, 422, "over_limit"),
    "long heads": ({"sentences": [LONG[:300]], "heads": True}, 422, "over_limit"),
    "huge nbest": ({**GOOD, "nbest": 10**9}, 422, "over_limit"),
    "huge beam": ({**GOOD, "beam": 10**9}, 422, "over_limit"),
    "nbest beyond beam": ({**GOOD, "beam": 2, "nbest": 3}, 422, "invalid"),
    "negative beam": ({**GOOD, "beam": -1}, 422, "invalid"),
    "a number of 5,000 digits": (b'{"sentences": ["a"], "beam": ' + b"9" * 5000 + b"}", 400, "not_json"),
    "NaN": (b'{"sentences": ["a"], "length_penalty": NaN}', 400, "not_json"),
    "infinity by overflow": (b'{"sentences": ["a"], "length_penalty": 1e999}', 422, "invalid"),
    "deep lists": (b"[" * 9_000 + b"]" * 9_000, 400, "not_json"),
    "lists somewhat deep": (b'{"sentences": ' + b"[" * 30 + b"]" * 30 + b"}", 400, "not_json"),
    "no UTF-8": (b'{"sentences": ["\xff"]}', 400, "not_json"),
    "UTF-16": (json.dumps(GOOD).encode("utf-16"), 400, "not_json"),
    "half a surrogate pair": (b'{"sentences": ["\\ud800"]}', 422, "invalid"),
    "half JSON": (b'{"sentences": ["a"', 400, "not_json"),
    "nothing": (b"", 400, "not_json"),
    "a list": ([SOURCE], 422, "invalid"),
    "a number for a text": ({"sentences": [1]}, 422, "invalid"),
    "a text for a list": ({"sentences": SOURCE}, 422, "invalid"),
    "a text for a number": ({**GOOD, "beam": "4"}, 422, "invalid"),
    "an unknown key": ({**GOOD, "k" * 5_000 + "\n": 1}, 422, "invalid"),
    "both": ({**GOOD, "documents": [[SOURCE]]}, 422, "invalid"),
    "neither": ({}, 422, "invalid"),
    "no sentences": ({"sentences": []}, 422, "invalid"),
}


@pytest.mark.parametrize(("body", "status", "code"), ABUSE.values(), ids=ABUSE)
def test_what_is_too_much_or_makes_no_sense_is_refused(server, body, status, code):
    assert refused(server.post(body), status, code)


def test_a_key_that_no_request_has_is_named(server):
    assert server.post({**GOOD, "beem": 4}).content["error"]["message"] == "'beem': unknown key"


def test_chunks_are_counted_while_they_arrive(server):
    """No length is announced, the body never ends, and memory does not grow with it."""
    before = server.gauge("process_resident_memory_bytes")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(21):
            connection.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        assert read_response(connection)[0] == 413
    assert server.gauge("process_resident_memory_bytes") - before < 20e6


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("POST", "/v1/translate", {"Content_Type": "text/plain"}, 415, "unsupported_type"),
        ("POST", "/v1/translate", {"Host": "evil.example"}, 403, "forbidden"),
        ("POST", "/v1/translate", {"Origin": "http://evil.example"}, 403, "forbidden"),
        ("GET", "/v1/translate", {}, 405, "method_not_allowed"),
        ("GET", "/docs", {}, 404, "not_found"),
        ("GET", "/page/../limits.py", {}, 404, "not_found"),
        ("GET", "/page/%2e%2e%2flimits.py", {}, 404, "not_found"),
    ],
)
def test_other_pages_paths_and_methods_are_refused(server, method, path, headers, status, code):
    body = b"{}" if method == "POST" else None
    answer = server.ask(method, path, body, **{"Content_Type": "application/json", **headers})
    assert refused(answer, status, code)


def test_a_slow_body_is_given_up(server):
    since = time.monotonic()
    with server.send(b'{"sentences": [', length=1000) as connection:
        for _ in range(3):
            time.sleep(0.2)
            connection.sendall(b" ")
        status, content = read_response(connection)
        assert (status, content["error"]["code"]) == (408, "slow_body")
        assert 0.9 < time.monotonic() - since < soon(2)
        assert connection.recv(1) == b""  # closed


def test_a_client_that_goes_frees_its_place_while_it_is_decoded(server):
    connection = server.send(json.dumps(MANY).encode())
    wait_until(lambda: server.gauge("queue_requests") == 1)
    time.sleep(0.2)
    assert server.gauge("queue_requests") == 1
    since = time.monotonic()
    connection.close()
    wait_until(lambda: server.gauge("queue_requests") == 0)
    assert server.gauge("waiting_tasks") == 0
    assert server.post(GOOD).status == 200
    assert time.monotonic() - since < soon()
    assert server.gauge("abandoned_requests_total") >= 1


def test_what_takes_too_long_is_dropped(server):
    held = [server.send(json.dumps(MANY).encode()) for _ in range(5)]  # together some 20 s of work
    answer = server.post(MANY)
    assert "5 s" in refused(answer, 504, "deadline")
    assert 4.9 < answer.seconds < soon(6)
    for connection in held:
        connection.close()
    wait_until(lambda: server.gauges("queue_requests", "waiting_tasks") == [0, 0], soon())
    assert server.post(GOOD).seconds < soon()


def test_a_sentence_does_not_wait_for_a_long_request(server):
    """While thirty long sentences are on their way, a short one is next."""
    with server.send(json.dumps(MANY).encode()):
        wait_until(lambda: server.gauge("queue_requests") == 1)
        answer = server.post(GOOD)
        assert answer.status == 200
        assert server.gauge("waiting_tasks") > 0


def test_the_server_says_its_model_and_limits(server):
    content = server.ask("GET", "/v1/model").content
    assert content["name"] == "tiny"
    assert (content["source_language"], content["target_language"]) == ("de", "en")
    assert content["variants"] == {"encoder": "rela-g", "decoder": "rela-g", "cross": "rela-g"}
    assert content["limits"]["queue_requests"] == 16
    for name, value in content["limits"].items():
        assert f"{name} {value:g}" in server.said


def test_a_stopping_server_is_not_ready_then_finishes_then_ends(run):
    server = Server(run, "--port", 0, "--device", "cpu", "--batch-tokens", 400)
    server.until("/readyz", 200)
    body = {"sentences": [LONG] * 4, "beam": 8}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(server.post, body) for _ in range(4)]
        wait_until(lambda: server.gauge("queue_requests") == 4)
        server.process.send_signal(signal.SIGTERM)
        assert server.until("/readyz", 503) < soon()
        assert server.ask("GET", "/livez").status == 200
        assert refused(server.post(GOOD), 503, "unavailable")
        assert server.process.poll() is None
        assert [answer.result().status for answer in answers] == [200] * 4
    assert server.end() == (0, b"", b"")


@pytest.mark.parametrize("how", ["a second signal", pytest.param("the end of --drain", marks=pytest.mark.slow)])
def test_what_the_end_cuts_off_is_told_so_at_once(run, how):
    """Requests that are decoded, that wait, and whose body has not come: none is dropped, none gets plain text."""
    drain = 30 if how == "a second signal" else 0.3
    server = Server(run, "--port", 0, "--device", "cpu", "--drain", drain)
    server.until("/readyz", 200)
    held = [server.send(json.dumps(MANY).encode()) for _ in range(4)] + [server.send(b"{", length=100)]
    wait_until(lambda: server.gauge("queue_requests") == 4)
    since = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    if how == "a second signal":
        server.until("/readyz", 503)
        server.process.send_signal(signal.SIGINT)
    for connection in held:
        with connection:
            status, content = read_response(connection)
        assert (status, content["error"]["code"]) == (503, "unavailable")
    assert server.process.wait(30) == 0
    assert time.monotonic() - since < soon(3)
    assert server.end() == (0, b"", b"")


@pytest.fixture(scope="module")
def broken(run, tmp_path_factory):
    """A run, one whose weights lack their last byte, a token that is too short, and no run."""
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(run, folder / "corrupt")
    for weights in (folder / "corrupt").rglob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    (folder / "token").write_text("short\n")
    (folder / "good").symlink_to(run)
    return folder


@pytest.mark.parametrize(
    ("name", "options", "status", "words"),
    [
        ("missing", (), 4, "missing"),
        ("corrupt", (), 4, "corrupt"),
        ("corrupt", ("--port", "{port}"), 2, "cannot listen on 127.0.0.1:{port}: Address already in use"),
        ("corrupt", ("--host", "0.0.0.0"), 2, "set --token-file or RECTIFORMER_TOKEN"),
        ("corrupt", ("--host", "::", "--token-file", "{broken}/token"), 2, "/token: the token has 5 characters"),
        ("corrupt", ("--token-file", "{broken}/none"), 2, "No such file"),
        ("corrupt", ("--deadline", "-1"), 2, "deadline = -1.0, but it must be above 0"),
        ("good", ("--max-sentence-tokens", "5000"), 2, "max_sentence_tokens = 5000, but this model"),
        ("good", ("--alignments", "9:average:normal"), 2, "layer 9 does not exist"),
    ],
)
def test_a_start_that_cannot_work_fails_in_one_line(server, broken, name, options, status, words, capsys, monkeypatch):
    """In this process: none of these gets as far as to listen."""
    known = {"port": server.port, "broken": broken}
    given = [word.format(**known) for word in ("--port", "0", *options)]
    monkeypatch.setattr(sys, "argv", ["rectiformer", "serve", str(broken / name), "--device", "cpu", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (status, "")
    lines = err.rstrip("\n").split("\n")
    assert words.format(**known) in lines[-1]
    assert all(line.startswith("rectiformer: ") for line in lines)


def test_health_is_answered_while_the_model_works(server):
    """Ten looks at /livez while long sentences are decoded: none takes long."""
    with server.send(json.dumps(MANY).encode()):
        slow = max(server.ask("GET", "/livez").seconds for _ in range(10))
    assert slow < 0.5


def test_answers_leave_at_once(server):
    """On a connection that is kept, the parts of an answer do not wait for acknowledgements, which take 40 ms."""
    body = json.dumps({"sentences": [""]}).encode()
    with server.send(body) as connection:
        read_response(connection)
        seconds = []
        for _ in range(20):
            since = time.monotonic()
            server.write(connection, body)
            read_response(connection)
            seconds.append(time.monotonic() - since)
    assert statistics.median(seconds) < 0.03


def test_many_slow_clients_do_not_keep_others_out(server):
    """Bodies that never come take no slot in the queue."""
    held = [server.send(b"{", length=100) for _ in range(40)]
    assert server.post(GOOD).status == 200
    for connection in held:
        connection.close()
