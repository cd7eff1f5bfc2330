"""Load on `didi serve`: what batching at the level of steps is worth, and what a full server does.

    python benchmarks/serve_load.py [SOURCE] [--clients 16] [--seconds 30] [--json FILE]

Three ways to write the same texts are timed in turns within one run: `didi serve`; a plain FastAPI
handler that calls `Model.generate` under a lock; and `Model.generate` with all texts in one
batch, the ceiling. Closed loop: so many clients, each of which asks again when it has its text.
Then an open loop, in which requests arrive at rising rates whether or not there are answers, which
shows queueing. Seeds are unique: a text that is lost, doubled or another's is counted as wrong, by
comparison with `Model.generate` for a part of them.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import didi_instruct as didi

CHECKED = 8
"""Every so many texts are compared with those of `Model.generate`."""


@dataclass
class Tally:
    """What the clients of a load saw."""

    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0

    def row(self, name: str) -> dict[str, Any]:
        """Numbers of a table."""
        row: dict[str, Any] = {"row": name, "texts": len(self.texts), "seconds": self.seconds}
        row["texts_per_second"] = len(self.texts) / self.seconds if self.seconds else None
        row["refused"] = self.statuses.get(429, 0)
        row["failed"] = sum(n for status, n in self.statuses.items() if status not in (200, 429))
        row["doubled"] = len(self.ids) - len(set(self.ids))
        for label, times in (("first", self.first), ("last", self.last)):
            for percent in (50, 95, 99):
                row[f"{label}_p{percent}"] = percentile(times, percent)
        return row


def percentile(values: list[float], percent: int) -> float | None:
    """Value below which so many percent of the values lie."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def ask(client: httpx.AsyncClient, tally: Tally, seed: int, steps: int, stream: bool) -> None:
    """Send one request and note when its first and its last canvas came."""
    body = {"seed": seed, "steps": steps, "echo": True}
    begun = time.monotonic()
    if not stream:
        answer = await client.post("/v1/completions", json=body)
        tally.statuses[answer.status_code] = tally.statuses.get(answer.status_code, 0) + 1
        if answer.status_code == 200:
            note(tally, seed, answer.json(), time.monotonic() - begun)
        return
    body |= {"stream": True, "diffusing": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        tally.statuses[answer.status_code] = tally.statuses.get(answer.status_code, 0) + 1
        if answer.status_code != 200:
            return
        seen = False
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if not seen:
                tally.first.append(time.monotonic() - begun)
                seen = True
            if '"usage"' in line:
                note(tally, seed, json.loads(line.removeprefix("data: ")), time.monotonic() - begun)


def note(tally: Tally, seed: int, answer: dict[str, Any], seconds: float) -> None:
    """Keep a text."""
    tally.texts[seed] = answer["choices"][0]["text"]
    tally.ids.append(answer["id"])
    tally.last.append(seconds)


def connect(address: str) -> httpx.AsyncClient:
    """A client with as many connections as it takes."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=address, timeout=None, limits=limits)


async def closed_loop(
    address: str, clients: int, seconds: float, steps: int, *, stream: bool, first_seed: int
) -> Tally:
    """Let so many clients ask again and again for some time."""
    tally, seeds = Tally(), iter(range(first_seed, first_seed + 10**6))
    begun = time.monotonic()

    async def one(client: httpx.AsyncClient) -> None:
        while time.monotonic() - begun < seconds:
            await ask(client, tally, next(seeds), steps, stream)

    async with connect(address) as client:
        await asyncio.gather(*(one(client) for _ in range(clients)))
    tally.seconds = time.monotonic() - begun
    return tally


async def open_loop(
    address: str, rate: float, seconds: float, steps: int, *, first_seed: int
) -> Tally:
    """Send requests at random times, so many a second, whatever comes back."""
    tally, rng, tasks, seed = Tally(), random.Random(first_seed), [], first_seed
    begun = at = time.monotonic()
    async with connect(address) as client:
        while at - begun < seconds:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.append(asyncio.create_task(ask(client, tally, seed, steps, True)))
            at, seed = at + rng.expovariate(rate), seed + 1
        await asyncio.gather(*tasks)
    tally.seconds = time.monotonic() - begun
    return tally


@contextmanager
def server(*command: str) -> Iterator[tuple[str, int]]:
    """Run a server in a process of its own; yield its address and process id."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                wait_ready(found[0])
                yield found[0], process.pid
                break
    finally:
        process.terminate()
        process.wait(60)


def wait_ready(address: str) -> None:
    """Wait until a server answers."""
    for _ in range(600):
        try:
            httpx.get(f"{address}/health")
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found[1]) / 1024 if found else float("nan")


def plain_server(source: str) -> None:
    """Serve `Model.generate` by a handler under a lock, as one writes it in five minutes."""
    import socket

    import uvicorn
    from fastapi import FastAPI

    model, lock, app = didi.load(source), threading.Lock(), FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/v1/completions")
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        with lock:
            (text,) = model.generate(seed=body["seed"], steps=body["steps"])
        return {"id": str(body["seed"]), "choices": [{"text": text}], "usage": {}}

    bound = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[bound])


def ceiling(model: didi.Model, texts: int, steps: int, seconds: float) -> dict[str, Any]:
    """Time batches of all clients' texts."""
    model.generate(num=texts, steps=steps)
    begun, count = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        model.generate(num=texts, steps=steps, seed=count)
        count += texts
    taken = time.monotonic() - begun
    return {"row": f"Model.generate({texts})", "texts": count, "texts_per_second": count / taken}


def wrong_texts(model: didi.Model, tally: Tally, steps: int) -> int:
    """Texts that are not those of `Model.generate`, of a part of them."""
    checked = sorted(tally.texts)[::CHECKED]
    return sum(model.generate(seed=s, steps=steps) != [tally.texts[s]] for s in checked)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run all loads; yield a row for each."""
    model, steps = didi.load(options.source), options.steps
    extra = ["--no-fast"] if options.no_fast else []
    serve = ["-m", "didi_instruct", "serve", options.source, "--port", "0", *extra]
    if not options.no_fast:
        model.accelerate()
    seed = 0
    with server(*serve) as (ours, pid), server(__file__, "--plain", options.source) as (plain, _):
        for turn in range(options.turns):
            yield ceiling(model, options.clients, steps, options.seconds) | {"turn": turn}
            for name, address in (("didi serve", ours), ("lock", plain)):
                load = closed_loop(address, options.clients, options.seconds, steps, stream=False,
                                   first_seed=seed)  # fmt: skip
                tally, seed = asyncio.run(load), seed + 10**6
                row = tally.row(f"{name}, {options.clients} clients") | {"turn": turn}
                yield row | {"wrong": wrong_texts(model, tally, steps)}
        memory = resident_mib(pid)
        load = closed_loop(ours, options.crowd, options.seconds, steps, stream=True,
                           first_seed=seed)  # fmt: skip
        tally, seed = asyncio.run(load), seed + 10**6
        row = tally.row(f"didi serve, {options.crowd} clients, canvases")
        row |= {"wrong": wrong_texts(model, tally, steps), "mib_before": memory}
        yield row | {"mib_after": resident_mib(pid)}
        for rate in options.rates:
            load = open_loop(ours, rate, options.seconds, steps, first_seed=seed)
            tally, seed = asyncio.run(load), seed + 10**6
            row = tally.row(f"didi serve, {rate:g} requests/s, canvases")
            row |= {"wrong": wrong_texts(model, tally, steps), "mib_after": resident_mib(pid)}
            yield row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", nargs="?", default="stories")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--crowd", type=int, default=200)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.5, 1, 2, 4])
    parser.add_argument("--no-fast", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", metavar="SOURCE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain_server(options.plain)
        return
    rows = []
    for row in measure(options):
        rows.append(row)
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(shown), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"settings": vars(options), "rows": rows}, default=str))


if __name__ == "__main__":
    main()
