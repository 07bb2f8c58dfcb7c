"""Many clients in one process: each sends its next request when it has its answer, on a connection that it keeps."""

import asyncio
import json
import sys
import time
from collections import Counter


class Clients:
    """What all of them found."""

    def __init__(self, port, body, until):
        self.port, self.until = port, until
        raw = json.dumps(body).encode()
        head = f"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
        self.request = head.encode() + b"Content-Type: application/json\r\n\r\n" + raw
        self.statuses = Counter()
        self.answer_seconds, self.refusal_seconds = [], []
        self.lost = self.without_retry_after = 0

    async def client(self, delay):
        await asyncio.sleep(delay)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while time.monotonic() < self.until:
            since = time.monotonic()
            try:
                writer.write(self.request)
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                content = await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
            except (OSError, asyncio.IncompleteReadError):
                self.lost += 1
                return
            self.count(head, content, time.monotonic() - since)
            if "retry-after: " in head:
                await asyncio.sleep(float(head.partition("retry-after: ")[2].partition("\r\n")[0]))
        writer.close()

    def count(self, head, content, seconds):
        status = head.split(" ")[1]
        self.statuses[status] += 1
        if status == "200":
            self.answer_seconds.append(seconds)
            assert json.loads(content)["translations"]
        else:
            self.refusal_seconds.append(seconds)
            self.without_retry_after += "retry-after: " not in head


async def main(port, clients, seconds, body):
    """They come within the first second."""
    all_of_them = Clients(port, body, time.monotonic() + seconds)
    await asyncio.gather(*(all_of_them.client(number / clients) for number in range(clients)))
    found = vars(all_of_them)
    names = ("statuses", "answer_seconds", "refusal_seconds", "lost", "without_retry_after")
    print(json.dumps({name: found[name] for name in names}))


if __name__ == "__main__":
    port, clients, seconds, body = sys.argv[1:]
    asyncio.run(main(int(port), int(clients), float(seconds), json.loads(body)))
