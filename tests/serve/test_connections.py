"""Connections and heads of requests: bounded in number, size and time, and refused in JSON like everything else."""

import asyncio
import json
import resource
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import requests
from serve.asking import Server, read_response, soon, wait_until
from uvicorn import Config
from uvicorn.server import ServerState

from rectiformer.connections import SHORTEST_IDLE, Connection, accept
from rectiformer.web import WebLimits

GOOD = {"sentences": ["Der Hund schläft."], "beam": 1}
WORK = 1.3
"""Seconds that an answer takes: longer than an idle connection is safe."""
MALFORMED = {
    "no HTTP": b"what is this\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a header without a value": b"GET /livez HTTP/1.1\r\nno colon\r\n\r\n",
    "an address that is none": b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "two lengths": b"POST /v1/translate HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "a chunk of no length": b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
}


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def hear(connection):
    """Status and code of a refusal after which the server closes the connection."""
    status, content = read_response(connection)
    assert connection.recv(1) == b""
    return status, content["error"]["code"]


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_http_is_refused_in_json(server, raw):
    with connect(server) as connection:
        connection.sendall(raw)
        assert hear(connection) == (400, "not_http")
    assert server.post(GOOD).status == 200


@pytest.mark.parametrize("head", [b"GET /livez HTTP/1.1\r\nX: ", b"GET /", b"GET /livez HTTP/1.1\r\nX: y\r\n" * 40])
def test_endless_headers_are_refused_before_they_are_held(server, head):
    before = server.gauge("process_resident_memory_bytes")
    with connect(server) as connection:
        connection.sendall(head)
        for _ in range(8):
            connection.sendall(b"a" * 2**20)
        assert hear(connection)[0] in {400, 431}
    assert server.gauge("process_resident_memory_bytes") - before < 2e6


def test_headers_that_come_at_once_are_counted_too(server):
    def ask(size):
        with connect(server) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * size + b"\r\n\r\n")
            return read_response(connection)

    assert ask(16_000)[0] == 200
    status, content = ask(17_000)
    assert (status, content["error"]["code"]) == (431, "large_headers")
    assert "16,384 bytes" in content["error"]["message"]


def test_slow_headers_are_given_up(server):
    since = time.monotonic()
    with connect(server) as silent, connect(server) as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\n")
        assert hear(slow) == (408, "slow_headers")
        assert silent.recv(1) == b""
    assert 0.9 < time.monotonic() - since < soon(3)


def by_urllib(address, body, kind):
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, {"Content-Type": kind})) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read()


def by_requests(address, body, kind):
    answer = requests.post(address, body, headers={"Content-Type": kind}, timeout=30)
    return answer.status_code, answer.content


def by_httpx(address, body, kind):
    answer = httpx.post(address, content=body, headers={"Content-Type": kind}, timeout=30)
    return answer.status_code, answer.content


@pytest.mark.parametrize("post", [by_urllib, by_requests, by_httpx])
@pytest.mark.parametrize(
    ("path", "kind", "status", "code"),
    [
        ("v1/translate", "application/json", 413, "too_large"),
        ("v1/translate", "text/plain", 415, "unsupported_type"),
        ("nowhere", "application/json", 404, "not_found"),
    ],
)
def test_a_client_that_writes_a_large_body_first_hears_why_it_is_refused(server, post, path, kind, status, code):
    """Closed at once, the connection would be reset while the client still writes."""
    found, content = post(server.address + path, b" " * 5_000_000, kind)
    assert (found, json.loads(content)["error"]["code"]) == (status, code)


def test_idle_connections_beyond_the_limit_make_room(run):
    """200 of them where the process may open 128 files: no CPU time, one line, and a client that asks is answered."""
    few = (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    server = Server(run, "--port", 0, "--device", "cpu", "--max-connections", 300, files=few)
    server.until("/readyz", 200)
    assert "max_connections 64" in server.said
    held = [connect(server) for _ in range(200)]
    (before,), since = server.gauges("process_cpu_seconds_total"), time.monotonic()
    time.sleep(1)
    answer = server.post(GOOD)
    after, files = server.gauges("process_cpu_seconds_total", "process_open_fds")
    assert answer.status == 200
    assert after - before < 0.5 * (time.monotonic() - since)
    assert files < 100
    for connection in held:
        connection.close()
    wait_until(lambda: server.gauge("process_open_fds") < 30)
    status, _, err = server.end()
    assert (status, err.count(b"\n"), b"at most 64 connections" in err) == (0, 1, True)


def test_who_is_busy_or_has_just_come_is_not_closed_for_another():
    """Two connections are allowed; the third waits until one has been idle for a while, or is done."""

    async def answer(scope, receive, send):
        await asyncio.sleep(WORK)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def ask(port, sent):
        since = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        found = await reader.read(12)
        writer.close()
        return found, time.monotonic() - since

    async def play(bound):
        state, config = ServerState(), Config(answer, ws="none", log_level="error")
        accepting = asyncio.create_task(
            accept(bound, lambda: Connection(config, state, {}, WebLimits()), state.connections, 2)
        )
        request, port = b"GET / HTTP/1.1\r\n\r\n", bound.getsockname()[1]
        busy, idle = asyncio.create_task(ask(port, request)), asyncio.create_task(ask(port, b""))
        await asyncio.sleep(0.1)
        found = await asyncio.gather(busy, idle, ask(port, request))
        accepting.cancel()
        return found

    with socket.create_server(("127.0.0.1", 0)) as bound, ThreadPoolExecutor(1) as pool:
        (busy, _), (idle, kept), (third, waited) = pool.submit(asyncio.run, play(bound)).result()
    assert (busy, idle, third) == (b"HTTP/1.1 200", b"", b"HTTP/1.1 200")
    assert kept >= SHORTEST_IDLE
    assert waited >= WORK
