"""Throughput of `rectiformer serve` under many clients, vs. `translate` of the same sentences with the same batches.

    python benchmarks/serving.py runs/tiny --out benchmarks/results/serving.jsonl

The server is a process of its own; clients, each with a connection that it keeps, ask from this one. Turns of both
alternate, so that a busy machine slows both; a point has the median of their ratios, of time and of CPU time that the
two processes took, and is written only if every translation is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from points import add_result_options, append_point, describe_machine

from rectiformer.text.grammar import draw_sentences
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator


@contextmanager
def serving(run: Path, arguments: argparse.Namespace) -> Iterator[int]:
    """A server of the run while inside; its port."""
    command = [sys.executable, "-m", "rectiformer", "serve", str(run), "--port", "0", "--device", arguments.device]
    command += ["--batch-tokens", str(arguments.batch_tokens), "--queue-requests", str(2 * arguments.clients)]
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "PYTHONPATH": root}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if " at http://" not in line:
            sys.exit("the server did not start")
        yield int(line.split(" at http://")[1].split("/")[0].rpartition(":")[2])
    finally:
        process.terminate()
        process.communicate()


class Load:
    """Clients that share a list of requests; each sends its next one when it has its answer."""

    def __init__(self, port: int, requests: list[list[str]], beam: int) -> None:
        self.port = port
        self.bodies = [json.dumps({"sentences": lines, "beam": beam}).encode() for lines in requests]
        self.texts: list[list[str]] = [[] for _ in requests]
        self.latencies: list[float] = []

    async def run(self, clients: int) -> float:
        """Send all; the seconds it took."""
        indices = iter(range(len(self.bodies)))
        connections = [await asyncio.open_connection("127.0.0.1", self.port) for _ in range(clients)]
        since = time.perf_counter()
        await asyncio.gather(*(self.client(indices, *connection) for connection in connections))
        seconds = time.perf_counter() - since
        for _, writer in connections:
            writer.close()
        return seconds

    async def client(self, indices: Iterator[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One of the clients."""
        for index in indices:
            since = time.perf_counter()
            body = self.bodies[index]
            head = f"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            size = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length"))
            answer = json.loads(await reader.readexactly(size))
            if " 200 " not in lines[0]:
                sys.exit(f"refused: {lines[0]} {answer}")
            self.latencies.append(time.perf_counter() - since)
            self.texts[index] = [each["text"] for each in answer["translations"]]


async def get(port: int, path: str) -> str:
    """Status line, headers and body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.decode()


def wait_until_ready(port: int) -> None:
    """Return once a request would be accepted."""
    while True:
        with suppress(ConnectionRefusedError):
            if " 200 " in asyncio.run(get(port, "/readyz")).split("\r\n")[0]:
                return
        time.sleep(0.1)


def cpu_seconds(port: int) -> float:
    """What the server has taken so far."""
    lines = asyncio.run(get(port, "/metrics")).split("\n")
    return next(float(line.split(" ")[1]) for line in lines if line.startswith("process_cpu_seconds_total "))


def measure(arguments: argparse.Namespace, each: int) -> dict[str, object]:
    """One point: requests of `each` sentences."""
    translator = Translator.from_run(arguments.run, device=arguments.device)
    options = SearchOptions(beam=arguments.beam)
    lines = [pair.source for pair in draw_sentences(arguments.sentences, 7, "test")]
    requests = [lines[start : start + each] for start in range(0, len(lines), each)]
    ratios, cpu_ratios, speeds, latencies = [], [], [], []
    with serving(arguments.run, arguments) as port:
        wait_until_ready(port)
        translator.translate(lines, options, batch_tokens=arguments.batch_tokens)  # neither first turn is counted
        asyncio.run(Load(port, requests, arguments.beam).run(arguments.clients))
        for _ in range(arguments.turns):
            since, taken = time.perf_counter(), time.process_time()
            expected = translator.translate(lines, options, batch_tokens=arguments.batch_tokens)
            offline, offline_cpu = time.perf_counter() - since, time.process_time() - taken
            taken = cpu_seconds(port)
            load = Load(port, requests, arguments.beam)
            seconds = asyncio.run(load.run(arguments.clients))
            cpu_ratios.append(offline_cpu / (cpu_seconds(port) - taken))
            if [text for texts in load.texts for text in texts] != [found.text for found in expected]:
                sys.exit("the server's translations are not those of translate; nothing is reported")
            ratios.append(offline / seconds)
            speeds.append(len(lines) / seconds)
            latencies += load.latencies
    cuts = statistics.quantiles(latencies, n=20)
    return {
        "benchmark": "serving",
        "run": arguments.run.name,
        "clients": arguments.clients,
        "sentences_per_request": each,
        "sentences": len(lines),
        "beam": arguments.beam,
        "batch_tokens": arguments.batch_tokens,
        "turns": arguments.turns,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_ratio": statistics.median(cpu_ratios),
        "sentences_per_second": statistics.median(speeds),
        "p50": statistics.median(latencies),
        "p95": cuts[18],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--sentences", type=int, default=2_000)
    parser.add_argument("--each", type=int, nargs="+", default=[1, 8], help="sentences per request; one point for each")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--batch-tokens", type=int, default=4_096)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    add_result_options(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for each in arguments.each:
        point = measure(arguments, each) | describe_machine(arguments.device)
        print(
            f"{each} per request: {point['ratio']:.2f} x offline ({point['cpu_ratio']:.2f} by CPU time), "
            f"{point['sentences_per_second']:.0f} sentences/s, "
            f"p50 {point['p50']:.3f} s, p95 {point['p95']:.3f} s"
        )
        append_point(arguments.out, point)


if __name__ == "__main__":
    main()
