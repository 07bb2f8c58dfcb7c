"""A server in a process of its own, and ways to ask it."""

import http.client
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

LONG = "Der alte Hund sieht die kleine Katze und die Katze sieht den alten Hund im Garten. " * 5
"""Some 200 subwords of the tiny run, whose beam then takes about a second."""


def soon(seconds=1.0):
    """So many seconds of a free machine: more, where others want its cores as well."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Server:
    """`rectiformer serve`, as a user starts it; `files` are the limits, soft and hard, of those it may open."""

    def __init__(self, *arguments, env=None, files=None):
        command = [sys.executable, "-m", "rectiformer", "serve", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            preexec_fn=None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files),
        )  # fmt: skip
        self.said = self.process.stdout.readline().decode()
        if " at http://" in self.said:
            self.said += self.process.stdout.readline().decode()  # the limits
            self.address = re.search(r"http://\S+", self.said)[0]
            self.port = int(self.address.rstrip("/").rpartition(":")[2])

    def until(self, path, status):
        """Ask until the answer has this status; how long that took."""

        def there():
            try:
                return self.ask("GET", path).status == status
            except ConnectionRefusedError:
                return False

        return wait_until(there)

    def ask(self, method, path, body=None, timeout=60, **headers):
        """One request; status, headers, content, and seconds until they were there."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        since = time.monotonic()
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        is_json = answer.headers["Content-Type"] == "application/json"
        content = json.loads(raw) if is_json else raw.decode()
        return SimpleNamespace(
            status=answer.status, headers=answer.headers, content=content, seconds=time.monotonic() - since
        )

    def post(self, body, **headers):
        """A request to translate; `body` is content, or bytes as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", "/v1/translate", raw, **{"Content_Type": "application/json", **headers})

    def send(self, body, length=None):
        """A connection on which a request to translate was sent, whole or with `length` announced."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        self.write(connection, body, length)
        return connection

    def write(self, connection, body, length=None):
        """Send a request to translate on a connection that is there."""
        connection.sendall(
            b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body) if length is None else length}\r\n\r\n".encode()
            + body
        )

    def gauges(self, *names):
        """Figures of /metrics, of one moment."""
        text = self.ask("GET", "/metrics").content
        return [float(re.search(rf"^(rectiformer_)?{name} (\S+)$", text, re.MULTILINE)[2]) for name in names]

    def gauge(self, name):
        """A figure of /metrics."""
        return self.gauges(name)[0]

    def end(self, timeout=30):
        """Stop it; exit status and what it said since it started."""
        if self.process.poll() is None:
            self.process.terminate()
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err


def wait_until(condition, seconds=60):
    """How long it took until `condition()` held."""
    since = time.monotonic()
    while not condition():
        assert time.monotonic() - since < seconds, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - since


def read_response(connection):
    """Status and JSON content of what comes back on a connection that the server then closes, or keeps."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())
